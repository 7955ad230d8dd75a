// SPDX-License-Identifier: Apache-2.0
//
// CUDA C++ as plain C++, for tests where there is no GPU: CUDA's own headers for types and the
// runtime's declarations, and here what only nvcc knows. Kernels see it through gpu/cuda/port.h.
// What it models and what it does not: docs/testing.md.
// Tested by tests/cuemu/cuemu_test.cc.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include "tests/cuemu/machine.h"
#include "tests/cuemu/mma.h"
#include "tests/cuemu/runtime.h"

// One block runs at a time, so its shared memory may be static.
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)

#define threadIdx (::cuemu::Here().thread)
#define blockIdx (::cuemu::Here().block)
#define blockDim (::cuemu::Here().block_dim)
#define gridDim (::cuemu::Here().grid_dim)

// The machine compares lanes' values behind the thread sanitizer's back, as a GPU's registers are.
#define CUEMU_UNSEEN __attribute__((no_sanitize("thread")))
#define CUEMU_PLACE const ::cuemu::Place& place = ::cuemu::Place::Here()

namespace cuemu {

// Meets the other lanes of `mask`; `F(mask, in, out)` gives each its answer.
template <class In, class Out, class F>
Out Collective(const Place& place, unsigned mask, In in, F /*combine*/) {
  static_assert(sizeof(In) <= kValueBytes && sizeof(Out) <= kValueBytes);
  Out out;
  const Combine combine = [](unsigned lanes, const void* const* from,
                             void* const* to) CUEMU_UNSEEN {
    F{}(lanes, reinterpret_cast<const In* const*>(from), reinterpret_cast<Out* const*>(to));
  };
  MeetWarp({.place = place, .mask = mask, .combine = combine}, &in, sizeof(in), &out, sizeof(out));
  return out;
}

template <class T>
struct Shuffled {
  T value;
  int source;
  Place place;
};

template <class T>
T Shuffle(const Place& place, unsigned mask, T value, int source) {
  return Collective<Shuffled<T>, T>(
      place, mask, {value, source, place},
      [](unsigned lanes, const Shuffled<T>* const* in, T* const* out) CUEMU_UNSEEN {
        for (int l = 0; l < kWarpLanes; ++l) {
          if ((lanes >> l & 1U) == 0) continue;
          if ((lanes >> in[l]->source & 1U) == 0) {
            Fail("a shuffle reads a lane outside its mask", in[l]->place);
          }
          *out[l] = in[in[l]->source]->value;
        }
      });
}

// The lanes' values joined by `Op` in the order of lanes.
template <class T, class Op>
T Reduce(const Place& place, unsigned mask, T value, Op /*op*/) {
  return Collective<T, T>(place, mask, value,
                          [](unsigned lanes, const T* const* in, T* const* out) CUEMU_UNSEEN {
                            T joined{};
                            bool is_first = true;
                            for (int l = 0; l < kWarpLanes; ++l) {
                              if ((lanes >> l & 1U) == 0) continue;
                              joined = is_first ? *in[l] : Op{}(joined, *in[l]);
                              is_first = false;
                            }
                            for (int l = 0; l < kWarpLanes; ++l) {
                              if ((lanes >> l & 1U) != 0) *out[l] = joined;
                            }
                          });
}

inline double WidenBits(__half /*type*/, unsigned short bits) {
  return static_cast<double>(__half2float(__half(__half_raw{bits})));
}
inline double WidenBits(__nv_bfloat16 /*type*/, unsigned short bits) {
  return static_cast<double>(__bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits})));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32, or bf16; sum is both of its accumulators.
template <class T>
void MultiplyAdd16x8x16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                        const Place& place) {
  Fragments mine{.sum = {sum[0], sum[1], sum[2], sum[3]},
                 .a = {a[0], a[1], a[2], a[3]},
                 .b = {b[0], b[1]},
                 .widen = [](unsigned short bits) { return WidenBits(T(), bits); },
                 .place = place};
  mine = Collective<Fragments, Fragments>(
      place, 0xFFFFFFFFU, mine,
      [](unsigned lanes, const Fragments* const* in, Fragments* const* out)
          CUEMU_UNSEEN { MultiplyAddFragments(lanes, in, out); });
  for (int i = 0; i < 4; ++i) sum[i] = mine.sum[i];
}

template <class T, class Next>
T Exchange(T* at, Next next) {
  std::atomic_ref<T> cell(*at);
  T old = cell.load(std::memory_order_relaxed);
  while (!cell.compare_exchange_weak(old, next(old), std::memory_order_relaxed)) {
  }
  return old;
}

}  // namespace cuemu

// Names that CUDA reserves are what this file is there to define.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): CUDA's own names.

inline void __syncthreads(CUEMU_PLACE) {
  cuemu::MeetBlock(false, place);
}
inline int __syncthreads_count(int predicate, CUEMU_PLACE) {
  return cuemu::MeetBlock(predicate != 0, place);
}
inline int __syncthreads_or(int predicate, CUEMU_PLACE) {
  return cuemu::MeetBlock(predicate != 0, place) != 0 ? 1 : 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU, CUEMU_PLACE) {
  cuemu::MeetWarp({.place = place, .mask = mask, .combine = nullptr, .orders_memory = true},
                  nullptr, 0, nullptr, 0);
}
inline void __threadfence() {}  // One thread runs at a time.

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUEMU_PLACE) {
  const int base = cuemu::Lane() & ~(width - 1);
  return cuemu::Shuffle(place, mask, value, base | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUEMU_PLACE) {
  const int lane = cuemu::Lane();
  const int source = lane ^ bits;
  const bool is_beyond = (source & ~(width - 1)) > (lane & ~(width - 1));
  return cuemu::Shuffle(place, mask, value, is_beyond ? lane : source);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUEMU_PLACE) {
  const int lane = cuemu::Lane();
  const int source = lane - static_cast<int>(delta);
  return cuemu::Shuffle(place, mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUEMU_PLACE) {
  const int lane = cuemu::Lane();
  const int source = lane + static_cast<int>(delta);
  return cuemu::Shuffle(place, mask, value, source > (lane | (width - 1)) ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUEMU_PLACE) {
  const unsigned bit = predicate != 0 ? 1U << cuemu::Lane() : 0U;
  return cuemu::Reduce(place, mask, bit, std::bit_or<unsigned>{});
}
inline int __any_sync(unsigned mask, int predicate, CUEMU_PLACE) {
  return __ballot_sync(mask, predicate, place) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate, CUEMU_PLACE) {
  return __ballot_sync(mask, predicate == 0 ? 1 : 0, place) == 0 ? 1 : 0;
}

template <class T>
T atomicAdd(T* at, T value) {
  return cuemu::Exchange(at, [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* at, T value) {
  return cuemu::Exchange(at, [value](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* at, T value) {
  return cuemu::Exchange(at, [value](T old) { return value < old ? value : old; });
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
inline unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}
inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline float __double2float_ru(double value) {
  const auto near = static_cast<float>(value);
  return static_cast<double>(near) < value ? std::nextafter(near, INFINITY) : near;
}
inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming): back to the rules.
