// SPDX-License-Identifier: Apache-2.0

#include "tests/support/stepped_executor.h"

#include <utility>

#include "absl/strings/str_format.h"

#include "base/status_macros.h"

namespace ebbtide::test {

absl::Status SteppedExecutor::Submit(std::string_view name, std::function<void()> job) {
  absl::MutexLock lock(&mu_);
  if (queue_.size() >= queue_limit_) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("stepped executor: queue is full with %d jobs; %s was refused",
                        queue_.size(), std::string(name)));
  }
  queue_.push_back({.name = std::string(name), .run = std::move(job)});
  return absl::OkStatus();
}

bool SteppedExecutor::RunNext() {
  Job job;
  {
    absl::MutexLock lock(&mu_);
    if (queue_.empty()) {
      return false;
    }
    job = std::move(queue_.front());
    queue_.pop_front();
  }
  job.run();
  return true;
}

size_t SteppedExecutor::RunAll() {
  size_t ran = 0;
  while (RunNext()) {
    ++ran;
    EBBTIDE_CHECK(ran < 1'000'000, "jobs submit each other without end");
  }
  return ran;
}

size_t SteppedExecutor::waiting() const {
  absl::MutexLock lock(&mu_);
  return queue_.size();
}

std::string SteppedExecutor::next_name() const {
  absl::MutexLock lock(&mu_);
  return queue_.empty() ? std::string() : queue_.front().name;
}

}  // namespace ebbtide::test
