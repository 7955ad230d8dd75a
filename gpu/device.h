// SPDX-License-Identifier: Apache-2.0
//
// A device as one caller uses it, step by step: whatever Run began is done when it ends, with an
// error or an exception too, for it may read what the caller gives away next.

#pragma once

#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/status_macros.h"
#include "gpu/backend.h"

namespace ebbtide::gpu {

// Thread-compatible.
class Device {
 public:
  //   kUnavailable  as Backend::MakeStream
  static absl::StatusOr<Device> Open(Backend& backend) {
    EBBTIDE_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, backend.MakeStream());
    return Device(backend, std::move(stream));
  }

  //   kResourceExhausted, kInternal, kUnavailable  as Backend::Run and Stream::Wait
  absl::Status Run(const Batch& batch) const {
    absl::Cleanup wait = [this] { (void)stream_->Wait(); };
    absl::Status run = backend_->Run(*stream_, batch);
    std::move(wait).Cancel();
    absl::Status waited = stream_->Wait();
    return run.ok() ? waited : run;
  }

 private:
  Device(Backend& backend, std::unique_ptr<Stream> stream)
      : backend_(&backend), stream_(std::move(stream)) {}

  Backend* backend_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace ebbtide::gpu
