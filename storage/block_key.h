// SPDX-License-Identifier: Apache-2.0
//
// What names a block in every tier. Sequences are numbered by the daemon, never reused within a
// boot, so a late write of a closed sequence can never be taken for another's block.

#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace ebbtide::storage {

struct BlockKey {
  uint64_t sequence = 0;    // The daemon's number of the sequence.
  uint32_t block = 0;       // Block number: first index / page tokens.
  uint32_t generation = 0;  // Rises each time the block is sealed anew; 0 until one can be.

  friend auto operator<=>(const BlockKey&, const BlockKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockKey& key) {
    return H::combine(std::move(h), key.sequence, key.block, key.generation);
  }
  std::string DebugString() const;  // "sequence 7, block 3, generation 0"
};

}  // namespace ebbtide::storage
