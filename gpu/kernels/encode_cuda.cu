// SPDX-License-Identifier: Apache-2.0
//
// Encoding: one block for each page. A thread for each channel finds the values' box, one for each
// byte of nibbles codes two elements; then, for each form and half, the block rounds the
// differences to integers in shared memory and multiplies them, all exact, so that the order of
// sums is free. What is rounded is rounded as the reference does: codes and norms are part of the
// record at rest.

#include <cmath>
#include <vector>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/code_box.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/warp.cuh"
#include "gpu/kernels/codes.h"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsMax = kMatrixRowsMax;
constexpr int kOwned = kRowsMax * kRowsMax / kThreads;  // Elements of a square that a thread finds.
constexpr int kSquareBits = IntegerBits(kMatrixRowsMax);  // Of what is multiplied a second time.
constexpr int kColumnsOfMoreBits = 64;                    // IntegerBits
static_assert(IntegerBits(kColumnsOfMoreBits) == 12 && IntegerBits(kColumnsOfMoreBits + 1) == 11);
// How near norms come.
constexpr JointNorm kJointCoarseKey = JointNormOf(CodeForm::k4Bit, true);
constexpr JointNorm kJointCoarseValue = JointNormOf(CodeForm::k4Bit, false);
constexpr JointNorm kJointFineKey = JointNormOf(CodeForm::k8Bit, true);
constexpr JointNorm kJointFineValue = JointNormOf(CodeForm::k8Bit, false);

struct Half {
  const std::byte* rows;
  std::byte* coarse;  // Nibbles.
  std::byte* fine;
};
struct Page {
  Half half[2];  // Keys, values.
  const std::byte* key_box;
  std::byte* value_box;
  std::byte* norms;
  int32_t tokens;
  int32_t head_dim;
};

struct Shared {
  CodeChannel box[2][kHeadDimMax];
  float factor[kHeadDimMax];
  int16_t matrix[kRowsMax * kHeadDimMax];  // Of integers; then their Gram matrix, shifted.
};

// Outward, +0 for either zero.
template <class T>
__device__ void StoreValueBox(const Page& page) {
  const auto dim = static_cast<size_t>(page.head_dim);
  for (size_t d = threadIdx.x; d < dim; d += kThreads) {
    float low = INFINITY;
    float high = -INFINITY;
    for (int j = 0; j < page.tokens; ++j) {
      const size_t at = (static_cast<size_t>(j) * dim + d) * sizeof(T);
      const float x = Element<T>::Widen(ReadAt<T>(page.half[1].rows + at));
      low = fminf(low, x);
      high = fmaxf(high, x);
    }
    WriteAt(page.value_box + 2 * d, __float2half_rd(low + 0.0F));
    WriteAt(page.value_box + 2 * (dim + d), __float2half_ru(high + 0.0F));
  }
}

__device__ __forceinline__ uint32_t CodeOf(const CodeChannel& channel, float x) {
  if (!channel.is_finite() || channel.width() == 0) return 8;
  const float steps = (x - channel.low) * (240 / channel.width());
  return static_cast<uint32_t>(fminf(fmaxf(steps + 8.5F, 8.0F), 248.0F));
}

template <class T>
__device__ __forceinline__ float ElementOf(const Half& half, int i) {
  return Element<T>::Widen(ReadAt<T>(half.rows + static_cast<size_t>(i) * sizeof(T)));
}

template <class T>
__device__ void StoreCodes(const Page& page, const Half& half, const CodeChannel* box) {
  const int count = page.tokens * page.head_dim;
  for (int b = static_cast<int>(threadIdx.x); 2 * b < count; b += kThreads) {
    const uint32_t even = CodeOf(box[2 * b % page.head_dim], ElementOf<T>(half, 2 * b));
    const uint32_t odd =
        2 * b + 1 < count ? CodeOf(box[(2 * b + 1) % page.head_dim], ElementOf<T>(half, 2 * b + 1))
                          : 0;
    half.coarse[b] = static_cast<std::byte>(even >> 4 | (odd >> 4) << 4);
    half.fine[b] = static_cast<std::byte>((even & 15U) | (odd & 15U) << 4);
  }
}

// As ResidualUnits (codes.cc); factors go to shared memory.
struct Units {
  double unit = 1;
  bool is_finite = true;
  bool has_width = false;
};
__device__ Units FindUnits(const Page& page, const CodeChannel* box, bool are_keys,
                           Shared& shared) {
  float mine = 0;
  int infinite = 0;
  for (int d = static_cast<int>(threadIdx.x); d < page.head_dim; d += kThreads) {
    mine = fmaxf(mine, box[d].width());
    infinite |= box[d].is_finite() ? 0 : 1;
  }
  const float largest = JoinBlock<kThreads>(mine, Larger{});
  Units units{.is_finite = JoinBlock<kThreads>(infinite, Larger64{}) == 0,
              .has_width = largest > 0};
  if (units.has_width && !are_keys) {
    units.unit = ldexp(1.0, ilogb(static_cast<double>(largest)));
  }
  const auto per_unit = static_cast<float>(1 / units.unit);
  for (int d = static_cast<int>(threadIdx.x); d < page.head_dim; d += kThreads) {
    const float width = box[d].width();
    shared.factor[d] = width > 0 ? (are_keys ? 1 / width : per_unit) : 0.0F;
  }
  __syncthreads();
  return units;
}

// What the form changes in element i, in units.
template <class T>
__device__ __forceinline__ float Residual(const Page& page, const Half& half,
                                          const CodeChannel* box, CodeForm form, int i,
                                          const float* factor) {
  const int d = i % page.head_dim;
  const auto at = static_cast<size_t>(i);
  const uint32_t coarse = NibbleAt(half.coarse, at);
  const float decoded =
      form == CodeForm::k4Bit
          ? StepsToFloat(box[d], kCoarseSteps, coarse)
          : StepsToFloat(box[d], kFineSteps, FineSteps(16 * coarse + NibbleAt(half.fine, at)));
  return (ElementOf<T>(half, i) - decoded) * factor[d];
}

// Elements e of the square that the thread owns: e = t + i * kThreads.
template <class F>
__device__ __forceinline__ void EachOwned(int rows, F each) {
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const int e = static_cast<int>(threadIdx.x) + i * kThreads;
    if (e < rows * rows) each(i, e / rows, e % rows);
  }
}

__device__ __forceinline__ int32_t Product(const int16_t* a, const int16_t* b, int count) {
  int32_t sum = 0;
  for (int k = 0; k < count; ++k) sum += static_cast<int32_t>(a[k]) * static_cast<int32_t>(b[k]);
  return sum;
}

// Shifts the square down for another product; returns by how much (ShiftOf, matrix_norms.cc).
__device__ int ShiftDown(int rows, int32_t (&square)[kOwned]) {
  uint32_t mine = 0;
  EachOwned(rows, [&](int i, int, int) {
    mine = max(mine, static_cast<uint32_t>(square[i] < 0 ? -square[i] : square[i]));
  });
  const uint32_t largest = JoinBlock<kThreads>(mine, Larger64{});
  int shift = 0;
  while (largest >> shift >= 1U << kSquareBits) ++shift;
  if (shift > 0) {
    EachOwned(rows,
              [&](int i, int, int) { square[i] = (square[i] + (1 << (shift - 1))) >> shift; });
  }
  return shift;
}

// As NormsFrom (matrix_norms.cc), where the proof is.
__device__ MatrixNorms NormsOf(const IntegerNorms& integers, int rows, int columns,
                               JointNorm joint) {
  constexpr double kSlack = 1 + 1e-12;
  constexpr double kRounding = 0.5 + 0x1p-20;
  const auto before_shift = [&](double norm, int shift) {
    return ldexp(norm + (shift > 0 ? 0.5 * rows : 0), shift) * kSlack;
  };
  auto squared = static_cast<double>(integers.lengths);
  if (joint != JointNorm::kLengths) {
    double norm = sqrt(static_cast<double>(integers.squares));
    if (joint == JointNorm::kSquare) norm = sqrt(before_shift(norm, integers.shift[1]));
    squared = static_cast<double>(integers.lengths / rows) + before_shift(norm, integers.shift[0]);
  }
  const double unit = ldexp(1.0, integers.exponent);
  const double off = kRounding * sqrt(static_cast<double>(columns));
  const double each = sqrt(static_cast<double>(integers.longest)) + off;
  const double both = sqrt(squared) + off * sqrt(static_cast<double>(rows));
  return {.each = unit * each * kSlack, .joint = unit * both * kSlack};
}

// Norms of the integers in shared memory, which are overwritten.
__device__ IntegerNorms Multiply(int rows, int columns, JointNorm joint, int16_t* matrix) {
  IntegerNorms integers;
  int32_t square[kOwned] = {};
  int64_t lengths = 0;
  int64_t longest = 0;
  EachOwned(rows, [&](int i, int row, int column) {
    if (joint == JointNorm::kLengths && row != column) return;
    square[i] = Product(matrix + row * columns, matrix + column * columns, columns);
    if (row != column) return;
    lengths += square[i];
    longest = max(longest, static_cast<int64_t>(square[i]));
  });
  integers.lengths = JoinBlock<kThreads>(lengths, Plus{});
  integers.longest = JoinBlock<kThreads>(longest, Larger64{});
  if (joint == JointNorm::kLengths) return integers;
  const auto mean = static_cast<int32_t>(integers.lengths / rows);
  EachOwned(rows, [&](int i, int row, int column) {
    if (row == column) square[i] -= mean;
  });
  integers.shift[0] = ShiftDown(rows, square);
  if (joint == JointNorm::kSquare) {
    EachOwned(rows, [&](int i, int row, int column) {
      matrix[row * rows + column] = static_cast<int16_t>(square[i]);
    });
    __syncthreads();
    EachOwned(rows, [&](int i, int row, int column) {
      square[i] = Product(matrix + row * rows, matrix + column * rows, rows);
    });
    integers.shift[1] = ShiftDown(rows, square);
  }
  int64_t squares = 0;
  EachOwned(rows, [&](int i, int, int) {
    squares += static_cast<int64_t>(square[i]) * static_cast<int64_t>(square[i]);
  });
  integers.squares = JoinBlock<kThreads>(squares, Plus{});
  return integers;
}

// Norms of what the form changes in one half.
template <class T>
__device__ CodeNorm NormOf(const Page& page, int which, CodeForm form, JointNorm joint,
                           Shared& shared) {
  const Half& half = page.half[which];
  const CodeChannel* const box = shared.box[which];
  const Units units = FindUnits(page, box, which == 0, shared);
  if (!units.is_finite) return {.each = INFINITY, .joint = INFINITY};
  if (!units.has_width) return {};
  const int count = page.tokens * page.head_dim;
  float mine = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    mine = fmaxf(mine, fabsf(Residual<T>(page, half, box, form, i, shared.factor)));
  }
  const float largest = JoinBlock<kThreads>(mine, Larger{});
  MatrixNorms scaled;
  if (largest > 0) {
    // ExponentOf (matrix_norms.cc).
    const int exponent =
        ilogb(static_cast<double>(largest)) - ((page.head_dim <= kColumnsOfMoreBits ? 12 : 11) - 1);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const float residual = Residual<T>(page, half, box, form, i, shared.factor);
      shared.matrix[i] =
          static_cast<int16_t>(rint(ldexp(static_cast<double>(residual), -exponent)));
    }
    __syncthreads();
    IntegerNorms integers = Multiply(page.tokens, page.head_dim, joint, shared.matrix);
    integers.exponent = exponent;
    scaled = NormsOf(integers, page.tokens, page.head_dim, joint);
  }
  // As ResidualUnits::NormOf (codes.cc), where the proof is.
  constexpr double kRoundings = 1 + 40 * 0x1p-24;
  return {.each = RoundUp32(units.unit * (scaled.each * kRoundings + 0x1p-140)),
          .joint = RoundUp32(units.unit * (scaled.joint * kRoundings + 0x1p-140))};
}

template <class T>
__device__ void StoreNorm(const Page& page, int half, CodeForm form, JointNorm joint,
                          Shared& shared) {
  const CodeNorm norm = NormOf<T>(page, half, form, joint, shared);
  if (threadIdx.x == 0) {
    WriteAt(page.norms + (form == CodeForm::k4Bit ? 0 : sizeof(CodeNorms)) +
                static_cast<size_t>(half) * sizeof(CodeNorm),
            norm);
  }
  __syncthreads();  // Shared memory is free for the next.
}

template <class T>
__global__ void __launch_bounds__(kThreads) EncodePages(const Page* pages) {
  __shared__ Shared shared;
  const Page page = pages[blockIdx.x];
  StoreValueBox<T>(page);
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < page.head_dim; d += kThreads) {
    shared.box[0][d] = ChannelAt(page.key_box, page.head_dim, d);
    shared.box[1][d] = ChannelAt(page.value_box, page.head_dim, d);
  }
  __syncthreads();
  for (int half = 0; half < 2; ++half) StoreCodes<T>(page, page.half[half], shared.box[half]);
  __syncthreads();
  StoreNorm<T>(page, 0, CodeForm::k4Bit, kJointCoarseKey, shared);
  StoreNorm<T>(page, 1, CodeForm::k4Bit, kJointCoarseValue, shared);
  StoreNorm<T>(page, 0, CodeForm::k8Bit, kJointFineKey, shared);
  StoreNorm<T>(page, 1, CodeForm::k8Bit, kJointFineValue, shared);
}

}  // namespace

absl::Status EncodeCuda(std::span<const EncodeArgs> lanes, CudaStream& stream) {
  for (const Dtype dtype : kDtypes) {
    std::vector<Page> pages;
    for (const EncodeArgs& args : lanes) {
      if (args.shape.dtype != dtype) continue;
      CheckEncode(args);
      std::byte* const nibbles = args.coarse.data() + CoarseHeadBytes(args.shape);
      const size_t values = NibbleBytes(args.shape);
      pages.push_back({.half = {{args.page.data(), nibbles, args.fine.data()},
                                {args.page.data() + args.shape.half_bytes(), nibbles + values,
                                 args.fine.data() + values}},
                       .key_box = args.digest.data(),
                       .value_box = args.coarse.data(),
                       .norms = args.coarse.data() + CodeBoxBytes(args.shape),
                       .tokens = args.shape.tokens,
                       .head_dim = args.shape.head_dim});
    }
    if (pages.empty()) continue;
    EBBTIDE_ASSIGN_OR_RETURN(const Page* there, stream.Upload(std::span<const Page>(pages)));
    EBBTIDE_RETURN_IF_ERROR(WithElement(dtype, [&](auto element) {
      return Launch(stream,
                    {.operation = "encode", .grid = GridOf(pages.size(), 1), .threads = kThreads},
                    &EncodePages<typename decltype(element)::Type>, there);
    }));
  }
  return absl::OkStatus();
}

}  // namespace ebbtide::gpu
