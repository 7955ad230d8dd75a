// SPDX-License-Identifier: Apache-2.0
//
// Bounded queues of named jobs, and loops spread over threads. Threads in the daemon; stepped by
// hand in tests (tests/support/stepped_executor.h).

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

  // Queues `job`; it runs later, exactly once, unless the executor is destroyed first. A job ends
  // its own exceptions; one that leaves it is logged, and ends no more than the job.
  //   kResourceExhausted  the queue is full
  virtual absl::Status Submit(std::string_view name, std::function<void()> job) = 0;
};

// `threads` threads over one queue of at most `queue_limit` waiting jobs, first in, first out. The
// destructor finishes the running jobs and drops the waiting ones.
std::unique_ptr<Executor> MakeThreadExecutor(std::string_view name, int threads,
                                             size_t queue_limit);

// A loop over a few threads, cheap enough to be called several times per decode step.
// Thread-safe: calls from several threads share the helpers.
class ParallelFor {
 public:
  explicit ParallelFor(int threads);  // 1: everything on the caller.
  ~ParallelFor();

  int threads() const { return threads_; }

  // Runs fn(0) … fn(count - 1) on the calling thread and up to `threads() - 1` helpers; returns
  // when all are done, and their writes are visible then. The order is any. A call inside `fn`, of
  // this or another ParallelFor, runs on its own thread; where count is 1 it may use the helpers.
  // An exception of `fn`, on whichever thread, is the caller's once nobody runs `fn` any more; what
  // was not begun by then is left out.
  void Run(int count, const std::function<void(int)>& fn);

 private:
  class Pool;

  const int threads_;
  std::unique_ptr<Pool> pool_;
};

// CPUs this process may use: the least of affinity and cgroup quota (v1 or v2), rounded down since
// a thread too many is throttled in the middle of a step; at least 1.
int AvailableCpus();

// Memory this process may use: the least of physical memory and the cgroup's limit.
size_t AvailableMemoryBytes();

}  // namespace ebbtide
