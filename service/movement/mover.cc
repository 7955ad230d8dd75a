// SPDX-License-Identifier: Apache-2.0

#include "service/movement/mover.h"

#include <algorithm>
#include <exception>
#include <new>
#include <type_traits>
#include <vector>

#include "absl/cleanup/cleanup.h"
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
  const storage::RecordGeometry geometry = model.record();
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

// What `work` answers, or what it ended in, where that is an exception.
template <typename Work>
std::invoke_result_t<Work> Caught(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Refuse(absl::StatusCode::kUnavailable, "OUT_OF_MEMORY", "memory ran out");
  } catch (const std::exception& error) {
    return Refuse(absl::StatusCode::kUnavailable, "EXCEPTION", error.what());
  } catch (...) {
    return Refuse(absl::StatusCode::kUnavailable, "EXCEPTION", "of an unknown kind");
  }
}

// The device's, for a carrier: to be tried again, whatever it is.
absl::Status DeviceFailure(const absl::Status& status) {
  if (status.ok()) return status;
  const absl::string_view message = status.message();
  return Refuse(absl::StatusCode::kUnavailable, ReasonOf(WithDeviceReason(status)),
                {message.data(), message.size()});
}

// One line for a reason's failures of so long.
constexpr absl::Duration kQuietTime = absl::Minutes(1);

bool IsOver(const storage::ByteBudget& budget, uint64_t percent) {
  return budget.used_bytes() > budget.limit_bytes() / 100 * percent;
}

}  // namespace

void Mover::Kick() noexcept {
  if (is_kicked_.exchange(true)) return;
  const absl::Status status =
      Caught([this] { return carriers_.Submit("carry", [this] { Carry(); }); });
  if (!status.ok()) is_kicked_ = false;  // A later kick tries again.
}

void Mover::Carry() noexcept {
  is_kicked_ = false;  // Whoever kicks from now on is heard.
  NoteFailure("carriers gave up a round", Caught([this] {
                CarryAll();
                return absl::OkStatus();
              }));
}

void Mover::CarryAll() {
  SettleOwed();
  SealAll();
  if (tiers_.rocksdb == nullptr || IsDegradedBelow()) return;
  if (!IsOver(tiers_.host_budget, kDemoteAbovePercent)) return;
  while (IsOver(tiers_.host_budget, kDemoteUntilPercent) && MoveOneDown()) {
  }
}

void Mover::ProbeBelow() noexcept {
  if (!IsDegradedBelow()) return;
  std::vector<storage::BlockKey> keys;
  {
    const absl::MutexLock lock(&mu_);
    std::swap(keys, owed_.rocksdb);
  }
  EraseOrOwe({}, std::move(keys));
  CountFailure(Caught([this] { return tiers_.rocksdb->Probe(); }));
}

// Each block that waits is tried once. Where one is not sealed, for want of room or memory mostly,
// those of its size wait for the next round; others may find some: tiers keep sizes apart.
void Mover::SealAll() {
  std::vector<storage::RecordSize> full;
  for (size_t left = cache_.BlocksToSeal(); left > 0; --left) {
    const auto plan = cache_.PlanSeal(full);
    if (!plan.has_value()) return;
    if (!SealOne(*plan).ok()) full.push_back(plan->sequence->model->record_size());
  }
}

absl::Status Mover::SealOne(const CarryPlan& plan) noexcept {
  const absl::StatusOr<TierName> tier = Caught([&]() -> absl::StatusOr<TierName> {
    const uint64_t bytes = plan.sequence->model->record_size().bytes;
    RecordBuffer buffer = TakeBuffer(bytes);
    const std::span<std::byte> record(buffer.memory.get(), bytes);
    const absl::StatusOr<gpu::Device> device = gpu::Device::Open(backend_);
    EBBTIDE_RETURN_IF_ERROR(DeviceFailure(device.status()));
    EBBTIDE_RETURN_IF_ERROR(DeviceFailure(BuildRecord(plan, *device, record)));
    absl::StatusOr<TierName> written = WriteDown(plan, record);
    KeepBuffer(std::move(buffer));
    return written;
  });
  NoteFailure("a block is not sealed yet", tier.status());
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
absl::StatusOr<TierName> Mover::WriteDown(const CarryPlan& plan,
                                          std::span<const std::byte> record) {
  const storage::BlockWrite write = {.key = plan.key, .record = record};
  absl::Status status = tiers_.host.Write({&write, 1});
  while (absl::IsResourceExhausted(status) && MoveOneDown())
    status = tiers_.host.Write({&write, 1});
  if (status.ok()) return TierName::kHost;
  if (tiers_.rocksdb != nullptr && WriteRocksdb(plan, record).ok()) return TierName::kRocksdb;
  return status;
}

bool Mover::MoveOneDown() {
  if (tiers_.rocksdb == nullptr) return false;
  bool has_freed = false;
  {
    const absl::MutexLock lock(&mu_);
    ++moving_;
  }
  const absl::Cleanup ends = [&] {
    const absl::MutexLock lock(&mu_);
    --moving_;
    freed_ += has_freed ? 1 : 0;
  };
  has_freed = MoveFirstThatFits();
  return has_freed;
}

bool Mover::MoveFirstThatFits() {
  std::vector<storage::RecordSize> full;  // As in SealAll.
  while (const auto plan = cache_.PlanMoveDown(full)) {
    const absl::Status status = MoveDown(*plan);
    if (status.ok()) return true;
    if (!absl::IsResourceExhausted(status)) return false;
    full.push_back(plan->sequence->model->record_size());
  }
  return false;
}

//   kResourceExhausted, kUnavailable  the tier below did not take the block
absl::Status Mover::MoveDown(const CarryPlan& plan) noexcept {
  CarryOutcome outcome = CarryOutcome::kRetry;
  const absl::Status status = Caught([&]() -> absl::Status {
    const storage::BlockPin pin = tiers_.host.Pin(plan.key);
    // A block that the host tier lost stays named there: reads answer that it is missing.
    absl::Status written =
        pin == nullptr ? absl::InvalidArgumentError("") : WriteRocksdb(plan, *pin);
    outcome = absl::IsInvalidArgument(written) ? CarryOutcome::kLost
              : written.ok()                   ? CarryOutcome::kMoved
                                               : CarryOutcome::kRetry;
    return written;
  });
  NoteFailure("a block is not moved down yet", status);
  const bool is_closed = cache_.CommitMoveDown(plan, outcome);
  if (is_closed) {
    Erase({&plan.key, 1});
  } else if (outcome == CarryOutcome::kMoved) {
    EraseOrOwe({plan.key}, {});
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

absl::Status Mover::WriteRocksdb(const CarryPlan& plan, std::span<const std::byte> record) {
  storage::BlockWrite write = {.key = plan.key, .record = record, .may_begin_segment = false};
  absl::Status status = tiers_.rocksdb->Write({&write, 1});
  if (absl::IsFailedPrecondition(status)) {  // It needs a segment: is none promised the bytes?
    if (!cache_.BeginSegment(plan.sequence->model->record_size())) {
      const std::string why = tiers_.rocksdb->why_no_writes();
      if (!why.empty()) return absl::UnavailableError(why);
      return absl::ResourceExhaustedError(absl::StrCat(
          "what is left below is promised to records of other sizes than ", record.size(), " B"));
    }
    const absl::Cleanup ends = [this] { cache_.EndSegment(); };
    write.may_begin_segment = true;
    status = tiers_.rocksdb->Write({&write, 1});
  }
  return status;
}

absl::StatusOr<storage::ByteCharge> Mover::ChargeHost(uint64_t bytes, absl::Duration deadline) {
  if (bytes == 0) return storage::ByteCharge();
  for (;;) {
    const uint64_t freed = Freed();
    if (auto charge = storage::ByteCharge::Try(tiers_.host_budget, bytes))
      return *std::move(charge);
    // Where all that could move is on its way already, its end is waited for.
    if (clock_.SinceStart() < deadline && (MoveOneDown() || AwaitFreed(freed, deadline))) continue;
    return Refuse(
        absl::StatusCode::kResourceExhausted, "LOWER_TIERS_FULL",
        absl::StrCat("host tier: ", bytes, " B for lanes, digests and score state do not fit, ",
                     tiers_.host_budget.free_bytes(), " of ", tiers_.host_budget.limit_bytes(),
                     " B are free; close sequences, or raise the host budget"));
  }
}

LowerRoom Mover::RoomOf(std::span<const storage::RecordSize> sizes) const {
  LowerRoom room;
  uint64_t largest_cost = 0;
  const storage::TierRoom host = tiers_.host.Room(sizes);
  for (size_t i = 0; i < sizes.size(); ++i) {
    room.sizes[sizes[i]].host_cost_bytes = host.sizes[i].segment_bytes;
    largest_cost = std::max(largest_cost, host.sizes[i].segment_bytes);
  }
  // One record's room in the host stays free, so that blocks can always move through it.
  const uint64_t limit = tiers_.host_budget.limit_bytes();
  room.host_bytes = limit - std::min(limit, tiers_.staging_bytes + largest_cost);
  if (tiers_.rocksdb == nullptr) return room;

  room.below_why = tiers_.rocksdb->why_no_writes();
  const storage::TierRoom below = tiers_.rocksdb->Room(sizes);
  room.below_bytes = below.free_bytes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    LowerRoom::Size& size = room.sizes[sizes[i]];
    size.slots_made = below.sizes[i].slots_made;
    size.segment_slots = below.sizes[i].segment_slots;
    size.segment_bytes = below.sizes[i].segment_bytes;
    size.segments_begun = below.sizes[i].segments_begun;
  }
  return room;
}

void Mover::Erase(std::span<const storage::BlockKey> keys) noexcept {
  const std::vector<storage::BlockKey> all(keys.begin(), keys.end());
  EraseOrOwe(all, all);
}

void Mover::Reap(const SequenceRef& sequence) noexcept {
  if (!cache_.MayReap(sequence)) return;
  const absl::Status status = Zero(*sequence);
  if (status.ok()) return cache_.Reap(sequence);
  // Given to nobody, and tried again later.
  Log(LogLevel::kError, "frames of a closed sequence are not zeroed yet, and given to nobody",
      {{"sequence", sequence->facts.args.sequence},
       {"bytes", sequence->facts.pool_bytes},
       {"why", std::string(status.message())}});
  const absl::MutexLock lock(&mu_);
  owed_.frames.push_back(sequence);
}

absl::Status Mover::Zero(const OpenedSequence& sequence) {
  absl::Status status = Caught([&]() -> absl::Status {
    const gpu::ZeroArgs zero{
        {sequence.memory.front().frames, sequence.facts.pool_bytes}};  // Closed: nobody writes it.
    const absl::StatusOr<gpu::Device> device = gpu::Device::Open(backend_);
    EBBTIDE_RETURN_IF_ERROR(DeviceFailure(device.status()));
    return DeviceFailure(device->Run(std::span(&zero, 1)));
  });
  CountFailure(status);
  return status;
}

bool Mover::IsDegradedBelow() const {
  return tiers_.rocksdb != nullptr && !tiers_.rocksdb->why_no_writes().empty();
}

void Mover::SettleOwed() noexcept {
  Owed owed;
  const bool is_degraded = IsDegradedBelow();
  {
    const absl::MutexLock lock(&mu_);
    std::swap(owed, owed_);
    if (is_degraded) std::swap(owed.rocksdb, owed_.rocksdb);
  }
  EraseOrOwe(std::move(owed.host), std::move(owed.rocksdb));
  ZeroOrOwe(std::move(owed.frames));
}

void Mover::EraseOrOwe(std::vector<storage::BlockKey> host,
                       std::vector<storage::BlockKey> rocksdb) noexcept {
  EraseFrom(tiers_.host, host);
  if (tiers_.rocksdb != nullptr) {
    EraseFrom(*tiers_.rocksdb, rocksdb);
  } else {
    rocksdb.clear();
  }
  const absl::MutexLock lock(&mu_);
  owed_.host.insert(owed_.host.end(), host.begin(), host.end());
  owed_.rocksdb.insert(owed_.rocksdb.end(), rocksdb.begin(), rocksdb.end());
}

// Erases `keys`, a few per call: none is so long that its medium seems to hang. Leaves those that
// were not taken.
void Mover::EraseFrom(storage::Tier& tier, std::vector<storage::BlockKey>& keys) noexcept {
  constexpr size_t kKeysPerCall = 128;
  size_t erased = 0;
  while (erased < keys.size()) {
    const auto next =
        std::span(keys).subspan(erased).first(std::min(keys.size() - erased, kKeysPerCall));
    const absl::Status status = Caught([&] { return tier.Erase(next); });
    CountFailure(status);
    if (!status.ok()) break;
    erased += next.size();
  }
  keys.erase(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(erased));
}

void Mover::ZeroOrOwe(std::vector<SequenceRef> frames) noexcept {
  std::erase_if(frames, [this](const SequenceRef& sequence) {
    if (!Zero(*sequence).ok()) return false;
    cache_.Reap(sequence);
    Log(LogLevel::kInfo, "frames of a closed sequence are zeroed",
        {{"sequence", sequence->facts.args.sequence}});
    return true;
  });
  const absl::MutexLock lock(&mu_);
  owed_.frames.insert(owed_.frames.end(), frames.begin(), frames.end());
}

// Those of a tier have no reason: they are told by its being full, or degraded.
void Mover::CountFailure(const absl::Status& status) noexcept {
  const std::string reason = ReasonOf(status);
  if (!reason.empty()) cache_.Count([&](Stats& stats) { ++stats.carries_failed[reason]; });
}

void Mover::NoteFailure(std::string_view what, const absl::Status& status) noexcept {
  CountFailure(status);
  const std::string reason = ReasonOf(status);
  if (reason.empty()) return;
  uint64_t failures = 0;
  {
    const absl::MutexLock lock(&mu_);
    const absl::Duration now = clock_.SinceStart();
    const auto [known, is_new] = failures_.try_emplace(reason);
    ++known->second.unlogged;
    if (!is_new && now - known->second.logged < kQuietTime) return;
    known->second.logged = now;
    failures = std::exchange(known->second.unlogged, 0);
  }
  Log(LogLevel::kError, what,
      {{"reason", reason}, {"why", std::string(status.message())}, {"failures", failures}});
}

}  // namespace ebbtide::service
