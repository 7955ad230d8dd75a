// SPDX-License-Identifier: Apache-2.0
//
// One growing run of tokens: its lanes, how far each layer has come, and where each block lies.
// Facts only; bytes are moved by service/movement. Tested by tests/unit/service/sequence_test.cc.

#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"

#include "service/calls.h"
#include "service/model/geometry.h"
#include "service/model/lane.h"
#include "storage/block_key.h"

namespace ebbtide::service {

struct Model {
  std::string name;
  std::string weights_fingerprint;
  Geometry geometry;
  uint64_t fingerprint = 0;

  storage::RecordGeometry record() const { return geometry.record(fingerprint); }
  storage::RecordSize record_size() const { return record().size(); }
};

// XXH3-128 of the dtype, shape, keys and values of a mutating call.
struct CallDigest {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const CallDigest&, const CallDigest&) = default;
};

struct LastCall {
  int32_t first_index = 0;
  int32_t tokens = 0;  // 0: no mutating call yet.
  CallDigest digest;
};

struct Layer {
  int32_t length = 0;
  int32_t observed_end = 0;  // A query is observed iff its index is not below.
  LastCall last;
  bool in_flight = false;
};

enum class BlockStage : uint8_t {
  kOpen,     // Some layer lacks some of its tokens.
  kSealing,  // Complete; its copy below is not confirmed yet.
  kSealed,   // A tier keeps its authoritative copy.
};

struct Block {
  BlockStage stage = BlockStage::kOpen;
  TierName tier = TierName::kDevice;  // Of the authoritative copy.
};

// Everything about a sequence that the cache's lock guards. What belongs to one layer's call in
// flight (bytes, scores, digests) lies beside it (service/policy/lane_memory.h).
struct Sequence {
  Sequence(uint64_t number, OpenArgs args, std::shared_ptr<const Model> model);

  const uint64_t number;                     // Never reused within a boot.
  const OpenArgs args;                       // As asked, to recognise an equal OpenSequence.
  const std::shared_ptr<const Model> model;  // Shared by the sequences of a model.
  OpenAnswer answer;                         // As resolved; fixed once the sequence is open.

  std::vector<Lane> lanes;  // [layers * kv_heads]
  std::vector<Layer> layers;
  std::vector<Block> blocks;       // [ceil(longest layer / page_tokens)]
  int32_t blocks_below = 0;        // Those whose tier is kRocksdb.
  std::vector<int64_t> positions;  // [longest layer]; as the first layer's call gave them
  int32_t committed = 0;           // Least length over layers.
  int32_t longest = 0;            // Greatest length over layers, what the lower tiers reserved for.
  uint64_t metadata_at_open = 0;  // Part of metadata_bytes: lanes and windows.
  uint64_t metadata_bytes = 0;    // Charged to the host tier; with digests, positions, score state.
  uint64_t pool_offset = 0;
  uint64_t pool_bytes = 0;
  absl::Duration last_call;                            // On the steady clock.
  std::set<std::pair<uint32_t, uint64_t>> lost_pages;  // Noted so far: lane, first index.
  int carriers = 0;  // Seals and moves under way, which still read its bytes.
  bool is_closed = false;
  bool is_reaped = false;  // Its frames are given back.

  const Geometry& geometry() const { return model->geometry; }
  Lane& lane(int layer, int kv_head) {
    return lanes[static_cast<size_t>(layer * geometry().kv_heads + kv_head)];
  }
  const Lane& lane(int layer, int kv_head) const {
    return lanes[static_cast<size_t>(layer * geometry().kv_heads + kv_head)];
  }
  storage::BlockKey key(int32_t block) const {
    return {.sequence = number, .block = static_cast<uint32_t>(block), .generation = 0};
  }
  bool any_in_flight() const;
  bool is_confirmed(int32_t block) const {
    return blocks[static_cast<size_t>(block)].stage == BlockStage::kSealed;
  }
  int32_t sealable_end() const;  // First index of the first block that is not complete.
  int32_t blocks_of(int32_t tokens) const {
    return (tokens + geometry().page_tokens - 1) / geometry().page_tokens;
  }

  // Makes room for tokens up to `end`: blocks and positions ([end - longest], empty: the indices).
  void Lengthen(int32_t end, std::span<const int64_t> new_positions);
  // The layer holds `tokens` more; returns the blocks that became complete by it.
  std::vector<int32_t> Extend(int layer, int32_t tokens);
  // Forgets the tokens from `length` on, none of which is in a complete block.
  void Truncate(int32_t length);
  TokensByTier Tokens() const;  // Lane-tokens.
  void CheckInvariants() const;
};

}  // namespace ebbtide::service
