// SPDX-License-Identifier: Apache-2.0

#include "service/model/sequence.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "service/model/grow.h"

namespace ebbtide::service {

Sequence::Sequence(uint64_t sequence_number, OpenArgs open_args,
                   std::shared_ptr<const Model> sequence_model)
    : number(sequence_number),
      args(std::move(open_args)),
      model(std::move(sequence_model)),
      layers(static_cast<size_t>(model->geometry.layers)) {}

bool Sequence::any_in_flight() const {
  return std::ranges::any_of(layers, [](const Layer& layer) { return layer.in_flight; });
}

int32_t Sequence::sealable_end() const {
  return committed / geometry().page_tokens * geometry().page_tokens;
}

void Sequence::Lengthen(int32_t end, std::span<const int64_t> new_positions) {
  ReserveSparingly(positions, static_cast<size_t>(std::max(longest, end)));
  for (int32_t index = longest; index < end; ++index) {
    const auto i = static_cast<size_t>(index - longest);
    positions.push_back(new_positions.empty() ? index : new_positions[i]);
  }
  longest = std::max(longest, end);
  blocks.resize(static_cast<size_t>(blocks_of(longest)));
}

void Sequence::Truncate(int32_t length) {
  EBBTIDE_CHECK(length >= sealable_end(), "complete blocks are not truncated");
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i].Truncate(length);
  for (Layer& layer : layers) {
    layer.length = std::min(layer.length, length);
    layer.observed_end = std::min(layer.observed_end, length);
    if (layer.last.first_index + layer.last.tokens > length) layer.last = {};
  }
  committed = std::min(committed, length);
  longest = std::min(longest, length);
  positions.resize(static_cast<size_t>(longest));
  blocks.resize(static_cast<size_t>(blocks_of(longest)));
}

std::vector<int32_t> Sequence::Extend(int layer, int32_t tokens) {
  layers[static_cast<size_t>(layer)].length += tokens;
  const int32_t before = sealable_end() / geometry().page_tokens;
  committed = std::ranges::min(layers, {}, &Layer::length).length;

  std::vector<int32_t> complete;
  for (int32_t block = before; block < sealable_end() / geometry().page_tokens; ++block) {
    blocks[static_cast<size_t>(block)].stage = BlockStage::kSealing;
    complete.push_back(block);
  }
  return complete;
}

TokensByTier Sequence::Tokens() const {
  TokensByTier tokens;
  const auto lane_count = static_cast<uint64_t>(geometry().lanes());
  const auto page_tokens = static_cast<uint64_t>(geometry().page_tokens);
  for (const Lane& lane : lanes) tokens.device += static_cast<uint64_t>(lane.resident());
  uint64_t sealed = 0;
  for (const Block& block : blocks) {
    if (block.stage != BlockStage::kSealed) continue;
    (block.tier == TierName::kHost ? tokens.host : tokens.rocksdb) += lane_count * page_tokens;
    sealed += page_tokens;
  }
  for (const Layer& layer : layers) {
    tokens.open +=
        (static_cast<uint64_t>(layer.length) - sealed) * static_cast<uint64_t>(geometry().kv_heads);
  }
  return tokens;
}

void Sequence::CheckInvariants() const {
  const int32_t page_tokens = geometry().page_tokens;
  int32_t least = longest;
  for (const Layer& layer : layers) {
    EBBTIDE_CHECK(layer.length == committed || layer.length == longest,
                  "layers differ by one step at most");
    least = std::min(least, layer.length);
  }
  EBBTIDE_CHECK(least == committed, "the committed length is the least over layers");
  EBBTIDE_CHECK(static_cast<int32_t>(blocks.size()) == (longest + page_tokens - 1) / page_tokens,
                "every token has a block");
  for (size_t block = 0; block < blocks.size(); ++block) {
    const bool is_complete = static_cast<int32_t>(block + 1) * page_tokens <= committed;
    EBBTIDE_CHECK((blocks[block].stage != BlockStage::kOpen) == is_complete,
                  "complete blocks are sealing or sealed, others are open");
  }
  EBBTIDE_CHECK(std::ranges::count(blocks, TierName::kRocksdb, &Block::tier) == blocks_below,
                "blocks below are counted");
  for (size_t i = 0; i < lanes.size(); ++i) {
    lanes[i].CheckInvariants();
    const Layer& layer = layers[i / static_cast<size_t>(geometry().kv_heads)];
    EBBTIDE_CHECK(lanes[i].length() == layer.length || layer.in_flight,
                  "a lane is as long as its layer between calls");
    for (int32_t index = sealable_end(); index < lanes[i].length(); ++index) {
      EBBTIDE_CHECK(lanes[i].is_resident(index), "a token of an open block is resident");
    }
    for (int32_t index = 0; index < lanes[i].length(); ++index) {
      EBBTIDE_CHECK(lanes[i].slot_of(index) != kNoSlot || is_confirmed(index / page_tokens),
                    "a token has a slot or a confirmed copy below");
    }
  }
}

}  // namespace ebbtide::service
