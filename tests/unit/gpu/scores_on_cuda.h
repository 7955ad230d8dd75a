// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels of scores (damage, geometry, page damage) as the contracts' tests call them: see
// on_cuda.h.

#pragma once

#include "gpu/kernels/damage.h"
#include "gpu/kernels/geometry.h"
#include "gpu/kernels/page_damage.h"
#include "tests/unit/gpu/on_cuda.h"

namespace ebbtide::gpu {

#if defined(EBBTIDE_CUDA_EMULATED) || defined(EBBTIDE_CUDA_DEVICE)

inline void DamageOnCuda(const DamageArgs& args) {
  RunOnCuda<DamageArgs>(&DamageCuda, {&args, 1});
}
inline void FastDamageOnCuda(const DamageArgs& args) {
  RunOnCuda<DamageArgs>(&FastDamageCuda, {&args, 1});
}
inline void KeyDiffOnCuda(const GeometryArgs& args) {
  RunOnCuda<GeometryArgs>(&KeyDiffCuda, {&args, 1});
}
inline void PageDamageOnCuda(const PageDamageArgs& args) {
  RunOnCuda<PageDamageArgs>(&PageDamageCuda, {&args, 1});
}
inline void WeightedValueOnCuda(const WeightedValueArgs& args) {
  RunOnCuda<WeightedValueArgs>(&WeightedValueCuda, {&args, 1});
}

#else

inline void DamageOnCuda(const DamageArgs& /*args*/) {}
inline void FastDamageOnCuda(const DamageArgs& /*args*/) {}
inline void KeyDiffOnCuda(const GeometryArgs& /*args*/) {}
inline void PageDamageOnCuda(const PageDamageArgs& /*args*/) {}
inline void WeightedValueOnCuda(const WeightedValueArgs& /*args*/) {}

#endif

}  // namespace ebbtide::gpu
