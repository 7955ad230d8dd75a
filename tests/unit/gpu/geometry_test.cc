// SPDX-License-Identifier: Apache-2.0
//
// KeyDiff against its definition: the mean cosine of a key to all keys has the same order.

#include "gpu/kernels/geometry.h"

#include <cmath>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/forbidden_memory.h"
#include "tests/unit/gpu/implementation.h"
#include "tests/unit/gpu/sample_lane.h"
#include "tests/unit/gpu/scores_on_cuda.h"

namespace ebbtide::gpu {
namespace {

class GeometryTest : public testing::TestWithParam<ImplementationCase> {
 protected:
  std::vector<float> KeyDiff(const SampleLane& lane) {
    std::vector<float> score(lane.slots(), 99.0F);
    Run({.dtype = lane.options().dtype,
         .head_dim = lane.options().head_dim,
         .extents = lane.extents(),
         .score = score});
    return score;
  }
  void Run(const GeometryArgs& args) const {
    implementation_.Choose(KeyDiffReference, KeyDiffCpu, KeyDiffOnCuda)(args);
  }

  Implementation implementation_{GetParam().name};
};

TEST_P(GeometryTest, ValuesAreNeverTouched) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.dtype = GetParam().dtype, .head_dim = 24, .slots = 70}, random);
  const ForbiddenMemory forbidden;
  std::vector<Extent> extents = lane.extents();
  for (Extent& extent : extents) extent.value = forbidden.bytes();
  std::vector<float> score(lane.slots(), 99.0F);

  Run({.dtype = GetParam().dtype, .head_dim = 24, .extents = extents, .score = score});

  EXPECT_EQ(score, KeyDiff(lane));
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

TEST_P(GeometryTest, KeyDiffIsProportionalToTheMeanCosineWithAllKeys) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.dtype = GetParam().dtype,
                         .head_dim = 52,
                         .slots = 150,
                         .extent_slots = 16,
                         .empty_one_in = 5,
                         .poison_empty = true},
                        random);

  const std::vector<float> score = KeyDiff(lane);

  // The mean unit key's squared norm is the mean of all mean cosines.
  std::vector<double> mean_cosine(lane.slots());
  double count = 0;
  for (size_t s = 0; s < lane.slots(); ++s) count += lane.is_empty(s) ? 0 : 1;
  double squared_norm = 0;
  for (size_t s = 0; s < lane.slots(); ++s) {
    for (size_t t = 0; t < lane.slots() && !lane.is_empty(s); ++t) {
      if (!lane.is_empty(t)) mean_cosine[s] += Cosine(lane, s, t) / count;
    }
    squared_norm += mean_cosine[s] / count;
  }
  for (size_t s = 0; s < lane.slots(); ++s) {
    EXPECT_NEAR(score[s], -mean_cosine[s] / std::sqrt(squared_norm), 1e-6) << s;
  }
}

TEST_P(GeometryTest, ZeroKeyScoresZeroAndLeavesTheOthersAlone) {
  std::mt19937_64 random(2);
  SampleLane lane({.dtype = GetParam().dtype, .head_dim = 16, .slots = 9, .extent_slots = 9},
                  random);
  SampleLane shorter({.dtype = GetParam().dtype, .head_dim = 16, .slots = 8, .extent_slots = 8},
                     random);
  for (size_t d = 0; d < 16; ++d) {
    for (size_t s = 0; s < 8; ++s) shorter.set_key(s, d, lane.key(s, d));
    lane.set_key(8, d, 0.0);
  }

  const std::vector<float> score = KeyDiff(lane);
  const std::vector<float> without = KeyDiff(shorter);

  EXPECT_EQ(score[8], 0.0F);
  for (size_t s = 0; s < 8; ++s) EXPECT_EQ(score[s], without[s]) << s;
}

TEST_P(GeometryTest, KeysThatCancelScoreZeroRatherThanNothing) {
  std::mt19937_64 random(3);
  SampleLane lane({.dtype = GetParam().dtype, .head_dim = 8, .slots = 2, .extent_slots = 2},
                  random);
  for (size_t d = 0; d < 8; ++d) lane.set_key(1, d, -lane.key(0, d));

  const std::vector<float> score = KeyDiff(lane);

  EXPECT_EQ(score[0], 0.0F);
  EXPECT_EQ(score[1], 0.0F);
}

TEST_P(GeometryTest, EveryTargetAgreesWithTheReferenceOnALongLane) {
  std::mt19937_64 random(test::RandomSeed());
  for (const int head_dim : {8, 64, 77, 128}) {
    const SampleLane lane({.dtype = GetParam().dtype,
                           .head_dim = head_dim,
                           .slots = 1000,
                           .extent_slots = 32,
                           .empty_one_in = 9,
                           .poison_empty = true},
                          random);
    std::vector<float> reference(lane.slots());
    KeyDiffReference({.dtype = GetParam().dtype,
                      .head_dim = head_dim,
                      .extents = lane.extents(),
                      .score = reference});

    EXPECT_THAT(KeyDiff(lane), testing::Pointwise(testing::FloatNear(2e-6F), reference));
  }
}

INSTANTIATE_TEST_SUITE_P(Every, GeometryTest, testing::ValuesIn(EveryImplementationAndCuda()),
                         ImplementationCaseName);

}  // namespace
}  // namespace ebbtide::gpu
