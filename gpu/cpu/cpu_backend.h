// SPDX-License-Identifier: Apache-2.0
//
// The simulated device: kernels on this machine's threads, a device tier in this machine's memory.

#pragma once

#include <memory>
#include <string>

#include "base/executor.h"
#include "gpu/backend.h"

namespace ebbtide::gpu {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads);

  std::string_view name() const override { return name_; }
  bool is_simulated() const override { return true; }
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override;
  absl::Status Run(Stream& stream, const Batch& batch) override;

 private:
  // Fixed after construction.
  const std::string name_;

  // Synchronised by itself.
  ParallelFor threads_;
};

}  // namespace ebbtide::gpu
