// SPDX-License-Identifier: Apache-2.0
//
// ParallelFor: helpers that look for a loop to join, spin a moment for the next one, then sleep.
// A decode step runs several short loops with short gaps between them; waking a sleeping thread
// costs about as much as such a loop, so a helper stays awake over a gap and no longer.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "base/executor.h"
#include "base/status_macros.h"

namespace ebbtide {
namespace {

using SpinClock = std::chrono::steady_clock;

// A loop costs 0.5 us beyond its tasks while helpers are awake, 18 us where they must be woken
// (bench/micro/base/parallel_for_bench.cc, 2 cores): worth staying awake for the gap between two
// loops of a step, not for the gap between two steps.
constexpr auto kSpin = std::chrono::microseconds(50);

// Set while this thread runs somebody's fn: a call in there has no helpers to wait for.
thread_local bool t_is_inside_run = false;

void RelaxCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// True as soon as `is_done()` is; false once `spin` has gone by.
template <typename Condition>
bool SpinUntil(SpinClock::duration spin, const Condition& is_done) {
  if (is_done()) {
    return true;
  }
  if (spin == SpinClock::duration::zero()) {
    return false;
  }
  const auto end = SpinClock::now() + spin;
  do {
    for (int i = 0; i < 8; ++i) {
      RelaxCpu();
      if (is_done()) {
        return true;
      }
    }
  } while (SpinClock::now() < end);
  return false;
}

// One call of Run. Outlives it (the pool keeps and reuses them), so that a helper may still wake
// the caller after the caller has seen the end.
struct Loop {
  const std::function<void(int)>* fn = nullptr;
  int count = 0;
  std::atomic<int> next = 0;     // The first index nobody has taken.
  std::atomic<int> helpers = 0;  // Joined and not yet left. The caller returns at zero.
  std::atomic<bool> is_broken = false;
  std::exception_ptr broken_by;  // The first exception of `fn`: of whoever set is_broken.

  bool HasWork() const { return next.load(std::memory_order_relaxed) < count; }

  void Work() {
    t_is_inside_run = true;
    for (int i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      try {
        (*fn)(i);
      } catch (...) {
        next.store(count, std::memory_order_relaxed);  // Nobody begins another.
        if (!is_broken.exchange(true, std::memory_order_relaxed))
          broken_by = std::current_exception();
      }
    }
    t_is_inside_run = false;
  }
};

}  // namespace

class ParallelFor::Pool {
 public:
  explicit Pool(int helpers)
      // With more threads than CPUs, who spins keeps off the one being waited for.
      : spin_(helpers < AvailableCpus() ? kSpin : SpinClock::duration::zero()) {
    helpers_.reserve(static_cast<size_t>(helpers));
    for (int i = 0; i < helpers; ++i) {
      helpers_.emplace_back([this] { Help(); });
    }
  }

  ~Pool() {
    is_stopping_.store(true, std::memory_order_relaxed);
    posted_.fetch_add(1, std::memory_order_release);
    posted_.notify_all();
    helpers_.clear();  // Joins.
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void Run(int count, const std::function<void(int)>& fn) ABSL_LOCKS_EXCLUDED(mu_) {
    Loop& loop = Open(count, fn);
    WakeHelpers(count - 1);
    loop.Work();
    Close(loop);
    AwaitHelpers(loop);
    const std::exception_ptr broken_by = std::exchange(loop.broken_by, nullptr);
    Recycle(loop);
    if (broken_by != nullptr) std::rethrow_exception(broken_by);
  }

 private:
  Loop& Open(int count, const std::function<void(int)>& fn) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (spare_.empty()) {
      spare_.reserve(loops_.size() + 1);  // So that each comes back.
      loops_.push_back(std::make_unique<Loop>());
      spare_.push_back(loops_.back().get());
    }
    open_.push_back(spare_.back());
    spare_.pop_back();
    Loop& loop = *open_.back();
    loop.fn = &fn;
    loop.count = count;
    loop.next.store(0, std::memory_order_relaxed);
    loop.is_broken.store(false, std::memory_order_relaxed);
    posted_.fetch_add(1, std::memory_order_release);
    return loop;
  }

  // Helpers that spin see the post by themselves. Counting one that is about to sleep is harmless:
  // it compares `posted_` once more as it lies down.
  void WakeHelpers(int useful) {
    const int all = static_cast<int>(helpers_.size());
    const int sleepers = std::min(useful, all) - spinning_.load(std::memory_order_relaxed);
    if (sleepers >= all) {
      posted_.notify_all();
      return;
    }
    for (int i = 0; i < sleepers; ++i) {
      posted_.notify_one();
    }
  }

  // From here on nobody joins.
  void Close(Loop& loop) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    std::erase(open_, &loop);
  }

  void AwaitHelpers(Loop& loop) {
    const auto all_left = [&] { return loop.helpers.load(std::memory_order_acquire) == 0; };
    if (SpinUntil(spin_, all_left)) {
      return;
    }
    for (int left = loop.helpers.load(std::memory_order_acquire); left != 0;
         left = loop.helpers.load(std::memory_order_acquire)) {
      loop.helpers.wait(left, std::memory_order_acquire);
    }
  }

  void Recycle(Loop& loop) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    spare_.push_back(&loop);
  }

  void Help() ABSL_LOCKS_EXCLUDED(mu_) {
    pthread_setname_np(pthread_self(), "ebbtide-loop");
    for (;;) {
      // Read first: whatever was posted up to `seen`, the end included, is visible below.
      const uint32_t seen = posted_.load(std::memory_order_acquire);
      if (is_stopping_.load(std::memory_order_relaxed)) {
        return;
      }
      if (Loop* loop = Join()) {
        loop->Work();
        Leave(*loop);
        continue;
      }
      spinning_.fetch_add(1, std::memory_order_relaxed);
      const bool is_posted =
          SpinUntil(spin_, [&] { return posted_.load(std::memory_order_acquire) != seen; });
      spinning_.fetch_sub(1, std::memory_order_relaxed);
      if (!is_posted) {
        posted_.wait(seen, std::memory_order_acquire);
      }
    }
  }

  // The open loop with the fewest helpers, so that callers at the same time share them.
  Loop* Join() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    Loop* best = nullptr;
    for (Loop* loop : open_) {
      if (loop->HasWork() && (best == nullptr || loop->helpers < best->helpers)) {
        best = loop;
      }
    }
    if (best != nullptr) {
      best->helpers.fetch_add(1, std::memory_order_relaxed);
    }
    return best;
  }

  // The release hands this helper's writes to the caller.
  static void Leave(Loop& loop) {
    if (loop.helpers.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      loop.helpers.notify_one();
    }
  }

  const SpinClock::duration spin_;

  absl::Mutex mu_;
  std::vector<std::unique_ptr<Loop>> loops_ ABSL_GUARDED_BY(mu_);
  std::vector<Loop*> open_ ABSL_GUARDED_BY(mu_);   // May be joined.
  std::vector<Loop*> spare_ ABSL_GUARDED_BY(mu_);  // Belong to no call.

  // Synchronised by themselves.
  std::atomic<uint32_t> posted_ = 0;  // Counts loops opened; helpers sleep on it.
  std::atomic<int> spinning_ = 0;     // Helpers awake and looking at `posted_`.
  std::atomic<bool> is_stopping_ = false;

  std::vector<std::jthread> helpers_;  // Last: they use everything above.
};

ParallelFor::ParallelFor(int threads) : threads_(threads) {
  EBBTIDE_CHECK(threads >= 1, "a loop needs at least the caller's thread");
  if (threads > 1) {
    pool_ = std::make_unique<Pool>(threads - 1);
  }
}

ParallelFor::~ParallelFor() = default;

void ParallelFor::Run(int count, const std::function<void(int)>& fn) {
  if (pool_ != nullptr && count > 1 && !t_is_inside_run) {
    pool_->Run(count, fn);
    return;
  }
  for (int i = 0; i < count; ++i) {
    fn(i);
  }
}

}  // namespace ebbtide
