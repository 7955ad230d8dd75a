// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/rocksdb_tier.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "base/log.h"
#include "base/status_macros.h"
#include "storage/rocksdb/rocksdb_options.h"

namespace ebbtide::storage {
namespace {

// Large enough that making and deleting is rare, small enough that the half-empty last one is a
// small share of the budget; and few enough (each holds a descriptor) where the budget is large.
uint64_t SegmentBytes(uint64_t budget_bytes) {
  constexpr uint64_t kUsualBytes = uint64_t{64} << 20;
  return std::max(std::min(kUsualBytes, budget_bytes / 128), budget_bytes / 256);
}

SlotSize SlotFor(const RecordSize& size) {
  return {.bytes = size.bytes, .entry_bytes = BlockIndex::EntryCostBytes(size.header_used_bytes)};
}

void WarnWhereTheDiskIsSmaller(const RocksdbTierOptions& options) {
  struct statvfs disk = {};
  if (statvfs(options.folder.c_str(), &disk) != 0) return;
  const uint64_t free_bytes = uint64_t{disk.f_bavail} * disk.f_frsize;
  if (free_bytes >= options.budget_bytes) return;
  Log(LogLevel::kWarn, "rocksdb tier: the disk has less free space than the budget",
      {{"folder", options.folder.string()},
       {"budget_bytes", options.budget_bytes},
       {"free_bytes", free_bytes}});
}

}  // namespace

// What the index says of a block.
struct RocksdbTier::Block {
  BlockEntry entry;
  RecordHeader header;  // Of `entry`.
  std::shared_ptr<Segment> segment;
};

// One read of the disk, for pages of one block.
struct RocksdbTier::ReadJob {
  std::shared_ptr<const Block> block;
  PageRun run;
  std::vector<PageRead*> pages;
};

absl::StatusOr<std::unique_ptr<RocksdbTier>> RocksdbTier::Create(
    const RocksdbTierOptions& options) {
  if (options.budget_bytes <= kIndexHeadroomBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rocksdb tier: a budget of ", options.budget_bytes, " B leaves nothing beside the index's ",
        kIndexHeadroomBytes, " B of head-room; raise rocksdb.budget"));
  }
  FileCalls& calls = options.calls != nullptr ? *options.calls : SystemFileCalls();
  EBBTIDE_ASSIGN_OR_RETURN(std::unique_ptr<TierFolder> folder,
                           TierFolder::Take(options.folder, calls));
  WarnWhereTheDiskIsSmaller(options);
  EBBTIDE_ASSIGN_OR_RETURN(std::unique_ptr<BlockIndex> index,
                           BlockIndex::Create(folder->index_path(), options.env));
  return std::unique_ptr<RocksdbTier>(
      new RocksdbTier(options, std::move(folder), std::move(index)));
}

RocksdbTier::RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<TierFolder> folder,
                         std::unique_ptr<BlockIndex> index)
    : io_(options.io),
      folder_(std::move(folder)),
      budget_(options.budget_bytes),
      slots_(*folder_, {.segment_bytes_max = SegmentBytes(options.budget_bytes),
                        .calls = options.calls != nullptr ? *options.calls : SystemFileCalls(),
                        .budget = budget_}),
      index_(std::move(index)) {
  EBBTIDE_CHECK(budget_.TryCharge(kIndexHeadroomBytes), "the budget holds the head-room");
}

RocksdbTier::~RocksdbTier() = default;

absl::Status RocksdbTier::Write(std::span<const BlockWrite> blocks) {
  EBBTIDE_RETURN_IF_ERROR(folder_->CheckOwned());
  EBBTIDE_RETURN_IF_ERROR(HealIndex());
  for (const BlockWrite& block : blocks) EBBTIDE_RETURN_IF_ERROR(WriteOne(block));
  return absl::OkStatus();
}

absl::Status RocksdbTier::WriteOne(const BlockWrite& block) {
  EBBTIDE_ASSIGN_OR_RETURN(const RecordHeader header, CheckRecord(block.key, block.record));
  const RecordSize size = header.geometry.size();
  EBBTIDE_ASSIGN_OR_RETURN(const SlotPlace place,
                           slots_.Allocate(SlotFor(size), block.may_begin_segment));
  absl::Cleanup free_slot = [&] { slots_.Free(place); };
  EBBTIDE_RETURN_IF_ERROR(slots_.Find(place.segment)->Write(place.slot, block.record));
  std::move(free_slot).Cancel();
  // An exception leaves open whether the index names it: then the slot is lost, unless it does and
  // comes back with its erasure.
  absl::Cleanup lose_slot = [&] { slots_.Lose(place); };
  absl::Status status = Commit(block.key, place, block.record.first(size.header_used_bytes));
  std::move(lose_slot).Cancel();
  if (!status.ok()) slots_.Free(place);
  return status;
}

absl::Status RocksdbTier::Commit(const BlockKey& key, const SlotPlace& place,
                                 std::span<const std::byte> header_used) {
  std::optional<BlockEntry> replaced;
  absl::Status damage;
  {
    absl::MutexLock lock(&commit_mu_);
    absl::StatusOr<std::optional<BlockEntry>> found = index_->Get(key);
    // A damaged entry is replaced too.
    if (!found.ok() && !absl::IsDataLoss(found.status())) return found.status();
    EBBTIDE_RETURN_IF_ERROR(Noted(index_->Put(key, place, header_used)));
    damage = found.status();
    if (found.ok()) replaced = *std::move(found);
    if (damage.ok() && !replaced) blocks_.fetch_add(1, std::memory_order_relaxed);
  }
  NoteDamage(damage);
  if (replaced) slots_.Free(replaced->place);
  return absl::OkStatus();
}

absl::Status RocksdbTier::Erase(std::span<const BlockKey> keys) {
  if (keys.empty()) return absl::OkStatus();
  if (has_index_failed_.load(std::memory_order_acquire)) {
    // Not healed here: a healing copies all of the index, and erasures come often.
    return absl::UnavailableError(
        absl::StrCat("rocksdb tier: ", folder_->path().string(),
                     ": the index took no change; nothing is erased until a probe has healed it"));
  }
  for (const BlockKey& key : keys) EBBTIDE_RETURN_IF_ERROR(EraseOne(key));
  return slots_.DeleteLeftOver();
}

absl::Status RocksdbTier::EraseOne(const BlockKey& key) {
  std::optional<BlockEntry> erased;
  absl::Status damage;
  {
    absl::MutexLock lock(&commit_mu_);
    absl::StatusOr<std::optional<BlockEntry>> found = index_->Get(key);
    if (!found.ok() && !absl::IsDataLoss(found.status())) return found.status();
    if (found.ok() && !found->has_value()) return absl::OkStatus();
    EBBTIDE_RETURN_IF_ERROR(Noted(index_->Delete(key)));
    damage = found.status();
    if (found.ok()) erased = *std::move(found);
    // What was damaged when it was put may not have been counted.
    const uint64_t blocks = blocks_.load(std::memory_order_relaxed);
    blocks_.store(blocks - std::min<uint64_t>(blocks, 1), std::memory_order_relaxed);
  }
  NoteDamage(damage);
  if (erased) slots_.Free(erased->place);
  return absl::OkStatus();
}

absl::Status RocksdbTier::Probe() {
  constexpr BlockKey kNobodys = {};  // Sequences count from 1.
  EBBTIDE_RETURN_IF_ERROR(folder_->CheckOwned());
  EBBTIDE_RETURN_IF_ERROR(HealIndex());
  EBBTIDE_RETURN_IF_ERROR(slots_.Probe());
  absl::MutexLock lock(&commit_mu_);
  return Noted(index_->Delete(kNobodys));
}

void RocksdbTier::NoteDamage(const absl::Status& entry) {
  if (entry.ok() || has_told_damage_.exchange(true, std::memory_order_relaxed)) return;
  Log(LogLevel::kWarn,
      "rocksdb tier: the index is damaged; the slots of blocks that it can't find take room until "
      "the daemon is restarted (said once)",
      {{"folder", folder_->path().string()}, {"why", std::string(entry.message())}});
}

absl::Status RocksdbTier::Noted(absl::Status status) {
  if (!status.ok()) has_index_failed_.store(true, std::memory_order_release);
  return status;
}

absl::Status RocksdbTier::HealIndex() {
  if (!has_index_failed_.load(std::memory_order_acquire)) return absl::OkStatus();
  {
    absl::MutexLock lock(&commit_mu_);
    if (!has_index_failed_.load(std::memory_order_acquire))
      return absl::OkStatus();  // Another did it.
    EBBTIDE_RETURN_IF_ERROR(index_->Rebuild());
    has_index_failed_.store(false, std::memory_order_release);
  }
  Log(LogLevel::kInfo, "rocksdb tier: the index takes writes again",
      {{"folder", folder_->path().string()}});
  return absl::OkStatus();
}

absl::Status RocksdbTier::Read(std::span<PageRead> pages, absl::Duration /*patience*/) {
  for (PageRead& page : pages) page.state = PageState::kMissing;
  const SlotFiles::Reading reading(slots_);  // Before the look-ups: what they find stays in place.
  std::vector<size_t> order(pages.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tuple(pages[a].key, pages[a].part, pages[a].page) <
           std::tuple(pages[b].key, pages[b].part, pages[b].page);
  });

  std::vector<ReadJob> jobs;
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin + 1;
    while (end < order.size() && pages[order[end]].key == pages[order[begin]].key) ++end;
    EBBTIDE_RETURN_IF_ERROR(PlanBlock(pages, std::span(order).subspan(begin, end - begin), jobs));
    begin = end;
  }

  std::vector<absl::Status> statuses(jobs.size());
  const auto run = [&](int job) {
    statuses[static_cast<size_t>(job)] = RunJob(jobs[static_cast<size_t>(job)]);
  };
  if (io_ != nullptr && jobs.size() > 1) {
    io_->Run(static_cast<int>(jobs.size()), run);
  } else {
    for (size_t job = 0; job < jobs.size(); ++job) run(static_cast<int>(job));
  }
  for (absl::Status& status : statuses) EBBTIDE_RETURN_IF_ERROR(std::move(status));
  return absl::OkStatus();
}

bool RocksdbTier::Describe(const BlockKey& key, BlockEntry entry, Block& block) const {
  block.entry = std::move(entry);
  block.segment = slots_.Find(block.entry.place.segment);
  const absl::StatusOr<RecordHeader> header = ParseHeader(block.entry.header);
  if (!header.ok() || header->key != key || block.segment == nullptr) return false;
  block.header = *header;
  const SegmentShape& shape = block.segment->shape();
  return block.entry.place.slot < shape.slots &&
         header->geometry.record_bytes() == shape.slot.bytes;
}

absl::Status RocksdbTier::PlanBlock(std::span<PageRead> pages, std::span<const size_t> order,
                                    std::vector<ReadJob>& jobs) {
  const BlockKey& key = pages[order[0]].key;
  absl::StatusOr<std::optional<BlockEntry>> entry = index_->Get(key);
  if (entry.ok() && !entry->has_value()) return absl::OkStatus();
  if (!entry.ok() && !absl::IsDataLoss(entry.status())) return entry.status();

  const auto block = std::make_shared<Block>();
  if (!entry.ok() || !Describe(key, **std::move(entry), *block)) {
    for (const size_t i : order) MarkCorrupt(pages[i]);  // The entry itself is damaged.
    return absl::OkStatus();
  }

  const RecordGeometry& geometry = block->header.geometry;
  std::vector<ByteRange> wanted;
  for (const size_t i : order) {
    EBBTIDE_RETURN_IF_ERROR(CheckRead(pages[i], geometry));
    wanted.push_back({.offset = geometry.part_offset(pages[i].page, pages[i].part),
                      .bytes = geometry.part_bytes(pages[i].part)});
  }
  for (const PageRun& run : PlanPageRuns(wanted)) {
    ReadJob& job = jobs.emplace_back(ReadJob{.block = block, .run = run, .pages = {}});
    for (size_t i = run.first; i < run.last; ++i) job.pages.push_back(&pages[order[i]]);
  }
  return absl::OkStatus();
}

absl::Status RocksdbTier::RunJob(const ReadJob& job) {
  const uint64_t run_bytes = job.run.end - job.run.begin;
  const IoBuffers::Buffer buffer = buffers_.Lend(run_bytes);
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t read_bytes,
                           job.block->segment->Read(job.block->entry.place.slot, job.run.begin,
                                                    buffer.bytes().first(run_bytes)));
  const RecordGeometry& geometry = job.block->header.geometry;
  for (PageRead* page : job.pages) {
    const uint64_t offset = geometry.part_offset(page->page, page->part) - job.run.begin;
    if (offset + page->into.size() > read_bytes) {  // The file was cut behind our back.
      MarkCorrupt(*page);
      continue;
    }
    std::memcpy(page->into.data(), buffer.bytes().data() + offset, page->into.size());
    // The copy is checked, not the source: what is delivered is what was tested.
    if (PartIsIntact(job.block->header, page->page, page->part, page->into)) {
      page->state = PageState::kOk;
    } else {
      MarkCorrupt(*page);
    }
  }
  return absl::OkStatus();
}

void RocksdbTier::MarkCorrupt(PageRead& page) {
  page.state = PageState::kCorrupt;
  corrupt_pages_.fetch_add(1, std::memory_order_relaxed);
}

BlockPin RocksdbTier::Pin(const BlockKey& /*key*/) {
  return nullptr;
}

TierUsage RocksdbTier::Usage() const {
  return {.budget_bytes = budget_.limit_bytes(),
          .used_bytes = budget_.used_bytes(),
          .blocks = blocks_.load(std::memory_order_relaxed),
          .corrupt_pages = corrupt_pages_.load(std::memory_order_relaxed)};
}

TierRoom RocksdbTier::Room(std::span<const RecordSize> sizes) const {
  std::vector<SlotSize> slots;
  for (const RecordSize& size : sizes) slots.push_back(SlotFor(size));
  return slots_.Room(slots);
}

}  // namespace ebbtide::storage
