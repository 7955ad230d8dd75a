// SPDX-License-Identifier: Apache-2.0
//
// The operations of gpu/kernels on CUDA: what the contracts there say, for all lanes in one launch.
// Lists of addresses in the args (extents, key_slot, …) are read before return; arrays they name
// are read and written by the device, in stream order, and lie in memory that it reaches. Results
// are there after Wait.
//
//   kResourceExhausted  no device memory for lists or scratch; nothing was launched
//   kUnavailable        the device failed
//
// A broken contract that the host can see stops the process, one that only the device sees stops
// the device: Wait then answers kUnavailable. Tested with the contracts' own tests, on tests/cuemu.

#pragma once

#include <span>

#include "absl/status/status.h"

#include "gpu/kernels/append.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/attend_page.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/damage.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/gather.h"
#include "gpu/kernels/geometry.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/merge.h"
#include "gpu/kernels/page_damage.h"
#include "gpu/kernels/select.h"
#include "gpu/kernels/window.h"

namespace ebbtide::gpu {

class CudaStream;

absl::Status AppendCuda(std::span<const AppendArgs> lanes, CudaStream& stream);
absl::Status AttendCuda(std::span<const AttendArgs> lanes, CudaStream& stream);
absl::Status AttendPageCuda(std::span<const AttendPageArgs> lanes, CudaStream& stream);
absl::Status AveragePoolCuda(std::span<const PoolArgs> lanes, CudaStream& stream);
absl::Status BoundCuda(std::span<const BoundArgs> lanes, CudaStream& stream);
absl::Status CodeErrorsCuda(std::span<const CodeErrorArgs> lanes, CudaStream& stream);
absl::Status DamageCuda(std::span<const DamageArgs> lanes, CudaStream& stream);
absl::Status DecodeCuda(std::span<const DecodeArgs> lanes, CudaStream& stream);
absl::Status DigestCuda(std::span<const DigestArgs> lanes, CudaStream& stream);
absl::Status EncodeCuda(std::span<const EncodeArgs> lanes, CudaStream& stream);
absl::Status FastDamageCuda(std::span<const DamageArgs> lanes, CudaStream& stream);
absl::Status GatherCuda(std::span<const GatherArgs> lanes, CudaStream& stream);
absl::Status KeyDiffCuda(std::span<const GeometryArgs> lanes, CudaStream& stream);
absl::Status MassCuda(std::span<const MassArgs> lanes, CudaStream& stream);
absl::Status MaxPoolCuda(std::span<const PoolArgs> lanes, CudaStream& stream);
absl::Status MergeCuda(std::span<const MergeArgs> lanes, CudaStream& stream);
absl::Status PageDamageCuda(std::span<const PageDamageArgs> lanes, CudaStream& stream);
absl::Status ValueDistanceCuda(std::span<const ValueDistanceArgs> lanes, CudaStream& stream);
absl::Status WeightedValueCuda(std::span<const WeightedValueArgs> lanes, CudaStream& stream);
absl::Status WindowCuda(std::span<const WindowArgs> lanes, CudaStream& stream);

struct SelectCudaArgs {
  SelectArgs select;
  std::span<int32_t> leaving;  // out: as many as leave, at most select.count
  int32_t* left = nullptr;     // out: how many those are
};
absl::Status SelectCuda(std::span<const SelectCudaArgs> lanes, CudaStream& stream);

}  // namespace ebbtide::gpu
