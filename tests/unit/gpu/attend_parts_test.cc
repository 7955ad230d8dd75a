// SPDX-License-Identifier: Apache-2.0
//
// Attend where each extent is wanted alone: against the formula in long double, and against what
// the parts are for: merged they are the answer. Extents are of any size, some without slots, some
// without a slot that anybody sees.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "gpu/kernels/merge.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"
#include "tests/unit/gpu/kernel_grid.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The lane's slots in extents of 0 to kPageTokensMax.
std::vector<Extent> Ragged(const SampleLane& lane, std::mt19937_64& random) {
  const Extent whole = lane.extents()[0];
  const size_t row_bytes = RowBytes(lane.options().dtype, lane.options().head_dim);
  std::vector<Extent> extents;
  for (size_t first = 0; first < lane.slots();) {
    const size_t slots =
        random() % 4 == 0 ? 0
                          : std::min<size_t>(random() % (kPageTokensMax + 1), lane.slots() - first);
    extents.push_back({.key = whole.key + first * row_bytes,
                       .value = whole.value + first * row_bytes,
                       .index = whole.index + first,
                       .slots = static_cast<int32_t>(slots)});
    first += slots;
  }
  return extents;
}

// Queries over extents, and room for what attend answers.
struct Call {
  Call(const SampleLane& lane_in, std::vector<Extent> extents_in, int group_in, int queries_in,
       std::mt19937_64& random)
      : lane(lane_in), extents(std::move(extents_in)), group(group_in), queries(queries_in) {
    std::normal_distribution<float> normal;
    const auto rows = static_cast<size_t>(group * queries);
    query.resize(rows * lane.dim());
    for (float& element : query) element = normal(random);
    for (int m = 0; m < queries; ++m) {
      query_index.push_back(static_cast<int32_t>(lane.slots()) - queries + m);
    }
    output.assign(query.size(), -1.0F);
    lse.assign(rows, -1.0F);
    logits.assign(rows * lane.slots(), -1.0F);
    part_output.assign(extents.size() * query.size(), -1.0F);
    part_lse.assign(extents.size() * rows, -1.0F);
  }

  AttendArgs Args() {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = group,
            .queries = queries,
            .scale = 1 / std::sqrt(static_cast<float>(lane.dim())),
            .extents = extents,
            .query = query,
            .query_index = query_index,
            .output = output,
            .lse = lse,
            .logits = logits,
            .part_output = part_output,
            .part_lse = part_lse};
  }

  size_t rows() const { return lse.size(); }
  bool sees(size_t row, size_t s) const {
    return !lane.is_empty(s) &&
           static_cast<int32_t>(s) <= query_index[row % static_cast<size_t>(queries)];
  }

  const SampleLane& lane;
  std::vector<Extent> extents;
  int group;
  int queries;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<float> output, lse, logits, part_output, part_lse;
};

// What a row's attention over slots [first, end) is; its log-sum-exp last.
std::vector<double> Exact(const Call& call, float scale, size_t row, size_t first, size_t end) {
  const size_t dim = call.lane.dim();
  std::vector<long double> sum(dim, 0.0L);
  long double total = 0;
  for (size_t s = first; s < end; ++s) {
    if (!call.sees(row, s)) continue;
    long double dot = 0;
    for (size_t d = 0; d < dim; ++d) {
      dot += static_cast<long double>(call.query[row * dim + d]) * call.lane.key(s, d);
    }
    const long double weight = std::exp(scale * dot);
    total += weight;
    for (size_t d = 0; d < dim; ++d) sum[d] += weight * call.lane.value(s, d);
  }
  std::vector<double> exact;
  for (const long double x : sum) exact.push_back(total > 0 ? static_cast<double>(x / total) : 0);
  exact.push_back(total > 0 ? static_cast<double>(std::log(total)) : kMinusInfinity);
  return exact;
}

class AttendPartsTest : public OnReferenceAndTarget {
 protected:
  void Attend(const AttendArgs& args) const {
    Choose(&AttendReference, &AttendCpu, &AttendOnCuda)(args);
  }

  SampleLane::Options RandomShape() {
    const int usual[] = {64, 80, 96, 128, 256};
    return {.dtype = kDtypes[random_() % kDtypes.size()],
            .head_dim = random_() % 2 == 0 ? usual[random_() % 5]
                                           : static_cast<int>(1 + random_() % kHeadDimMax),
            .slots = static_cast<int>(1 + random_() % (random_() % 3 == 0 ? 1500 : 200)),
            .extent_slots = kPageTokensMax,
            .empty_one_in = static_cast<int>(random_() % 4),
            .poison_empty = true};
  }

  std::mt19937_64 random_{test::RandomSeed()};
};
INSTANTIATE_TEST_SUITE_P(Every, AttendPartsTest, ReferenceTargetsAndCuda(), TargetName);

TEST_P(AttendPartsTest, PartsAreTheAttentionOverEachExtentAlone) {
  for (int repeat = 0; repeat < 6; ++repeat) {
    const SampleLane lane(RandomShape(), random_);
    Call call(lane, Ragged(lane, random_), static_cast<int>(1 + random_() % kGroupMax),
              static_cast<int>(1 + random_() % 3), random_);
    const AttendArgs args = call.Args();
    SCOPED_TRACE(testing::Message() << "head_dim " << lane.dim() << " slots " << lane.slots()
                                    << " rows " << call.rows());

    Attend(args);

    size_t first = 0;
    for (size_t x = 0; x < call.extents.size(); ++x) {
      const size_t end = first + static_cast<size_t>(call.extents[x].slots);
      for (size_t row = 0; row < call.rows(); ++row) {
        const std::vector<double> exact = Exact(call, args.scale, row, first, end);
        const size_t part = x * call.rows() + row;
        for (size_t d = 0; d < lane.dim(); ++d) {
          ASSERT_NEAR(call.part_output[part * lane.dim() + d], exact[d],
                      1e-6 * (1 + std::fabs(exact[d])))
              << "extent " << x << " row " << row << " channel " << d;
        }
        if (call.part_lse[part] == exact.back()) continue;
        ASSERT_NEAR(call.part_lse[part], exact.back(), 2e-6 * (1 + std::fabs(exact.back())))
            << "extent " << x << " row " << row;
      }
      first = end;
    }
  }
}

TEST_P(AttendPartsTest, TheRestOfTheAnswerIsThatOfTheReference) {
  for (int repeat = 0; repeat < 6; ++repeat) {
    const SampleLane lane(RandomShape(), random_);
    Call expected(lane, Ragged(lane, random_), static_cast<int>(1 + random_() % kGroupMax),
                  static_cast<int>(1 + random_() % 3), random_);
    Call call = expected;
    AttendArgs plain = expected.Args();
    plain.part_output = {};
    plain.part_lse = {};

    AttendReference(plain);
    Attend(call.Args());

    ExpectNear(call.output, expected.output, 1e-6, 1e-6);
    ExpectNear(call.lse, expected.lse, 2e-6, 2e-6);
    ExpectNear(call.logits, expected.logits, 2e-6, 4e-6);
  }
}

TEST_P(AttendPartsTest, MergedTheyAreTheAnswer) {
  for (int repeat = 0; repeat < 4; ++repeat) {
    const SampleLane lane(RandomShape(), random_);
    Call call(lane, Ragged(lane, random_), static_cast<int>(1 + random_() % kGroupMax), 2, random_);
    std::vector<float> output(call.output.size(), 0.0F);
    std::vector<float> lse(call.rows(), kMinusInfinity);

    Attend(call.Args());
    for (size_t x = 0; x < call.extents.size(); ++x) {
      MergeReference(
          {.rows = static_cast<int>(call.rows()),
           .head_dim = lane.options().head_dim,
           .part_output = std::span(call.part_output).subspan(x * output.size(), output.size()),
           .part_lse = std::span(call.part_lse).subspan(x * lse.size(), lse.size()),
           .output = output,
           .lse = lse});
    }

    ExpectNear(output, call.output, 2e-6, 2e-6);
    ExpectNear(lse, call.lse, 3e-6, 3e-6);
  }
}

TEST_P(AttendPartsTest, RepeatsBitForBitWithLogitsOrWithout) {
  const SampleLane lane({.head_dim = 96, .slots = 1400, .extent_slots = 64, .empty_one_in = 5},
                        random_);
  Call call(lane, Ragged(lane, random_), 3, 5, random_);
  Call again = call;
  AttendArgs without_logits = again.Args();
  without_logits.logits = {};

  Attend(call.Args());
  Attend(without_logits);

  EXPECT_EQ(call.output, again.output);
  EXPECT_EQ(call.lse, again.lse);
  EXPECT_EQ(call.part_output, again.part_output);
  EXPECT_EQ(call.part_lse, again.part_lse);
}

// Pages that hold the same tokens draw the same, to the last bit, wherever they stand.
TEST_P(AttendPartsTest, EqualExtentsHaveEqualParts) {
  const SampleLane lane({.head_dim = 80, .slots = 33, .extent_slots = 33, .empty_one_in = 6},
                        random_);
  const SampleLane other({.head_dim = 80, .slots = 200, .extent_slots = 25}, random_);
  std::vector<Extent> extents = other.extents();
  extents.insert(extents.begin() + 3, lane.extents()[0]);
  extents.push_back(lane.extents()[0]);
  Call call(other, extents, 5, 1, random_);
  call.query_index = {1000};
  call.logits.clear();

  Attend(call.Args());

  const auto outputs = [&](size_t x) {
    const auto first = call.part_output.begin() + static_cast<ptrdiff_t>(x * call.query.size());
    return std::vector<float>(first, first + static_cast<ptrdiff_t>(call.query.size()));
  };
  EXPECT_EQ(outputs(3), outputs(extents.size() - 1));
  EXPECT_NE(outputs(3), outputs(0));
}

TEST_P(AttendPartsTest, ExtentsThatNobodySeesAreZerosAndMinusInfinity) {
  for (const Dtype dtype : kDtypes) {  // Of short rows, which few threads share.
    const SampleLane lane({.dtype = dtype, .head_dim = 24, .slots = 90, .extent_slots = 30},
                          random_);
    Call call(lane, lane.extents(), 2, 3, random_);
    call.query_index = {-1, 20, 45};  // None, of the first extent only, not of the last.

    Attend(call.Args());

    for (size_t x = 0; x < 3; ++x) {
      for (size_t row = 0; row < call.rows(); ++row) {
        const bool sees_some = row % 3 >= 1 + x;
        const size_t part = x * call.rows() + row;
        EXPECT_EQ(call.part_lse[part] != kMinusInfinity, sees_some) << x << " " << row;
        for (size_t d = 0; d < lane.dim() && !sees_some; ++d) {
          EXPECT_EQ(call.part_output[part * lane.dim() + d], 0.0F) << x << " " << row;
        }
      }
    }
  }
}

TEST_P(AttendPartsTest, LanesOfEmptyExtentsAreAnswered) {
  const SampleLane lane({.head_dim = 24, .slots = 12, .empty_one_in = 1, .poison_empty = true},
                        random_);
  std::vector<Extent> extents = lane.extents();
  extents.insert(extents.begin(), 20, Extent{});
  for (const std::vector<Extent>& each :
       {extents, std::vector<Extent>(11), std::vector<Extent>()}) {
    Call call(lane, each, 3, 1, random_);
    call.logits.clear();

    Attend(call.Args());

    EXPECT_EQ(call.output, std::vector<float>(call.output.size(), 0.0F));
    EXPECT_EQ(call.lse, std::vector<float>(3, kMinusInfinity));
    EXPECT_EQ(call.part_output, std::vector<float>(call.part_output.size(), 0.0F));
    EXPECT_EQ(call.part_lse, std::vector<float>(call.part_lse.size(), kMinusInfinity));
  }
}

// The sizes that models come in; CUDA's are in kernel_grid_test.cc.
TEST_P(AttendPartsTest, AgreesWithTheReferenceAtEverySize) {
  if (GetParam() == "cuda" || GetParam() == "reference") return;
  for (const Dtype dtype : kDtypes) {
    for (const int head_dim : kHeadDims) {
      for (int group = 1; group <= kGroupMax; group += kGroupStep) {
        SCOPED_TRACE(testing::Message() << DtypeName(dtype) << " " << head_dim << " " << group);
        const GridLane lane(GridLane::Size(dtype, head_dim), group, 2, random_);
        GridLane::Answer answer = lane.NoAnswer();
        const size_t parts = lane.lane().extents().size() * lane.rows();
        std::vector<float> output(parts * lane.lane().dim()), lse(parts);
        std::vector<float> expected_output = output, expected_lse = lse;
        AttendArgs args = lane.Args(answer);
        args.part_output = expected_output;
        args.part_lse = expected_lse;
        AttendReference(args);
        args.part_output = output;
        args.part_lse = lse;

        Attend(args);

        ExpectNear(output, expected_output, 1e-6, 1e-6);
        ExpectNear(lse, expected_lse, 2e-6, 2e-6);
        ExpectNear(answer.output, lane.answer().output, 1e-6, 1e-6);
        ExpectNear(answer.lse, lane.answer().lse, 2e-6, 2e-6);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

// Logits that rise from extent to extent make each weigh what was before anew; values of one sign
// let no rounding cancel.
TEST_P(AttendPartsTest, SumErrorHoldsWhereEveryExtentRaisesTheMaximum) {
  for (const int extent_slots : {1, 3, 40}) {
    SampleLane lane({.dtype = Dtype::kF32,
                     .head_dim = 16,
                     .slots = extent_slots * 50,
                     .extent_slots = extent_slots},
                    random_);
    Call call(lane, lane.extents(), 1, 1, random_);
    for (size_t d = 0; d < lane.dim(); ++d) call.query[d] = d == 0 ? 4.0F : 0.0F;
    for (size_t s = 0; s < lane.slots(); ++s) {
      lane.set_key(s, 0, 3.0 * static_cast<double>(s) / static_cast<double>(lane.slots()));
      for (size_t d = 0; d < lane.dim(); ++d) lane.set_value(s, d, std::fabs(lane.value(s, d)));
    }
    const AttendArgs args = call.Args();

    Attend(args);

    // Subtracting the maximum rounds too: of logits up to 3.
    const double allowed = AttendSumError(lane.slots()) + std::expm1(2 * 3 * 0x1p-24) * 2;
    const std::vector<double> exact = Exact(call, args.scale, 0, 0, lane.slots());
    for (size_t d = 0; d < lane.dim(); ++d) {
      EXPECT_LE(std::fabs(call.output[d] - exact[d]), allowed * exact[d]) << d;
    }
  }
}

TEST(AttendPartsCheckTest, SpansThatDisagreeWithTheExtentsStopTheProcess) {
  std::mt19937_64 random(1);
  const SampleLane lane({.head_dim = 8, .slots = 60, .extent_slots = 30}, random);
  Call call(lane, lane.extents(), 2, 1, random);

  AttendArgs args = call.Args();
  args.part_lse = args.part_lse.first(3);
  EXPECT_DEATH(AttendCpu(args), "part_lse is .extents, group, queries. or empty");
  args.part_lse = {};
  EXPECT_DEATH(AttendCpu(args), "part_output is .*or empty with part_lse");
}

}  // namespace
}  // namespace ebbtide::gpu
