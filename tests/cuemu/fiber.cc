// SPDX-License-Identifier: Apache-2.0

#include "tests/cuemu/fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define CUEMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUEMU_ASAN 1
#endif
#endif
#if defined(CUEMU_TSAN)
#include <sanitizer/tsan_interface.h>
#elif defined(CUEMU_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuemu {
namespace {

constexpr size_t kStackBytes = size_t{512} << 10;  // Virtual; pages are there once touched.
constexpr size_t kGuardBytes = 4096;

}  // namespace

void Fiber::Adopt() {
#if defined(CUEMU_TSAN)
  sanitizer_ = __tsan_get_current_fiber();
#elif defined(CUEMU_ASAN)
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack_, &stack_bytes_);
  pthread_attr_destroy(&attributes);
#endif
}

void Fiber::Start(void (*entry)()) {
  void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    std::perror("cuemu: no memory for a thread's stack");
    std::abort();
  }
  stack_ = static_cast<char*>(memory) + kGuardBytes;
  stack_bytes_ = kStackBytes - kGuardBytes;
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_bytes_;
  makecontext(&context_, entry, 0);
#if defined(CUEMU_TSAN)
  sanitizer_ = __tsan_create_fiber(0);
#endif
}

void Fiber::SwitchTo(Fiber& next) {
#if defined(CUEMU_TSAN)
  __tsan_switch_to_fiber(next.sanitizer_, __tsan_switch_to_fiber_no_sync);
#elif defined(CUEMU_ASAN)
  __sanitizer_start_switch_fiber(&sanitizer_, next.stack_, next.stack_bytes_);
#endif
  swapcontext(&context_, &next.context_);
#if !defined(CUEMU_TSAN) && defined(CUEMU_ASAN)
  __sanitizer_finish_switch_fiber(sanitizer_, nullptr, nullptr);
#endif
}

void Fiber::Arrived() {
#if !defined(CUEMU_TSAN) && defined(CUEMU_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

}  // namespace cuemu
