// SPDX-License-Identifier: Apache-2.0
//
// Products of matrices as the emulator's tensor cores make them, right and with one thing wrong.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cuda/port.h"
#include "tests/cuemu/cuemu_fixture.h"

namespace ebbtide::gpu {
namespace {

// Places of a matrix's f16 in the fragments of a warp.
enum class Fragment { kRight, kRowsAndChannelsSwapped, kColumnsApart, kSumTransposed };

unsigned BitsOf(__half element) {
  return __half_as_ushort(element);
}
unsigned BitsOf(__nv_bfloat16 element) {
  return __bfloat16_as_ushort(element);
}
template <class T>
T Make(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half(x);
  else
    return __float2bfloat16(x);
}
template <class T>
float Widen(T x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else
    return __bfloat162float(x);
}

// sum += a b for one 16 x 16 a and one 16 x 8 b, by one warp.
template <Fragment kKind, class T = __half>
__global__ void MultiplyMatrices(const T* a, const T* b, float* sum) {
  const int t = static_cast<int>(threadIdx.x);
  const int g = t / 4;
  const int c = t % 4 * 2;
  const auto pair = [](T first, T second) { return BitsOf(first) | BitsOf(second) << 16; };
  const auto pair_of_a = [&](int row, int channel) {
    return pair(a[row * 16 + channel], a[row * 16 + channel + 1]);
  };
  const auto pair_of_b = [&](int channel) {
    const int column = kKind == Fragment::kColumnsApart ? t % 8 : g;
    return pair(b[channel * 8 + column], b[(channel + 1) * 8 + column]);
  };
  unsigned in_a[4] = {pair_of_a(g, c), pair_of_a(g + 8, c), pair_of_a(g, c + 8),
                      pair_of_a(g + 8, c + 8)};
  if (kKind == Fragment::kRowsAndChannelsSwapped) std::swap(in_a[1], in_a[2]);
  const unsigned in_b[2] = {pair_of_b(c), pair_of_b(c + 8)};
  float* place[4];
  float mine[4];
  for (int i = 0; i < 4; ++i) {
    const int column = c + i % 2;
    place[i] =
        sum + i / 2 * 64 + (kKind == Fragment::kSumTransposed ? column * 8 + g : g * 8 + column);
    mine[i] = *place[i];
  }
  MultiplyAdd16x8x16<T>(mine, in_a, in_b);
  for (int i = 0; i < 4; ++i) *place[i] = mine[i];
}

// Small whole numbers, so that no order of sums rounds.
template <class T = __half>
struct Matrices {
  Matrices() {
    for (int i = 0; i < 256; ++i) a.push_back(Make<T>(static_cast<float>(i * 7 % 23 - 11)));
    for (int i = 0; i < 128; ++i) b.push_back(Make<T>(static_cast<float>(i * 5 % 19 - 9)));
    for (int i = 0; i < 128; ++i) sum.push_back(static_cast<float>(i));
  }

  std::vector<float> Product() const {
    std::vector<float> product = sum;
    for (size_t row = 0; row < 16; ++row) {
      for (size_t column = 0; column < 8; ++column) {
        for (size_t c = 0; c < 16; ++c) {
          product[row * 8 + column] += Widen(a[row * 16 + c]) * Widen(b[c * 8 + column]);
        }
      }
    }
    return product;
  }

  std::vector<T> a, b;
  std::vector<float> sum;
};

template <class T>
class TensorCoresTest : public CuemuTest {};
using Elements = testing::Types<__half, __nv_bfloat16>;
TYPED_TEST_SUITE(TensorCoresTest, Elements);

TYPED_TEST(TensorCoresTest, MultiplyFragmentsAsThePtxIsaLaysThemOut) {
  for (const uint32_t seed : {0U, 1U}) {
    cuemu::SetSeed(seed);
    Matrices<TypeParam> matrices;
    const std::vector<float> product = matrices.Product();

    this->Run(&MultiplyMatrices<Fragment::kRight, TypeParam>, 1, 32, matrices.a.data(),
              matrices.b.data(), matrices.sum.data());

    EXPECT_EQ(matrices.sum, product);
  }
}

// Sixteen times 2^-24 beside 1: each is cut off, where rounding at the end would keep 2^-20.
TEST_F(CuemuTest, TensorCoresCutOffWhatDoesNotFitBesideTheLargest) {
  for (const float sign : {1.0F, -1.0F}) {
    Matrices<> matrices;
    std::ranges::fill(matrices.a, __float2half(0x1p-12F));
    std::ranges::fill(matrices.b, __float2half(sign * 0x1p-12F));
    std::ranges::fill(matrices.sum, 1.0F);
    Run(&MultiplyMatrices<Fragment::kRight>, 1, 32, matrices.a.data(), matrices.b.data(),
        matrices.sum.data());
    EXPECT_EQ(matrices.sum, std::vector<float>(128, 1.0F));

    std::ranges::fill(matrices.sum, 0.5F);  // Beside which they fit.
    Run(&MultiplyMatrices<Fragment::kRight>, 1, 32, matrices.a.data(), matrices.b.data(),
        matrices.sum.data());
    EXPECT_EQ(matrices.sum, std::vector<float>(128, 0.5F + sign * 0x1p-20F));
  }
}

// --- Planted bugs ---

TEST_F(CuemuTest, FindsFragmentsThatAreLaidOutWrong) {
  for (const auto kernel :
       {&MultiplyMatrices<Fragment::kRowsAndChannelsSwapped>,
        &MultiplyMatrices<Fragment::kColumnsApart>, &MultiplyMatrices<Fragment::kSumTransposed>}) {
    Matrices<> matrices;
    matrices.sum.assign(matrices.sum.size(), 0.0F);
    const std::vector<float> product = matrices.Product();

    Run(kernel, 1, 32, matrices.a.data(), matrices.b.data(), matrices.sum.data());

    EXPECT_NE(matrices.sum, product);
  }
}

__global__ void MultiplyWithoutALane() {
  if (threadIdx.x == 7) return;
  float sum[4] = {};
  MultiplyAdd16x8x16<__half>(sum, {1, 2, 3, 4}, {5, 6});
}
__global__ void MultiplyInBranch() {
  float sum[4] = {};
  if (threadIdx.x < 16) MultiplyAdd16x8x16<__half>(sum, {1, 2, 3, 4}, {5, 6});
  __syncthreads();
}

TEST_F(CuemuTest, FindsProductsOfMatricesThatLackALane) {
  EXPECT_DEATH(Run(&MultiplyWithoutALane, 1, 32), "lacks lanes of the warp");
  EXPECT_DEATH(Run(&MultiplyInBranch, 1, 32), "deadlock in block 0,0,0.*\n.*waits at .*mma_test");
}

}  // namespace
}  // namespace ebbtide::gpu
