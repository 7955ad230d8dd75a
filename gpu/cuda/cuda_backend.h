// SPDX-License-Identifier: Apache-2.0
//
// The backend of a CUDA device: its memory is the device's, its kernels are those of
// gpu/cuda/kernels.h, and the caller's arrays are carried over and back around them.
// Tested by tests/unit/gpu/backend_test.cc and cuda_backend_test.cc.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "gpu/backend.h"
#include "gpu/cuda/cuda_device.h"
#include "gpu/cuda/device_ranges.h"

namespace ebbtide::gpu {

class IdleStreams;

struct CudaBackendOptions {
  // What a stream carries of the caller's arrays before it waits for itself, within a lane.
  size_t carried_bytes_max = size_t{64} << 20;
  // Device memory that streams hold while nobody uses them, beside what was allocated. One that
  // would pass it is taken down with its memory.
  size_t idle_bytes_max = size_t{256} << 20;
};

class CudaBackend final : public Backend {
 public:
  // As FindCudaDevice.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Make(const CudaBackendOptions& options = {});

  std::string_view name() const override { return name_; }
  bool is_simulated() const override { return false; }
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override;
  absl::StatusOr<std::unique_ptr<HostReach>> ReachHost(
      std::span<const std::byte> addresses) override;
  absl::Status Run(Stream& stream, const Batch& batch) override;

 private:
  CudaBackend(CudaDevice device, const CudaBackendOptions& options);

  // `buffer`, whose memory batches find while it lives.
  DeviceBuffer InReach(DeviceBuffer buffer);

  // Fixed after construction.
  const CudaDevice device_;
  const std::string name_;
  const CudaBackendOptions options_;

  // Synchronised by themselves. Buffers and streams may outlive the backend.
  const std::shared_ptr<DeviceRanges> ranges_ = std::make_shared<DeviceRanges>();
  const std::shared_ptr<IdleStreams> idle_streams_;
};

}  // namespace ebbtide::gpu
