// SPDX-License-Identifier: Apache-2.0
//
// An Extent is where some tokens of one lane lie together: a frame of the device pool, or a page
// read in place where a lower tier keeps it, or a staged copy. Kernels attend over lists of them.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ebbtide::gpu {

inline constexpr int32_t kNoToken = -1;  // A slot that holds nothing a kernel may look at.

struct Extent {
  const std::byte* key = nullptr;    // [slots, head_dim], 16-byte aligned
  const std::byte* value = nullptr;  // [slots, head_dim], 16-byte aligned
  const int32_t* index = nullptr;    // [slots] token index, or kNoToken
  int32_t slots = 0;
};

}  // namespace ebbtide::gpu
