// SPDX-License-Identifier: Apache-2.0

#include "tests/support/faulty_tier.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"
#include "storage/block_record.h"

namespace ebbtide::test {

using storage::BlockKey;
using storage::BlockWrite;
using storage::PageRead;
using storage::ParseHeader;
using storage::RecordGeometry;
using storage::RecordHeader;

void FaultyTier::Set(const Faults& faults) {
  absl::MutexLock lock(&mu_);
  faults_ = faults;
}

uint64_t FaultyTier::damaged_records() const {
  absl::MutexLock lock(&mu_);
  return damaged_records_;
}

absl::Status FaultyTier::Write(std::span<const BlockWrite> blocks) {
  EBBTIDE_RETURN_IF_ERROR(BeforeCall("write"));
  {
    absl::MutexLock lock(&mu_);
    if (Draw(faults_.full)) return absl::ResourceExhaustedError("faulty tier: full");
  }
  for (const BlockWrite& block : blocks) {
    const std::vector<std::byte> damaged = Damage(block.record);
    BlockWrite write = block;
    if (!damaged.empty()) write.record = damaged;
    EBBTIDE_RETURN_IF_ERROR(tier_.Write({&write, 1}));
  }
  return absl::OkStatus();
}

absl::Status FaultyTier::Read(std::span<PageRead> pages, absl::Duration patience) {
  EBBTIDE_RETURN_IF_ERROR(BeforeCall("read"));
  return tier_.Read(pages, patience);
}

absl::Status FaultyTier::Erase(std::span<const BlockKey> keys) {
  EBBTIDE_RETURN_IF_ERROR(BeforeCall("erase"));
  return tier_.Erase(keys);
}

absl::Status FaultyTier::Probe() {
  EBBTIDE_RETURN_IF_ERROR(BeforeCall("probe"));
  return tier_.Probe();
}

bool FaultyTier::Draw(double chance) {
  return std::bernoulli_distribution(chance)(random_);
}

absl::Status FaultyTier::BeforeCall(std::string_view call) {
  std::function<void()> delay;
  bool is_refused = false;
  {
    absl::MutexLock lock(&mu_);
    if (Draw(faults_.delay)) delay = faults_.on_delay;
    is_refused = Draw(faults_.refuse);
  }
  if (delay) delay();
  if (!is_refused) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("faulty tier: ", absl::string_view(call.data(), call.size()), " refused"));
}

std::vector<std::byte> FaultyTier::Damage(std::span<const std::byte> record) {
  const absl::StatusOr<RecordHeader> header = ParseHeader(record);
  if (!header.ok()) return {};  // The tier below refuses it anyway.
  const RecordGeometry& geometry = header->geometry;
  const uint64_t pages_begin = geometry.header_bytes();
  const uint64_t pages_end = geometry.part_offset(0, storage::PagePart::kFine) +
                             uint64_t{geometry.pages()} * geometry.fine_bytes;

  absl::MutexLock lock(&mu_);
  const bool is_torn = Draw(faults_.torn);
  const bool is_flipped = Draw(faults_.flipped);
  if (!is_torn && !is_flipped) return {};
  ++damaged_records_;
  std::vector<std::byte> damaged(record.begin(), record.end());
  std::uniform_int_distribution<uint64_t> place(pages_begin, pages_end - 1);
  if (is_torn) {
    std::fill(damaged.begin() + static_cast<ptrdiff_t>(place(random_)), damaged.end(),
              std::byte{0});
  }
  if (is_flipped) damaged[place(random_)] ^= std::byte{0x10};
  return damaged;
}

}  // namespace ebbtide::test
