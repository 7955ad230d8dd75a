// SPDX-License-Identifier: Apache-2.0
//
// A fiber: a stack of its own that the thread switches to and from (ucontext), announced to the
// address and the thread sanitizer. A switch orders nothing for the thread sanitizer: what orders
// CUDA threads is said where they synchronise (machine.cc).
// Tested by tests/cuemu/cuemu_test.cc.

#pragma once

#include <ucontext.h>

#include <cstddef>

namespace cuemu {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes this the fiber that the calling thread runs on now.
  void Adopt();

  // Gives it a stack, on which `entry` starts at the first switch to it. `entry` never returns, and
  // calls Arrived first. Fibers and their stacks live as long as the process.
  void Start(void (*entry)());
  bool has_started() const { return stack_ != nullptr; }

  void SwitchTo(Fiber& next);

  // What `entry` calls on a stack that has just been switched to for the first time.
  static void Arrived();

 private:
  ucontext_t context_ = {};
  void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  [[maybe_unused]] void* sanitizer_ =
      nullptr;  // TSan: its name of the fiber. ASan: the fiber's fake stack.
};

}  // namespace cuemu
