// SPDX-License-Identifier: Apache-2.0
//
// Memory that may not be read: touching it ends the process. Or, for kernels that all arrays are
// carried to, memory that may not be used: NaNs, whatever the dtype.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>

namespace ebbtide::gpu {

class ForbiddenMemory {
 public:
  enum class Use { kMayNotBeRead, kMayBeCopied };

  explicit ForbiddenMemory(Use use = Use::kMayNotBeRead)
      : memory_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::memset(memory_, 0xFF, kBytes);
    if (use == Use::kMayNotBeRead) mprotect(memory_, kBytes, PROT_NONE);
  }
  ~ForbiddenMemory() { munmap(memory_, kBytes); }
  ForbiddenMemory(const ForbiddenMemory&) = delete;
  ForbiddenMemory& operator=(const ForbiddenMemory&) = delete;

  const std::byte* bytes() const { return static_cast<const std::byte*>(memory_); }

 private:
  static constexpr size_t kBytes = size_t{1} << 20;
  void* memory_;
};

}  // namespace ebbtide::gpu
