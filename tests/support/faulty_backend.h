// SPDX-License-Identifier: Apache-2.0
//
// A device that fails on demand, before a sound one: each batch that `fails` names is refused and
// not run.

#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "gpu/backend.h"

namespace ebbtide::test {

// Thread-safe where `backend` is.
class FaultyBackend final : public gpu::Backend {
 public:
  explicit FaultyBackend(gpu::Backend& backend) : backend_(backend) {}

  using Fault = std::function<bool(const gpu::Batch&)>;

  // From now on.
  void Fail(Fault fails) {
    const absl::MutexLock lock(&mu_);
    fails_ = std::move(fails);
  }
  void Heal() { Fail(nullptr); }
  // A fault: every batch of such args.
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
    if (const Fault fails = Now(); fails != nullptr && fails(batch))
      return absl::UnavailableError("the device failed, as told");
    return backend_.Run(stream, batch);
  }

 private:
  Fault Now() {
    const absl::MutexLock lock(&mu_);
    return fails_;
  }

  gpu::Backend& backend_;
  absl::Mutex mu_;
  Fault fails_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::test
