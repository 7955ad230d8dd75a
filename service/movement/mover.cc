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

uint64_t RecordBytes(const CarryPlan& plan) {
  const Model& model = *plan.sequence->model;
  return model.geometry.record(model.fingerprint).record_bytes();
}

// Does the tier's budget have room for a record more?
bool HasRoom(const storage::Tier& tier, uint64_t record_bytes) {
  const storage::TierRoom room = tier.Room({&record_bytes, 1});
  const storage::SizeRoom& size = room.sizes.front();
  return size.kept > size.held || room.free_bytes >= size.run_bytes;
}

// Erases `keys`, a few per call: none is so long that its medium seems to hang. Returns those that
// were not taken.
std::vector<storage::BlockKey> EraseFrom(storage::Tier& tier,
                                         std::span<const storage::BlockKey> keys) {
  constexpr size_t kKeysPerCall = 128;
  while (!keys.empty()) {
    const size_t count = std::min(keys.size(), kKeysPerCall);
    if (!tier.Erase(keys.first(count)).ok()) break;
    keys = keys.subspan(count);
  }
  return {keys.begin(), keys.end()};
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
  SealAll();
  if (tiers_.rocksdb == nullptr) return;
  // One block now and then finds out whether a tier that took none takes blocks again.
  if (!Degraded().empty() && !MoveOneDown()) return;
  if (!IsOver(tiers_.host_budget, kDemoteAbovePercent)) return;
  while (IsOver(tiers_.host_budget, kDemoteUntilPercent) && MoveOneDown()) {
  }
}

// Each block that waits is tried once. Where one finds no room, records of other sizes may: tiers
// keep those apart.
void Mover::SealAll() {
  std::vector<uint64_t> full;
  for (size_t left = cache_.BlocksWaiting().to_seal; left > 0; --left) {
    const auto plan = cache_.PlanSeal(full);
    if (!plan.has_value()) return;
    const absl::Status status = SealOne(*plan);
    if (absl::IsResourceExhausted(status)) {
      full.push_back(RecordBytes(*plan));
    } else if (!status.ok()) {
      return;
    }
  }
}

absl::Status Mover::SealOne(const CarryPlan& plan) {
  const uint64_t bytes = RecordBytes(plan);
  RecordBuffer buffer = TakeBuffer(bytes);
  const std::span<std::byte> record(buffer.memory.get(), bytes);
  const auto write = [&]() -> absl::StatusOr<TierName> {
    EBBTIDE_ASSIGN_OR_RETURN(const gpu::Device device, gpu::Device::Open(backend_));
    EBBTIDE_RETURN_IF_ERROR(BuildRecord(plan, device, record));
    return WriteDown({.key = plan.key, .record = record});
  };
  const absl::StatusOr<TierName> tier = write();
  KeepBuffer(std::move(buffer));
  Commit(plan, tier);
  return tier.status();
}

void Mover::Commit(const CarryPlan& plan, const absl::StatusOr<TierName>& tier) {
  const bool is_closed = cache_.CommitSeal(plan, tier);
  if (is_closed) Erase({&plan.key, 1});
  Reap(plan.sequence);
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
absl::StatusOr<TierName> Mover::WriteDown(const storage::BlockWrite& write) {
  absl::Status status = tiers_.host.Write({&write, 1});
  while (absl::IsResourceExhausted(status) && MoveOneDown())
    status = tiers_.host.Write({&write, 1});
  if (status.ok()) return TierName::kHost;
  if (tiers_.rocksdb != nullptr && WriteRocksdb(write).ok()) return TierName::kRocksdb;
  return status;
}

bool Mover::MoveOneDown() {
  if (tiers_.rocksdb == nullptr) return false;
  {
    const absl::MutexLock lock(&mu_);
    ++moving_;
  }
  const bool has_freed = MoveFirstThatFits();
  const absl::MutexLock lock(&mu_);
  --moving_;
  freed_ += has_freed ? 1 : 0;
  return has_freed;
}

bool Mover::MoveFirstThatFits() {
  std::vector<uint64_t> full;  // As in SealAll.
  for (size_t left = cache_.BlocksWaiting().in_host; left > 0; --left) {
    const auto plan = cache_.PlanMoveDown(full);
    if (!plan.has_value()) return false;
    const absl::Status status = MoveDown(*plan);
    if (status.ok()) return true;
    if (!absl::IsResourceExhausted(status)) return false;
    full.push_back(RecordBytes(*plan));
  }
  return false;
}

//   kResourceExhausted, kUnavailable  the tier below did not take the block
absl::Status Mover::MoveDown(const CarryPlan& plan) {
  // A block that the host tier lost stays named there: reads answer that it is missing.
  const storage::BlockPin pin = tiers_.host.Pin(plan.key);
  absl::Status status = absl::OkStatus();
  if (pin != nullptr) status = WriteRocksdb({.key = plan.key, .record = *pin});
  const CarryOutcome outcome = pin == nullptr || absl::IsInvalidArgument(status)
                                   ? CarryOutcome::kLost
                               : absl::IsResourceExhausted(status) ? CarryOutcome::kNoRoom
                               : status.ok()                       ? CarryOutcome::kMoved
                                                                   : CarryOutcome::kRetry;
  const bool is_closed = cache_.CommitMoveDown(plan, outcome);
  if (is_closed) {
    Erase({&plan.key, 1});
  } else if (outcome == CarryOutcome::kMoved) {
    if (!tiers_.host.Erase({&plan.key, 1}).ok()) {
      const absl::MutexLock lock(&mu_);
      owed_host_.push_back(plan.key);
    }
  }
  Reap(plan.sequence);
  return outcome == CarryOutcome::kLost ? absl::OkStatus() : status;
}

uint64_t Mover::Freed() const {
  const absl::MutexLock lock(&mu_);
  return freed_;
}

bool Mover::AwaitFreed(uint64_t before, absl::Duration deadline) const {
  const absl::MutexLock lock(&mu_);
  const auto has_ended = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return freed_ != before || moving_ == 0;
  };
  mu_.AwaitWithTimeout(absl::Condition(&has_ended), deadline - clock_.SinceStart());
  return freed_ != before;
}

absl::Status Mover::WriteRocksdb(const storage::BlockWrite& write) {
  const absl::Status status = tiers_.rocksdb->Write({&write, 1});
  // A budget that is used up is no fault: what is promised is within it.
  if (!absl::IsResourceExhausted(status) || HasRoom(*tiers_.rocksdb, write.record.size()))
    NoteMedium(status);
  return status;
}

void Mover::NoteMedium(const absl::Status& status) {
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
}

absl::Status Mover::ChargeHost(uint64_t bytes, absl::Duration deadline) {
  if (bytes == 0) return absl::OkStatus();
  for (;;) {
    const uint64_t freed = Freed();
    if (tiers_.host_budget.TryCharge(bytes)) return absl::OkStatus();
    // Where all that could move is on its way already, its end is waited for.
    if (clock_.SinceStart() < deadline && (MoveOneDown() || AwaitFreed(freed, deadline))) continue;
    return Refuse(
        absl::StatusCode::kResourceExhausted, "LOWER_TIERS_FULL",
        absl::StrCat("host tier: ", bytes, " B for lanes, digests and score state do not fit, ",
                     tiers_.host_budget.free_bytes(), " of ", tiers_.host_budget.limit_bytes(),
                     " B are free; close sequences, or raise the host budget"));
  }
}

LowerRoom Mover::RoomOf(uint64_t record_bytes) const {
  std::vector<uint64_t> sizes = cache_.RecordSizes();
  if (std::ranges::find(sizes, record_bytes) == sizes.end()) sizes.push_back(record_bytes);

  LowerRoom room;
  uint64_t largest_cost = 0;
  const storage::TierRoom host = tiers_.host.Room(sizes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    room.sizes[sizes[i]].host_cost_bytes = host.sizes[i].run_bytes;
    largest_cost = std::max(largest_cost, host.sizes[i].run_bytes);
  }
  // One record's room in the host stays free, so that blocks can always move through it.
  const uint64_t limit = tiers_.host_budget.limit_bytes();
  room.host_bytes = limit - std::min(limit, tiers_.staging_bytes + largest_cost);
  if (tiers_.rocksdb == nullptr) return room;

  // A tier that does not take blocks now holds what it holds.
  room.below_why = Degraded();
  const bool is_well = room.below_why.empty();
  const storage::TierRoom below = tiers_.rocksdb->Room(sizes);
  room.below_bytes = is_well ? below.free_bytes : 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    LowerRoom::Size& size = room.sizes[sizes[i]];
    size.kept_below = is_well ? below.sizes[i].kept : below.sizes[i].held;
    size.run_records_below = below.sizes[i].run_records;
    size.run_bytes_below = below.sizes[i].run_bytes;
  }
  return room;
}

void Mover::Erase(std::span<const storage::BlockKey> keys) {
  const std::vector<storage::BlockKey> host = EraseFrom(tiers_.host, keys);
  std::vector<storage::BlockKey> below;
  if (tiers_.rocksdb != nullptr) below = EraseFrom(*tiers_.rocksdb, keys);
  if (host.empty() && below.empty()) return;
  const absl::MutexLock lock(&mu_);
  owed_host_.insert(owed_host_.end(), host.begin(), host.end());
  owed_rocksdb_.insert(owed_rocksdb_.end(), below.begin(), below.end());
}

void Mover::EraseOwed() {
  std::vector<storage::BlockKey> host;
  std::vector<storage::BlockKey> below;
  std::vector<SequenceRef> frames;
  {
    const absl::MutexLock lock(&mu_);
    host.swap(owed_host_);
    below.swap(owed_rocksdb_);
    frames.swap(owed_frames_);
  }
  host = EraseFrom(tiers_.host, host);
  if (tiers_.rocksdb != nullptr) below = EraseFrom(*tiers_.rocksdb, below);
  for (const SequenceRef& sequence : frames) ZeroAndRelease(sequence);
  const absl::MutexLock lock(&mu_);
  owed_host_.insert(owed_host_.end(), host.begin(), host.end());
  owed_rocksdb_.insert(owed_rocksdb_.end(), below.begin(), below.end());
}

void Mover::Reap(const SequenceRef& sequence) {
  if (cache_.MayReap(sequence)) ZeroAndRelease(sequence);
}

// Frames that could not be zeroed are given to nobody, and tried again later.
void Mover::ZeroAndRelease(const SequenceRef& sequence) {
  const gpu::ZeroArgs zero{
      {sequence->memory.front().frames, sequence->facts.pool_bytes}};  // Closed: nobody writes it.
  const absl::StatusOr<gpu::Device> device = gpu::Device::Open(backend_);
  absl::Status status = device.status();
  if (device.ok()) status = device->Run(std::span(&zero, 1));
  if (status.ok()) return cache_.Reap(sequence);
  Log(LogLevel::kError, "frames of a closed sequence are not zeroed yet, and given to nobody",
      {{"sequence", sequence->facts.args.sequence},
       {"bytes", sequence->facts.pool_bytes},
       {"why", std::string(status.message())}});
  const absl::MutexLock lock(&mu_);
  owed_frames_.push_back(sequence);
}

std::string Mover::Degraded() const {
  const absl::MutexLock lock(&mu_);
  return degraded_;
}

}  // namespace ebbtide::service
