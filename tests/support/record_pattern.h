// SPDX-License-Identifier: Apache-2.0
//
// Block records for tests, filled with a pattern computed from identity and place, so that a wrong
// byte tells where it came from.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/block_key.h"
#include "storage/block_record.h"

namespace ebbtide::test {

using storage::BlockKey;
using storage::RecordGeometry;

// A valid geometry of `layers` * `kv_heads` pages of `page_bytes`.
RecordGeometry MakeGeometry(uint32_t layers, uint32_t kv_heads, uint32_t page_bytes,
                            uint32_t coarse_bytes = 0, uint32_t fine_bytes = 0);

// The page that MakeRecord puts at `page`; another `salt` gives another content of the same key.
std::vector<std::byte> PatternPage(const BlockKey& key, uint32_t page, uint32_t page_bytes,
                                   uint64_t salt = 0);

// A framed record of patterned pages.
std::vector<std::byte> MakeRecord(const BlockKey& key, const RecordGeometry& geometry,
                                  uint64_t salt = 0);

}  // namespace ebbtide::test
