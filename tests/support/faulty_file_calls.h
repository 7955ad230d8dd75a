// SPDX-License-Identifier: Apache-2.0
//
// The kernel's file calls with faults: each call can be made to fail with an errno, O_DIRECT can be
// refused, a write can stop half way.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <limits>

#include "storage/rocksdb/file_calls.h"

namespace ebbtide::test {

// Thread-safe. 0 means no fault; faults last until they are set back.
class FaultyFileCalls final : public storage::FileCalls {
 public:
  std::atomic<bool> refuse_direct = false;  // EINVAL for O_DIRECT, as tmpfs of old kernels.
  std::atomic<int> open_error = 0;
  std::atomic<int> allocate_error = 0;
  std::atomic<off_t> room_bytes = std::numeric_limits<off_t>::max();  // ENOSPC for what needs more.
  std::atomic<int> read_error = 0;
  std::atomic<int> write_error = 0;  // After half of the bytes were written.
  std::atomic<int> sync_error = 0;
  std::atomic<int> unlink_error = 0;
  std::atomic<bool> open_throws = false;  // As where memory runs out.
  std::atomic<bool> write_throws = false;
  std::atomic<bool> short_transfers = false;  // Reads and writes move a part at a time.

  // Run first, where set; set before others call.
  std::function<void()> on_open = nullptr;
  std::function<void()> on_unlink = nullptr;

  // How often each was called.
  std::atomic<int> reads = 0;
  std::atomic<int> syncs = 0;

  int Open(const char* path, int flags) override;
  int Allocate(int fd, off_t bytes) override;
  ssize_t Read(int fd, void* into, size_t bytes, off_t offset) override;
  ssize_t Write(int fd, const void* from, size_t bytes, off_t offset) override;
  int Sync(int fd) override;
  int Unlink(const char* path) override;
};

}  // namespace ebbtide::test
