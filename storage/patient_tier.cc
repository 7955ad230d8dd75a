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

// Bytes of several callers' spans, one after the other, left as they are until they are filled.
std::unique_ptr<std::byte[]> MakeBytes(size_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

}  // namespace

struct PatientTier::Call {
  Job job;
  absl::Duration begun = absl::InfiniteDuration();
  absl::Status status = absl::OkStatus();
  std::exception_ptr thrown = nullptr;
  bool is_done = false;
  bool is_left = false;
};

PatientTier::PatientTier(std::unique_ptr<Tier> tier, const Patience& patience, Clock& clock)
    : tier_(std::move(tier)),
      limit_(patience.limit),
      threads_max_(static_cast<size_t>(patience.threads)),
      clock_(clock),
      threads_(MakeThreadExecutor(tier_->name(), patience.threads,
                                  static_cast<size_t>(patience.threads))) {
  for (int i = 0; i < patience.threads; ++i)
    EBBTIDE_CHECK(threads_->Submit("calls", [this] { Work(); }).ok(), "the queue holds them all");
}

PatientTier::~PatientTier() {
  const absl::MutexLock lock(&mu_);
  is_ending_ = true;
}

bool PatientTier::MayBeginAChange() const {
  return !changes_.empty() && std::ranges::none_of(running_, [](const auto& call) {
    return call->is_left && call->job.access == Access::kChanges;
  });
}

bool PatientTier::HasWork() const {
  return is_ending_ || MayBeginAChange() || !reads_.empty();
}

bool PatientTier::IsStuck(Access access) const {
  const absl::Duration now = clock_.SinceStart();
  size_t stuck = 0;
  for (const auto& call : running_) {
    if (now - call->begun < limit_) continue;
    if (access == Access::kReads || call->job.access == Access::kChanges) return true;
    ++stuck;
  }
  return stuck == threads_max_;
}

absl::Status PatientTier::Refused(std::string_view what) const {
  const auto left = std::ranges::count_if(running_, [](const auto& each) { return each->is_left; });
  return absl::UnavailableError(absl::StrCat(
      std::string(name()), " tier: ", running_.size(),
      running_.size() == 1 ? " earlier call still runs, " : " earlier calls still run, ", left,
      " of them given up; a ", std::string(what),
      " waits until the medium answers: see to its disk"));
}

void PatientTier::Work() {
  for (;;) {
    Calls::iterator call;
    {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &PatientTier::HasWork));
      if (is_ending_) return;
      Calls& waiting = MayBeginAChange() ? changes_ : reads_;
      call = waiting.begin();
      running_.splice(running_.end(), waiting, call);
      (*call)->begun = clock_.SinceStart();
    }
    absl::Status status;
    std::exception_ptr thrown;
    try {
      status = (*call)->job.work();
    } catch (...) {
      thrown = std::current_exception();
    }
    Calls done;  // Its memory goes after the lock.
    const absl::MutexLock lock(&mu_);
    (*call)->status = std::move(status);
    (*call)->thrown = std::move(thrown);
    (*call)->is_done = true;
    done.splice(done.end(), running_, call);
  }
}

absl::Status PatientTier::Wait(Job job) {
  const absl::Duration patience = std::min(job.patience, limit_);
  const absl::Duration until = clock_.SinceStart() + patience;
  const auto call = std::make_shared<Call>(Call{.job = std::move(job)});
  const std::string what(call->job.what);
  const Access access = call->job.access;
  const absl::MutexLock lock(&mu_);
  if (IsStuck(access)) return Refused(what);
  Calls& waiting = access == Access::kReads ? reads_ : changes_;
  waiting.push_back(call);
  if (mu_.AwaitWithTimeout(absl::Condition(&call->is_done), until - clock_.SinceStart())) {
    if (call->thrown != nullptr) std::rethrow_exception(call->thrown);
    return std::move(call->status);
  }
  if (waiting.remove(call) > 0 && access == Access::kChanges) return Refused(what);
  call->is_left = true;
  const std::string message = absl::StrCat(std::string(name()), " tier: no answer to a ", what,
                                           " within ", absl::FormatDuration(patience));
  if (call->job.patience < limit_) return absl::DeadlineExceededError(message);
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
  EBBTIDE_RETURN_IF_ERROR(
      Wait({.what = "read", .access = Access::kReads, .patience = patience, .work = [this, copy] {
              size_t bytes = 0;  // Taken now: what waits for its turn holds none.
              for (const PageRead& page : copy->pages) bytes += page.into.size();
              copy->bytes = MakeBytes(bytes);
              std::byte* into = copy->bytes.get();
              for (PageRead& page : copy->pages) {
                page.into = {into, page.into.size()};
                into += page.into.size();
              }
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
