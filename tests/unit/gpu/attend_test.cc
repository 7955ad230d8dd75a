// SPDX-License-Identifier: Apache-2.0
//
// Attend on every SIMD target and on CUDA against the reference, and both against what the contract
// promises: hidden slots never matter, errors stay within the bounds that the certificate is built
// on, the same call gives the same bits. The reference itself is held against golden vectors in
// golden_test.cc.

#include "gpu/kernels/attend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"
#include "tests/unit/gpu/forbidden_memory.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Queries over a lane, and room for what attend answers.
struct Call {
  Call(const SampleLane& lane, int group_in, int queries_in, double spread, std::mt19937_64& random)
      : group(group_in), queries(queries_in) {
    std::normal_distribution<float> normal(0, static_cast<float>(spread));
    const auto rows = static_cast<size_t>(group * queries);
    query.resize(rows * lane.dim());
    for (float& element : query) element = normal(random);
    // Consecutive tokens, the last of which sees about everything.
    for (int m = 0; m < queries; ++m) {
      query_index.push_back(static_cast<int32_t>(lane.slots()) - queries + m);
    }
    output.assign(query.size(), -1.0F);
    lse.assign(rows, -1.0F);
    logits.assign(rows * lane.slots(), -1.0F);
  }

  AttendArgs Args(const SampleLane& lane) {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = group,
            .queries = queries,
            .scale = 1 / std::sqrt(static_cast<float>(lane.dim())),
            .extents = lane.extents(),
            .query = query,
            .query_index = query_index,
            .output = output,
            .lse = lse,
            .logits = logits};
  }

  size_t rows() const { return lse.size(); }
  bool sees(const SampleLane& lane, size_t row, size_t s) const {
    return !lane.is_empty(s) &&
           static_cast<int32_t>(s) <= query_index[row % static_cast<size_t>(queries)];
  }

  int group;
  int queries;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<float> output;
  std::vector<float> lse;
  std::vector<float> logits;
};

double Norm(const float* row, size_t dim) {
  double sum = 0;
  for (size_t d = 0; d < dim; ++d) sum += static_cast<double>(row[d]) * row[d];
  return std::sqrt(sum);
}

double KeyNorm(const SampleLane& lane, size_t s) {
  double sum = 0;
  for (size_t d = 0; d < lane.dim(); ++d) sum += lane.key(s, d) * lane.key(s, d);
  return std::sqrt(sum);
}

double ExactLogit(const SampleLane& lane, const AttendArgs& args, size_t row, size_t s) {
  long double sum = 0;
  for (size_t d = 0; d < lane.dim(); ++d) {
    sum += static_cast<long double>(args.query[row * lane.dim() + d]) * lane.key(s, d);
  }
  return static_cast<double>(args.scale * sum);
}

SampleLane::Options RandomShape(std::mt19937_64& random) {
  const auto between = [&](int least, int most) {
    return static_cast<int>(std::uniform_int_distribution<int>(least, most)(random));
  };
  const int usual[] = {64, 80, 96, 128, 256};
  return {.dtype = kDtypes[random() % kDtypes.size()],
          .head_dim = between(0, 1) == 0 ? usual[between(0, 4)] : between(1, kHeadDimMax),
          .slots = between(0, 3) == 0 ? between(1000, 2500) : between(1, 300),
          .extent_slots = between(1, kPageTokensMax),
          .empty_one_in = between(0, 2) == 0 ? 0 : between(1, 8),
          .poison_empty = true};
}

class AttendOnTarget : public OnTarget {
 protected:
  void Attend(const AttendArgs& args) const { Choose(&AttendCpu, &AttendOnCuda)(args); }
  void ExpectNothingOf(const ForbiddenMemory& forbidden) const;
};
INSTANTIATE_TEST_SUITE_P(EveryTarget, AttendOnTarget, EveryTargetAndCuda(), TargetName);

TEST_P(AttendOnTarget, AgreesWithReferenceOverRandomShapes) {
  test::ForEachSeed(6, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    const SampleLane lane(RandomShape(random), random);
    const int group = std::uniform_int_distribution<int>(1, kGroupMax)(random);
    const int most = GetParam() == "cuda" ? 5 : 40;  // Emulated, each takes its time.
    const int queries = std::uniform_int_distribution<int>(1, 2)(random) == 1
                            ? 1
                            : std::uniform_int_distribution<int>(1, most)(random);
    Call expected(lane, group, queries, 1, random);
    Call call = expected;
    SCOPED_TRACE(testing::Message() << "head_dim " << lane.dim() << " slots " << lane.slots()
                                    << " group " << group << " queries " << queries);

    AttendReference(expected.Args(lane));
    Attend(call.Args(lane));

    for (size_t i = 0; i < call.output.size(); ++i) {
      ASSERT_NEAR(call.output[i], expected.output[i], 1e-6 * (1 + std::fabs(expected.output[i])))
          << "output " << i;
    }
    for (size_t row = 0; row < call.rows(); ++row) {
      if (expected.lse[row] == kMinusInfinity) {
        ASSERT_EQ(call.lse[row], kMinusInfinity) << "row " << row;
      } else {
        ASSERT_NEAR(call.lse[row], expected.lse[row], 2e-6 * (1 + std::fabs(expected.lse[row])))
            << "row " << row;
      }
    }
    const AttendArgs args = call.Args(lane);
    for (size_t i = 0; i < call.logits.size(); ++i) {
      const size_t row = i / lane.slots();
      const size_t s = i % lane.slots();
      if (!call.sees(lane, row, s)) {
        ASSERT_EQ(call.logits[i], kMinusInfinity) << "row " << row << " slot " << s;
        continue;
      }
      const double query_norm = Norm(&call.query[row * lane.dim()], lane.dim());
      const double bound =
          AttendLogitError(args.head_dim, args.scale, static_cast<float>(query_norm * (1 + 1e-6)),
                           static_cast<float>(KeyNorm(lane, s) * (1 + 1e-6)));
      ASSERT_LE(std::fabs(call.logits[i] - ExactLogit(lane, args, row, s)), bound)
          << "row " << row << " slot " << s;
    }
  });
}

TEST_P(AttendOnTarget, RepeatsBitForBitWithLogitsOrWithout) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 96, .slots = 2500, .empty_one_in = 5}, random);
  Call call(lane, 3, 5, 1, random);
  Call again = call;
  AttendArgs without_logits = again.Args(lane);
  without_logits.logits = {};

  Attend(call.Args(lane));
  Attend(without_logits);

  EXPECT_EQ(call.output, again.output);
  EXPECT_EQ(call.lse, again.lse);
}

// Slots that nobody sees lie in `forbidden`, and the answer is as if they were not there.
void AttendOnTarget::ExpectNothingOf(const ForbiddenMemory& forbidden) const {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 72, .slots = 40, .extent_slots = 20}, random);
  Call expected(lane, 2, 1, 1, random);
  expected.logits.clear();
  Call call = expected;
  const std::vector<int32_t> hidden(32, kNoToken);
  const std::vector<int32_t> future(32, 1000);
  const Extent seen_first = lane.extents()[0];
  const Extent seen_last = lane.extents()[1];
  const std::vector<Extent> extents = {{forbidden.bytes(), forbidden.bytes(), hidden.data(), 32},
                                       seen_first,
                                       {forbidden.bytes(), forbidden.bytes(), future.data(), 32},
                                       seen_last,
                                       {forbidden.bytes(), forbidden.bytes(), hidden.data(), 7}};
  AttendArgs args = call.Args(lane);
  args.extents = extents;

  AttendReference(expected.Args(lane));
  Attend(args);

  for (size_t i = 0; i < call.output.size(); ++i) {
    EXPECT_NEAR(call.output[i], expected.output[i], 1e-6) << i;
  }
}

TEST_P(AttendOnTarget, NeverTouchesSlotsThatNobodySees) {
  if (!InPlace::kIsPossible && GetParam() == "cuda")
    GTEST_SKIP() << "not run: a device reads copies of these arrays; the emulator runs it";
  const InPlace in_place;
  ExpectNothingOf(ForbiddenMemory());
}

TEST_P(AttendOnTarget, SlotsThatNobodySeesMayHoldAnything) {
  ExpectNothingOf(ForbiddenMemory(ForbiddenMemory::Use::kMayBeCopied));
}

// A token that one query sees and another does not shares a tile with both.
TEST_P(AttendOnTarget, KeepsWhatOneQueryCannotSeeOutOfItsAnswer) {
  std::mt19937_64 random(test::RandomSeed());
  SampleLane lane({.dtype = Dtype::kF32, .head_dim = 40, .slots = 50}, random);
  Call expected(lane, 2, 8, 1, random);
  AttendReference(expected.Args(lane));
  Call call = expected;
  for (size_t d = 0; d < lane.dim(); ++d) {
    lane.set_key(49, d, std::numeric_limits<double>::quiet_NaN());
    lane.set_value(49, d, std::numeric_limits<double>::quiet_NaN());
  }

  Attend(call.Args(lane));

  for (size_t row = 0; row < call.rows(); ++row) {
    if (call.sees(lane, row, 49)) continue;
    EXPECT_NEAR(call.lse[row], expected.lse[row], 1e-5) << "row " << row;
    for (size_t d = 0; d < lane.dim(); ++d) {
      const size_t i = row * lane.dim() + d;
      EXPECT_NEAR(call.output[i], expected.output[i], 1e-6) << "row " << row;
    }
  }
}

TEST_P(AttendOnTarget, NothingSeenIsZerosAndMinusInfinity) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 24, .slots = 70}, random);
  Call call(lane, 2, 3, 1, random);
  call.query_index = {-1, -1, 5};

  Attend(call.Args(lane));

  for (const size_t row : {0U, 1U, 3U, 4U}) {
    EXPECT_EQ(call.lse[row], kMinusInfinity) << row;
    for (size_t d = 0; d < lane.dim(); ++d) EXPECT_EQ(call.output[row * lane.dim() + d], 0.0F);
    for (size_t s = 0; s < lane.slots(); ++s) {
      EXPECT_EQ(call.logits[row * lane.slots() + s], kMinusInfinity);
    }
  }
  EXPECT_GT(call.lse[2], kMinusInfinity);
}

TEST_P(AttendOnTarget, NoExtentsAndNoQueriesAreAnswered) {
  std::vector<float> query(16, 1.0F);
  std::vector<float> output(16, 1.0F);
  std::vector<float> lse(2, 1.0F);
  const int32_t last = 7;

  Attend({.head_dim = 8,
          .group = 2,
          .scale = 1,
          .extents = {},
          .query = query,
          .query_index = {&last, 1},
          .output = output,
          .lse = lse,
          .logits = {}});
  Attend({.head_dim = 8,
          .group = 2,
          .queries = 0,
          .scale = 1,
          .extents = {},
          .query = {},
          .query_index = {},
          .output = {},
          .lse = {},
          .logits = {}});

  EXPECT_EQ(output, std::vector<float>(16, 0.0F));
  EXPECT_EQ(lse, std::vector<float>(2, kMinusInfinity));
}

// CUDA adds up eight neighbouring channels in a row, however few there are: the first product fills
// the place of all that follow, each of which is cut off.
TEST_P(AttendOnTarget, LogitErrorHoldsForShortRowsThatOneThreadAddsUp) {
  std::mt19937_64 random(1);
  for (const int head_dim : {8, 16, 24}) {
    SampleLane lane({.head_dim = head_dim, .slots = 1}, random);
    Call call(lane, 1, 1, 1, random);
    for (size_t d = 0; d < lane.dim(); ++d) {
      lane.set_key(0, d, d == 0 ? 1 + 0x1p-10 : d < 8 ? 0x1p-12 : 0.0);
      call.query[d] = d == 0 ? 1 + 511 * 0x1p-23F : d < 8 ? 0.499F * 0x1p-11F : 0.0F;
    }
    AttendArgs args = call.Args(lane);
    args.scale = 1;

    Attend(args);

    const double error = std::fabs(call.logits[0] - ExactLogit(lane, args, 0, 0));
    const auto query_norm = static_cast<float>(Norm(call.query.data(), lane.dim()));
    EXPECT_LE(error,
              AttendLogitError(head_dim, 1, query_norm, static_cast<float>(KeyNorm(lane, 0))))
        << "head_dim " << head_dim;
    if (GetParam() != "cuda") continue;
    EXPECT_GT(error, 7 * 0x1p-24) << "nothing was cut off as meant";
  }
}

// Sums that round the same way at every step: a large product in each lane first, then products
// that are a little over half of its last place.
TEST_P(AttendOnTarget, LogitErrorHoldsForSumsThatAlwaysRoundUp) {
  std::mt19937_64 random(1);
  double worst = 0;
  for (const int head_dim : {16, 20, 31, 64, 100, 128, 200, 256}) {
    SampleLane lane({.dtype = Dtype::kF32, .head_dim = head_dim, .slots = 64}, random);
    Call call(lane, 1, 1, 1, random);
    for (size_t d = 0; d < lane.dim(); ++d) call.query[d] = d < 16 ? 1.0F : 0x1p-12F;
    for (size_t s = 0; s < lane.slots(); ++s) {
      for (size_t d = 0; d < lane.dim(); ++d) {
        lane.set_key(s, d, d < 16 ? 1.0 : 0x1.01p-12 * (1 + static_cast<double>(s) / 64));
      }
    }
    AttendArgs args = call.Args(lane);

    Attend(args);

    const auto query_norm = static_cast<float>(Norm(call.query.data(), lane.dim()) * (1 + 1e-6));
    for (size_t s = 0; s < lane.slots(); ++s) {
      const double error = std::fabs(call.logits[s] - ExactLogit(lane, args, 0, s));
      const double bound = AttendLogitError(head_dim, args.scale, query_norm,
                                            static_cast<float>(KeyNorm(lane, s) * (1 + 1e-6)));
      ASSERT_LE(error, bound) << "head_dim " << head_dim << " slot " << s;
      worst = std::max(worst, error / bound);
    }
  }
  RecordProperty("worst_error_over_bound", std::to_string(worst));
  EXPECT_GT(worst, 0.02) << "the sums do not round as meant, so this test shows nothing";
}

TEST_P(AttendOnTarget, LogitErrorHoldsForSumsThatCancel) {
  test::ForEachSeed(20, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    const int head_dim = std::uniform_int_distribution<int>(2, kHeadDimMax)(random);
    SampleLane lane({.dtype = Dtype::kF32, .head_dim = head_dim, .slots = 80}, random);
    Call call(lane, 2, 1, 30, random);
    for (size_t s = 0; s < lane.slots(); ++s) {  // Half of the products undo the other half.
      const size_t half = lane.dim() / 2;
      for (size_t d = 0; d < half; ++d) {
        const auto q = static_cast<double>(call.query[half + d]);
        lane.set_key(s, half + d, -lane.key(s, d) * static_cast<double>(call.query[d]) / q);
      }
    }
    AttendArgs args = call.Args(lane);

    Attend(args);

    for (size_t i = 0; i < call.logits.size(); ++i) {
      const size_t row = i / lane.slots();
      const size_t s = i % lane.slots();
      const double norm = Norm(&call.query[row * lane.dim()], lane.dim()) * (1 + 1e-6);
      const double bound = AttendLogitError(head_dim, args.scale, static_cast<float>(norm),
                                            static_cast<float>(KeyNorm(lane, s) * (1 + 1e-6)));
      ASSERT_LE(std::fabs(call.logits[i] - ExactLogit(lane, args, row, s)), bound) << i;
    }
  });
}

// Logits that rise all the way make every tile rescale what came before; values of one sign let no
// rounding cancel.
TEST_P(AttendOnTarget, SumErrorHoldsWhereEveryTileRaisesTheMaximum) {
  std::mt19937_64 random(test::RandomSeed());
  SampleLane lane({.dtype = Dtype::kF32, .head_dim = 16, .slots = 4000, .extent_slots = 40},
                  random);
  Call call(lane, 1, 1, 1, random);
  for (size_t d = 0; d < lane.dim(); ++d) call.query[d] = d == 0 ? 4.0F : 0.0F;
  for (size_t s = 0; s < lane.slots(); ++s) {
    lane.set_key(s, 0, 0.001 * static_cast<double>(s));
    for (size_t d = 0; d < lane.dim(); ++d) lane.set_value(s, d, std::fabs(lane.value(s, d)));
  }

  Attend(call.Args(lane));

  const double peak = *std::max_element(call.logits.begin(), call.logits.end());
  long double mass = 0;
  std::vector<long double> sum(lane.dim(), 0.0L);
  for (size_t s = 0; s < lane.slots(); ++s) {
    const long double weight = std::exp(static_cast<long double>(call.logits[s]) - peak);
    mass += weight;
    for (size_t d = 0; d < lane.dim(); ++d) sum[d] += weight * lane.value(s, d);
  }
  // Subtracting the maximum rounds too; AttendLogitError accounts for that, and here it is 8 *
  // 2^-24.
  const double allowed = AttendSumError(lane.slots()) + std::expm1(2 * 8 * 0x1p-24) * 2;
  for (size_t d = 0; d < lane.dim(); ++d) {
    const auto exact =
        static_cast<double>(sum[d] / mass);  // All values are positive: also |value|.
    EXPECT_LE(std::fabs(call.output[d] - exact), allowed * exact) << d;
  }
}

TEST(AttendTest, SumErrorGrowsWithSlotsAndStaysSmall) {
  EXPECT_GT(AttendSumError(1), 0.0F);
  EXPECT_LT(AttendSumError(64), AttendSumError(1024));
  EXPECT_LT(AttendSumError(1024), AttendSumError(1 << 20));
  EXPECT_LT(AttendSumError(16384), 2e-5F);
}

TEST(AttendTest, SpansThatDisagreeWithTheShapeStopTheProcess) {
  std::vector<float> query(16, 1.0F);
  std::vector<float> output(15);
  std::vector<float> lse(2);
  const int32_t last = 7;
  const AttendArgs args = {.head_dim = 8,
                           .group = 2,
                           .scale = 1,
                           .extents = {},
                           .query = query,
                           .query_index = {&last, 1},
                           .output = output,
                           .lse = lse,
                           .logits = {}};

  EXPECT_DEATH(AttendCpu(args), "output is .group, queries, head_dim.");
}

}  // namespace
}  // namespace ebbtide::gpu
