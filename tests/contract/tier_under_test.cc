// SPDX-License-Identifier: Apache-2.0

#include "tests/contract/tier_under_test.h"

#include <utility>

#include "base/status_macros.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"

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

}  // namespace

std::vector<TierCase> AllTiers() {
  return {
      {.name = "host",
       .budget_bytes = 2 << 20,
       .is_memory = true,
       .make = [](uint64_t budget) { return std::make_unique<HostUnderTest>(budget); }},
  };
}

}  // namespace ebbtide::storage
