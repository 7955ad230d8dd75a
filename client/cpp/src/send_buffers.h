// SPDX-License-Identifier: Apache-2.0
//
// Memory for messages on their way out. A large buffer fresh from the system costs a page fault for
// every 4 KiB, more than filling it does; so the last ones are kept. Tested by
// tests/unit/client/send_buffers_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ebbtide::client {

// Thread-safe. Its buffers may outlive it: gRPC lets go of a message when it is done with it.
class SendBuffers {
 public:
  static constexpr size_t kKeptBytesMax = size_t{64} << 20;  // Of all that nobody uses.
  static constexpr size_t kStepBytes = size_t{64} << 10;     // Sizes of what is kept; less is not.

  // At least `bytes`, not zeroed. Goes back when the last copy of the pointer is gone.
  std::shared_ptr<uint8_t[]> Take(size_t bytes);

  size_t kept_bytes() const;

 private:
  struct Buffer {
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes = 0;
  };
  struct Spares {
    absl::Mutex mu;
    std::vector<Buffer> buffers ABSL_GUARDED_BY(mu);
    size_t bytes ABSL_GUARDED_BY(mu) = 0;
  };
  static Buffer TakeSpare(Spares& spares, size_t bytes);
  static void GiveBack(Spares& spares, Buffer buffer);

  const std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
};

}  // namespace ebbtide::client
