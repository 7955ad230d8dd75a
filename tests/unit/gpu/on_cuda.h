// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels as the contracts' tests call them: one lane, done on return. They run on the
// emulator (tests/cuemu), or in gpu_device_tests on a device; arrays are carried to both and back,
// but not under the address sanitizer, which sees the borders of the test's own. Without CUDA's
// headers they are not built, and kHasCuda is false.

#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/append.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/attend_page.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/gather.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/merge.h"
#include "gpu/kernels/select.h"
#include "gpu/kernels/window.h"

#if defined(EBBTIDE_CUDA_EMULATED) || defined(EBBTIDE_CUDA_DEVICE)
#include "gpu/cuda/bring.h"
#include "gpu/cuda/carried_arrays.h"
#include "gpu/cuda/cuda_device.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/kernels.h"
#endif
#if defined(EBBTIDE_CUDA_EMULATED)
#include "tests/cuemu/device.h"
#endif

namespace ebbtide::gpu {

// While one lives, nothing is carried: kernels work on arrays where they lie. Only the emulator's
// can, whose device memory is this process's.
class InPlace {
 public:
#if defined(EBBTIDE_CUDA_DEVICE)
  static constexpr bool kIsPossible = false;
#else
  static constexpr bool kIsPossible = true;
#endif

  InPlace() {
    ++living_;
  }
  ~InPlace() {
    --living_;
  }
  InPlace(const InPlace&) = delete;
  InPlace& operator=(const InPlace&) = delete;

#if defined(__SANITIZE_ADDRESS__)
  static bool is_on() {
    return true;
  }
#else
  static bool is_on() {
    return living_ > 0;
  }
#endif

 private:
  static inline int living_ = 0;
};

#if defined(EBBTIDE_CUDA_EMULATED) || defined(EBBTIDE_CUDA_DEVICE)

inline constexpr bool kHasCuda = true;

// Why kernels can't be run here; "" where they can.
inline std::string WhyNoCuda() {
#if defined(EBBTIDE_CUDA_DEVICE)
  static const absl::Status status = FindCudaDevice().status();
  return std::string(status.message());
#else
  return "";
#endif
}

// What only tests carry: the product's selection and pooling run on the host.
inline void Bring(AttendPageArgs& args, CarriedArrays& arrays) {
  CheckAttendPage(args);
  arrays.In(args.query);
  arrays.In(args.page);
  arrays.In(args.visible);
  arrays.Out(args.output);
  arrays.Out(args.lse);
  arrays.Out(args.focal_output);
  arrays.Out(args.spread);
  arrays.Out(args.logits);
}
inline void Bring(PoolArgs& args, CarriedArrays& arrays) {
  CheckPool(args);
  arrays.In(args.mass);
  arrays.Out(args.pooled);
}
inline void Bring(SelectCudaArgs& args, CarriedArrays& arrays) {
  arrays.In(args.select.score);
  arrays.In(args.select.index);
  arrays.In(args.select.eligible);
  arrays.Out(args.leaving);
  std::span<int32_t> left(args.left, 1);
  arrays.Out(left);
  args.left = left.data();
}

// Runs `operation` over `lanes` on a stream of its own.
template <class Args>
void RunOnCuda(absl::Status (*operation)(std::span<const Args>, CudaStream&),
               std::span<const Args> lanes) {
#if defined(EBBTIDE_CUDA_EMULATED)
  cuemu::SetDevice({.hides_memory = !InPlace::is_on()});  // As a device does.
#endif
  constexpr size_t kScratchBytesMax = size_t{1}
                                      << 20;  // One lane needs little, and it is dear here.
  const auto stream = CudaStream::Make(kScratchBytesMax);
  ASSERT_TRUE(stream.ok()) << stream.status();
  CarriedArrays arrays(**stream);
  std::vector<Args> brought(lanes.begin(), lanes.end());
  if (!InPlace::is_on()) {
    for (Args& args : brought) Bring(args, arrays);
  }
  const absl::Status over = arrays.CarryOver();
  ASSERT_TRUE(over.ok()) << over;
  const absl::Status run = operation(brought, **stream);
  ASSERT_TRUE(run.ok()) << run;
  const absl::Status back = arrays.CarryBack();
  ASSERT_TRUE(back.ok()) << back;
  const absl::Status done = (*stream)->Wait();
  ASSERT_TRUE(done.ok()) << done;
  arrays.Deliver();
}

inline void AppendOnCuda(const AppendArgs& args) {
  RunOnCuda<AppendArgs>(&AppendCuda, {&args, 1});
}
inline void AttendOnCuda(const AttendArgs& args) {
  RunOnCuda<AttendArgs>(&AttendCuda, {&args, 1});
}
inline void AttendPageOnCuda(const AttendPageArgs& args) {
  RunOnCuda<AttendPageArgs>(&AttendPageCuda, {&args, 1});
}
inline void AveragePoolOnCuda(const PoolArgs& args) {
  RunOnCuda<PoolArgs>(&AveragePoolCuda, {&args, 1});
}
inline void BoundOnCuda(const BoundArgs& args) {
  RunOnCuda<BoundArgs>(&BoundCuda, {&args, 1});
}
inline void CodeErrorsOnCuda(const CodeErrorArgs& args) {
  RunOnCuda<CodeErrorArgs>(&CodeErrorsCuda, {&args, 1});
}
inline void DecodeOnCuda(const DecodeArgs& args) {
  RunOnCuda<DecodeArgs>(&DecodeCuda, {&args, 1});
}
inline void DigestOnCuda(const DigestArgs& args) {
  RunOnCuda<DigestArgs>(&DigestCuda, {&args, 1});
}
inline void EncodeOnCuda(const EncodeArgs& args) {
  RunOnCuda<EncodeArgs>(&EncodeCuda, {&args, 1});
}
inline void GatherOnCuda(const GatherArgs& args) {
  RunOnCuda<GatherArgs>(&GatherCuda, {&args, 1});
}
inline void MassOnCuda(const MassArgs& args) {
  RunOnCuda<MassArgs>(&MassCuda, {&args, 1});
}
inline void MaxPoolOnCuda(const PoolArgs& args) {
  RunOnCuda<PoolArgs>(&MaxPoolCuda, {&args, 1});
}
inline void MergeOnCuda(const MergeArgs& args) {
  RunOnCuda<MergeArgs>(&MergeCuda, {&args, 1});
}
inline std::vector<int32_t> SelectOnCuda(const SelectArgs& args) {
  std::vector<int32_t> leaving(std::min(args.count, args.score.size()));
  int32_t left = 0;
  const SelectCudaArgs lane{.select = args, .leaving = leaving, .left = &left};
  RunOnCuda<SelectCudaArgs>(&SelectCuda, {&lane, 1});
  leaving.resize(static_cast<size_t>(left));
  return leaving;
}
inline void ValueDistanceOnCuda(const ValueDistanceArgs& args) {
  RunOnCuda<ValueDistanceArgs>(&ValueDistanceCuda, {&args, 1});
}
inline void WindowOnCuda(const WindowArgs& args) {
  RunOnCuda<WindowArgs>(&WindowCuda, {&args, 1});
}

#else

inline constexpr bool kHasCuda = false;

inline std::string WhyNoCuda() {
  return "this build has no cuda_runtime.h";
}

inline void AppendOnCuda(const AppendArgs& /*args*/) {}
inline void AttendOnCuda(const AttendArgs& /*args*/) {}
inline void AttendPageOnCuda(const AttendPageArgs& /*args*/) {}
inline void AveragePoolOnCuda(const PoolArgs& /*args*/) {}
inline void BoundOnCuda(const BoundArgs& /*args*/) {}
inline void CodeErrorsOnCuda(const CodeErrorArgs& /*args*/) {}
inline void DecodeOnCuda(const DecodeArgs& /*args*/) {}
inline void DigestOnCuda(const DigestArgs& /*args*/) {}
inline void EncodeOnCuda(const EncodeArgs& /*args*/) {}
inline void GatherOnCuda(const GatherArgs& /*args*/) {}
inline void MassOnCuda(const MassArgs& /*args*/) {}
inline void MaxPoolOnCuda(const PoolArgs& /*args*/) {}
inline void MergeOnCuda(const MergeArgs& /*args*/) {}
inline std::vector<int32_t> SelectOnCuda(const SelectArgs& /*args*/) {
  return {};
}
inline void ValueDistanceOnCuda(const ValueDistanceArgs& /*args*/) {}
inline void WindowOnCuda(const WindowArgs& /*args*/) {}

#endif

}  // namespace ebbtide::gpu
