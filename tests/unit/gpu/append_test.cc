// SPDX-License-Identifier: Apache-2.0
//
// Append on every SIMD target and CUDA: bytes unchanged, norms never below the exact ones, whatever
// the alignment of the worker's tensor. And the search for elements that are not finite.

#include "gpu/kernels/append.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/element.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"

namespace ebbtide::gpu {
namespace {

std::vector<std::byte> RandomElements(Dtype dtype, size_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(count * DtypeBytes(dtype));
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < count; ++i) {
    StoreElement(dtype, bytes.data(), static_cast<int>(i), normal(random));
  }
  return bytes;
}

// A worker's tensor [tokens, stride] that starts at an odd address, and slots in reverse order.
struct Call {
  Call(Dtype dtype_in, int head_dim_in, int tokens_in, std::mt19937_64& random)
      : dtype(dtype_in), head_dim(head_dim_in), tokens(tokens_in) {
    row_bytes = static_cast<size_t>(head_dim) * DtypeBytes(dtype);
    stride = row_bytes + 6;
    for (std::vector<std::byte>* tensor : {&key, &value}) {
      tensor->resize(1 + static_cast<size_t>(tokens) * stride);
      for (int token = 0; token < tokens; ++token) {
        const auto row = RandomElements(dtype, static_cast<size_t>(head_dim), random);
        std::memcpy(tensor->data() + 1 + static_cast<size_t>(token) * stride, row.data(),
                    row_bytes);
      }
    }
    key_memory.resize(static_cast<size_t>(tokens) * row_bytes);
    value_memory.resize(key_memory.size());
    for (int token = tokens - 1; token >= 0; --token) {
      key_slot.push_back(key_memory.data() + static_cast<size_t>(token) * row_bytes);
      value_slot.push_back(value_memory.data() + static_cast<size_t>(token) * row_bytes);
    }
    key_norm.resize(static_cast<size_t>(tokens));
    value_norm.resize(static_cast<size_t>(tokens));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  AppendArgs Args() {
    return {.dtype = dtype,
            .head_dim = head_dim,
            .tokens = tokens,
            .key = key.data() + 1,
            .value = value.data() + 1,
            .stride = stride,
            .key_slot = key_slot,
            .value_slot = value_slot,
            .key_norm = key_norm,
            .value_norm = value_norm};
  }

  Dtype dtype;
  int head_dim;
  int tokens;
  size_t row_bytes = 0;
  size_t stride = 0;
  std::vector<std::byte> key, value;
  std::vector<std::byte> key_memory, value_memory;
  std::vector<std::byte*> key_slot, value_slot;
  std::vector<float> key_norm, value_norm;
};

// One step more, where norms are subnormal.
constexpr long double kSmallest = std::numeric_limits<float>::denorm_min();

long double ExactNorm(Dtype dtype, int head_dim, const std::byte* row) {
  long double sum = 0;
  for (int d = 0; d < head_dim; ++d) {
    const long double element = ElementAt(dtype, row, d);
    sum += element * element;
  }
  return std::sqrt(sum);
}

void ExpectAppended(const Call& call) {
  for (size_t token = 0; token < static_cast<size_t>(call.tokens); ++token) {
    const std::byte* key = call.key.data() + 1 + token * call.stride;
    const std::byte* value = call.value.data() + 1 + token * call.stride;
    ASSERT_EQ(std::memcmp(call.key_slot[token], key, call.row_bytes), 0) << token;
    ASSERT_EQ(std::memcmp(call.value_slot[token], value, call.row_bytes), 0) << token;
    const long double key_norm = ExactNorm(call.dtype, call.head_dim, key);
    const long double value_norm = ExactNorm(call.dtype, call.head_dim, value);
    ASSERT_GE(call.key_norm[token], key_norm) << token;
    ASSERT_LE(call.key_norm[token], key_norm * (1 + 1e-6L) + kSmallest) << token;
    ASSERT_GE(call.value_norm[token], value_norm) << token;
    ASSERT_LE(call.value_norm[token], value_norm * (1 + 1e-6L) + kSmallest) << token;
  }
}

TEST(AppendReferenceTest, CopiesBytesAndRoundsNormsUp) {
  std::mt19937_64 random(test::RandomSeed());
  for (const Dtype dtype : kDtypes) {
    Call call(dtype, 100, 9, random);

    AppendReference(call.Args());

    ExpectAppended(call);
  }
}

class AppendOnTarget : public OnTarget {
 protected:
  void Append(const AppendArgs& args) const { Choose(&AppendCpu, &AppendOnCuda)(args); }
};
INSTANTIATE_TEST_SUITE_P(EveryTarget, AppendOnTarget, EveryTargetAndCuda(), TargetName);

TEST_P(AppendOnTarget, CopiesBytesAndRoundsNormsUp) {
  test::ForEachSeed(30, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    const Dtype dtype = kDtypes[random() % kDtypes.size()];
    Call call(dtype, std::uniform_int_distribution<int>(1, kHeadDimMax)(random),
              std::uniform_int_distribution<int>(0, 20)(random), random);

    Append(call.Args());

    ExpectAppended(call);
  });
}

TEST_P(AppendOnTarget, NormsOfTheSmallestAndTheLargestNumbersHold) {
  std::mt19937_64 random(test::RandomSeed());
  Call call(Dtype::kF32, 3, 3, random);
  const float rows[3][3] = {
      {0, 0, 0}, {std::numeric_limits<float>::denorm_min(), 0, 0}, {1e38F, -1e38F, 1e38F}};
  for (size_t token = 0; token < 3; ++token) {
    std::memcpy(call.key.data() + 1 + token * call.stride, rows[token], sizeof(rows[token]));
  }

  Append(call.Args());

  ExpectAppended(call);
  EXPECT_EQ(call.key_norm[0], 0.0F);
  EXPECT_GE(call.key_norm[1], std::numeric_limits<float>::denorm_min());
}

class FindTooLargeOnTarget : public OnTarget {};
INSTANTIATE_TEST_SUITE_P(EveryTarget, FindTooLargeOnTarget, EveryTarget(), TargetName);

TEST_P(FindTooLargeOnTarget, FindsTheFirstWhereverItStands) {
  std::mt19937_64 random(test::RandomSeed());
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float beyond = 1.01F * kMagnitudeMax;  // Infinite in f16, the next one up in bf16.
  const float bad[] = {kInfinity,
                       -kInfinity,
                       beyond,
                       -beyond,
                       std::numeric_limits<float>::quiet_NaN(),
                       -std::numeric_limits<float>::quiet_NaN()};
  for (const Dtype dtype : kDtypes) {
    for (const size_t count : {1U, 2U, 31U, 64U, 129U, 700U}) {
      const std::vector<std::byte> finite = RandomElements(dtype, count, random);
      ASSERT_EQ(FindTooLarge(dtype, finite), -1) << count;
      for (size_t at = 0; at < count; ++at) {
        std::vector<std::byte> elements(1);  // An odd address.
        elements.insert(elements.end(), finite.begin(), finite.end());
        for (const size_t i : {at, count - 1}) {  // The second is behind the first.
          StoreElement(dtype, &elements[1], static_cast<int>(i), bad[(at + i) % 6]);
        }
        ASSERT_EQ(FindTooLarge(dtype, std::span(elements).subspan(1)), static_cast<ptrdiff_t>(at))
            << "of " << count;
      }
    }
  }
}

TEST_P(FindTooLargeOnTarget, LargestAllowedAreNotFound) {
  const std::vector<float> floats(300, -kMagnitudeMax);
  const std::vector<uint16_t> halves(300, 0xFBFF);  // -65504
  const std::vector<uint16_t> bfloats(300, FloatToBfloat16(-kMagnitudeMax));

  EXPECT_EQ(FindTooLarge(Dtype::kF32, std::as_bytes(std::span(floats))), -1);
  EXPECT_EQ(FindTooLarge(Dtype::kF16, std::as_bytes(std::span(halves))), -1);
  EXPECT_EQ(FindTooLarge(Dtype::kBF16, std::as_bytes(std::span(bfloats))), -1);
  EXPECT_EQ(FindTooLarge(Dtype::kF16, {}), -1);
}

}  // namespace
}  // namespace ebbtide::gpu
