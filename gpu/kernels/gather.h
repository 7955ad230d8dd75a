// SPDX-License-Identifier: Apache-2.0
//
// Slots of one lane into a dense page.
// Tested by tests/unit/gpu/gather_test.cc.

#pragma once

#include <cstddef>
#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

struct GatherArgs {
  PageShape shape;
  std::span<const std::byte* const> key_slot;    // [tokens] at most shape.tokens
  std::span<const std::byte* const> value_slot;  // [tokens]
  std::span<std::byte> page;  // shape.page_bytes() out; rows past `tokens` are zeroed
};

//   Cost      reads and writes each byte once; runs of neighbouring slots are one copy
void GatherReference(const GatherArgs& args);
void GatherCpu(const GatherArgs& args);

// Stops the process where a span disagrees with the shape.
void CheckGather(const GatherArgs& args);

}  // namespace ebbtide::gpu
