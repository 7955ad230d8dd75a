// SPDX-License-Identifier: Apache-2.0
//
// The one header of CUDA that a kernel file includes: CUDA's own under nvcc, elsewhere the emulator
// that tests run kernels on (tests/cuemu). Only here do the two differ.

#pragma once

#include <type_traits>
#include <utility>

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// A contract of a kernel: where it is broken the device stops, and whoever waits for it learns so.
#define EBBTIDE_DEVICE_CHECK(condition, message) \
  do {                                           \
    if (!(condition)) __trap();                  \
  } while (false)

namespace ebbtide::gpu {

template <class... Parameters, class... Arguments>
cudaError_t Enqueue(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                    const Arguments&... arguments) {
  kernel<<<grid, block, 0, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

// sum += a b on tensor cores, by all threads of a warp together: a has 16 rows and b 8 columns of
// 16 T, f16 or bf16, two to a register. Which thread holds what is in the PTX ISA, "mma.m16n8k16":
// with g the thread / 4 and c its number % 4 * 2, and c + 1 beside c in a register,
//   a    rows g and g + 8 of channels from c, then both of channels from c + 8
//   b    channels from c, then those from c + 8, of column g
//   sum  row g of columns c and c + 1, then row g + 8
#define EBBTIDE_MMA_16X8X16(type)                                                     \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <class T>
__device__ __forceinline__ void MultiplyAdd16x8x16(float (&sum)[4], const unsigned (&a)[4],
                                                   const unsigned (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    EBBTIDE_MMA_16X8X16("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    EBBTIDE_MMA_16X8X16("bf16");
  }
}
#undef EBBTIDE_MMA_16X8X16

}  // namespace ebbtide::gpu

#else

#include <cuemu.h>

#define EBBTIDE_DEVICE_CHECK(condition, message)                      \
  do {                                                                \
    if (!(condition)) ::cuemu::Fail(message, ::cuemu::Place::Here()); \
  } while (false)

namespace ebbtide::gpu {

template <class... Parameters, class... Arguments>
cudaError_t Enqueue(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                    const Arguments&... arguments) {
  const cudaError_t error = ::cuemu::Enqueue(stream, [=] {
    ::cuemu::RunGrid(grid, block, [&] { kernel(static_cast<Parameters>(arguments)...); });
  });
  return error != cudaSuccess ? error : cudaGetLastError();
}

template <class T>
void MultiplyAdd16x8x16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                        const ::cuemu::Place& place = ::cuemu::Place::Here()) {
  ::cuemu::MultiplyAdd16x8x16<T>(sum, a, b, place);
}

}  // namespace ebbtide::gpu

#endif
