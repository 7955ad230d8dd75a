// SPDX-License-Identifier: Apache-2.0

#include "tests/contract/tier_under_test.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "base/executor.h"
#include "base/status_macros.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "storage/patient_tier.h"
#include "storage/rocksdb/rocksdb_tier.h"
#include "tests/support/faulty_file_calls.h"
#include "tests/support/record_pattern.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::storage {
namespace {

class HostUnderTest final : public TierUnderTest {
 public:
  explicit HostUnderTest(uint64_t budget_bytes) : budget_(budget_bytes) {
    auto tier = HostTier::Create(budget_);
    EBBTIDE_CHECK(tier.ok(), "a small host tier can be made");
    tier_ = *std::move(tier);
  }

  Tier& tier() override { return *tier_; }
  void DestroyTier() override { tier_.reset(); }

  void FlipPageByte(const BlockKey& key, uint32_t page, const RecordGeometry& geometry) override {
    const BlockPin pin = tier_->Pin(key);
    EBBTIDE_CHECK(pin != nullptr, "the block to damage is held");
    // The arena is writable memory of ours; only the pin's type says const.
    auto* bytes = const_cast<std::byte*>(pin->data());
    bytes[geometry.part_offset(page, PagePart::kExact) + geometry.page_bytes / 2] ^=
        std::byte{0x40};
  }

 private:
  ByteBudget budget_;
  std::unique_ptr<HostTier> tier_;
};

class RocksdbUnderTest final : public TierUnderTest {
 public:
  RocksdbUnderTest(uint64_t budget_bytes, bool refuse_direct) {
    calls_.refuse_direct = refuse_direct;
    auto tier = RocksdbTier::Create({.folder = folder_.path() / "tier",
                                     .budget_bytes = budget_bytes,
                                     .io = &io_,
                                     .calls = &calls_,
                                     .env = nullptr});
    EBBTIDE_CHECK(tier.ok(), "a small RocksDB tier can be made");
    rocksdb_ = tier->get();
    EBBTIDE_CHECK(!refuse_direct || !rocksdb_->folder().is_direct(), "O_DIRECT is refused");
    // As the daemon has it.
    tier_ = std::make_unique<PatientTier>(*std::move(tier), Patience{.limit = absl::Minutes(1)});
  }

  Tier& tier() override { return *tier_; }
  void DestroyTier() override { tier_.reset(); }

  void FlipPageByte(const BlockKey& key, uint32_t page, const RecordGeometry& geometry) override {
    const std::vector<std::byte> pattern = test::PatternPage(key, page, geometry.page_bytes);
    const auto* text = reinterpret_cast<const char*>(pattern.data());
    const std::string wanted(text, pattern.size());
    for (const auto& entry : std::filesystem::directory_iterator(rocksdb_->folder().path())) {
      if (!entry.path().filename().string().starts_with("slots-")) continue;
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(file), {}};
      const size_t at = bytes.find(wanted);
      if (at == std::string::npos) continue;
      const size_t flipped = at + geometry.page_bytes / 2;
      file.clear();
      file.seekp(static_cast<std::streamoff>(flipped));
      file.put(static_cast<char>(bytes[flipped] ^ 0x40));
      return;
    }
    EBBTIDE_CHECK(false, "the page to damage lies in a slot file");
  }

 private:
  test::TempFolder folder_;
  test::FaultyFileCalls calls_;
  ParallelFor io_{4};
  std::unique_ptr<Tier> tier_;
  RocksdbTier* rocksdb_ = nullptr;  // Behind it.
};

}  // namespace

std::vector<TierCase> AllTiers() {
  constexpr uint64_t kRocksdbBudget = 36 << 20;  // 32 MiB of it are the index's head-room.
  return {
      {.name = "host",
       .budget_bytes = 2 << 20,
       .is_memory = true,
       .make = [](uint64_t budget) { return std::make_unique<HostUnderTest>(budget); }},
      {.name = "rocksdb",
       .budget_bytes = kRocksdbBudget,
       .is_memory = false,
       .make = [](uint64_t budget) { return std::make_unique<RocksdbUnderTest>(budget, false); }},
      {.name = "rocksdb_buffered",
       .budget_bytes = kRocksdbBudget,
       .is_memory = false,
       .make = [](uint64_t budget) { return std::make_unique<RocksdbUnderTest>(budget, true); }},
  };
}

}  // namespace ebbtide::storage
