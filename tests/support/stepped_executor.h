// SPDX-License-Identifier: Apache-2.0
//
// An executor without threads: the next job runs when the test says so, on the test's thread.
// Bounded like the real one, so that a test can fill the queue.

#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "base/executor.h"

namespace ebbtide::test {

// Thread-safe.
class SteppedExecutor final : public Executor {
 public:
  explicit SteppedExecutor(size_t queue_limit = 1024) : queue_limit_(queue_limit) {}

  absl::Status Submit(std::string_view name, std::function<void()> job) override
      ABSL_LOCKS_EXCLUDED(mu_);

  // Runs the job that waits longest; false where none waits.
  bool RunNext() ABSL_LOCKS_EXCLUDED(mu_);

  // Runs jobs, those they submit included, until none waits; how many ran. A job that always
  // submits another is stopped at a million by a failed check.
  size_t RunAll() ABSL_LOCKS_EXCLUDED(mu_);

  size_t waiting() const ABSL_LOCKS_EXCLUDED(mu_);

  // Name of the job that RunNext would run; empty where none waits.
  std::string next_name() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Job {
    std::string name;
    std::function<void()> run;
  };

  const size_t queue_limit_;

  mutable absl::Mutex mu_;
  std::deque<Job> queue_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::test
