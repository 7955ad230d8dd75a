// SPDX-License-Identifier: Apache-2.0
//
// Bounded queues of named jobs. Threads in the daemon; stepped by hand in tests
// (tests/support/stepped_executor.h).

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

#include "absl/status/status.h"

namespace ebbtide {

// Thread-safe.
class Executor {
 public:
  virtual ~Executor() = default;

  // Queues `job`; it runs later, exactly once, unless the executor is destroyed first.
  //   kResourceExhausted  the queue is full
  virtual absl::Status Submit(std::string_view name, std::function<void()> job) = 0;
};

// `threads` workers over one queue of at most `queue_limit` waiting jobs. The destructor finishes the
// running jobs and drops the waiting ones.
std::unique_ptr<Executor> MakeThreadExecutor(std::string_view name, int threads, size_t queue_limit);

// Runs fn(0) … fn(count - 1), on the calling thread and up to `threads() - 1` helpers; returns when all
// are done. Calls from several threads share the helpers; a call inside fn runs on its own thread.
class ParallelFor {
 public:
  explicit ParallelFor(int threads);  // 1: everything on the caller.
  ~ParallelFor();
  int threads() const { return threads_; }
  void Run(int count, const std::function<void(int)>& fn);

 private:
  struct Pool;
  const int threads_;
  std::unique_ptr<Pool> pool_;
};

// CPUs this process may use: the least of affinity and cgroup quota (v1 or v2), at least 1.
int AvailableCpus();

// Memory this process may use: the least of physical memory and the cgroup's limit.
size_t AvailableMemoryBytes();

}  // namespace ebbtide
