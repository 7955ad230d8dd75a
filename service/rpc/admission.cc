// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/admission.h"

#include "absl/strings/str_format.h"

#include "base/bytes.h"
#include "base/status_macros.h"
#include "service/reason.h"

namespace ebbtide::service {

Admission::Ticket::~Ticket() {
  if (admission_ != nullptr) {
    admission_->Leave(bytes_);
  }
}

absl::StatusOr<Admission::Ticket> Admission::Enter(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (is_closed_) {
    return Refuse(
        absl::StatusCode::kUnavailable, "SHUTTING_DOWN",
        "the daemon is shutting down and takes no new calls; go on without it, or connect "
        "again later");
  }
  if (calls_ >= limits_.calls) {
    return Refuse(
        absl::StatusCode::kResourceExhausted, "SERVER_BUSY",
        absl::StrFormat("%d calls are in progress, the limit; %s", calls_, limits_.advice));
  }
  EBBTIDE_RETURN_IF_ERROR(CheckBytes("request", bytes, calls_));
  bytes_ += bytes;
  if (++calls_ == limits_.calls) {
    full_since_ = clock_.SinceStart();
  }
  return Ticket(this, bytes);
}

absl::Status Admission::CheckBytes(std::string_view what, uint64_t bytes, uint32_t others) const {
  if (others == 0 || bytes_ + bytes <= limits_.bytes) return absl::OkStatus();
  return Refuse(
      absl::StatusCode::kResourceExhausted, "SERVER_BUSY",
      absl::StrFormat("this %s of %s would exceed the limit of %s for all calls in "
                      "progress, which hold %s; call again later",
                      what, FormatBytes(bytes), FormatBytes(limits_.bytes), FormatBytes(bytes_)));
}

absl::Status Admission::Ticket::Grow(uint64_t bytes, std::string_view what) {
  const absl::MutexLock lock(&admission_->mu_);
  EBBTIDE_RETURN_IF_ERROR(admission_->CheckBytes(what, bytes, admission_->calls_ - 1));
  admission_->bytes_ += bytes;
  bytes_ += bytes;
  return absl::OkStatus();
}

void Admission::Leave(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  --calls_;
  bytes_ -= bytes;
}

void Admission::Close() {
  absl::MutexLock lock(&mu_);
  is_closed_ = true;
}

bool Admission::WaitIdle(absl::Duration patience) {
  absl::MutexLock lock(&mu_);
  const auto is_idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_ == 0; };
  return mu_.AwaitWithTimeout(absl::Condition(&is_idle), patience);
}

bool Admission::is_closed() const {
  absl::MutexLock lock(&mu_);
  return is_closed_;
}

absl::Duration Admission::StuckFor() const {
  absl::MutexLock lock(&mu_);
  return calls_ < limits_.calls ? absl::ZeroDuration() : clock_.SinceStart() - full_since_;
}

}  // namespace ebbtide::service
