// SPDX-License-Identifier: Apache-2.0

#include "storage/circuit_breaker.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "base/log.h"
#include "base/status_macros.h"

namespace ebbtide::storage {
namespace {

constexpr absl::Duration kQuietTime = absl::Minutes(1);

}  // namespace

std::string CircuitBreaker::why_no_writes() const {
  const absl::MutexLock lock(&mu_);
  return is_open_ ? writes_.last : "";
}

std::string CircuitBreaker::why_degraded() const {
  const absl::Duration now = clock_.SinceStart();
  const absl::MutexLock lock(&mu_);
  if (is_open_) return writes_.last;
  return now - reads_.at < kQuietTime ? reads_.last : "";
}

absl::Status CircuitBreaker::Write(std::span<const BlockWrite> blocks) {
  if (const std::string why = why_no_writes(); !why.empty()) {
    return absl::UnavailableError(absl::StrCat(why, "; nothing is written until it is well again"));
  }
  absl::Status status = tier_.Write(blocks);
  if (absl::IsUnavailable(status)) Open(status);
  return status;
}

absl::Status CircuitBreaker::Read(std::span<PageRead> pages, absl::Duration patience) {
  absl::Status status = tier_.Read(pages, patience);
  if (absl::IsUnavailable(status)) NoteRead(status);
  return status;
}

absl::Status CircuitBreaker::Erase(std::span<const BlockKey> keys) {
  absl::Status status = tier_.Erase(keys);
  if (absl::IsUnavailable(status)) Open(status);
  return status;
}

absl::Status CircuitBreaker::Probe() {
  absl::Status status = tier_.Probe();
  if (status.ok()) {
    Close();
  } else {
    Open(status);
  }
  return status;
}

void CircuitBreaker::Open(const absl::Status& failure) {
  uint64_t failures = 0;
  {
    const absl::MutexLock lock(&mu_);
    is_open_ = true;
    failures = Count(failure, writes_);
    if (failures == 0) return;
    is_told_ = true;
  }
  Log(LogLevel::kWarn, "tier is degraded",
      {{"tier", name()}, {"why", std::string(failure.message())}, {"failures", failures}});
}

void CircuitBreaker::Close() {
  {
    const absl::MutexLock lock(&mu_);
    is_open_ = false;
    if (!std::exchange(is_told_, false)) return;
  }
  Log(LogLevel::kInfo, "tier is well again", {{"tier", name()}});
}

void CircuitBreaker::NoteRead(const absl::Status& failure) {
  uint64_t failures = 0;
  {
    const absl::MutexLock lock(&mu_);
    failures = Count(failure, reads_);
    if (failures == 0) return;
  }
  Log(LogLevel::kWarn, "tier does not read what it holds",
      {{"tier", name()}, {"why", std::string(failure.message())}, {"failures", failures}});
}

uint64_t CircuitBreaker::Count(const absl::Status& failure, Failures& failures) {
  failures.last = std::string(failure.message());
  failures.at = clock_.SinceStart();
  ++failures.unlogged;
  if (failures.at - failures.logged < kQuietTime) return 0;
  failures.logged = failures.at;
  return std::exchange(failures.unlogged, 0);
}

}  // namespace ebbtide::storage
