// SPDX-License-Identifier: Apache-2.0
//
// Bounds against what they bound, worked out in long double from the keys themselves. No check here
// has a tolerance: low <= true <= high, and distance >= true.

#include "gpu/kernels/bound.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/kernels/digest.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/implementation.h"
#include "tests/unit/gpu/sample_page.h"

namespace ebbtide::gpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Pages of one lane with their digests; of each page the last `absent` tokens are absent.
struct Lane {
  std::vector<SamplePage> pages;
  std::vector<std::vector<std::byte>> digests;
  std::vector<int32_t> absent;

  int dim() const { return pages[0].shape().head_dim; }

  void Add(const SamplePage& page, int32_t absent_tokens) {
    pages.push_back(page);
    absent.push_back(absent_tokens);
    digests.emplace_back(DigestBytes(page.shape().head_dim));
    DigestReference(page.Args(digests.back()));
  }

  std::vector<const std::byte*> Pointers() const {
    std::vector<const std::byte*> pointers;
    for (const auto& digest : digests) pointers.push_back(digest.data());
    return pointers;
  }
};

// One lane for each head_dim, with pages of every kind: half of them wholly absent, half in part.
std::vector<Lane> EveryLane(Dtype dtype, std::mt19937_64& random) {
  std::map<int, Lane> lanes;
  for (const SamplePage& page : EveryPage(dtype, random)) {
    const auto some = 1 + static_cast<int32_t>(random() % static_cast<uint64_t>(page.tokens()));
    lanes[page.shape().head_dim].Add(page, random() % 2 == 0 ? page.tokens() : some);
  }
  std::vector<Lane> result;
  for (auto& [head_dim, lane] : lanes) result.push_back(std::move(lane));
  return result;
}

struct Rows {
  int rows = 0;
  float scale = 0;
  std::vector<float> query;  // [rows, head_dim]
};

// Ordinary, tiny and large rows, and one with zeros in every second channel.
Rows RandomRows(int rows, int head_dim, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Rows result{rows, 1 / std::sqrt(static_cast<float>(head_dim)), {}};
  for (int r = 0; r < rows; ++r) {
    const float size = std::array{2.0F, 1.0F, 1e-3F, 50.0F}[static_cast<size_t>(r % 4)];
    for (int d = 0; d < head_dim; ++d) {
      const float x = size * normal(random);
      result.query.push_back(r % 5 == 1 && d % 2 == 0 ? 0.0F : x);
    }
  }
  return result;
}

long double Logit(const Rows& rows, int r, const SamplePage& page, int j) {
  const int dim = page.shape().head_dim;
  long double sum = 0;
  for (int d = 0; d < dim; ++d) {
    sum += static_cast<long double>(rows.query[static_cast<size_t>(r * dim + d)]) * page.key(j, d);
  }
  return rows.scale * sum;
}

long double AbsentMass(const Rows& rows, int r, const SamplePage& page, int32_t absent) {
  std::vector<long double> logits;
  for (int j = page.tokens() - absent; j < page.tokens(); ++j) {
    logits.push_back(Logit(rows, r, page, j));
  }
  const long double peak = *std::max_element(logits.begin(), logits.end());
  long double total = 0;
  for (const long double logit : logits) total += std::exp(logit - peak);
  return peak + std::log(total);
}

struct Bounds {
  std::vector<float> low;
  std::vector<float> high;
  std::vector<float> estimate;
};

// The bounds that do not hold, in words.
std::vector<std::string> Violations(const Lane& lane, const Rows& rows, const Bounds& bounds) {
  std::vector<std::string> violations;
  for (int r = 0; r < rows.rows; ++r) {
    for (size_t p = 0; p < lane.pages.size(); ++p) {
      const size_t i = static_cast<size_t>(r) * lane.pages.size() + p;
      const long double exact = AbsentMass(rows, r, lane.pages[p], lane.absent[p]);
      if (bounds.low[i] <= exact && exact <= bounds.high[i]) continue;
      violations.push_back(absl::StrFormat("row %d page %d: %.9g <= %.12g <= %.9g", r, p,
                                           bounds.low[i], exact, bounds.high[i]));
    }
  }
  return violations;
}

// Sums of the resident logits, each off by `error`.
std::vector<float> ResidentSums(const Lane& lane, const Rows& rows, double error) {
  std::vector<float> sums;
  for (int r = 0; r < rows.rows; ++r) {
    for (size_t p = 0; p < lane.pages.size(); ++p) {
      long double sum = 0;
      for (int j = 0; j < lane.pages[p].tokens() - lane.absent[p]; ++j) {
        sum += Logit(rows, r, lane.pages[p], j) + error;
      }
      sums.push_back(static_cast<float>(sum));
    }
  }
  return sums;
}

class BoundTest : public testing::TestWithParam<ImplementationCase> {
 protected:
  static Bounds Run(const Lane& lane, const Rows& rows, std::span<const float> sums,
                    float logit_error, void (*bound)(const BoundArgs&)) {
    const size_t size = static_cast<size_t>(rows.rows) * lane.pages.size();
    Bounds bounds{std::vector<float>(size, kInfinity), std::vector<float>(size, -kInfinity),
                  std::vector<float>(size, kInfinity)};
    const std::vector<float> errors(static_cast<size_t>(rows.rows), logit_error);
    bound({.head_dim = lane.dim(),
           .rows = rows.rows,
           .pages = static_cast<int>(lane.pages.size()),
           .scale = rows.scale,
           .query = rows.query,
           .digest = lane.Pointers(),
           .absent = lane.absent,
           .resident_logit_sum = sums,
           .resident_logit_error = errors,
           .mass_low = bounds.low,
           .mass_high = bounds.high,
           .mass_estimate = bounds.estimate});
    return bounds;
  }

  Bounds Bound(const Lane& lane, const Rows& rows) {
    return Run(lane, rows, ResidentSums(lane, rows, 0), 0,
               implementation_.Choose(BoundReference, BoundCpu, BoundOnCuda));
  }

  Implementation implementation_{GetParam().name};
};

TEST_P(BoundTest, AbsentMassLiesBetweenTheBoundsOnEveryPage) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const Lane& lane : EveryLane(GetParam().dtype, random)) {
      const Rows rows = RandomRows(15, lane.dim(), random);  // 8 + 4 + 2 + 1: every tile of rows.

      EXPECT_THAT(Violations(lane, rows, Bound(lane, rows)), testing::IsEmpty());
    }
  });
}

TEST_P(BoundTest, BoundPlantedOnePercentShortIsNoticed) {
  std::mt19937_64 random(3);
  Lane lane;
  lane.Add(SamplePage({.dtype = GetParam().dtype, .tokens = 1}, random), 1);
  Rows rows{2, 0.125F, {}};
  for (int i = 0; i < 2 * lane.dim(); ++i) {  // The key itself, and its opposite.
    const double x = lane.pages[0].key(0, i % lane.dim());
    rows.query.push_back(static_cast<float>(i < lane.dim() ? x : -x));
  }
  ASSERT_THAT(Violations(lane, rows, Bound(lane, rows)), testing::IsEmpty());

  auto* const halves = reinterpret_cast<uint16_t*>(lane.digests[0].data());
  for (int i = 0; i < 3 * lane.dim(); ++i) halves[i] = HalfNearest(0.99 * HalfToFloat(halves[i]));

  EXPECT_THAT(Violations(lane, rows, Bound(lane, rows)), testing::SizeIs(2));
}

TEST_P(BoundTest, ErrorOfResidentLogitsIsAllowedForEitherWay) {
  std::mt19937_64 random(4);
  Lane lane;
  for (const int32_t absent : {1, 2, 31, 32}) {
    lane.Add(SamplePage({.dtype = GetParam().dtype}, random), absent);
    lane.Add(SamplePage({.dtype = GetParam().dtype, .kind = PageKind::kIdentical}, random), absent);
  }
  const Rows rows = RandomRows(8, lane.dim(), random);
  const auto bound = implementation_.Choose(BoundReference, BoundCpu, BoundOnCuda);
  for (const double error : {0.02, -0.02}) {
    const std::vector<float> sums = ResidentSums(lane, rows, error);

    EXPECT_THAT(Violations(lane, rows, Run(lane, rows, sums, 0.021F, bound)), testing::IsEmpty());
    // Without the allowance the same sums give bounds that do not hold.
    EXPECT_THAT(Violations(lane, rows, Run(lane, rows, sums, 0.0F, bound)),
                testing::Not(testing::IsEmpty()));
  }
}

bool HasInfiniteEdge(const DigestView& digest, int head_dim) {
  for (int d = 0; d < head_dim; ++d) {
    if (std::isinf(HalfToFloat(digest.key_low[d]) - HalfToFloat(digest.key_high[d]))) return true;
  }
  return false;
}

TEST_P(BoundTest, SimdIsHardlyWiderThanTheReference) {
  std::mt19937_64 random(5);
  for (const Lane& lane : EveryLane(GetParam().dtype, random)) {
    const Rows rows = RandomRows(8, lane.dim(), random);
    const Bounds tested = Bound(lane, rows);
    const Bounds reference = Run(lane, rows, ResidentSums(lane, rows, 0), 0, BoundReference);
    for (int r = 0; r < rows.rows; ++r) {
      double query_norm = 0;
      for (int d = 0; d < lane.dim(); ++d) {
        query_norm += std::pow(rows.query[static_cast<size_t>(r * lane.dim() + d)], 2.0);
      }
      for (size_t p = 0; p < lane.pages.size(); ++p) {
        const size_t i = static_cast<size_t>(r) * lane.pages.size() + p;
        const DigestView digest(lane.digests[p].data(), lane.dim());
        // With an edge at infinity, SIMD knows the largest norm alone.
        if (HasInfiniteEdge(digest, lane.dim())) continue;
        const DigestTail& tail = digest.tail;
        // Rounding in f32, as a share of the largest logit there could be, and amplified where a
        // page's few absent tokens are known through its mean.
        const double largest = rows.scale * std::sqrt(query_norm) * tail.key_norm_max;
        const double open = 1e-5 * (1 + largest * (2 + 2.0 * tail.tokens / lane.absent[p]));
        EXPECT_LE(tested.high[i], reference.high[i] + open);
        EXPECT_GE(tested.low[i], reference.low[i] - open);
        EXPECT_NEAR(tested.estimate[i], reference.estimate[i], open);
      }
    }
  }
}

TEST_P(BoundTest, ZeroQueryKnowsTheMass) {
  std::mt19937_64 random(6);
  Lane lane;
  lane.Add(SamplePage({.dtype = GetParam().dtype}, random), 32);
  lane.Add(SamplePage({.dtype = GetParam().dtype, .kind = PageKind::kFormatLimit}, random), 5);
  const Rows rows{1, 0.125F, std::vector<float>(64, 0.0F)};

  const Bounds bounds = Bound(lane, rows);

  EXPECT_THAT(Violations(lane, rows, bounds), testing::IsEmpty());
  EXPECT_NEAR(bounds.high[0], std::log(32.0), 1e-4);
  EXPECT_NEAR(bounds.low[1], std::log(5.0), 1e-4);
}

TEST_P(BoundTest, OverflowGivesInfiniteBoundsNeverNaN) {
  std::mt19937_64 random(7);
  Lane lane;
  for (const int32_t absent : {32, 7}) {
    lane.Add(SamplePage({.dtype = GetParam().dtype, .kind = PageKind::kFormatLimit}, random),
             absent);
    lane.Add(SamplePage({.dtype = GetParam().dtype}, random), absent);
  }
  const Rows rows{2, 1.0F, std::vector<float>(128, 2e38F)};

  const Bounds bounds = Bound(lane, rows);

  EXPECT_THAT(Violations(lane, rows, bounds), testing::IsEmpty());
  EXPECT_THAT(bounds.estimate, testing::Each(testing::Not(testing::IsNan())));
}

std::vector<float> Outputs(int rows, int head_dim, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> output;
  for (int i = 0; i < rows * head_dim; ++i) {
    output.push_back((i / head_dim % 2 == 0 ? 1.0F : 1e3F) * normal(random));
  }
  return output;
}

class ValueDistanceTest : public BoundTest {
 protected:
  std::vector<float> Distance(const Lane& lane, std::span<const float> output, int rows,
                              void (*distance_function)(const ValueDistanceArgs&)) {
    std::vector<float> distance(static_cast<size_t>(rows) * lane.pages.size());
    distance_function({.head_dim = lane.dim(),
                       .rows = rows,
                       .pages = static_cast<int>(lane.pages.size()),
                       .output = output,
                       .digest = lane.Pointers(),
                       .distance = distance});
    return distance;
  }

  // Tokens whose value is further from a row's output than their page's distance.
  static int Further(const Lane& lane, std::span<const float> output, int rows,
                     std::span<const float> distance) {
    int further = 0;
    for (int r = 0; r < rows; ++r) {
      for (size_t p = 0; p < lane.pages.size(); ++p) {
        for (int j = 0; j < lane.pages[p].tokens(); ++j) {
          long double sum = 0;
          for (int d = 0; d < lane.dim(); ++d) {
            const long double off = static_cast<long double>(lane.pages[p].value(j, d)) -
                                    output[static_cast<size_t>(r * lane.dim() + d)];
            sum += off * off;
          }
          further += std::sqrt(sum) > distance[static_cast<size_t>(r) * lane.pages.size() + p];
        }
      }
    }
    return further;
  }
};

TEST_P(ValueDistanceTest, NoTokenIsFurtherThanItsPage) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const Lane& lane : EveryLane(GetParam().dtype, random)) {
      const std::vector<float> output = Outputs(15, lane.dim(), random);
      const auto distance = Distance(
          lane, output, 15,
          implementation_.Choose(ValueDistanceReference, ValueDistanceCpu, ValueDistanceOnCuda));

      EXPECT_EQ(Further(lane, output, 15, distance), 0);
    }
  });
}

TEST_P(ValueDistanceTest, RadiusPlantedOnePercentShortIsNoticed) {
  std::mt19937_64 random(8);
  Lane lane;
  lane.Add(SamplePage({.dtype = GetParam().dtype}, random), 32);
  DigestTail tail = DigestView(lane.digests[0].data(), 64).tail;
  tail.value_radius *= 0.99F;
  tail.value_norm_max = kInfinity;  // Only the ball is tried.
  std::memcpy(lane.digests[0].data() + DigestBytes(64) - sizeof(tail), &tail, sizeof(tail));
  // From the mean itself, where the farthest token is a radius away.
  std::vector<float> output;
  for (int d = 0; d < 64; ++d) {
    output.push_back(HalfToFloat(DigestView(lane.digests[0].data(), 64).value_mean[d]));
  }

  const auto distance = Distance(
      lane, output, 1,
      implementation_.Choose(ValueDistanceReference, ValueDistanceCpu, ValueDistanceOnCuda));

  EXPECT_EQ(Further(lane, output, 1, distance), 1);
}

TEST_P(ValueDistanceTest, SimdIsHardlyWiderThanTheReference) {
  std::mt19937_64 random(9);
  for (const Lane& lane : EveryLane(GetParam().dtype, random)) {
    const std::vector<float> output = Outputs(8, lane.dim(), random);
    const auto tested = Distance(
        lane, output, 8,
        implementation_.Choose(ValueDistanceReference, ValueDistanceCpu, ValueDistanceOnCuda));
    const auto reference = Distance(lane, output, 8, ValueDistanceReference);

    for (size_t i = 0; i < tested.size(); ++i) {
      EXPECT_LE(tested[i], reference[i] * (1 + 1e-5) + 1e-18);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, BoundTest, testing::ValuesIn(EveryImplementationAndCuda()),
                         ImplementationCaseName);
INSTANTIATE_TEST_SUITE_P(Every, ValueDistanceTest, testing::ValuesIn(EveryImplementationAndCuda()),
                         ImplementationCaseName);

}  // namespace
}  // namespace ebbtide::gpu
