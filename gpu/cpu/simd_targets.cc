// SPDX-License-Identifier: Apache-2.0
//
// Names for Highway's targets. Built with the flags of the kernels, so that HWY_TARGETS is theirs.

#include "gpu/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/cpu/simd_targets.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu::HWY_NAMESPACE {

int64_t CompiledTarget() {
  return HWY_TARGET;
}

}  // namespace ebbtide::gpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(CompiledTarget);

std::string_view TargetName(int64_t target) {
  switch (target) {
#if HWY_ARCH_X86
    case HWY_AVX3:
      return "avx512";
    case HWY_AVX2:
      return "avx2";
    case HWY_SSE4:
      return "sse4";
#endif
    default:
      return "baseline";
  }
}

}  // namespace

std::vector<std::string_view> SimdTargets() {
  std::vector<std::string_view> names;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    names.push_back(TargetName(target));
  }
  return names;
}

std::string_view ChosenSimdTarget() {
  return TargetName(HWY_DYNAMIC_DISPATCH(CompiledTarget)());
}

absl::Status ForceSimdTarget(std::string_view name) {
  if (name == "auto") {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return absl::OkStatus();
  }
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (TargetName(target) == name) {
      hwy::GetChosenTarget().Update(target);
      return absl::OkStatus();
    }
  }
  std::string known = "auto";
  for (const std::string_view target : SimdTargets()) {
    absl::StrAppend(&known, ", ", absl::string_view(target.data(), target.size()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("SIMD target \"", absl::string_view(name.data(), name.size()),
                   "\" is not among those of this build and CPU: ", known));
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
