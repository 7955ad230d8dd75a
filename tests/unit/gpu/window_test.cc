// SPDX-License-Identifier: Apache-2.0
//
// What slots draw from an observation window: on every SIMD target and CUDA against the reference,
// within the bound that the contract names, and the reference against attend and mass, which it
// joins.

#include "gpu/kernels/window.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "gpu/kernels/mass.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"
#include "tests/unit/gpu/forbidden_memory.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

// A window over a lane, and room for what it answers.
struct Call {
  Call(const SampleLane& lane, int group_in, int queries_in, double spread, std::mt19937_64& random)
      : group(group_in), queries(queries_in) {
    std::normal_distribution<float> normal(0, static_cast<float>(spread));
    query.resize(static_cast<size_t>(group * queries) * lane.dim());
    for (float& element : query) element = normal(random);
    // Consecutive tokens, the last of which sees everything.
    for (int m = 0; m < queries; ++m) {
      query_index.push_back(static_cast<int32_t>(lane.slots()) - queries + m);
    }
    mass.assign(lane.slots(), -1.0F);
  }

  WindowArgs Args(const SampleLane& lane) {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = group,
            .queries = queries,
            .scale = 1 / std::sqrt(static_cast<float>(lane.dim())),
            .extents = lane.extents(),
            .query = query,
            .query_index = query_index,
            .mass = mass};
  }

  int group;
  int queries;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<float> mass;
};

// The largest l2 norm of `rows`.
double Norm(std::span<const float> rows, size_t dim) {
  double largest = 0;
  for (size_t first = 0; first < rows.size(); first += dim) {
    double sum = 0;
    for (size_t d = 0; d < dim; ++d) sum += static_cast<double>(rows[first + d]) * rows[first + d];
    largest = std::max(largest, std::sqrt(sum));
  }
  return largest;
}

double KeyNorm(const SampleLane& lane) {
  double largest = 0;
  for (size_t s = 0; s < lane.slots(); ++s) {
    double sum = 0;
    for (size_t d = 0; d < lane.dim(); ++d) sum += lane.key(s, d) * lane.key(s, d);
    if (!lane.is_empty(s)) largest = std::max(largest, std::sqrt(sum));
  }
  return largest;
}

// Masses within the contract's bound; returns the largest error relative to it.
double ExpectWithinError(const SampleLane& lane, const WindowArgs& args,
                         std::span<const float> expected) {
  const double bound =
      WindowError(args, static_cast<float>(Norm(args.query, lane.dim()) * (1 + 1e-6)),
                  static_cast<float>(KeyNorm(lane) * (1 + 1e-6)));
  const double least = 1e-37 * args.group * args.queries;
  double worst = 0;
  for (size_t s = 0; s < expected.size(); ++s) {
    const double error = std::fabs(static_cast<double>(args.mass[s]) - expected[s]);
    EXPECT_LE(error, bound * expected[s] + least) << "slot " << s << " of " << expected[s];
    if (lane.is_empty(s)) {
      EXPECT_EQ(args.mass[s], 0.0F) << "slot " << s;
    }
    if (expected[s] > least) worst = std::max(worst, error / (bound * expected[s]));
  }
  return worst;
}

SampleLane::Options RandomShape(std::mt19937_64& random) {
  const auto between = [&](int least, int most) {
    return static_cast<int>(std::uniform_int_distribution<int>(least, most)(random));
  };
  const int usual[] = {64, 80, 96, 128, 256};
  return {.dtype = kDtypes[random() % kDtypes.size()],
          .head_dim = between(0, 1) == 0 ? usual[between(0, 4)] : between(1, kHeadDimMax),
          .slots = between(0, 3) == 0 ? between(700, 1300) : between(1, 300),
          .extent_slots = between(1, kPageTokensMax),
          .empty_one_in = between(0, 2) == 0 ? 0 : between(1, 8),
          .poison_empty = true};
}

TEST(WindowReferenceTest, IsAttendAndThenMass) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 48, .slots = 300, .empty_one_in = 5}, random);
  Call call(lane, 3, 17, 2, random);
  const WindowArgs args = call.Args(lane);
  std::vector<float> output(call.query.size());
  std::vector<float> lse(51);
  std::vector<float> logits(51 * lane.slots());
  std::vector<double> mass(lane.slots(), 0.0);

  AttendReference({.dtype = args.dtype,
                   .head_dim = args.head_dim,
                   .group = args.group,
                   .queries = args.queries,
                   .scale = args.scale,
                   .extents = args.extents,
                   .query = args.query,
                   .query_index = args.query_index,
                   .output = output,
                   .lse = lse,
                   .logits = logits});
  MassReference({.group = 3,
                 .queries = 17,
                 .slots = static_cast<int>(lane.slots()),
                 .logits = logits,
                 .lse = lse,
                 .mass = mass});
  WindowReference(args);

  for (size_t s = 0; s < mass.size(); ++s) {
    EXPECT_NEAR(call.mass[s], mass[s], 2e-6 * mass[s]) << s;  // Logits of up to 10 as f32.
  }
}

class WindowOnTarget : public OnTarget {
 protected:
  void Window(const WindowArgs& args) const { Choose(&WindowCpu, &WindowOnCuda)(args); }
  void ExpectNothingOf(const ForbiddenMemory& forbidden) const;
  bool is_emulated() const { return GetParam() == "cuda"; }
};
INSTANTIATE_TEST_SUITE_P(EveryTarget, WindowOnTarget, EveryTargetAndCuda(), TargetName);

TEST_P(WindowOnTarget, AgreesWithReferenceOverRandomShapes) {
  test::ForEachSeed(6, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    const SampleLane lane(RandomShape(random), random);
    const int group = std::uniform_int_distribution<int>(1, is_emulated() ? 4 : 16)(random);
    const int most = is_emulated() ? 20 : 70;  // Emulated, each takes its time.
    const int queries = std::uniform_int_distribution<int>(1, most)(random);
    Call expected(lane, group, queries, 1, random);
    Call call = expected;
    SCOPED_TRACE(testing::Message()
                 << DtypeName(lane.options().dtype) << " head_dim " << lane.dim() << " slots "
                 << lane.slots() << " group " << group << " queries " << queries);

    WindowReference(expected.Args(lane));
    Window(call.Args(lane));

    ExpectWithinError(lane, call.Args(lane), expected.mass);
  });
}

// Logits of hundreds: most weights are 0, and errors of logits are what counts.
TEST_P(WindowOnTarget, StaysWithinItsErrorWhereAFewTokensDrawEverything) {
  std::mt19937_64 random(test::RandomSeed());
  for (const Dtype dtype : kDtypes) {
    const SampleLane lane({.dtype = dtype, .head_dim = 128, .slots = 400}, random);
    Call expected(lane, 2, 9, 60, random);
    Call call = expected;

    WindowReference(expected.Args(lane));
    Window(call.Args(lane));

    ExpectWithinError(lane, call.Args(lane), expected.mass);
  }
}

// Far beyond what f16 holds, in both directions, and some that it holds.
TEST_P(WindowOnTarget, QueriesMayBeOfAnySize) {
  std::mt19937_64 random(test::RandomSeed());
  SampleLane lane({.head_dim = 64, .slots = 200}, random);
  Call call(lane, 1, 8, 1, random);
  const float size[] = {1, 0x1p-30F, 0x1p20F, 0x1p-120F, 1e-40F, 0x1p14F, 3, 0};
  for (size_t s = 0; s < lane.slots(); ++s) {  // Keys so small that logits are not.
    for (size_t d = 0; d < lane.dim(); ++d) lane.set_key(s, d, 0x1p-18 * lane.key(s, d));
  }
  for (size_t m = 0; m < 8; ++m) {
    for (size_t d = 0; d < lane.dim(); ++d) {
      float& element = call.query[m * lane.dim() + d];
      if (m == 6) element = std::round(element * 16) / 16;
      element *= size[m];
    }
  }
  Call expected = call;

  WindowReference(expected.Args(lane));
  Window(call.Args(lane));

  ExpectWithinError(lane, call.Args(lane), expected.mass);
}

// 1 + 2^-12 is 1 to f16, and what is left of these sums is the 2^-12 alone: no implementation
// rounds them.
TEST_P(WindowOnTarget, QueriesThatF16DoesNotHoldCountInFull) {
  std::mt19937_64 random(test::RandomSeed());
  SampleLane lane({.head_dim = 32, .slots = 64}, random);
  Call call(lane, 1, 4, 1, random);
  for (size_t d = 0; d < lane.dim(); ++d) {
    for (size_t m = 0; m < 4; ++m) {
      call.query[m * lane.dim() + d] = d % 2 == 0 ? 1 + 0x1p-12F : -1.0F;
    }
    for (size_t s = 0; s < lane.slots(); ++s) {
      lane.set_key(s, d, 256 * static_cast<double>(s % 16));
    }
  }
  Call expected = call;

  WindowReference(expected.Args(lane));
  Window(call.Args(lane));

  ASSERT_GT(expected.mass[15], 10 * expected.mass[0]);
  for (size_t s = 0; s < lane.slots(); ++s) {
    EXPECT_NEAR(call.mass[s], expected.mass[s], 2e-6 * expected.mass[s]) << s;
  }
}

TEST_P(WindowOnTarget, AllSlotsTogetherDrawAsMuchAsQueriesAsk) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 64, .slots = 1000, .empty_one_in = 4, .poison_empty = true},
                        random);
  Call call(lane, 4, 32, 1, random);
  call.query_index[3] = -1;  // Sees nothing, adds nothing.
  // Half of the rows ask so loudly that e^(z - their largest logit) is 0 for any other row.
  for (size_t i = 0; i < call.query.size() / 2; ++i) call.query[i] *= 60;

  Window(call.Args(lane));

  EXPECT_NEAR(std::accumulate(call.mass.begin(), call.mass.end(), 0.0), 31, 31 * 1e-5);
}

TEST_P(WindowOnTarget, LargestWindowIsAnswered) {
  std::mt19937_64 random(test::RandomSeed());
  const int group = is_emulated() ? 2 : 16;
  const SampleLane lane({.head_dim = 32, .slots = 300}, random);
  Call expected(lane, group, 256, 1, random);
  Call call = expected;

  WindowReference(expected.Args(lane));
  Window(call.Args(lane));

  ExpectWithinError(lane, call.Args(lane), expected.mass);
}

// Slots that nobody sees lie in `forbidden`, values where nobody may even copy them.
void WindowOnTarget::ExpectNothingOf(const ForbiddenMemory& forbidden) const {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 72, .slots = 40, .extent_slots = 20}, random);
  Call expected(lane, 2, 5, 1, random);
  WindowReference(expected.Args(lane));
  Call call = expected;
  const ForbiddenMemory value;
  const std::vector<int32_t> hidden(32, kNoToken);
  const std::vector<int32_t> future(32, 1000);
  Extent first = lane.extents()[0];
  Extent last = lane.extents()[1];
  first.value = last.value = value.bytes();
  const std::vector<Extent> extents = {{forbidden.bytes(), nullptr, hidden.data(), 32},
                                       first,
                                       {forbidden.bytes(), nullptr, future.data(), 32},
                                       last,
                                       {forbidden.bytes(), nullptr, hidden.data(), 7}};
  call.mass.assign(32 + 20 + 32 + 20 + 7, -1.0F);
  WindowArgs args = call.Args(lane);
  args.extents = extents;

  Window(args);

  std::vector<float> drawn(32, 0.0F);
  drawn.insert(drawn.end(), expected.mass.begin(), expected.mass.begin() + 20);
  drawn.insert(drawn.end(), 32, 0.0F);
  drawn.insert(drawn.end(), expected.mass.begin() + 20, expected.mass.end());
  drawn.insert(drawn.end(), 7, 0.0F);
  for (size_t s = 0; s < drawn.size(); ++s) {
    EXPECT_NEAR(call.mass[s], drawn[s], 1e-5 * drawn[s]) << s;
  }
}

TEST_P(WindowOnTarget, NeverTouchesSlotsThatNobodySeesNorValues) {
  if (!InPlace::kIsPossible && GetParam() == "cuda")
    GTEST_SKIP() << "not run: a device reads copies of these arrays; the emulator runs it";
  const InPlace in_place;
  ExpectNothingOf(ForbiddenMemory());
}

TEST_P(WindowOnTarget, SlotsThatNobodySeesMayHoldAnything) {
  ExpectNothingOf(ForbiddenMemory(ForbiddenMemory::Use::kMayBeCopied));
}

TEST_P(WindowOnTarget, RepeatsBitForBit) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 96, .slots = 900, .empty_one_in = 5}, random);
  Call call(lane, 3, 30, 1, random);
  Call again = call;

  Window(call.Args(lane));
  Window(again.Args(lane));

  EXPECT_EQ(call.mass, again.mass);
}

TEST_P(WindowOnTarget, NothingSeenDrawsNothing) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 24, .slots = 70}, random);
  Call call(lane, 2, 3, 1, random);
  call.query_index.assign(3, -1);
  Call nobody(lane, 2, 0, 1, random);
  Call nowhere(lane, 2, 3, 1, random);
  nowhere.mass.clear();
  WindowArgs args = nowhere.Args(lane);
  args.extents = {};

  Window(call.Args(lane));
  Window(nobody.Args(lane));
  Window(args);

  EXPECT_EQ(call.mass, std::vector<float>(70, 0.0F));
  EXPECT_EQ(nobody.mass, std::vector<float>(70, 0.0F));
}

TEST_P(WindowOnTarget, WrongShapesStopTheProcess) {
  std::mt19937_64 random(1);
  const SampleLane lane({.head_dim = 8, .slots = 10}, random);
  Call call(lane, 2, 3, 1, random);
  const auto with = [&](auto change) {
    WindowArgs args = call.Args(lane);
    change(args);
    return args;
  };

  EXPECT_DEATH(Window(with([](WindowArgs& a) { a.mass = a.mass.first(9); })), "mass is .slots.");
  EXPECT_DEATH(Window(with([](WindowArgs& a) { a.query = a.query.first(40); })), "query is");
  EXPECT_DEATH(Window(with([](WindowArgs& a) { a.query_index = a.query_index.first(2); })),
               "query_index is");
  EXPECT_DEATH(Window(with([](WindowArgs& a) { a.head_dim = 257; })), "head_dim is 1 to 256");
  EXPECT_DEATH(Window(with([](WindowArgs& a) { a.group = 17; })), "group is 1 to 16");
}

}  // namespace
}  // namespace ebbtide::gpu
