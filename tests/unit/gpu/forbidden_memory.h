// SPDX-License-Identifier: Apache-2.0
//
// Memory that may not be read: touching it ends the process.

#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace ebbtide::gpu {

class ForbiddenMemory {
 public:
  ForbiddenMemory()
      : memory_(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~ForbiddenMemory() { munmap(memory_, kBytes); }
  ForbiddenMemory(const ForbiddenMemory&) = delete;
  ForbiddenMemory& operator=(const ForbiddenMemory&) = delete;

  const std::byte* bytes() const { return static_cast<const std::byte*>(memory_); }

 private:
  static constexpr size_t kBytes = size_t{1} << 20;
  void* memory_;
};

}  // namespace ebbtide::gpu
