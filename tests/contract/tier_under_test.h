// SPDX-License-Identifier: Apache-2.0
//
// The tiers that the contract is run for, each with a way to damage what it holds.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "storage/tier.h"

namespace ebbtide::storage {

class TierUnderTest {
 public:
  virtual ~TierUnderTest() = default;
  virtual Tier& tier() = 0;
  virtual void DestroyTier() = 0;

  // Changes one byte of a held page behind the tier's back.
  virtual void FlipPageByte(const BlockKey& key, uint32_t page, const RecordGeometry& geometry) = 0;
};

struct TierCase {
  std::string name;
  uint64_t budget_bytes = 0;  // Small, but room for twenty records of 68 KiB.
  bool is_memory = false;     // Records can be pinned.
  std::function<std::unique_ptr<TierUnderTest>(uint64_t budget_bytes)> make;

  friend std::ostream& operator<<(std::ostream& os, const TierCase& c) { return os << c.name; }
};

std::vector<TierCase> AllTiers();

}  // namespace ebbtide::storage
