// SPDX-License-Identifier: Apache-2.0

#include "service/movement/page_source.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/gather.h"

namespace ebbtide::service {
namespace {

FetchState StateOf(storage::PageState state) {
  switch (state) {
    case storage::PageState::kOk:
      return FetchState::kOk;
    case storage::PageState::kMissing:
      return FetchState::kMissing;
    case storage::PageState::kCorrupt:
      return FetchState::kCorrupt;
  }
  return FetchState::kMissing;
}

}  // namespace

bool Staging::TakeShare(absl::Duration patience) {
  const absl::MutexLock lock(&mu_);
  const auto is_free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return free_ > 0; };
  if (!mu_.AwaitWithTimeout(absl::Condition(&is_free), patience)) return false;
  --free_;
  return true;
}

void Staging::GiveShare() {
  const absl::MutexLock lock(&mu_);
  ++free_;
}

PageSource::PageSource(Cache& cache, const LowerTiers& tiers, Staging& staging,
                       const gpu::Device& device, const Ticket& ticket)
    : cache_(cache),
      tiers_(tiers),
      staging_(staging),
      device_(device),
      sequence_(ticket.sequence),
      layer_(ticket.layer) {}

PageSource::~PageSource() {
  GiveUp();
}

void PageSource::GiveUp() {
  pinned_.clear();
  staged_.clear();
  if (std::exchange(holds_share_, false)) staging_.GiveShare();
}

uint64_t PageSource::bytes_of(storage::PagePart part) const {
  return sequence_->model->record().part_bytes(part);
}

std::span<std::byte> PageSource::Stage(size_t bytes) {
  return staged_.emplace_back(bytes);
}

void PageSource::Fetch(std::span<PageRequest> requests, absl::Duration patience) {
  GiveUp();
  pinned_.reserve(requests.size());
  std::vector<Block> places = cache_.Places(sequence_);
  std::vector<PageRequest*> in_slots;
  std::vector<PageRequest*> below;
  for (PageRequest& request : requests) {
    request.bytes = {};
    request.state = FetchState::kMissing;
    const Block& block = places[static_cast<size_t>(request.page)];
    if (block.stage != BlockStage::kSealed) {
      in_slots.push_back(&request);
    } else if (block.tier == TierName::kRocksdb || !FetchInPlace(request)) {
      below.push_back(&request);  // Or it moved down since the cache was asked.
    }
  }
  if (!in_slots.empty() || !below.empty()) {
    const absl::Duration begun = SteadyClock().SinceStart();
    holds_share_ = staging_.TakeShare(patience);
    for (PageRequest* const request : in_slots) FetchFromSlots(*request);
    FetchStaged(below, patience - (SteadyClock().SinceStart() - begun));
  }
  NoteLost(requests);
}

LostPage PageSource::Lost(const PageRequest& request) const {
  const Geometry& geometry = sequence_->model->geometry;
  return {.kv_head = static_cast<uint32_t>(request.kv_head),
          .first_index = static_cast<uint64_t>(request.page * geometry.page_tokens),
          .tokens = static_cast<uint32_t>(geometry.page_tokens),  // A block at rest is complete.
          .tier = request.tier,
          .is_corrupt = request.state == FetchState::kCorrupt};
}

void PageSource::NoteLost(std::span<const PageRequest> requests) {
  std::vector<LostPage> lost;
  for (const PageRequest& request : requests) {
    const bool is_gone =
        request.state == FetchState::kCorrupt || request.state == FetchState::kMissing;
    if (is_gone && request.part == storage::PagePart::kExact) lost.push_back(Lost(request));
  }
  if (lost.empty()) return;
  for (const LostPage& page : cache_.NoteLost(sequence_, layer_, lost)) {
    Log(LogLevel::kError, "page lost",
        {{"reason", page.reason()},
         {"sequence", sequence_->facts.args.sequence},
         {"layer", layer_},
         {"kv_head", page.kv_head},
         {"first_index", page.first_index},
         {"tokens", page.tokens},
         {"tier", page.tier == TierName::kRocksdb ? "rocksdb" : "host"}});
  }
}

void PageSource::FetchFromSlots(PageRequest& request) {
  request.tier = TierName::kDevice;
  request.state = FetchState::kNoStaging;
  if (!holds_share_) return;
  const LaneMemory& memory = sequence_->memory[static_cast<size_t>(
      layer_ * sequence_->model->geometry.kv_heads + request.kv_head)];
  const Lane& lane = sequence_->facts.lane(layer_, request.kv_head);
  const int32_t first = request.page * memory.shape.tokens;
  const int32_t end = std::min(first + memory.shape.tokens, lane.length());
  const SlotsOfTokens slots = FindSlots(memory, lane, first, end);
  const std::span<std::byte> page = Stage(memory.shape.page_bytes());
  const gpu::GatherArgs gather{
      .shape = memory.shape, .key_slot = slots.keys, .value_slot = slots.values, .page = page};
  request.state = FetchState::kDeviceFailed;
  status_.Update(device_.Run(std::span(&gather, 1)));
  if (!status_.ok()) return;
  request.bytes =
      request.part == storage::PagePart::kExact ? page : Encode(memory.shape, page, request.part);
  request.state = FetchState::kOk;
}

// The part as the block's record will hold it.
std::span<const std::byte> PageSource::Encode(const gpu::PageShape& shape,
                                              std::span<const std::byte> page,
                                              storage::PagePart part) {
  std::vector<std::byte> digest(gpu::DigestBytes(shape.head_dim));
  const std::span<std::byte> coarse = Stage(gpu::CoarseBytes(shape));
  const std::span<std::byte> fine = Stage(gpu::FineBytes(shape));
  gpu::DigestCpu({.shape = shape, .tokens = shape.tokens, .page = page, .digest = digest});
  gpu::EncodeCpu({.shape = shape, .page = page, .digest = digest, .coarse = coarse, .fine = fine});
  return part == storage::PagePart::kCoarse ? coarse : fine;
}

// The block's record in place, pinned until the next fetch; null where the host tier lacks it.
const PageSource::PinnedBlock* PageSource::Pinned(int32_t block) {
  const auto [entry, is_new] = pinned_.try_emplace(block);
  PinnedBlock& pinned = entry->second;
  if (!is_new) return &pinned;
  const storage::BlockKey key = sequence_->facts.key(block);
  pinned.pin = tiers_.host.Pin(key);
  if (pinned.pin == nullptr) {
    pinned_.erase(entry);
    return nullptr;
  }
  // Without the padding behind it, whose bytes nobody uses.
  const Model& model = *sequence_->model;
  const uint64_t used = model.record().header_used_bytes();
  const auto header =
      storage::ParseHeader(pinned.pin->first(std::min<size_t>(used, pinned.pin->size())));
  if (header.ok() && header->key == key) pinned.header = *header;
  return &pinned;
}

bool PageSource::FetchInPlace(PageRequest& request) {
  const PinnedBlock* block = Pinned(request.page);
  if (block == nullptr) return false;
  request.tier = TierName::kHost;
  if (!FindPart(*block, request)) {
    request.state = FetchState::kCorrupt;
    cache_.Count([](Stats& stats) { ++stats.corrupt_in_place; });
  }
  return true;
}

// The part within its pinned record, if it is sound.
bool PageSource::FindPart(const PinnedBlock& block, PageRequest& request) const {
  if (!block.header.has_value()) return false;
  const auto page =
      static_cast<uint32_t>(layer_ * sequence_->model->geometry.kv_heads + request.kv_head);
  const storage::RecordGeometry& geometry = block.header->geometry;
  const auto bytes = block.pin->subspan(geometry.part_offset(page, request.part),
                                        geometry.part_bytes(request.part));
  if (!storage::PartIsIntact(*block.header, page, request.part, bytes)) return false;
  request.bytes = bytes;
  request.state = FetchState::kOk;
  return true;
}

void PageSource::FetchStaged(std::span<PageRequest*> requests, absl::Duration patience) {
  if (requests.empty() || tiers_.rocksdb == nullptr) return;
  if (!holds_share_) {
    for (PageRequest* const request : requests) {
      request->tier = TierName::kRocksdb;
      request->state = FetchState::kNoStaging;
    }
    return;
  }
  const Model& model = *sequence_->model;
  const storage::RecordGeometry geometry = model.record();
  std::vector<storage::PageRead> reads;
  for (PageRequest* request : requests) {
    request->tier = TierName::kRocksdb;
    reads.push_back(
        {.key = sequence_->facts.key(request->page),
         .page = static_cast<uint32_t>(layer_ * model.geometry.kv_heads + request->kv_head),
         .part = request->part,
         .into = Stage(geometry.part_bytes(request->part))});
  }
  const absl::Status answered = tiers_.rocksdb->Read(reads, patience);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i]->state = answered.ok()                        ? StateOf(reads[i].state)
                         : absl::IsDeadlineExceeded(answered) ? FetchState::kOutOfTime
                                                              : FetchState::kUnavailable;
    if (requests[i]->state == FetchState::kOk) requests[i]->bytes = reads[i].into;
  }
}

}  // namespace ebbtide::service
