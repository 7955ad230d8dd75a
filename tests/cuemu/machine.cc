// SPDX-License-Identifier: Apache-2.0
//
// The blocks, their fibers and their meetings. Compiled without -fsanitize=thread: what a GPU
// orders is told to the thread sanitizer here, so that it finds the barriers that kernels lack.
// For the same reason nothing here is shared with instrumented files: no containers, no memcpy.

#include "tests/cuemu/machine.h"

#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/cuemu/fiber.h"

#if defined(CUEMU_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace cuemu {
namespace {

void Release([[maybe_unused]] void* what) {
#if defined(CUEMU_TSAN)
  __tsan_release(what);
#endif
}
void Acquire([[maybe_unused]] void* what) {
#if defined(CUEMU_TSAN)
  __tsan_acquire(what);
#endif
}

enum class State { kDone, kReady, kAtBarrier, kInWarp };

struct Thread {
  Fiber fiber;
  Coordinates at{};
  State state = State::kDone;
  Meeting meeting;
  alignas(16) std::byte in[kValueBytes] = {};
  alignas(16) std::byte out[kValueBytes] = {};
  int predicates = 0;  // Of the barrier it has passed.
};

struct Warp {
  unsigned alive = 0;    // Lanes that have not returned.
  unsigned waiting = 0;  // Lanes in a meeting.
  char order = 0;        // Its address is what __syncwarp orders by.
};

class Machine {
 public:
  constexpr Machine() = default;

  void Run(dim3 grid, dim3 block, const std::function<void()>& thread);
  void set_seed(uint32_t seed) { random_ = seed; }

  const Coordinates& here() const { return threads_[current_].at; }
  int lane() const { return current_ % kWarpLanes; }
  void MeetWarp(const Meeting& meeting, const void* in, size_t in_bytes, void* out,
                size_t out_bytes);
  int MeetBlock(bool predicate, const Place& place);
  [[noreturn]] void Fail(const char* what, const Place& place) const;

 private:
  static void Entry();
  std::unique_ptr<uint64_t[]> OrderOf(uint64_t blocks);
  void RunBlock(uint3 block, dim3 block_dim, dim3 grid_dim);
  void Queue(int thread) { ready_[(first_ready_ + ready_count_++) % kBlockThreadsMax] = thread; }
  int TakeReady();
  uint32_t Draw(uint32_t below);
  void RunNext();
  void Wake(int thread);
  void OpenBarrierIfAllWait();
  bool FinishMeetingOf(int thread);
  void Returned();
  [[noreturn]] void Deadlock() const;

  Thread threads_[kBlockThreadsMax];
  Warp warps_[kBlockThreadsMax / kWarpLanes];
  Fiber host_;
  int ready_[kBlockThreadsMax] = {};  // A ring.
  int first_ready_ = 0;
  int ready_count_ = 0;
  int current_ = 0;  // The thread that runs.
  int block_threads_ = 0;
  int live_ = 0;
  int at_barrier_ = 0;
  int predicates_ = 0;
  Place barrier_;
  char barrier_order_[2] = {};  // Their addresses are what barriers order by, in turns.
  int barrier_turn_ = 0;
  const std::function<void()>* body_ = nullptr;
  char started_ = 0;     // Addresses that order the host before a block's threads,
  char returned_ = 0;    // and those before the host; never one thread before another.
  uint32_t random_ = 0;  // 0: everything in order.
};

Machine& TheMachine() {
  static Machine* const machine = [] {
    auto* const made = new Machine;
    const char* const seed = std::getenv("CUEMU_SEED");
    if (seed != nullptr) made->set_seed(static_cast<uint32_t>(std::strtoul(seed, nullptr, 10)));
    return made;
  }();
  return *machine;
}

void CopyBytes(void* to, const void* from, size_t bytes) {
  auto* const target = static_cast<volatile std::byte*>(to);
  const auto* const source = static_cast<const volatile std::byte*>(from);
  for (size_t i = 0; i < bytes; ++i) target[i] = source[i];
}

// xorshift32 (Marsaglia, 2003).
uint32_t Machine::Draw(uint32_t below) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 17;
  random_ ^= random_ << 5;
  return random_ % below;
}

void Machine::Run(dim3 grid, dim3 block, const std::function<void()>& thread) {
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const uint64_t block_threads = uint64_t{block.x} * block.y * block.z;
  current_ = 0;
  if (block_threads == 0 || block_threads > kBlockThreadsMax || blocks == 0) {
    Fail("a launch of no blocks, or of blocks that have not 1 to 1024 threads", {});
  }
  block_threads_ = static_cast<int>(block_threads);
  body_ = &thread;
  host_.Adopt();
  for (int i = 0; i < block_threads_; ++i) {
    if (!threads_[i].fiber.has_started()) threads_[i].fiber.Start(&Machine::Entry);
  }
  const std::unique_ptr<uint64_t[]> order = OrderOf(blocks);
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t index = order[i];
    const auto x = static_cast<unsigned>(index % grid.x);
    const auto y = static_cast<unsigned>(index / grid.x % grid.y);
    const auto z = static_cast<unsigned>(index / (uint64_t{grid.x} * grid.y));
    RunBlock({x, y, z}, block, grid);
  }
}

// In the order of their numbers, or shuffled (Fisher and Yates).
std::unique_ptr<uint64_t[]> Machine::OrderOf(uint64_t blocks) {
  std::unique_ptr<uint64_t[]> order(new uint64_t[blocks]);
  for (uint64_t i = 0; i < blocks; ++i) {
    order[i] = i;
    if (random_ == 0) continue;
    const uint64_t other = Draw(static_cast<uint32_t>(i + 1));
    order[i] = order[other];
    order[other] = i;
  }
  return order;
}

void Machine::RunBlock(uint3 block, dim3 block_dim, dim3 grid_dim) {
  for (Warp& warp : warps_) warp.alive = warp.waiting = 0;
  live_ = block_threads_;
  for (int i = 0; i < block_threads_; ++i) {
    Thread& thread = threads_[i];
    const auto number = static_cast<unsigned>(i);
    thread.at.thread = {number % block_dim.x, number / block_dim.x % block_dim.y,
                        number / (block_dim.x * block_dim.y)};
    thread.at.block = block;
    thread.at.block_dim = block_dim;
    thread.at.grid_dim = grid_dim;
    thread.state = State::kReady;
    warps_[i / kWarpLanes].alive |= 1U << (i % kWarpLanes);
    Queue(i);
  }
  Release(&started_);
  current_ = TakeReady();
  host_.SwitchTo(threads_[current_].fiber);
  Acquire(&returned_);
}

void Machine::Entry() {
  Fiber::Arrived();
  Machine& machine = TheMachine();
  for (;;) {
    Acquire(&machine.started_);
    (*machine.body_)();  // NOLINT(clang-analyzer-core.CallAndMessage): Run has set it.
    Release(&machine.returned_);
    machine.Returned();
  }
}

int Machine::TakeReady() {
  int& first = ready_[first_ready_];
  if (random_ != 0) {
    const auto other = Draw(static_cast<uint32_t>(ready_count_));
    int& drawn = ready_[(static_cast<uint32_t>(first_ready_) + other) % kBlockThreadsMax];
    const int thread = first;
    first = drawn;
    drawn = thread;
  }
  --ready_count_;
  first_ready_ = (first_ready_ + 1) % kBlockThreadsMax;
  return first;
}

// Leaves the thread that runs for one that can, or for the host where the block is done.
void Machine::RunNext() {
  Thread& from = threads_[current_];
  if (ready_count_ == 0) {
    if (live_ > 0) Deadlock();
    from.fiber.SwitchTo(host_);
    return;
  }
  const int next = TakeReady();
  if (next == current_) return;
  current_ = next;
  from.fiber.SwitchTo(threads_[next].fiber);
}

void Machine::Wake(int thread) {
  threads_[thread].state = State::kReady;
  if (thread != current_) Queue(thread);
}

void Machine::OpenBarrierIfAllWait() {
  if (at_barrier_ == 0 || at_barrier_ != live_) return;
  for (int i = 0; i < block_threads_; ++i) {
    if (threads_[i].state != State::kAtBarrier) continue;
    threads_[i].predicates = predicates_;
    Wake(i);
  }
  at_barrier_ = 0;
  predicates_ = 0;
  barrier_turn_ ^= 1;
}

int Machine::MeetBlock(bool predicate, const Place& place) {
  Thread& me = threads_[current_];
  me.state = State::kAtBarrier;
  me.meeting.place = place;
  if (at_barrier_ > 0 && barrier_ != place) {
    Fail("threads of a block wait at different barriers", place);
  }
  barrier_ = place;
  ++at_barrier_;
  predicates_ += predicate ? 1 : 0;
  char* const order = &barrier_order_[barrier_turn_];
  Release(order);
  OpenBarrierIfAllWait();
  if (me.state == State::kAtBarrier) RunNext();
  Acquire(order);
  return me.predicates;
}

// Whether everybody of the thread's mask was there, and has what they came for.
bool Machine::FinishMeetingOf(int thread) {
  Warp& warp = warps_[thread / kWarpLanes];
  const unsigned lanes = threads_[thread].meeting.mask & warp.alive;
  if ((warp.waiting & lanes) != lanes) return false;
  const int first_thread = thread / kWarpLanes * kWarpLanes;
  Thread* const first = &threads_[first_thread];
  const Meeting& meeting = threads_[thread].meeting;
  const void* in[kWarpLanes] = {};
  void* out[kWarpLanes] = {};
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (first[l].meeting.mask != meeting.mask) return false;
    if (first[l].meeting.place != meeting.place) {
      Fail("lanes of one mask meet in different collectives", meeting.place);
    }
    in[l] = first[l].in;
    out[l] = first[l].out;
  }
  if (meeting.combine != nullptr) meeting.combine(lanes, in, out);
  warp.waiting &= ~lanes;
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    Wake(first_thread + std::countr_zero(left));
  }
  return true;
}

void Machine::MeetWarp(const Meeting& meeting, const void* in, size_t in_bytes, void* out,
                       size_t out_bytes) {
  Thread& me = threads_[current_];
  if ((meeting.mask >> lane() & 1U) == 0) {
    Fail("a lane calls a collective whose mask leaves it out", meeting.place);
  }
  CopyBytes(me.in, in, in_bytes);
  me.state = State::kInWarp;
  me.meeting = meeting;
  Warp& warp = warps_[current_ / kWarpLanes];
  warp.waiting |= 1U << lane();
  if (meeting.orders_memory) Release(&warp.order);
  if (!FinishMeetingOf(current_)) RunNext();
  if (meeting.orders_memory) Acquire(&warp.order);
  CopyBytes(out, me.out, out_bytes);
}

// The thread that runs has come to its end: others may have waited for it alone.
void Machine::Returned() {
  threads_[current_].state = State::kDone;
  --live_;
  warps_[current_ / kWarpLanes].alive &= ~(1U << lane());
  OpenBarrierIfAllWait();
  const int first = current_ / kWarpLanes * kWarpLanes;
  for (int i = first; i < first + kWarpLanes && i < block_threads_; ++i) {
    if (threads_[i].state == State::kInWarp) FinishMeetingOf(i);
  }
  RunNext();
}

void Machine::Deadlock() const {
  const uint3 block = here().block;
  std::fprintf(stderr, "cuemu: deadlock in block %u,%u,%u\n", block.x, block.y, block.z);
  for (int i = 0; i < block_threads_; ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == State::kDone) continue;
    std::fprintf(stderr, "  thread %d waits at %s:%d (%s)\n", i, thread.meeting.place.file,
                 thread.meeting.place.line, thread.state == State::kAtBarrier ? "barrier" : "warp");
  }
  std::abort();
}

void Machine::Fail(const char* what, const Place& place) const {
  const Coordinates& c = here();
  std::fprintf(stderr, "cuemu: %s: block %u,%u,%u thread %u,%u,%u at %s:%d\n", what, c.block.x,
               c.block.y, c.block.z, c.thread.x, c.thread.y, c.thread.z, place.file, place.line);
  std::abort();
}

}  // namespace

const Coordinates& Here() {
  return TheMachine().here();
}
int Lane() {
  return TheMachine().lane();
}
void Fail(const char* what, const Place& place) {
  TheMachine().Fail(what, place);
}
void MeetWarp(const Meeting& meeting, const void* in, size_t in_bytes, void* out,
              size_t out_bytes) {
  TheMachine().MeetWarp(meeting, in, in_bytes, out, out_bytes);
}
int MeetBlock(bool predicate, const Place& place) {
  return TheMachine().MeetBlock(predicate, place);
}
namespace {
std::atomic<uint64_t> grids_run = 0;
}  // namespace

void RunGrid(dim3 grid, dim3 block, const std::function<void()>& thread) {
  ++grids_run;
  TheMachine().Run(grid, block, thread);
}
uint64_t GridsRun() {
  return grids_run;
}
void SetSeed(uint32_t seed) {
  TheMachine().set_seed(seed);
}

}  // namespace cuemu
