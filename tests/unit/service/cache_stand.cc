// SPDX-License-Identifier: Apache-2.0

#include "tests/unit/service/cache_stand.h"

#include <cstring>
#include <limits>
#include <utility>

#include "base/status_macros.h"

namespace ebbtide::test {
namespace {

using service::Ticket;

uint64_t CostIn(const storage::Tier& tier, const storage::RecordSize& size) {
  return tier.Room({&size, 1}).sizes.front().segment_bytes;
}

// What a record costs does not depend on who asks.
uint64_t BudgetFor(int32_t blocks) {
  storage::ByteBudget probe(64 << 20);
  const auto tier = storage::HostTier::Create(probe);
  EBBTIDE_CHECK(tier.ok(), "a small host tier opens");
  return static_cast<uint64_t>(blocks) * CostIn(**tier, SmallGeometry().record(0).size());
}

std::unique_ptr<storage::HostTier> MakeTier(storage::ByteBudget& budget) {
  auto tier = storage::HostTier::Create(budget);
  EBBTIDE_CHECK(tier.ok(), "a small host tier opens");
  return *std::move(tier);
}

}  // namespace

service::LowerRoom RoomFor(uint64_t records, std::span<const storage::RecordSize> sizes) {
  service::LowerRoom room = {.below_bytes = records};
  for (const storage::RecordSize& size : sizes) {
    room.sizes[size] = {.segment_slots = 1, .segment_bytes = 1};
  }
  return room;
}

CacheStand::CacheStand(const CacheSetup& setup)
    : carriers_(setup.queue_limit),
      pool_(setup.device_bytes),
      host_budget_(BudgetFor(setup.host_blocks)),
      below_budget_(BudgetFor(std::max(1, setup.below_blocks))),
      host_tier_(MakeTier(host_budget_)),
      below_tier_(MakeTier(below_budget_)),
      host_(*host_tier_, 1),
      below_(*below_tier_, 2),
      breaker_(below_, clock_),
      tiers_{.host = host_,
             .host_budget = host_budget_,
             .rocksdb = setup.below_blocks > 0 ? &breaker_ : nullptr},
      cache_({.device_budget_bytes = setup.device_bytes,
              .default_recall = "exact",
              .idle_timeout = absl::Minutes(10),
              .look_at_room = [this](auto sizes) { return look_at_room_(sizes); }},
             clock_),
      mover_(cache_, clock_, carriers_, backend_, tiers_) {
  EBBTIDE_CHECK(cache_.RegisterModel("m", tokens_.geometry, "w").ok(), "the model is sound");
}

storage::RecordSize CacheStand::record_size() const {
  return tokens_.geometry.record(0).size();
}

uint64_t CacheStand::host_cost() const {
  return CostIn(*host_tier_, record_size());
}

service::SequenceRef CacheStand::Open(const std::string& name, int32_t budget_tokens,
                                      int32_t chunk_tokens, const std::string& model) {
  const auto opened =
      cache_.Open({.sequence = name,
                   .model = model,
                   .policy = "streaming",
                   .budget_tokens = static_cast<uint32_t>(budget_tokens),
                   .chunk_tokens = static_cast<uint32_t>(chunk_tokens)},
                  {.pool = pool_.data(), .charged_bytes = std::numeric_limits<uint64_t>::max()});
  EBBTIDE_CHECK(opened.ok(), "the sequence fits the pool");
  return *cache_.Find(name);
}

Ticket CacheStand::Begin(const std::string& name, uint32_t layer, uint64_t first, int32_t tokens) {
  service::Lengths lengths;
  auto ticket = cache_.Begin(*cache_.Find(name),
                             {.layer = layer, .first_index = first, .tokens = tokens}, &lengths);
  EBBTIDE_CHECK(ticket.ok(), "the call is in order");
  return *std::move(ticket);
}

void CacheStand::Place(const Ticket& ticket, const std::vector<int32_t>& victims) {
  const service::Geometry& geometry = tokens_.geometry;
  const std::vector<std::vector<int32_t>> victims_of_lanes(static_cast<size_t>(geometry.kv_heads),
                                                           victims);
  std::vector<std::vector<int32_t>> slots;
  EBBTIDE_CHECK(cache_.AwaitSlots(ticket, victims_of_lanes, clock_.SinceStart()).ok(),
                "there are slots");
  EBBTIDE_CHECK(cache_.Place(ticket, {.victims = victims_of_lanes, .positions = {}}, &slots).ok(),
                "there is room");
  const std::vector<std::byte> keys = tokens_.Keys(ticket.layer, ticket.first_index, ticket.tokens);
  const std::vector<std::byte> values =
      tokens_.Values(ticket.layer, ticket.first_index, ticket.tokens);
  const size_t row = geometry.page_shape().row_bytes();
  for (size_t head = 0; head < slots.size(); ++head) {
    const auto lane = static_cast<size_t>(ticket.layer * geometry.kv_heads) + head;
    const service::LaneMemory& memory = ticket.sequence->memory[lane];
    for (size_t t = 0; t < slots[head].size(); ++t) {
      const size_t at = (t * slots.size() + head) * row;
      std::memcpy(memory.key_slot(slots[head][t]), keys.data() + at, row);
      std::memcpy(memory.value_slot(slots[head][t]), values.data() + at, row);
    }
  }
}

bool CacheStand::Finish(const Ticket& ticket) {
  service::Lengths lengths;
  return cache_.Finish(ticket, {}, 0, &lengths);
}

void CacheStand::Append(const std::string& name, uint64_t first, int32_t tokens,
                        const std::vector<int32_t>& victims) {
  for (uint32_t layer = 0; layer < static_cast<uint32_t>(tokens_.geometry.layers); ++layer) {
    const Ticket ticket = Begin(name, layer, first, tokens);
    Place(ticket, victims);
    Finish(ticket);
  }
}

void CacheStand::Close(const std::string& name) {
  const auto closed = cache_.Close(name, "CLOSED");
  EBBTIDE_CHECK(closed.ok() && closed->has_value(), "the sequence is open and at rest");
  mover_.Erase((*closed)->blocks);
  mover_.Reap((*closed)->sequence);
}

void CacheStand::Carry() {
  mover_.ProbeBelow();
  mover_.Kick();
  carriers_.RunAll();
}

std::vector<std::byte> CacheStand::Page(int layer, int kv_head, int32_t block) const {
  const service::Geometry& geometry = tokens_.geometry;
  const int32_t first = block * geometry.page_tokens;
  const size_t row = geometry.page_shape().row_bytes();
  std::vector<std::byte> page;
  for (const std::vector<std::byte>& half : {tokens_.Keys(layer, first, geometry.page_tokens),
                                             tokens_.Values(layer, first, geometry.page_tokens)}) {
    for (size_t t = 0; t < static_cast<size_t>(geometry.page_tokens); ++t) {
      const auto at = static_cast<ptrdiff_t>(
          (t * static_cast<size_t>(geometry.kv_heads) + static_cast<size_t>(kv_head)) * row);
      page.insert(page.end(), half.begin() + at, half.begin() + at + static_cast<ptrdiff_t>(row));
    }
  }
  return page;
}

}  // namespace ebbtide::test
