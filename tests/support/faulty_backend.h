// SPDX-License-Identifier: Apache-2.0
//
// A device that fails on demand, before a sound one: each batch that `fails` names is refused and
// not run.

#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"

#include "gpu/backend.h"

namespace ebbtide::test {

// Thread-compatible in `fails`: set it while nobody calls.
class FaultyBackend final : public gpu::Backend {
 public:
  explicit FaultyBackend(gpu::Backend& backend) : backend_(backend) {}

  std::function<bool(const gpu::Batch&)> fails = [](const gpu::Batch&) { return false; };
  // For `fails`: every batch of such args.
  template <class Args>
  static bool Is(const gpu::Batch& batch) {
    return std::holds_alternative<std::span<const Args>>(batch);
  }

  std::string_view name() const override { return backend_.name(); }
  bool is_simulated() const override { return backend_.is_simulated(); }
  absl::StatusOr<gpu::DeviceBuffer> Allocate(size_t bytes) override {
    return backend_.Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> MakeStream() override {
    return backend_.MakeStream();
  }
  absl::Status Run(gpu::Stream& stream, const gpu::Batch& batch) override {
    if (fails(batch)) return absl::UnavailableError("the device failed, as told");
    return backend_.Run(stream, batch);
  }

 private:
  gpu::Backend& backend_;
};

}  // namespace ebbtide::test
