// SPDX-License-Identifier: Apache-2.0
//
// Gram matrices with columns across the lanes: each lane adds up one element, in the reference's
// order, so the width of vectors doesn't show. Eight rows share each load of a factor.
//
// Products are never fused with sums (the build forbids it, gpu/CMakeLists.txt).

#include "gpu/kernels/matrix_norms.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/matrix_norms_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "gpu/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr int kRowBlock = 8;

void GramTarget(const GramArgs& args) {
  constexpr int kStride = kMatrixRowsMax;
  const FloatTag tag;
  const float* const factor = args.factor.data();
  float* const gram = args.gram.data();
  for (int row = 0; row < args.rows; row += kRowBlock) {
    // Of a symmetric matrix, what lies left of the diagonal's vectors is there already.
    const int first = row / kLanes * kLanes;
    for (int column = first; column < kStride; column += kLanes) {
      Floats sum[kRowBlock];
      for (Floats& element : sum) element = hn::Zero(tag);
      const int products = column < args.rows ? args.products : 0;
      for (int k = 0; k < products; ++k) {
        const float* const terms = factor + static_cast<ptrdiff_t>(k) * kStride;
        const Floats right = hn::Load(tag, terms + column);
        for (int i = 0; i < kRowBlock; ++i) {
          sum[i] = hn::Add(sum[i], hn::Mul(hn::Set(tag, terms[row + i]), right));
        }
      }
      for (int i = 0; i < kRowBlock; ++i) {
        hn::Store(sum[i], tag, gram + (row + i) * kStride + column);
      }
    }
    for (int i = row; i < row + kRowBlock; ++i) {
      for (int column = 0; column < first; ++column) {
        gram[i * kStride + column] = gram[column * kStride + i];
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(GramTarget);

void GramCpu(const GramArgs& args) {
  HWY_DYNAMIC_DISPATCH(GramTarget)(args);
}

}  // namespace

MatrixNorms MatrixNormsCpu(const MatrixNormsArgs& args) {
  return MatrixNormsBy(&GramCpu, args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
