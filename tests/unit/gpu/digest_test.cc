// SPDX-License-Identifier: Apache-2.0
//
// A digest's promises are inequalities over the page it was made of. They are checked in long
// double without tolerance, on pages at the edges of the number formats; the SIMD digest must
// besides be as tight as the reference's, but for what digest.h allows.

#include "gpu/kernels/digest.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/implementation.h"
#include "tests/unit/gpu/sample_page.h"

namespace ebbtide::gpu {
namespace {

using Digest = std::vector<std::byte>;

class DigestTest : public testing::TestWithParam<ImplementationCase> {
 protected:
  Digest Make(const SamplePage& page) {
    Digest digest(DigestBytes(page.shape().head_dim), std::byte{0xAB});
    implementation_.Choose(DigestReference, DigestCpu, DigestOnCuda)(page.Args(digest));
    return digest;
  }

  Implementation implementation_{GetParam().name};
};

long double Root(long double x) {
  return std::sqrt(x);
}

// Messages of all promises that `digest` breaks.
std::vector<std::string> BrokenPromises(const SamplePage& page, const DigestView& digest) {
  std::vector<std::string> broken;
  const auto expect = [&](bool is_kept, const std::string& promise) {
    if (!is_kept) broken.push_back(promise);
  };
  const int dim = page.shape().head_dim;
  long double mean_error = 0;
  for (int d = 0; d < dim; ++d) {
    long double sum = 0;
    for (int j = 0; j < page.tokens(); ++j) {
      expect(HalfToFloat(digest.key_low[d]) <= page.key(j, d), "key_low");
      expect(HalfToFloat(digest.key_high[d]) >= page.key(j, d), "key_high");
      sum += page.key(j, d);
    }
    const long double off = sum / page.tokens() - HalfToFloat(digest.key_mean[d]);
    mean_error += off * off;
  }
  expect(digest.tail.key_mean_error >= Root(mean_error), "key_mean_error");
  for (int j = 0; j < page.tokens(); ++j) {
    long double key = 0;
    long double value = 0;
    long double distance = 0;
    for (int d = 0; d < dim; ++d) {
      const long double v = page.value(j, d);
      const long double off = v - HalfToFloat(digest.value_mean[d]);
      key += static_cast<long double>(page.key(j, d)) * page.key(j, d);
      value += v * v;
      distance += off * off;
    }
    expect(digest.tail.key_norm_max >= Root(key), "key_norm_max");
    expect(digest.tail.value_norm_max >= Root(value), "value_norm_max");
    expect(digest.tail.value_radius >= Root(distance), "value_radius");
  }
  expect(digest.tail.tokens == page.tokens(), "tokens");
  expect(digest.tail.reserved == 0, "reserved");
  return broken;
}

TEST_P(DigestTest, EveryPromiseHoldsForEveryPage) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const SamplePage& page : EveryPage(GetParam().dtype, random)) {
      const Digest digest = Make(page);

      EXPECT_THAT(BrokenPromises(page, DigestView(digest.data(), page.shape().head_dim)),
                  testing::IsEmpty());
    }
  });
}

TEST_P(DigestTest, PromisePlantedOnePercentShortIsNoticed) {
  std::mt19937_64 random(5);
  const SamplePage page({.dtype = GetParam().dtype}, random);
  const Digest whole = Make(page);
  const auto plant = [&](auto change) {
    Digest digest = whole;
    change(reinterpret_cast<uint16_t*>(digest.data()),
           reinterpret_cast<DigestTail*>(digest.data() + whole.size() - sizeof(DigestTail)));
    return BrokenPromises(page, DigestView(digest.data(), page.shape().head_dim));
  };

  EXPECT_THAT(plant([](auto*, auto* tail) { tail->value_radius *= 0.99F; }),
              testing::Contains("value_radius"));
  EXPECT_THAT(plant([](auto*, auto* tail) { tail->value_norm_max *= 0.99F; }),
              testing::Contains("value_norm_max"));
  EXPECT_THAT(plant([](auto*, auto* tail) { tail->key_norm_max *= 0.99F; }),
              testing::Contains("key_norm_max"));
  EXPECT_THAT(plant([](auto*, auto* tail) { tail->key_mean_error *= 0.99F; }),
              testing::Contains("key_mean_error"));
  EXPECT_THAT(plant([](auto* low, auto*) { low[3] = HalfNearest(0.99 * HalfToFloat(low[3])); }),
              testing::Contains("key_low"));
  EXPECT_THAT(plant([](auto* low, auto*) { low[67] = HalfNearest(0.99 * HalfToFloat(low[67])); }),
              testing::Contains("key_high"));
}

TEST_P(DigestTest, BoxIsAsTightAsTheFormatAllows) {
  std::mt19937_64 random(6);
  for (const SamplePage& page : EveryPage(GetParam().dtype, random)) {
    const Digest digest = Make(page);
    const DigestView view(digest.data(), page.shape().head_dim);
    for (int d = 0; d < page.shape().head_dim; ++d) {
      double low = page.key(0, d);
      double high = low;
      for (int j = 1; j < page.tokens(); ++j) {
        low = std::min(low, page.key(j, d));
        high = std::max(high, page.key(j, d));
      }
      EXPECT_EQ(HalfToFloat(view.key_low[d]), HalfToFloat(HalfDown(low)));
      EXPECT_EQ(HalfToFloat(view.key_high[d]), HalfToFloat(HalfUp(high)));
    }
  }
}

// Steps of f16 between two finite halves.
int StepsApart(uint16_t a, uint16_t b) {
  const auto ordered = [](uint16_t half) {
    return (half & 0x8000) != 0 ? -static_cast<int>(half & 0x7FFF) : static_cast<int>(half);
  };
  return std::abs(ordered(a) - ordered(b));
}

TEST_P(DigestTest, MeansRadiiAndNormsAreCloseToTheReference) {
  std::mt19937_64 random(7);
  for (const SamplePage& page : EveryPage(GetParam().dtype, random)) {
    const int dim = page.shape().head_dim;
    const Digest digest = Make(page);
    const DigestView view(digest.data(), dim);
    Digest reference_digest(digest.size());
    DigestReference(page.Args(reference_digest));
    const DigestView reference(reference_digest.data(), dim);

    // A mean one step off moves the radius by that step.
    double moved = 0;
    for (int d = 0; d < dim; ++d) {
      EXPECT_LE(StepsApart(view.key_mean[d], reference.key_mean[d]), 1);
      EXPECT_LE(StepsApart(view.value_mean[d], reference.value_mean[d]), 1);
      moved +=
          std::pow(HalfToFloat(view.value_mean[d]) - HalfToFloat(reference.value_mean[d]), 2.0);
    }
    const auto expect_near = [](float tested, double exact, double extra) {
      EXPECT_LE(tested, exact * (1 + 1e-5) + extra + 1e-18);
    };
    expect_near(view.tail.value_radius, reference.tail.value_radius, std::sqrt(moved));
    expect_near(view.tail.value_norm_max, reference.tail.value_norm_max, 0);
    expect_near(view.tail.key_norm_max, reference.tail.key_norm_max, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Every, DigestTest, testing::ValuesIn(EveryImplementationAndCuda()),
                         ImplementationCaseName);

}  // namespace
}  // namespace ebbtide::gpu
