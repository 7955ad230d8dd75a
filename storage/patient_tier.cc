// SPDX-License-Identifier: Apache-2.0

#include "storage/patient_tier.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
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
  absl::Status status;
  std::exception_ptr thrown;
  bool is_done = false;
  bool is_given_up = false;
};

PatientTier::PatientTier(std::unique_ptr<Tier> tier, const Patience& patience)
    : tier_(std::move(tier)),
      limit_(patience.limit),
      threads_(MakeThreadExecutor(tier_->name(), patience.threads, kQueueLimit)) {}

absl::Status PatientTier::Wait(std::string_view what, std::function<absl::Status()> work) {
  const auto call = std::make_shared<Call>();
  const absl::MutexLock lock(&mu_);
  if (given_up_ > 0) {
    return absl::UnavailableError(absl::StrCat(
        std::string(name()), " tier: ", given_up_, " earlier calls have not come back within ",
        absl::FormatDuration(limit_), "; ", std::string(what),
        " waits until the medium answers again: see to its disk"));
  }
  const absl::Status queued = threads_->Submit(what, [this, call, work = std::move(work)] {
    absl::Status status;
    std::exception_ptr thrown;
    try {
      status = work();
    } catch (...) {
      thrown = std::current_exception();
    }
    const absl::MutexLock job_lock(&mu_);
    call->status = std::move(status);
    call->thrown = std::move(thrown);
    call->is_done = true;
    if (call->is_given_up) --given_up_;
  });
  if (!queued.ok()) return absl::UnavailableError(queued.message());
  if (mu_.AwaitWithTimeout(absl::Condition(&call->is_done), limit_)) {
    if (call->thrown != nullptr) std::rethrow_exception(call->thrown);
    return std::move(call->status);
  }
  call->is_given_up = true;
  ++given_up_;
  return absl::UnavailableError(absl::StrCat(std::string(name()), " tier: no answer to a ",
                                             std::string(what), " within ",
                                             absl::FormatDuration(limit_), "; see to its disk"));
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
    copy->blocks.push_back({.key = block.key, .record = {to, block.record.size()}});
    to += block.record.size();
  }
  return Wait("write", [this, copy] { return tier_->Write(copy->blocks); });
}

absl::Status PatientTier::Read(std::span<PageRead> pages) {
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
  EBBTIDE_RETURN_IF_ERROR(Wait("read", [this, copy] { return tier_->Read(copy->pages); }));
  for (size_t i = 0; i < pages.size(); ++i) {
    pages[i].state = copy->pages[i].state;
    if (pages[i].state == PageState::kOk)
      std::ranges::copy(copy->pages[i].into, pages[i].into.begin());
  }
  return absl::OkStatus();
}

absl::Status PatientTier::Erase(std::span<const BlockKey> keys) {
  const auto copy = std::make_shared<std::vector<BlockKey>>(keys.begin(), keys.end());
  return Wait("erase", [this, copy] { return tier_->Erase(*copy); });
}

}  // namespace ebbtide::storage
