// SPDX-License-Identifier: Apache-2.0

#include "service/movement/mover.h"

#include <algorithm>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"

#include "base/log.h"
#include "base/status_macros.h"
#include "gpu/device.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/gather.h"
#include "service/reason.h"
#include "storage/block_record.h"

namespace ebbtide::service {
namespace {

// Gathers a complete block's pages out of the lanes' slots and frames them.
//   kResourceExhausted, kUnavailable  as gpu::Device::Run
absl::Status BuildRecord(const CarryPlan& plan, const gpu::Device& device,
                         std::span<std::byte> record) {
  const Model& model = *plan.sequence->model;
  const storage::RecordGeometry geometry = model.geometry.record(model.fingerprint);
  const std::vector<LaneMemory>& memories = plan.sequence->memory;
  const auto part = [&](size_t lane, storage::PagePart which) {
    return record.subspan(geometry.part_offset(static_cast<uint32_t>(lane), which),
                          geometry.part_bytes(which));
  };
  std::vector<const std::byte*> keys(plan.slots.size());  // [lanes, page_tokens]
  std::vector<const std::byte*> values(plan.slots.size());
  std::vector<gpu::GatherArgs> gathers;
  const auto page_tokens = static_cast<size_t>(model.geometry.page_tokens);
  for (size_t lane = 0; lane < memories.size(); ++lane) {
    for (size_t i = lane * page_tokens; i < (lane + 1) * page_tokens; ++i) {
      keys[i] = memories[lane].key_slot(plan.slots[i]);
      values[i] = memories[lane].value_slot(plan.slots[i]);
    }
    gathers.push_back({.shape = memories[lane].shape,
                       .key_slot = std::span(keys).subspan(lane * page_tokens, page_tokens),
                       .value_slot = std::span(values).subspan(lane * page_tokens, page_tokens),
                       .page = part(lane, storage::PagePart::kExact)});
  }
  EBBTIDE_RETURN_IF_ERROR(device.Run(gathers));

  // The codes' box, drawn anew: the lane's own digests belong to its calls.
  std::vector<std::byte> digest(gpu::DigestBytes(model.geometry.head_dim));
  for (size_t lane = 0; lane < memories.size(); ++lane) {
    const gpu::PageShape& shape = memories[lane].shape;
    const std::span<std::byte> page = part(lane, storage::PagePart::kExact);
    gpu::DigestCpu({.shape = shape, .tokens = shape.tokens, .page = page, .digest = digest});
    gpu::EncodeCpu({.shape = shape,
                    .page = page,
                    .digest = digest,
                    .coarse = part(lane, storage::PagePart::kCoarse),
                    .fine = part(lane, storage::PagePart::kFine)});
  }
  storage::FrameRecord(plan.key, geometry, plan.positions, record);
  return absl::OkStatus();
}

bool IsOver(const storage::ByteBudget& budget, uint64_t percent) {
  return budget.used_bytes() > budget.limit_bytes() / 100 * percent;
}

}  // namespace

void Mover::Kick() {
  if (is_kicked_.exchange(true)) return;
  if (!carriers_.Submit("carry", [this] { Carry(); }).ok())
    is_kicked_ = false;  // A later kick tries again.
}

void Mover::Carry() {
  is_kicked_ = false;  // Whoever kicks from now on is heard.
  EraseOwed();
  while (const auto plan = cache_.PlanSeal()) {
    if (!SealOne(*plan)) break;
  }
  if (tiers_.rocksdb == nullptr) return;
  // One block now and then finds out whether a tier that took none takes blocks again.
  if (!Degraded().empty() && !MoveOneDown()) return;
  if (!IsOver(tiers_.host_budget, kDemoteAbovePercent)) return;
  while (IsOver(tiers_.host_budget, kDemoteUntilPercent) && MoveOneDown()) {
  }
}

bool Mover::SealOne(const CarryPlan& plan) {
  const Model& model = *plan.sequence->model;
  const uint64_t bytes = model.geometry.record(model.fingerprint).record_bytes();
  RecordBuffer buffer = TakeBuffer(bytes);
  const std::span<std::byte> record(buffer.memory.get(), bytes);
  const absl::StatusOr<gpu::Device> device = gpu::Device::Open(backend_);
  const bool is_built = device.ok() && BuildRecord(plan, *device, record).ok();

  const auto tier = is_built ? WriteDown({.key = plan.key, .record = record}) : std::nullopt;
  KeepBuffer(std::move(buffer));
  const bool is_closed = cache_.CommitSeal(plan, tier);
  if (is_closed) Erase({&plan.key, 1});
  Reap(plan.sequence);
  return tier.has_value();
}

Mover::RecordBuffer Mover::TakeBuffer(uint64_t bytes) {
  RecordBuffer buffer;
  {
    const absl::MutexLock lock(&mu_);
    buffer = std::exchange(spare_, {});
  }
  if (buffer.bytes >= bytes) return buffer;
  buffer.memory.reset(new (std::align_val_t{storage::kRecordAlignment}) std::byte[bytes]);
  buffer.bytes = bytes;
  return buffer;
}

void Mover::KeepBuffer(RecordBuffer buffer) {
  const absl::MutexLock lock(&mu_);
  if (buffer.bytes > spare_.bytes) spare_ = std::move(buffer);
}

// The host tier, after making room; where that fails, straight into the tier below.
std::optional<TierName> Mover::WriteDown(const storage::BlockWrite& write) {
  absl::Status status = tiers_.host.Write({&write, 1});
  while (absl::IsResourceExhausted(status) && MoveOneDown())
    status = tiers_.host.Write({&write, 1});
  if (status.ok()) return TierName::kHost;
  if (tiers_.rocksdb != nullptr && WriteRocksdb(write).ok()) return TierName::kRocksdb;
  return std::nullopt;
}

bool Mover::MoveOneDown() {
  if (tiers_.rocksdb == nullptr) return false;
  const auto plan = cache_.PlanMoveDown();
  if (!plan.has_value()) return false;

  // A block that the host tier lost stays named there: reads answer that it is missing.
  const storage::BlockPin pin = tiers_.host.Pin(plan->key);
  const bool is_lost = pin == nullptr;
  const absl::Status status =
      is_lost ? absl::OkStatus() : WriteRocksdb({.key = plan->key, .record = *pin});
  const CarryOutcome outcome = is_lost                           ? CarryOutcome::kLost
                               : status.ok()                     ? CarryOutcome::kMoved
                               : absl::IsInvalidArgument(status) ? CarryOutcome::kLost
                                                                 : CarryOutcome::kRetry;
  const bool is_closed = cache_.CommitMoveDown(*plan, outcome);
  if (is_closed) {
    Erase({&plan->key, 1});
  } else if (outcome == CarryOutcome::kMoved) {
    if (!tiers_.host.Erase({&plan->key, 1}).ok()) {
      const absl::MutexLock lock(&mu_);
      owed_host_.push_back(plan->key);
    }
  }
  Reap(plan->sequence);
  return outcome != CarryOutcome::kRetry;
}

absl::Status Mover::WriteRocksdb(const storage::BlockWrite& write) {
  const absl::Status status = tiers_.rocksdb->Write({&write, 1});
  const bool is_well = status.ok() || absl::IsInvalidArgument(status);
  bool was_well = false;
  {
    const absl::MutexLock lock(&mu_);
    was_well = degraded_.empty();
    degraded_ = is_well ? std::string() : std::string(status.message());
  }
  if (was_well && !is_well) {
    Log(LogLevel::kWarn, "tier is degraded",
        {{"tier", tiers_.rocksdb->name()}, {"why", std::string(status.message())}});
  } else if (!was_well && is_well) {
    Log(LogLevel::kInfo, "tier is well again", {{"tier", tiers_.rocksdb->name()}});
  }
  return status;
}

absl::Status Mover::ChargeHost(uint64_t bytes, absl::Duration deadline) {
  if (bytes == 0) return absl::OkStatus();
  while (!tiers_.host_budget.TryCharge(bytes)) {
    if (clock_.SinceStart() < deadline && MoveOneDown()) continue;
    return Refuse(
        absl::StatusCode::kResourceExhausted, "LOWER_TIERS_FULL",
        absl::StrCat("host tier: ", bytes, " B for lanes, digests and score state do not fit, ",
                     tiers_.host_budget.free_bytes(), " of ", tiers_.host_budget.limit_bytes(),
                     " B are free; close sequences, or raise the host budget"));
  }
  return absl::OkStatus();
}

LowerRoom Mover::RoomOf(uint64_t record_bytes) const {
  // One record's room in the host stays free, so that blocks can always move through it.
  const uint64_t cost = tiers_.host.CostBytes(record_bytes);
  const uint64_t limit = tiers_.host_budget.limit_bytes();
  LowerRoom room{.record_bytes = record_bytes,
                 .host_bytes = limit - std::min(limit, tiers_.staging_bytes + cost),
                 .host_record_bytes = cost};
  if (tiers_.rocksdb == nullptr) return room;

  // A tier that does not take blocks now holds what it holds.
  const storage::TierUsage usage = tiers_.rocksdb->Usage();
  room.below_records = Degraded().empty()
                           ? usage.budget_bytes / tiers_.rocksdb->CostBytes(record_bytes)
                           : usage.blocks;
  return room;
}

void Mover::Erase(std::span<const storage::BlockKey> keys) {
  if (keys.empty()) return;
  const bool host_erased = tiers_.host.Erase(keys).ok();
  const bool below_erased = tiers_.rocksdb == nullptr || tiers_.rocksdb->Erase(keys).ok();
  const absl::MutexLock lock(&mu_);
  if (!host_erased) owed_host_.insert(owed_host_.end(), keys.begin(), keys.end());
  if (!below_erased) owed_rocksdb_.insert(owed_rocksdb_.end(), keys.begin(), keys.end());
}

void Mover::EraseOwed() {
  std::vector<storage::BlockKey> host;
  std::vector<storage::BlockKey> below;
  {
    const absl::MutexLock lock(&mu_);
    host.swap(owed_host_);
    below.swap(owed_rocksdb_);
  }
  const bool host_erased = host.empty() || tiers_.host.Erase(host).ok();
  const bool below_erased = below.empty() || tiers_.rocksdb->Erase(below).ok();
  const absl::MutexLock lock(&mu_);
  if (!host_erased) owed_host_.insert(owed_host_.end(), host.begin(), host.end());
  if (!below_erased) owed_rocksdb_.insert(owed_rocksdb_.end(), below.begin(), below.end());
}

// Frames that could not be zeroed are given to nobody.
void Mover::Reap(const SequenceRef& sequence) {
  if (!cache_.MayReap(sequence)) return;
  const gpu::ZeroArgs zero{
      {sequence->memory.front().frames, sequence->facts.pool_bytes}};  // Closed: nobody writes it.
  const absl::StatusOr<gpu::Device> device = gpu::Device::Open(backend_);
  if (device.ok() && device->Run(std::span(&zero, 1)).ok()) cache_.Reap(sequence);
}

std::string Mover::Degraded() const {
  const absl::MutexLock lock(&mu_);
  return degraded_;
}

}  // namespace ebbtide::service
