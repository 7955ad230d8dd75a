// SPDX-License-Identifier: Apache-2.0
//
// A device as one caller uses it, step by step: what it runs is done when Run returns.

#pragma once

#include <memory>
#include <utility>

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
    EBBTIDE_RETURN_IF_ERROR(backend_->Run(*stream_, batch));
    return stream_->Wait();
  }

 private:
  Device(Backend& backend, std::unique_ptr<Stream> stream)
      : backend_(&backend), stream_(std::move(stream)) {}

  Backend* backend_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace ebbtide::gpu
