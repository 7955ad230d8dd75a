// SPDX-License-Identifier: Apache-2.0
//
// A backend that remembers whether its device failed, whoever was told: a call, or a carrier that
// tries again. Tested by tests/unit/gpu/loss_noting_backend_test.cc.

#pragma once

#include <atomic>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/status_macros.h"
#include "gpu/backend.h"

namespace ebbtide::gpu {

// Thread-safe. Its streams must not outlive it.
class LossNotingBackend final : public Backend {
 public:
  explicit LossNotingBackend(Backend& backend) : backend_(backend) {}

  // From the first kUnavailable on; only a new process mends that.
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }

  std::string_view name() const override { return backend_.name(); }
  bool is_simulated() const override { return backend_.is_simulated(); }
  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override {
    absl::StatusOr<DeviceBuffer> buffer = backend_.Allocate(bytes);
    (void)Note(buffer.status());
    return buffer;
  }
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override {
    absl::StatusOr<std::unique_ptr<Stream>> stream = backend_.MakeStream();
    EBBTIDE_RETURN_IF_ERROR(Note(stream.status()));
    return std::make_unique<NotingStream>(*this, *std::move(stream));
  }
  absl::Status Run(Stream& stream, const Batch& batch) override {
    return Note(backend_.Run(static_cast<NotingStream&>(stream).stream(), batch));
  }

 private:
  class NotingStream final : public Stream {
   public:
    NotingStream(LossNotingBackend& backend, std::unique_ptr<Stream> stream)
        : backend_(backend), stream_(std::move(stream)) {}
    absl::Status Wait() override { return backend_.Note(stream_->Wait()); }
    Stream& stream() { return *stream_; }

   private:
    LossNotingBackend& backend_;
    std::unique_ptr<Stream> stream_;
  };

  absl::Status Note(absl::Status status) {
    if (absl::IsUnavailable(status)) has_failed_.store(true, std::memory_order_relaxed);
    return status;
  }

  Backend& backend_;
  std::atomic<bool> has_failed_ = false;
};

}  // namespace ebbtide::gpu
