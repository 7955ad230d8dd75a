// SPDX-License-Identifier: Apache-2.0
//
// One long mapping of shared memory: a memfd, so that workers can map it too and nothing is left
// behind when the process dies. Memory is taken page by page as it is written, and given back by
// Decommit. Where memfd_create is refused (seccomp) it is anonymous memory, and name() says so.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "storage/host/extent_map.h"

namespace ebbtide::storage {

// Thread-compatible: calls on extents that do not overlap may run at the same time.
class ShmArena {
 public:
  // Maps `bytes` (a multiple of 4096) without taking memory for them.
  //   kResourceExhausted  no address space, or no file descriptor
  static absl::StatusOr<std::unique_ptr<ShmArena>> Create(uint64_t bytes);
  ~ShmArena();
  ShmArena(const ShmArena&) = delete;
  ShmArena& operator=(const ShmArena&) = delete;

  std::string_view name() const { return fd_ >= 0 ? "memfd" : "anonymous memory"; }
  uint64_t size() const { return mapping_.size(); }
  int fd() const { return fd_; }  // -1 where the memory cannot be shared.
  std::span<std::byte> bytes(const Extent& extent) const {
    return mapping_.subspan(extent.offset, extent.bytes);
  }

  // Fills an extent that holds no memory yet, taking it. A refusal is a status, where a plain store
  // would be a SIGBUS.
  //   kResourceExhausted  the machine or the cgroup has no memory left; the extent holds none
  absl::Status Fill(const Extent& extent, std::span<const std::byte> bytes);

  // Gives the extent's memory back to the machine; it reads as zeros afterwards.
  void Decommit(const Extent& extent);

 private:
  ShmArena(int fd, std::span<std::byte> mapping) : fd_(fd), mapping_(mapping) {}

  // fixed after construction
  const int fd_;
  const std::span<std::byte> mapping_;
};

}  // namespace ebbtide::storage
