// SPDX-License-Identifier: Apache-2.0
//
// KeyDiff against its definition: the mean cosine of a key to all keys has the same order.

#include "gpu/kernels/geometry.h"

#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

std::vector<float> KeyDiff(const SampleLane& lane) {
  std::vector<float> score(lane.slots(), 99.0F);
  KeyDiffReference({.dtype = lane.options().dtype,
                    .head_dim = lane.options().head_dim,
                    .extents = lane.extents(),
                    .score = score});
  return score;
}

double Cosine(const SampleLane& lane, size_t s, size_t t) {
  double dot = 0;
  double s_norm = 0;
  double t_norm = 0;
  for (size_t d = 0; d < lane.dim(); ++d) {
    dot += lane.key(s, d) * lane.key(t, d);
    s_norm += lane.key(s, d) * lane.key(s, d);
    t_norm += lane.key(t, d) * lane.key(t, d);
  }
  return dot / std::sqrt(s_norm * t_norm);
}

TEST(GeometryTest, KeyDiffIsProportionalToTheMeanCosineWithAllKeys) {
  const uint64_t seed = TestSeed(1);
  SCOPED_TRACE(testing::Message() << "EBBTIDE_SEED=" << seed);
  std::mt19937_64 random(seed);
  const SampleLane lane({.head_dim = 24, .slots = 50, .extent_slots = 16, .empty_one_in = 5},
                        random);

  const std::vector<float> score = KeyDiff(lane);

  double ratio = 0;
  for (size_t s = 0; s < lane.slots(); ++s) {
    if (lane.is_empty(s)) {
      EXPECT_EQ(score[s], 0.0F);
      continue;
    }
    double mean_cosine = 0;
    for (size_t t = 0; t < lane.slots(); ++t) {
      if (!lane.is_empty(t)) mean_cosine += Cosine(lane, s, t);
    }
    if (ratio == 0) ratio = score[s] / mean_cosine;
    EXPECT_LT(ratio, 0);
    EXPECT_NEAR(score[s], ratio * mean_cosine, 1e-6);
  }
}

TEST(GeometryTest, ZeroKeyScoresZeroAndLeavesTheOthersAlone) {
  std::mt19937_64 random(2);
  SampleLane lane({.head_dim = 16, .slots = 9, .extent_slots = 9}, random);
  SampleLane shorter({.head_dim = 16, .slots = 8, .extent_slots = 8}, random);
  for (size_t d = 0; d < 16; ++d) {
    for (size_t s = 0; s < 8; ++s) shorter.set_key(s, d, lane.key(s, d));
    lane.set_key(8, d, 0.0);
  }

  const std::vector<float> score = KeyDiff(lane);
  const std::vector<float> without = KeyDiff(shorter);

  EXPECT_EQ(score[8], 0.0F);
  for (size_t s = 0; s < 8; ++s) EXPECT_EQ(score[s], without[s]);
}

TEST(GeometryTest, KeysThatCancelScoreZeroRatherThanNothing) {
  std::mt19937_64 random(3);
  SampleLane lane({.head_dim = 8, .slots = 2, .extent_slots = 2}, random);
  for (size_t d = 0; d < 8; ++d) lane.set_key(1, d, -lane.key(0, d));

  const std::vector<float> score = KeyDiff(lane);

  EXPECT_EQ(score[0], 0.0F);
  EXPECT_EQ(score[1], 0.0F);
}

}  // namespace
}  // namespace ebbtide::gpu
