// SPDX-License-Identifier: Apache-2.0
//
// Kernels of scores at every head_dim, dtype and group that models come in, CUDA against the
// reference; and the same tokens leave by either's scores. Tokens that are alike score alike, to
// the last bit, so that it is their age that decides.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/damage.h"
#include "gpu/kernels/geometry.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/merge.h"
#include "gpu/kernels/page_damage.h"
#include "gpu/kernels/select.h"
#include "gpu/kernels/window.h"
#include "tests/unit/gpu/kernel_grid.h"
#include "tests/unit/gpu/scores_on_cuda.h"

namespace ebbtide::gpu {
namespace {

// Scores that are further apart than this, relative to them, are in the same order everywhere.
constexpr double kApart = 1e-4;

class CudaScoreGridTest : public KernelGrid {
 protected:
  GridLane Lane(int head_dim, int group) {
    return {GridLane::Size(GetParam(), head_dim), group, GridLane::kQueriesMax, random_};
  }

  // Who leaves by `score` on CUDA are those who leave by `expected`, in the reference. The last to
  // leave is the older of a pair, the other of which stays.
  static void ExpectSameVictims(const GridLane& lane, const std::vector<float>& score,
                                const std::vector<float>& expected);
};
INSTANTIATE_TEST_SUITE_P(Every, CudaScoreGridTest, testing::ValuesIn(kDtypes), GridDtypeName);

// How many leave where only the first of a pair does: that pair which is furthest from all others,
// in `order` of leaving. 0 where there is none.
size_t CountThatPartsAPair(const std::vector<int32_t>& order, const std::vector<float>& score) {
  size_t count = 0;
  double furthest = kApart;
  for (size_t i = 1; i + 2 < order.size(); ++i) {
    const auto at = [&](size_t place) {
      return static_cast<double>(score[static_cast<size_t>(order[place])]);
    };
    if (at(i) != at(i + 1)) continue;
    const double apart = std::min(at(i) - at(i - 1), at(i + 2) - at(i + 1)) / std::fabs(at(i));
    if (apart <= furthest) continue;
    furthest = apart;
    count = i + 1;
  }
  return count;
}

void CudaScoreGridTest::ExpectSameVictims(const GridLane& lane, const std::vector<float>& score,
                                          const std::vector<float>& expected) {
  std::vector<int32_t> index(score.size());  // Later slots hold older tokens.
  std::iota(index.rbegin(), index.rend(), 100);
  std::vector<uint8_t> eligible;
  for (size_t s = 0; s < score.size(); ++s) {
    eligible.push_back(lane.lane().is_empty(s) ? 0 : 1);
    if (!lane.is_pair(s)) continue;
    ASSERT_EQ(score[s], score[s + GridLane::kPairs]) << s;
    ASSERT_EQ(expected[s], expected[s + GridLane::kPairs]) << s;
  }
  const std::vector<int32_t> order = SelectReference({expected, index, eligible, expected.size()});
  const size_t count = CountThatPartsAPair(order, expected);
  ASSERT_GT(count, 0U) << "no pair stands apart";

  std::vector<int32_t> leaving = SelectOnCuda({score, index, eligible, count});

  ASSERT_EQ(leaving, SelectReference({score, index, eligible, count}));
  std::vector<int32_t> victims(order.begin(), order.begin() + static_cast<ptrdiff_t>(count));
  std::ranges::sort(leaving);  // Scores that nearly tie may change places before the last.
  std::ranges::sort(victims);
  EXPECT_EQ(leaving, victims);
}

// Damage of a lane's tokens, in even groups beside a twentieth of attention that other tokens draw.
struct DamageCall {
  DamageCall(const GridLane& lane_in, const GridLane& other) : lane(lane_in), whole(lane.answer()) {
    if (lane.group() % 2 != 0) return;
    rest = other.answer();
    for (float& lse : rest.lse) lse -= 3;
    MergeReference({.rows = static_cast<int>(lane.rows()),
                    .head_dim = lane.lane().options().head_dim,
                    .part_output = rest.output,
                    .part_lse = rest.lse,
                    .output = whole.output,
                    .lse = whole.lse});
  }

  std::vector<float> By(void (*damage_of)(const DamageArgs&)) const {
    std::vector<float> damage(GridLane::kSlots, -1.0F);
    damage_of({.dtype = lane.lane().options().dtype,
               .head_dim = lane.lane().options().head_dim,
               .rows = static_cast<int>(lane.rows()),
               .extents = lane.lane().extents(),
               .logits = lane.answer().logits,
               .lse = whole.lse,
               .centre = whole.output,
               .rest_output = rest.output,
               .rest_lse = rest.lse,
               .damage = damage});
    return damage;
  }

  const GridLane& lane;
  GridLane::Answer whole;
  GridLane::Answer rest;
};

TEST_P(CudaScoreGridTest, Damage) {
  ForEachGroup([&](int head_dim, int group) {
    const GridLane lane = Lane(head_dim, group);
    const DamageCall call(lane, Lane(head_dim, group));
    const std::vector<float> expected = call.By(&DamageReference);

    const std::vector<float> damage = call.By(&DamageOnCuda);

    ExpectNear(damage, expected, 1.1e-5, 1e-30);  // a |o - v| is no more than the damage.
    ExpectSameVictims(lane, damage, expected);
  });
}

// Of a lane's extents and, at the end, its first once more.
TEST_P(CudaScoreGridTest, PageDamage) {
  ForEachGroup([&](int head_dim, int group) {
    const GridLane lane = Lane(head_dim, group);
    const DamageCall call(lane, Lane(head_dim, group));
    GridLane::Answer answer = lane.NoAnswer();
    std::vector<Extent> pages = lane.lane().extents();
    pages.push_back(pages[0]);
    std::vector<float> part_output(pages.size() * answer.output.size());
    std::vector<float> part_lse(pages.size() * lane.rows());
    AttendArgs attend = lane.Args(answer);
    attend.extents = pages;
    attend.logits = {};
    attend.part_output = part_output;
    attend.part_lse = part_lse;
    AttendReference(attend);
    const auto damage_by = [&](void (*damage_of)(const PageDamageArgs&)) {
      std::vector<float> damage(pages.size(), -1.0F);
      damage_of({.head_dim = head_dim,
                 .rows = static_cast<int>(lane.rows()),
                 .pages = static_cast<int>(pages.size()),
                 .part_output = part_output,
                 .part_lse = part_lse,
                 .output = answer.output,
                 .lse = answer.lse,
                 .rest_output = call.rest.output,
                 .rest_lse = call.rest.lse,
                 .damage = damage});
      return damage;
    };
    const std::vector<float> expected = damage_by(&PageDamageReference);

    const std::vector<float> damage = damage_by(&PageDamageOnCuda);

    ExpectNear(damage, expected, 1.1e-5, 1e-30);
    EXPECT_EQ(damage.front(), damage.back());
  });
}

TEST_P(CudaScoreGridTest, FastDamage) {
  ForEachGroup([&](int head_dim, int group) {
    const GridLane lane = Lane(head_dim, group);
    const DamageCall call(lane, Lane(head_dim, group));
    const std::vector<float> expected = call.By(&FastDamageReference);

    const std::vector<float> damage = call.By(&FastDamageOnCuda);

    ExpectNear(damage, expected, 1.1e-5, 1e-30);
    ExpectSameVictims(lane, damage, expected);
  });
}

TEST_P(CudaScoreGridTest, WeightedValue) {
  ForEachGroup([&](int head_dim, int group) {
    const GridLane lane = Lane(head_dim, group);
    std::vector<float> weight = lane.answer().logits;
    for (size_t i = 0; i < weight.size(); ++i) {
      weight[i] = std::exp(weight[i] - lane.answer().lse[i / GridLane::kSlots]);
    }
    const auto sums_by = [&](void (*sum)(const WeightedValueArgs&)) {
      std::vector<float> output(lane.answer().output.size());
      sum({.dtype = GetParam(),
           .head_dim = head_dim,
           .rows = static_cast<int>(lane.rows()),
           .extents = lane.lane().extents(),
           .weight = weight,
           .output = output});
      return output;
    };

    ExpectNear(sums_by(&WeightedValueOnCuda), sums_by(&WeightedValueReference), 1e-6, 1e-6);
  });
}

TEST_P(CudaScoreGridTest, KeyDiff) {
  ForEachHeadDim([&](int head_dim) {
    const GridLane lane = Lane(head_dim, 1);
    const auto scores_by = [&](void (*score_of)(const GeometryArgs&)) {
      std::vector<float> score(GridLane::kSlots, 99.0F);
      score_of({.dtype = GetParam(),
                .head_dim = head_dim,
                .extents = lane.lane().extents(),
                .score = score});
      return score;
    };
    const std::vector<float> expected = scores_by(&KeyDiffReference);

    const std::vector<float> score = scores_by(&KeyDiffOnCuda);

    ExpectNear(score, expected, 0, 2e-6);
    ExpectSameVictims(lane, score, expected);
  });
}

TEST_P(CudaScoreGridTest, MassAndPools) {
  ForEachGroup([&](int head_dim, int group) {
    const GridLane lane = Lane(head_dim, group);
    const auto mass_by = [&](void (*add)(const MassArgs&)) {
      std::vector<double> mass(GridLane::kSlots, 0.5);
      add({.group = group,
           .queries = lane.queries(),
           .slots = GridLane::kSlots,
           .logits = lane.answer().logits,
           .lse = lane.answer().lse,
           .mass = mass});
      return std::vector<float>(mass.begin(), mass.end());
    };
    const auto pooled_by = [&](void (*pool)(const PoolArgs&), const std::vector<float>& mass) {
      std::vector<float> pooled(mass.size());
      pool({.kernel = 7, .mass = mass, .pooled = pooled});
      return pooled;
    };
    const std::vector<float> expected = mass_by(&MassReference);

    const std::vector<float> mass = mass_by(&MassOnCuda);

    ExpectNear(mass, expected, 1e-6, 0);
    ExpectSameVictims(lane, mass, expected);
    EXPECT_EQ(pooled_by(&MaxPoolOnCuda, mass), pooled_by(&MaxPool, mass));
    ExpectNear(pooled_by(&AveragePoolOnCuda, mass), pooled_by(&AveragePool, mass), 1e-6, 0);
  });
}

TEST_P(CudaScoreGridTest, Window) {
  ForEachGroup([&](int head_dim, int group) {
    const GridLane lane = Lane(head_dim, group);
    GridLane::Answer unused;
    const AttendArgs attend = lane.Args(unused);
    const auto mass_by = [&](void (*draw)(const WindowArgs&)) {
      std::vector<float> mass(GridLane::kSlots, -1.0F);
      draw({.dtype = GetParam(),
            .head_dim = head_dim,
            .group = group,
            .queries = lane.queries(),
            .scale = attend.scale,
            .extents = attend.extents,
            .query = attend.query,
            .query_index = attend.query_index,
            .mass = mass});
      return mass;
    };
    const std::vector<float> expected = mass_by(&WindowReference);

    const std::vector<float> mass = mass_by(&WindowOnCuda);

    ExpectNear(mass, expected, 1e-5, 0);
    ExpectSameVictims(lane, mass, expected);
  });
}

}  // namespace
}  // namespace ebbtide::gpu
