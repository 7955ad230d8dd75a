// SPDX-License-Identifier: Apache-2.0
//
// Tells the thread sanitizer what Debian's uninstrumented Abseil does (and RocksDB, at the end).
// The linker (--wrap, see cmake/sanitizers.cmake, which reads the first argument of each WRAP line)
// sends our calls of absl::Mutex and its kin here; each one announces itself and passes the call
// on.

#include <sanitizer/tsan_interface.h>

#include <atomic>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace {

using absl::BlockingCounter;
using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Notification;
using absl::Time;

constexpr unsigned kReader = __tsan_mutex_read_lock;
constexpr unsigned kFailed = __tsan_mutex_try_lock_failed;

// The lock is taken while this lives.
class Locking {
 public:
  Locking(Mutex* mu, unsigned flags) : mu_(mu), flags_(flags) {
    __tsan_mutex_pre_lock(mu_, flags_);
  }
  ~Locking() { __tsan_mutex_post_lock(mu_, flags_, 0); }
  void Fail() { flags_ |= kFailed; }

 private:
  Mutex* mu_;
  unsigned flags_;
};

// The lock is given back while this lives.
class Unlocking {
 public:
  Unlocking(Mutex* mu, unsigned flags) : mu_(mu), flags_(flags) {
    __tsan_mutex_pre_unlock(mu_, flags_);
  }
  ~Unlocking() { __tsan_mutex_post_unlock(mu_, flags_); }

 private:
  Mutex* mu_;
  unsigned flags_;
};

// The lock is given back and taken again, somewhere within the call that follows.
void Announce(Mutex* mu) {
  __tsan_mutex_pre_unlock(mu, 0);
  __tsan_mutex_post_unlock(mu, 0);
}

}  // namespace

// Declares the real function and opens the wrapper's definition.
#define WRAP(symbol, result, ...)                 \
  extern "C" result __real_##symbol(__VA_ARGS__); \
  extern "C" result __wrap_##symbol(__VA_ARGS__)

WRAP(_ZN4absl7debian35Mutex4LockEv, void, Mutex* mu) {
  const Locking locking(mu, 0);
  __real__ZN4absl7debian35Mutex4LockEv(mu);
}
WRAP(_ZN4absl7debian35Mutex6UnlockEv, void, Mutex* mu) {
  const Unlocking unlocking(mu, 0);
  __real__ZN4absl7debian35Mutex6UnlockEv(mu);
}
WRAP(_ZN4absl7debian35Mutex10ReaderLockEv, void, Mutex* mu) {
  const Locking locking(mu, kReader);
  __real__ZN4absl7debian35Mutex10ReaderLockEv(mu);
}
WRAP(_ZN4absl7debian35Mutex12ReaderUnlockEv, void, Mutex* mu) {
  const Unlocking unlocking(mu, kReader);
  __real__ZN4absl7debian35Mutex12ReaderUnlockEv(mu);
}
WRAP(_ZN4absl7debian35Mutex7TryLockEv, bool, Mutex* mu) {
  Locking locking(mu, __tsan_mutex_try_lock);
  const bool is_taken = __real__ZN4absl7debian35Mutex7TryLockEv(mu);
  if (!is_taken) {
    locking.Fail();
  }
  return is_taken;
}
WRAP(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE, void, Mutex* mu,
     const Condition& condition) {
  const Locking locking(mu, 0);
  __real__ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE(mu, condition);
}
WRAP(_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE, bool, Mutex* mu,
     const Condition& condition, Duration timeout) {
  const Locking locking(mu, 0);
  return __real__ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE(
      mu, condition, timeout);
}
WRAP(_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE, bool, Mutex* mu,
     const Condition& condition, Time deadline) {
  const Locking locking(mu, 0);
  return __real__ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE(
      mu, condition, deadline);
}
WRAP(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE, void, Mutex* mu, const Condition& condition) {
  Announce(mu);
  const Locking locking(mu, 0);
  __real__ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE(mu, condition);
}
WRAP(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE, bool, Mutex* mu,
     const Condition& condition, Duration timeout) {
  Announce(mu);
  const Locking locking(mu, 0);
  return __real__ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE(
      mu, condition, timeout);
}
WRAP(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE, bool, Mutex* mu,
     const Condition& condition, Time deadline) {
  Announce(mu);
  const Locking locking(mu, 0);
  return __real__ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE(mu, condition,
                                                                                      deadline);
}

WRAP(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE, void, CondVar* var, Mutex* mu) {
  Announce(mu);
  const Locking locking(mu, 0);
  __real__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(var, mu);
}
WRAP(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE, bool, CondVar* var,
     Mutex* mu, Duration timeout) {
  Announce(mu);
  const Locking locking(mu, 0);
  return __real__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(var, mu,
                                                                                     timeout);
}
WRAP(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE, bool, CondVar* var,
     Mutex* mu, Time deadline) {
  Announce(mu);
  const Locking locking(mu, 0);
  return __real__ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE(var, mu,
                                                                                  deadline);
}

WRAP(_ZN4absl7debian312Notification6NotifyEv, void, Notification* notification) {
  __tsan_release(notification);
  __real__ZN4absl7debian312Notification6NotifyEv(notification);
}
// Only the flag's address comes in; the mutex before it begins the object.
WRAP(_ZN4absl7debian312Notification23HasBeenNotifiedInternalEPKSt6atomicIbE, bool,
     const std::atomic<bool>* flag) {
  const bool is_notified =
      __real__ZN4absl7debian312Notification23HasBeenNotifiedInternalEPKSt6atomicIbE(flag);
  if (is_notified) {
    const char* member = static_cast<const char*>(static_cast<const void*>(flag));
    __tsan_acquire(const_cast<char*>(member - sizeof(Mutex)));
  }
  return is_notified;
}
WRAP(_ZNK4absl7debian312Notification19WaitForNotificationEv, void, Notification* notification) {
  __real__ZNK4absl7debian312Notification19WaitForNotificationEv(notification);
  __tsan_acquire(notification);
}
WRAP(_ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE, bool,
     Notification* notification, Duration timeout) {
  const bool is_notified =
      __real__ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE(
          notification, timeout);
  __tsan_acquire(notification);
  return is_notified;
}
WRAP(_ZNK4absl7debian312Notification31WaitForNotificationWithDeadlineENS0_4TimeE, bool,
     Notification* notification, Time deadline) {
  const bool is_notified =
      __real__ZNK4absl7debian312Notification31WaitForNotificationWithDeadlineENS0_4TimeE(
          notification, deadline);
  __tsan_acquire(notification);
  return is_notified;
}

WRAP(_ZN4absl7debian315BlockingCounter14DecrementCountEv, bool, BlockingCounter* counter) {
  __tsan_release(counter);
  return __real__ZN4absl7debian315BlockingCounter14DecrementCountEv(counter);
}
WRAP(_ZN4absl7debian315BlockingCounter4WaitEv, void, BlockingCounter* counter) {
  __real__ZN4absl7debian315BlockingCounter4WaitEv(counter);
  __tsan_acquire(counter);
}

// Debian's RocksDB is not instrumented either: its memory is seen, the order that its atomics give
// is not. What happens inside is its own matter; our locks around it stay watched.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:rocksdb::*\nrace:librocksdb.so*\n";
}
