// SPDX-License-Identifier: Apache-2.0
//
// Reads every page of a sequence back from whatever tier answers for it, and compares each byte of
// its keys and values with the trace. Contract: tests/unit/client/byte_check_test.cc.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cli/trace.h"
#include "ebbtide/sequence.h"

namespace ebbtide::cli {

struct ByteCheck {
  uint64_t checked = 0;     // 2 * tokens * kv_heads * head_dim * dtype * layers, all accounted for.
  uint64_t mismatches = 0;  // Bytes that differ from what was sent, or were not answered.
  uint64_t lost = 0;        // Bytes of pages that the daemon itself calls missing or corrupt.
  std::map<std::string, uint64_t> checked_by_tier = {};
  std::vector<std::string> complaints = {};  // The first few, in words.
};

// Compares `pages` of one lane, in order, with the trace; adds to `check`.
void CheckPages(const Trace& trace, const TraceLayer& layer, uint32_t kv_head,
                std::span<const client::Page> pages, ByteCheck& check);

// All lanes of `sequence`, whose layers are the trace's in order. Layers hold `page_tokens` a page.
absl::StatusOr<ByteCheck> CheckEveryByte(const Trace& trace, const client::Sequence& sequence,
                                         uint32_t page_tokens);

}  // namespace ebbtide::cli
