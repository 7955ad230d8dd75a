// SPDX-License-Identifier: Apache-2.0
//
// The limit that reading kernels are held against: how fast this thread reads memory in order.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ebbtide::bench {

// Reads every byte once, with the widest loads this CPU has and software prefetch; returns a
// number that depends on all of them.
uint64_t StreamingRead(std::span<const std::byte> bytes);

}  // namespace ebbtide::bench
