// SPDX-License-Identifier: Apache-2.0

#include "storage/byte_budget.h"

#include <utility>

#include "base/status_macros.h"

namespace ebbtide::storage {

bool ByteBudget::TryCharge(uint64_t bytes) {
  if (!TryChargeWithoutReclaim(bytes)) return false;
  ByteCharge charge(*this, bytes);
  if (reclaim_) reclaim_();
  charge.Keep(bytes);
  return true;
}

bool ByteBudget::TryChargeWithoutReclaim(uint64_t bytes) {
  uint64_t used = used_bytes();
  do {
    if (bytes > limit_bytes_ - used) return false;
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_acq_rel));
  return true;
}

void ByteBudget::Release(uint64_t bytes) {
  const uint64_t before = used_bytes_.fetch_sub(bytes, std::memory_order_acq_rel);
  EBBTIDE_CHECK(before >= bytes, "no more is released than was charged");
}

uint64_t ByteBudget::free_bytes() const {
  return limit_bytes_ - used_bytes();
}

void ByteBudget::SetReclaim(std::function<void()> reclaim) {
  reclaim_ = std::move(reclaim);
}

ByteCharge::ByteCharge(ByteCharge&& other) noexcept
    : budget_(other.budget_), bytes_(std::exchange(other.bytes_, 0)) {}

ByteCharge& ByteCharge::operator=(ByteCharge&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

ByteCharge::~ByteCharge() {
  if (bytes_ > 0) budget_->Release(bytes_);
}

std::optional<ByteCharge> ByteCharge::Try(ByteBudget& budget, uint64_t bytes) {
  if (!budget.TryCharge(bytes)) return std::nullopt;
  return ByteCharge(budget, bytes);
}

void ByteCharge::Keep(uint64_t bytes) {
  EBBTIDE_CHECK(bytes <= bytes_, "no more is kept than was charged");
  bytes_ -= bytes;
}

}  // namespace ebbtide::storage
