// SPDX-License-Identifier: Apache-2.0

#include "storage/circuit_breaker.h"

#include "absl/strings/str_cat.h"

#include "base/log.h"
#include "base/status_macros.h"

namespace ebbtide::storage {

std::string CircuitBreaker::why() const {
  const absl::MutexLock lock(&mu_);
  return write_failure_.empty() ? read_failure_ : write_failure_;
}

absl::Status CircuitBreaker::CheckClosed() const {
  const absl::MutexLock lock(&mu_);
  if (write_failure_.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(write_failure_, "; nothing is written until it is well again"));
}

absl::Status CircuitBreaker::Write(std::span<const BlockWrite> blocks) {
  EBBTIDE_RETURN_IF_ERROR(CheckClosed());
  absl::Status status = tier_.Write(blocks);
  if (absl::IsUnavailable(status)) Note(&CircuitBreaker::write_failure_, status);
  return status;
}

absl::Status CircuitBreaker::Read(std::span<PageRead> pages, absl::Duration patience) {
  absl::Status status = tier_.Read(pages, patience);
  if (status.ok() || absl::IsUnavailable(status)) Note(&CircuitBreaker::read_failure_, status);
  return status;
}

absl::Status CircuitBreaker::Erase(std::span<const BlockKey> keys) {
  EBBTIDE_RETURN_IF_ERROR(CheckClosed());
  absl::Status status = tier_.Erase(keys);
  if (absl::IsUnavailable(status)) Note(&CircuitBreaker::write_failure_, status);
  return status;
}

absl::Status CircuitBreaker::Probe() {
  absl::Status status = tier_.Probe();
  Note(&CircuitBreaker::write_failure_, status);
  if (status.ok()) Note(&CircuitBreaker::read_failure_, status);
  return status;
}

void CircuitBreaker::Note(std::string CircuitBreaker::*failure, const absl::Status& status) {
  bool was_well = false;
  bool is_well = false;
  {
    const absl::MutexLock lock(&mu_);
    was_well = write_failure_.empty() && read_failure_.empty();
    if (status.ok() && was_well) return;  // As nearly always.
    this->*failure = status.ok() ? std::string() : std::string(status.message());
    is_well = write_failure_.empty() && read_failure_.empty();
  }
  if (was_well && !is_well) {
    Log(LogLevel::kWarn, "tier is degraded",
        {{"tier", name()}, {"why", std::string(status.message())}});
  } else if (!was_well && is_well) {
    Log(LogLevel::kInfo, "tier is well again", {{"tier", name()}});
  }
}

}  // namespace ebbtide::storage
