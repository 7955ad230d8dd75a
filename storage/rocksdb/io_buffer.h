// SPDX-License-Identifier: Apache-2.0
//
// Memory that O_DIRECT accepts, kept for reuse: taking a fresh mebibyte from the kernel costs as
// much as reading it from a fast disk.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "storage/block_record.h"

namespace ebbtide::storage {

// Thread-safe. Outlives the buffers it lends.
class IoBuffers {
 public:
  static constexpr size_t kKeptBytes = size_t{1} << 20;  // Longer ones are not kept.
  static constexpr size_t kKept = 16;

  // Aligned memory, given back when it goes.
  class Buffer {
   public:
    Buffer(IoBuffers& owner, std::byte* memory, size_t bytes)
        : owner_(&owner), memory_(memory), bytes_(bytes) {}
    ~Buffer() { owner_->GiveBack(memory_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    std::span<std::byte> bytes() const { return {memory_, bytes_}; }

   private:
    IoBuffers* owner_;
    std::byte* memory_;
    size_t bytes_;
  };

  ~IoBuffers() {
    for (std::byte* memory : kept_) std::free(memory);
  }

  // At least `bytes`, rounded up to what is kept.
  Buffer Lend(size_t bytes) ABSL_LOCKS_EXCLUDED(mu_) {
    if (bytes > kKeptBytes) return Buffer(*this, Allocate(bytes), RoundUp(bytes, kRecordAlignment));
    {
      absl::MutexLock lock(&mu_);
      if (!kept_.empty()) {
        std::byte* memory = kept_.back();
        kept_.pop_back();
        return Buffer(*this, memory, kKeptBytes);
      }
    }
    return Buffer(*this, Allocate(kKeptBytes), kKeptBytes);
  }

 private:
  static std::byte* Allocate(size_t bytes) {
    return static_cast<std::byte*>(
        std::aligned_alloc(kRecordAlignment, RoundUp(bytes, kRecordAlignment)));
  }

  void GiveBack(std::byte* memory, size_t bytes) ABSL_LOCKS_EXCLUDED(mu_) {
    if (bytes == kKeptBytes) {
      absl::MutexLock lock(&mu_);
      if (kept_.size() < kKept) {
        kept_.push_back(memory);
        return;
      }
    }
    std::free(memory);
  }

  absl::Mutex mu_;
  std::vector<std::byte*> kept_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::storage
