// SPDX-License-Identifier: Apache-2.0
//
// Slots into a page, one row after the other.

#include <cstring>

#include "gpu/kernels/gather.h"

namespace ebbtide::gpu {

void GatherReference(const GatherArgs& args) {
  CheckGather(args);
  const size_t row_bytes = args.shape.row_bytes();
  std::memset(args.page.data(), 0, args.page.size());
  for (size_t token = 0; token < args.key_slot.size(); ++token) {
    std::byte* key = args.page.data() + token * row_bytes;
    std::memcpy(key, args.key_slot[token], row_bytes);
    std::memcpy(key + args.shape.half_bytes(), args.value_slot[token], row_bytes);
  }
}

}  // namespace ebbtide::gpu
