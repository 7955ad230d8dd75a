// SPDX-License-Identifier: Apache-2.0
//
// Slots into a page, one copy per run of neighbouring slots: a page that is wholly resident in one
// frame is two copies.

#include "gpu/kernels/gather.h"

#include <cstring>

#include "base/status_macros.h"

namespace ebbtide::gpu {
namespace {

void GatherHalf(std::span<const std::byte* const> slots, size_t row_bytes,
                std::span<std::byte> half) {
  std::byte* target = half.data();
  for (size_t first = 0; first < slots.size();) {
    size_t count = 1;
    while (first + count < slots.size() &&
           slots[first + count] == slots[first] + count * row_bytes) {
      ++count;
    }
    std::memcpy(target, slots[first], count * row_bytes);
    target += count * row_bytes;
    first += count;
  }
  std::memset(target, 0, half.size() - slots.size() * row_bytes);
}

}  // namespace

void CheckGather(const GatherArgs& args) {
  EBBTIDE_CHECK(args.page.size() == args.shape.page_bytes(),
                "gather: page has the size of its shape");
  EBBTIDE_CHECK(args.key_slot.size() == args.value_slot.size(), "gather: as many keys as values");
  EBBTIDE_CHECK(args.key_slot.size() <= static_cast<size_t>(args.shape.tokens),
                "gather: at most shape.tokens slots");
}

void GatherCpu(const GatherArgs& args) {
  CheckGather(args);
  const size_t row_bytes = args.shape.row_bytes();
  const size_t half_bytes = args.shape.half_bytes();
  GatherHalf(args.key_slot, row_bytes, args.page.first(half_bytes));
  GatherHalf(args.value_slot, row_bytes, args.page.subspan(half_bytes));
}

}  // namespace ebbtide::gpu
