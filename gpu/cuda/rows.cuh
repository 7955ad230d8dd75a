// SPDX-License-Identifier: Apache-2.0
//
// How threads share a row of keys or values: 16 bytes each, side by side, widened to f32.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gpu/cuda/port.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

// Elements of one type. Another type is one more of these.
template <class T>
struct Element;
template <>
struct Element<float> {
  using Type = float;
  static __device__ __forceinline__ float Widen(float element) { return element; }
};
template <>
struct Element<__half> {
  using Type = __half;
  static __device__ __forceinline__ float Widen(__half element) { return __half2float(element); }
};
template <>
struct Element<__nv_bfloat16> {
  using Type = __nv_bfloat16;
  static __device__ __forceinline__ float Widen(__nv_bfloat16 element) {
    return __bfloat162float(element);
  }
};

// Calls use(Element<T>()), T being what elements of `dtype` are.
template <class Use>
auto WithElement(Dtype dtype, Use use) {
  switch (dtype) {
    case Dtype::kF32:
      return use(Element<float>());
    case Dtype::kF16:
      return use(Element<__half>());
    case Dtype::kBF16:
      break;
  }
  return use(Element<__nv_bfloat16>());
}

// kThreads neighbouring threads share a row, each with kChunks pieces of 16 bytes. kIsRagged: rows
// are no multiple of 16 bytes, and are read element by element.
template <class T, int kThreads, int kChunks, bool kIsRagged>
struct RowShape {
  using Type = T;
  static constexpr int kChunkElements = 16 / static_cast<int>(sizeof(T));
  static constexpr int kWidth = kThreads;
  static constexpr int kElements = kChunks * kChunkElements;  // Of one thread.
  static constexpr int kHeadDimMax = kThreads * kElements;

  // Where the chunk's elements of thread `part` start in the row.
  static __device__ __forceinline__ int First(int part, int chunk) {
    return (chunk * kThreads + part) * kChunkElements;
  }

  // The dimension of element `e` of a thread.
  static __device__ __forceinline__ int DimOf(int part, int e) {
    return First(part, e / kChunkElements) + e % kChunkElements;
  }

  // The thread's part of a row of f32, of which `head_dim` are there.
  static __device__ __forceinline__ void LoadFloats(const float* row, int head_dim, int part,
                                                    float (&wide)[kElements]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int d = DimOf(part, e);
      wide[e] = d < head_dim ? row[d] : 0.0F;
    }
  }

  struct Raw {
    uint4 chunk[kChunks];
  };

  // The thread's part of a row; zeros past its end, and all of it where there is no row.
  static __device__ __forceinline__ Raw Load(const std::byte* row, int head_dim, int part) {
    Raw raw;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      raw.chunk[c] = make_uint4(0, 0, 0, 0);
      const int first = First(part, c);
      if (row == nullptr || first >= head_dim) continue;
      if constexpr (kIsRagged) {
        T elements[kChunkElements] = {};
#pragma unroll
        for (int e = 0; e < kChunkElements; ++e) {
          if (first + e < head_dim) elements[e] = reinterpret_cast<const T*>(row)[first + e];
        }
        memcpy(&raw.chunk[c], elements, sizeof(elements));
      } else {
        raw.chunk[c] = __ldcs(reinterpret_cast<const uint4*>(row) + first / kChunkElements);
      }
    }
    return raw;
  }

  static __device__ __forceinline__ void Widen(const Raw& raw, float (&wide)[kElements]) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      T elements[kChunkElements];
      memcpy(static_cast<void*>(elements), &raw.chunk[c], sizeof(elements));
#pragma unroll
      for (int e = 0; e < kChunkElements; ++e) {
        wide[c * kChunkElements + e] = Element<T>::Widen(elements[e]);
      }
    }
  }
};

// Calls use(RowShape<…>()) with the shape that rows of `head_dim` elements are read in.
template <class T, class Use>
auto WithRowShapeOf(int head_dim, Use use) {
  constexpr int kChunkElements = 16 / static_cast<int>(sizeof(T));
  constexpr int kChunksMax = kHeadDimMax / kChunkElements / 32;
  const int chunks = head_dim / kChunkElements;
  if (head_dim % kChunkElements != 0) return use(RowShape<T, 32, kChunksMax, true>());
  if (chunks <= 8) return use(RowShape<T, 8, 1, false>());
  if (chunks <= 16) return use(RowShape<T, 16, 1, false>());
  if (chunks <= 32) return use(RowShape<T, 32, 1, false>());
  return use(RowShape<T, 32, kChunksMax, false>());
}
template <class Use>
auto WithRowShape(Dtype dtype, int head_dim, Use use) {
  return WithElement(dtype, [&](auto element) {
    return WithRowShapeOf<typename decltype(element)::Type>(head_dim, use);
  });
}

// Copies a row by the 32 threads of a warp, 16 bytes at a time where its addresses allow it; zeros
// where there is nothing to copy.
__device__ __forceinline__ void CopyRow(std::byte* to, const std::byte* from, int bytes,
                                        int thread) {
  const auto addresses = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                         static_cast<uintptr_t>(bytes);
  if (addresses % 16 == 0) {
    for (int i = thread; i < bytes / 16; i += 32) {
      reinterpret_cast<uint4*>(to)[i] = from == nullptr
                                            ? make_uint4(0, 0, 0, 0)
                                            : __ldcs(reinterpret_cast<const uint4*>(from) + i);
    }
    return;
  }
  for (int i = thread; i < bytes; i += 32) to[i] = from == nullptr ? std::byte{0} : from[i];
}

}  // namespace ebbtide::gpu
