// SPDX-License-Identifier: Apache-2.0
//
// Products of 16-bit integers, two at a time: lanes hold rows, each the integers of two columns.
// Integers are exact, so neither the order of sums nor the width of vectors shows.

#include "gpu/kernels/matrix_norms.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/matrix_norms_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "gpu/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

using ShortTag = hn::CappedTag<int16_t, 32>;
using IntTag = hn::RepartitionToWide<ShortTag>;
using Shorts = hn::Vec<ShortTag>;
using Ints = hn::Vec<IntTag>;
using QuadTag = hn::Full128<int32_t>;

constexpr int kRowBlock = kLanes == 16 ? 8 : 4;  // Whose sums, for two vectors, fit the registers.

constexpr int Padded(int count, int multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// A matrix of integers: row i of columns 2 k and 2 k + 1 at [k][i], the first in the lower half.
// Zeros past columns, and past rows up to `stride`, a multiple of kLanes and kRowBlock.
struct Pairs {
  int pairs = 0;
  int stride = 0;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): written
  Pairs() {}  // before it is read
  alignas(64) int32_t element[kMatrixColumnsMax / 2 * kMatrixRowsMax];
};
struct Square {
  int stride = 0;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): so too
  Square() {}
  alignas(64) int32_t element[kMatrixRowsMax * kMatrixRowsMax];
};

constexpr int StrideOf(int rows) {
  return Padded(rows, std::max(kLanes, kRowBlock));
}

// In four maxima that don't wait for each other.
HWY_INLINE float LargestMagnitude(std::span<const float> elements) {
  constexpr size_t kStep = 4 * kLanes;
  const FloatTag tag;
  Floats most[4];
  for (Floats& each : most) each = hn::Zero(tag);
  size_t i = 0;
  for (; i + kStep <= elements.size(); i += kStep) {
    for (size_t v = 0; v < 4; ++v)
      most[v] = hn::Max(most[v], hn::Abs(hn::LoadU(tag, &elements[i + v * kLanes])));
  }
  for (; i + kLanes <= elements.size(); i += kLanes)
    most[0] = hn::Max(most[0], hn::Abs(hn::LoadU(tag, &elements[i])));
  if (i < elements.size()) {
    const Floats rest = WidenTail(&elements[i], static_cast<int>(elements.size() - i));
    most[1] = hn::Max(most[1], hn::Abs(rest));
  }
  return hn::GetLane(
      hn::MaxOfLanes(tag, hn::Max(hn::Max(most[0], most[1]), hn::Max(most[2], most[3]))));
}

// to[j * to_stride + i] = from[i * from_stride + j] for i, j < 4
HWY_INLINE void Transpose4(const int32_t* from, int from_stride, int32_t* to, int to_stride) {
  const QuadTag quad;
  const hn::Repartition<int64_t, QuadTag> two;
  hn::Vec<QuadTag> row[4];
  for (int i = 0; i < 4; ++i) row[i] = hn::LoadU(quad, from + i * from_stride);
  const auto low = hn::BitCast(two, hn::InterleaveLower(quad, row[0], row[1]));
  const auto low_next = hn::BitCast(two, hn::InterleaveLower(quad, row[2], row[3]));
  const auto high = hn::BitCast(two, hn::InterleaveUpper(quad, row[0], row[1]));
  const auto high_next = hn::BitCast(two, hn::InterleaveUpper(quad, row[2], row[3]));
  const auto store = [&](hn::Vec<decltype(two)> x, int j) {
    hn::StoreU(hn::BitCast(quad, x), quad, to + j * to_stride);
  };
  store(hn::InterleaveLower(two, low, low_next), 0);
  store(hn::InterleaveUpper(two, low, low_next), 1);
  store(hn::InterleaveLower(two, high, high_next), 2);
  store(hn::InterleaveUpper(two, high, high_next), 3);
}

// In units of 2^exponent, ties to even. One factor could leave the range of f32.
HWY_INLINE void Round(const MatrixNormsArgs& args, int exponent, Pairs& rounded) {
  constexpr int kStep = 2 * kLanes > 8 ? 2 * kLanes : 8;  // Whole pairs of whole quads.
  const FloatTag tag;
  const hn::RebindToUnsigned<FloatTag> bits;
  const hn::Rebind<uint16_t, FloatTag> narrow;
  // Added to a small number, the sum's lowest bits are its nearest integer.
  const Floats shifter = hn::Set(tag, 0x1.8p23F);
  const int first_exponent = -exponent / 2;
  const Floats first = hn::Set(tag, std::ldexp(1.0F, first_exponent));
  const Floats second = hn::Set(tag, std::ldexp(1.0F, -exponent - first_exponent));
  const auto store = [&](Floats x, int16_t* to) {
    const Floats sum = hn::Add(hn::Mul(hn::Mul(x, first), second), shifter);
    hn::StoreU(hn::TruncateTo(narrow, hn::BitCast(bits, sum)), narrow,
               reinterpret_cast<uint16_t*>(to));
  };
  const int columns = args.columns;
  const int padded = Padded(columns, kStep);
  const int stride = StrideOf(args.rows);
  rounded.pairs = (columns + 1) / 2;
  rounded.stride = stride;
  for (int i = 0; i < stride; i += 4) {
    alignas(64) int16_t rows[4][kMatrixColumnsMax];
    for (int r = 0; r < 4; ++r) {
      int d = 0;
      if (i + r < args.rows) {
        const float* const row = args.matrix.data() + static_cast<ptrdiff_t>(i + r) * columns;
        for (; d + kLanes <= columns; d += kLanes) store(hn::LoadU(tag, row + d), rows[r] + d);
        if (d < columns) {
          store(WidenTail(row + d, columns - d), rows[r] + d);
          d += kLanes;
        }
      }
      std::fill(rows[r] + d, rows[r] + padded, int16_t{0});
    }
    for (int k = 0; k < padded / 2; k += 4) {
      Transpose4(reinterpret_cast<const int32_t*>(rows[0]) + k, kMatrixColumnsMax / 2,
                 rounded.element + k * stride + i, stride);
    }
  }
}

// Sums for kRowBlock rows from `row` against V vectors of rows from `column`.
template <int V>
HWY_INLINE void Products(const Pairs& matrix, int row, int column, int32_t* out) {
  const IntTag wide;
  const ShortTag narrow;
  Ints sum[kRowBlock][V];
  for (auto& of_row : sum) {
    for (Ints& each : of_row) each = hn::Zero(wide);
  }
  Ints unused = hn::Zero(wide);
  const int stride = matrix.stride;
  const int32_t* pair = matrix.element;
  for (const int32_t* const end = pair + matrix.pairs * stride; pair < end; pair += stride) {
    Shorts right[V];
    for (int v = 0; v < V; ++v)
      right[v] = hn::BitCast(narrow, hn::Load(wide, pair + column + v * kLanes));
    for (int i = 0; i < kRowBlock; ++i) {
      const Shorts left = hn::BitCast(narrow, hn::Set(wide, pair[row + i]));
      for (int v = 0; v < V; ++v)
        sum[i][v] = hn::ReorderWidenMulAccumulate(wide, left, right[v], sum[i][v], unused);
    }
  }
  for (int i = 0; i < kRowBlock; ++i) {
    for (int v = 0; v < V; ++v)
      hn::Store(sum[i][v], wide, out + (row + i) * stride + column + v * kLanes);
  }
}

// matrix matrix^T. What lies left of the diagonal's vectors is there already, the other way round.
HWY_INLINE void Gram(const Pairs& matrix, Square& gram) {
  const int stride = matrix.stride;
  gram.stride = stride;
  for (int row = 0; row < stride; row += kRowBlock) {
    const int first = row / kLanes * kLanes;
    int column = first;
    for (; column + 2 * kLanes <= stride; column += 2 * kLanes)
      Products<2>(matrix, row, column, gram.element);
    if (column < stride) Products<1>(matrix, row, column, gram.element);
    for (int i = row; i < row + kRowBlock; i += 4) {
      for (int j = 0; j < first; j += 4) {
        Transpose4(gram.element + j * stride + i, stride, gram.element + i * stride + j, stride);
      }
    }
  }
}

// Shifts a symmetric matrix down for another product; returns by how much.
HWY_INLINE int Shift(const Square& matrix, Pairs& shifted) {
  const IntTag tag;
  const int stride = matrix.stride;
  const int32_t* const from = matrix.element;
  Ints most = hn::Zero(tag);
  for (int i = 0; i < stride * stride; i += kLanes)
    most = hn::Max(most, hn::Abs(hn::Load(tag, from + i)));
  const int shift = ShiftOf(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(tag, most))));
  const Ints half = hn::Set(tag, shift == 0 ? 0 : 1 << (shift - 1));
  const Ints lower = hn::Set(tag, 0xFFFF);
  shifted.pairs = stride / 2;
  shifted.stride = stride;
  for (int k = 0; k < stride / 2; ++k) {
    for (int i = 0; i < stride; i += kLanes) {
      const auto element = [&](int row) {
        return hn::ShiftRightSame(hn::Add(hn::Load(tag, from + row * stride + i), half), shift);
      };
      const Ints pair =
          hn::Or(hn::And(element(2 * k), lower), hn::ShiftLeft<16>(element(2 * k + 1)));
      hn::Store(pair, tag, shifted.element + k * stride + i);
    }
  }
  return shift;
}

// Of each row, into `squares`.
HWY_INLINE void SumsOfSquares(const Pairs& matrix, int32_t* squares) {
  const IntTag wide;
  const ShortTag narrow;
  Ints unused = hn::Zero(wide);
  for (int i = 0; i < matrix.stride; i += kLanes) {
    Ints sum = hn::Zero(wide);
    for (int k = 0; k < matrix.pairs; ++k) {
      const Shorts pair =
          hn::BitCast(narrow, hn::Load(wide, matrix.element + k * matrix.stride + i));
      sum = hn::ReorderWidenMulAccumulate(wide, pair, pair, sum, unused);
    }
    hn::Store(sum, wide, squares + i);
  }
}

MatrixNorms NormsTarget(const MatrixNormsArgs& args) {
  const float largest = LargestMagnitude(args.matrix);
  if (largest == 0) return {};
  IntegerNorms integers;
  integers.exponent = ExponentOf(largest, args.columns);
  Pairs matrix;
  Round(args, integers.exponent, matrix);
  alignas(64) int32_t squares[kMatrixRowsMax];
  SumsOfSquares(matrix, squares);
  for (int i = 0; i < args.rows; ++i) {
    integers.lengths += squares[i];
    integers.longest = std::max<int64_t>(integers.longest, squares[i]);
  }
  if (args.joint == JointNorm::kLengths) return NormsFrom(integers, args);
  Square gram;
  Gram(matrix, gram);
  for (int i = 0; i < args.rows; ++i)
    gram.element[i * (gram.stride + 1)] -= MeanOf(integers, args.rows);
  integers.shift[0] = Shift(gram, matrix);
  if (args.joint == JointNorm::kSquare) {
    Gram(matrix, gram);
    integers.shift[1] = Shift(gram, matrix);
  }
  SumsOfSquares(matrix, squares);
  for (int i = 0; i < args.rows; ++i) integers.squares += squares[i];
  return NormsFrom(integers, args);
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(NormsTarget);

MatrixNorms MatrixNormsCpu(const MatrixNormsArgs& args) {
  CheckMatrixNorms(args);
  return HWY_DYNAMIC_DISPATCH(NormsTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
