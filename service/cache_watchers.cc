// SPDX-License-Identifier: Apache-2.0
//
// What watchers ask of the cache: lists, descriptions, counters, invariants.

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"
#include "service/cache.h"
#include "service/reason.h"

namespace ebbtide::service {

SequenceSummary Cache::Summarise(const OpenedSequence& sequence) const {
  const Sequence& facts = sequence.facts;
  return {.sequence = facts.args.sequence,
          .model = facts.model->name,
          .policy = facts.answer.policy,
          .recall = facts.answer.recall,
          .prefill = facts.answer.prefill,
          .committed = static_cast<uint64_t>(facts.committed),
          .budget_tokens = facts.answer.budget_tokens,
          .device_bytes = facts.pool_bytes,
          .idle = clock_.SinceStart() - facts.last_call,
          .tokens = facts.Tokens()};
}

std::vector<SequenceSummary> Cache::List(std::string_view after, size_t limit) {
  const absl::MutexLock lock(&mu_);
  std::vector<SequenceSummary> summaries;
  for (auto it = sequences_.upper_bound(after); it != sequences_.end() && summaries.size() < limit;
       ++it) {
    summaries.push_back(Summarise(*it->second));
  }
  return summaries;
}

absl::StatusOr<SequenceDescription> Cache::Describe(const DescribeArgs& args) {
  const absl::MutexLock lock(&mu_);
  EBBTIDE_ASSIGN_OR_RETURN(const SequenceRef sequence, FindLocked(args.sequence));
  const Sequence& facts = sequence->facts;
  const Geometry& geometry = facts.geometry();
  SequenceDescription description{
      .summary = Summarise(*sequence), .layer_lengths = {}, .lanes = {}, .tokens = {}};
  for (const Layer& layer : facts.layers) {
    description.layer_lengths.push_back(static_cast<uint64_t>(layer.length));
  }
  for (size_t i = 0; args.with_lanes && i < facts.lanes.size(); ++i) {
    const Lane& lane = facts.lanes[i];
    description.lanes.push_back(
        {.layer = static_cast<uint32_t>(i) / static_cast<uint32_t>(geometry.kv_heads),
         .kv_head = static_cast<uint32_t>(i) % static_cast<uint32_t>(geometry.kv_heads),
         .length = static_cast<uint64_t>(lane.length()),
         .resident = static_cast<uint32_t>(lane.resident()),
         .absent = static_cast<uint32_t>(lane.length() - lane.resident()),
         .demoted = lane.demoted()});
  }
  if (!args.with_tokens) return description;

  if (args.layer >= static_cast<uint32_t>(geometry.layers) ||
      args.kv_head >= static_cast<uint32_t>(geometry.kv_heads)) {
    return Refuse(absl::StatusCode::kInvalidArgument, "LANE_OUT_OF_RANGE",
                  absl::StrCat("lane ", args.layer, "/", args.kv_head, "; model \"",
                               facts.model->name, "\" has layers 0 to ", geometry.layers - 1,
                               " and kv heads 0 to ", geometry.kv_heads - 1));
  }
  if (facts.layers[args.layer].in_flight) {
    return Refuse(
        absl::StatusCode::kUnavailable, "CALL_IN_FLIGHT",
        absl::StrCat("layer ", args.layer, " is being called, so its scores are changing; retry"));
  }
  const size_t number = args.layer * static_cast<size_t>(geometry.kv_heads) + args.kv_head;
  const Lane& lane = facts.lanes[number];
  const LaneMemory& memory = sequence->memory[number];
  for (int32_t index = 0; index < lane.length(); ++index) {
    const Block& block = facts.blocks[static_cast<size_t>(index / geometry.page_tokens)];
    const std::string_view why =
        ProtectionOf(sequence->policy.resolved, index, lane.length(), facts.sealable_end());
    description.tokens.push_back({.index = static_cast<uint64_t>(index),
                                  .position = facts.positions[static_cast<size_t>(index)],
                                  .resident = lane.is_resident(index),
                                  .tier = block.tier,
                                  .score = memory.score[static_cast<size_t>(index)],
                                  .why = why.empty() ? "score" : why});
  }
  return description;
}

TierReport Cache::DeviceReport() {
  const absl::MutexLock lock(&mu_);
  TierReport report{.tier = TierName::kDevice,
                    .budget_bytes = pool_.budget_bytes(),
                    .used_bytes = pool_.used_bytes()};
  return report;
}

TokensByTier Cache::Tokens() {
  const absl::MutexLock lock(&mu_);
  TokensByTier all;
  for (const auto& [name, sequence] : sequences_) {
    const TokensByTier tokens = sequence->facts.Tokens();
    all.device += tokens.device;
    all.host += tokens.host;
    all.rocksdb += tokens.rocksdb;
    all.open += tokens.open;
  }
  return all;
}

std::vector<int64_t> Cache::Positions(const Ticket& ticket) {
  const absl::MutexLock lock(&mu_);
  return ticket.sequence->facts.positions;
}

void Cache::Count(const std::function<void(Stats&)>& update) {
  const absl::MutexLock lock(&mu_);
  update(stats_);
}

Stats Cache::Counters() {
  const absl::MutexLock lock(&mu_);
  Stats stats = stats_;
  stats.sequences = sequences_.size();
  return stats;
}

uint64_t Cache::metadata_bytes() {
  const absl::MutexLock lock(&mu_);
  return metadata_bytes_;
}

std::vector<std::string> Cache::Idle() {
  const absl::MutexLock lock(&mu_);
  std::vector<std::string> names;
  for (const auto& [name, sequence] : sequences_) {
    if (IsIdle(sequence->facts)) names.push_back(name);
  }
  return names;
}

bool Cache::IsIdle(const Sequence& facts) const {
  return !facts.any_in_flight() &&
         clock_.SinceStart() - facts.last_call >= facts.answer.idle_timeout;
}

void Cache::CheckInvariants() {
  const absl::MutexLock lock(&mu_);
  PromisedRecords promised;
  uint64_t metadata = 0;
  uint64_t pool = 0;
  int unsealed = 0;
  for (const auto& [name, sequence] : sequences_) {
    const Sequence& facts = sequence->facts;
    facts.CheckInvariants();
    const Need need = NeedOfBlocks(*sequence, static_cast<int32_t>(facts.blocks.size()));
    EBBTIDE_CHECK(facts.metadata_bytes == facts.metadata_at_open + need.metadata_bytes,
                  "metadata is charged at open and once for each block");
    if (need.blocks > 0) {
      promised[facts.model->record_size()] += static_cast<uint64_t>(need.blocks);
    }
    metadata += facts.metadata_bytes;
    pool += facts.pool_bytes;
    unsealed +=
        static_cast<int>(std::ranges::count(facts.blocks, BlockStage::kSealing, &Block::stage));
    for (const Lane& lane : facts.lanes) {
      EBBTIDE_CHECK(lane.resident() <= sequence->budget_tokens + sequence->chunk_tokens,
                    "a lane holds at most its budget and one chunk");
    }
  }
  EBBTIDE_CHECK(promised == promised_, "a record is promised for each block of an open sequence");
  EBBTIDE_CHECK(metadata == metadata_bytes_, "metadata is that of the open sequences");
  EBBTIDE_CHECK(pool <= pool_.used_bytes() && pool_.used_bytes() <= pool_.budget_bytes(),
                "frames in use are within the pool");
  EBBTIDE_CHECK(unsealed == unsealed_, "unsealed blocks are counted");
}

}  // namespace ebbtide::service
