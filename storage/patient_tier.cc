// SPDX-License-Identifier: Apache-2.0

#include "storage/patient_tier.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"

namespace ebbtide::storage {
namespace {

constexpr size_t kQueueLimit = 256;

// Bytes of several callers' spans, one after the other, left as they are until they are filled.
std::unique_ptr<std::byte[]> MakeBytes(size_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

}  // namespace

struct PatientTier::Call {
  absl::Duration begun;
  absl::Status status = absl::OkStatus();
  std::exception_ptr thrown = nullptr;
  bool is_done = false;
  bool is_left = false;
  bool is_stuck = false;  // Its caller waited for the whole limit.
};

PatientTier::PatientTier(std::unique_ptr<Tier> tier, const Patience& patience)
    : tier_(std::move(tier)),
      limit_(patience.limit),
      threads_(MakeThreadExecutor(tier_->name(), patience.threads, kQueueLimit)) {}

bool PatientTier::IsStuck() const {
  const absl::Duration now = clock_.SinceStart();
  return std::ranges::any_of(
      left_, [&](const auto& call) { return call->is_stuck || now - call->begun >= limit_; });
}

void PatientTier::Run(Call& call, const std::function<absl::Status()>& work) {
  absl::Status status;
  std::exception_ptr thrown;
  try {
    status = work();
  } catch (...) {
    thrown = std::current_exception();
  }
  const absl::MutexLock lock(&mu_);
  call.status = std::move(status);
  call.thrown = std::move(thrown);
  call.is_done = true;
  if (call.is_left) left_.remove_if([&](const auto& left) { return left.get() == &call; });
}

absl::Status PatientTier::Wait(Job job) {
  const auto call = std::make_shared<Call>(Call{.begun = clock_.SinceStart()});
  const absl::Duration patience = std::min(job.patience, limit_);
  const absl::MutexLock lock(&mu_);
  const std::vector<std::shared_ptr<Call>> before(left_.begin(), left_.end());
  const auto may_go = [&] {
    return job.access == Access::kReads ||
           std::ranges::all_of(before, [](const auto& each) { return each->is_done; });
  };
  if (IsStuck() || !mu_.AwaitWithTimeout(absl::Condition(&may_go), patience)) {
    return absl::UnavailableError(absl::StrCat(
        std::string(name()), " tier: ", left_.size(), " earlier calls have not come back within ",
        absl::FormatDuration(limit_), "; ", std::string(job.what),
        " waits until the medium answers again: see to its disk"));
  }
  if (const absl::Status queued = threads_->Submit(
          job.what, [this, call, work = std::move(job.work)] { Run(*call, work); });
      !queued.ok()) {
    return absl::UnavailableError(queued.message());
  }
  const absl::Duration rest = patience - (clock_.SinceStart() - call->begun);
  if (mu_.AwaitWithTimeout(absl::Condition(&call->is_done), rest)) {
    if (call->thrown != nullptr) std::rethrow_exception(call->thrown);
    return std::move(call->status);
  }
  call->is_left = true;
  call->is_stuck = job.patience >= limit_;
  left_.push_back(call);
  const std::string message =
      absl::StrCat(std::string(name()), " tier: no answer to a ", std::string(job.what), " within ",
                   absl::FormatDuration(patience));
  if (!call->is_stuck) return absl::DeadlineExceededError(message);
  return absl::UnavailableError(message + "; see to its disk");
}

absl::Status PatientTier::Write(std::span<const BlockWrite> blocks) {
  struct Copy {
    std::vector<BlockWrite> blocks;
    std::unique_ptr<std::byte[]> bytes;
  };
  const auto copy = std::make_shared<Copy>();
  size_t bytes = 0;
  for (const BlockWrite& block : blocks) bytes += block.record.size();
  copy->bytes = MakeBytes(bytes);
  std::byte* to = copy->bytes.get();
  for (const BlockWrite& block : blocks) {
    std::ranges::copy(block.record, to);
    copy->blocks.push_back(block);
    copy->blocks.back().record = {to, block.record.size()};
    to += block.record.size();
  }
  return Wait(
      {.what = "write", .access = Access::kChanges, .patience = limit_, .work = [this, copy] {
         return tier_->Write(copy->blocks);
       }});
}

absl::Status PatientTier::Read(std::span<PageRead> pages, absl::Duration patience) {
  struct Copy {
    std::vector<PageRead> pages;
    std::unique_ptr<std::byte[]> bytes;
  };
  const auto copy = std::make_shared<Copy>();
  copy->pages.assign(pages.begin(), pages.end());
  size_t bytes = 0;
  for (const PageRead& page : pages) bytes += page.into.size();
  copy->bytes = MakeBytes(bytes);
  std::byte* into = copy->bytes.get();
  for (PageRead& page : copy->pages) {
    page.into = {into, page.into.size()};
    into += page.into.size();
  }
  EBBTIDE_RETURN_IF_ERROR(
      Wait({.what = "read", .access = Access::kReads, .patience = patience, .work = [this, copy] {
              return tier_->Read(copy->pages, limit_);
            }}));
  for (size_t i = 0; i < pages.size(); ++i) {
    pages[i].state = copy->pages[i].state;
    if (pages[i].state == PageState::kOk)
      std::ranges::copy(copy->pages[i].into, pages[i].into.begin());
  }
  return absl::OkStatus();
}

absl::Status PatientTier::Erase(std::span<const BlockKey> keys) {
  const auto copy = std::make_shared<std::vector<BlockKey>>(keys.begin(), keys.end());
  return Wait(
      {.what = "erase", .access = Access::kChanges, .patience = limit_, .work = [this, copy] {
         return tier_->Erase(*copy);
       }});
}

absl::Status PatientTier::Probe() {
  return Wait({.what = "probe", .access = Access::kChanges, .patience = limit_, .work = [this] {
                 return tier_->Probe();
               }});
}

}  // namespace ebbtide::storage
