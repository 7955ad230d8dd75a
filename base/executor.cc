// SPDX-License-Identifier: Apache-2.0
//
// Threads over one bounded queue: the executor of the daemon.

#include "base/executor.h"

#include <pthread.h>
#include <unistd.h>

#include <deque>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/background_writer.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace ebbtide {
namespace {

void NameThisThread(const std::string& name) {
  // Linux keeps 15 characters and refuses longer names.
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

struct Job {
  std::string name;
  std::function<void()> run;
  explicit operator bool() const { return run != nullptr; }
};

class ThreadExecutor final : public Executor {
 public:
  ThreadExecutor(std::string_view name, int threads, size_t queue_limit)
      : name_(name), queue_limit_(queue_limit) {
    threads_.reserve(static_cast<size_t>(threads));
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this] { Work(); });
    }
  }

  ~ThreadExecutor() override {
    {
      absl::MutexLock lock(&mu_);
      is_stopping_ = true;
      work_.SignalAll();
    }
    threads_.clear();  // Joins; the waiting jobs are dropped with the queue.
  }

  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  absl::Status Submit(std::string_view name, std::function<void()> job) override
      ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (queue_.size() >= queue_limit_) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "executor %s: queue is full with %d of %d jobs; %s was refused, retry later", name_,
          queue_.size(), queue_limit_, std::string(name)));
    }
    queue_.push_back({.name = std::string(name), .run = std::move(job)});
    work_.Signal();
    return absl::OkStatus();
  }

 private:
  void Work() ABSL_LOCKS_EXCLUDED(mu_) {
    NameThisThread(name_);
    while (const Job job = NextJob()) {
      try {
        job.run();
      } catch (const std::exception& error) {
        LogEnd(job.name, error.what());
      } catch (...) {
        LogEnd(job.name, "of an unknown kind");
      }
    }
  }

  // As far as there is memory for it.
  void LogEnd(const std::string& job, const char* what) const noexcept {
    try {
      Log(LogLevel::kError, "a job ended in an exception",
          {{"executor", name_}, {"job", job}, {"what", what}});
    } catch (...) {
      WriteWithin(STDERR_FILENO,
                  "a job ended in an exception, and there is no memory to say which\n",
                  absl::ZeroDuration());
    }
  }

  // Waits for a job; none at the end.
  Job NextJob() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    while (queue_.empty() && !is_stopping_) {
      work_.Wait(&mu_);
    }
    if (is_stopping_) {
      return {};
    }
    Job job = std::move(queue_.front());
    queue_.pop_front();
    return job;
  }

  // Fixed after construction.
  const std::string name_;
  const size_t queue_limit_;

  absl::Mutex mu_;
  absl::CondVar work_;
  std::deque<Job> queue_ ABSL_GUARDED_BY(mu_);
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;

  std::vector<std::jthread> threads_;  // Last: they use everything above.
};

}  // namespace

std::unique_ptr<Executor> MakeThreadExecutor(std::string_view name, int threads,
                                             size_t queue_limit) {
  EBBTIDE_CHECK(threads >= 1, "an executor needs a thread");
  EBBTIDE_CHECK(queue_limit >= 1, "an executor needs room for a job");
  return std::make_unique<ThreadExecutor>(name, threads, queue_limit);
}

}  // namespace ebbtide
