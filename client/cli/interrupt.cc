// SPDX-License-Identifier: Apache-2.0
//
// A handler may do next to nothing: it notes the time and wakes a thread, which asks for the stop.

#include "client/cli/interrupt.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <thread>

namespace ebbtide::cli {
namespace {

constexpr std::array kInterrupts = {SIGINT, SIGTERM, SIGHUP};

// Who means one end may signal it twice: `timeout` tells its child and then their group, and of a
// terminal that closes both the kernel and the shell tell. Nobody presses Ctrl-C twice so fast.
constexpr int64_t kOneEndNs = 500'000'000;

std::atomic<int64_t> g_first_ns = 0;                     // When the first came; 0: none has.
std::atomic<const std::string*> g_last_words = nullptr;  // Whoever takes them keeps them.
static_assert(std::atomic<int64_t>::is_always_lock_free &&
                  std::atomic<const std::string*>::is_always_lock_free,
              "a handler may touch no other");
int g_wake = -1;

// What base/clock.h tells, in a call that a handler may make.
int64_t NowNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Note(int signal) {
  const int error = errno;
  const int64_t now = NowNs();
  int64_t first = 0;
  if (g_first_ns.compare_exchange_strong(first, now)) {
    const uint64_t one = 1;
    static_cast<void>(!write(g_wake, &one, sizeof(one)));
  } else if (now - first >= kOneEndNs) {
    if (const std::string* words = g_last_words.exchange(nullptr); words != nullptr) {
      static_cast<void>(!write(STDERR_FILENO, words->data(), words->size()));
    }
    struct sigaction action = {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
    raise(signal);  // Held back until this returns; then it ends the program.
  }
  errno = error;
}

// A pipe has an error without readers, a terminal or a socket a hang-up.
bool IsUnread(const pollfd& output) {
  return (output.revents & (POLLERR | POLLHUP)) != 0;
}

// Lives as long as the process: a signal may come at any time, and a reader go.
void AwaitWakes(std::stop_source& stop) {
  g_wake = eventfd(0, EFD_CLOEXEC);
  std::thread([&stop] {
    std::array<pollfd, 2> watched = {{{.fd = g_wake, .events = POLLIN, .revents = 0},
                                      {.fd = STDOUT_FILENO, .events = 0, .revents = 0}}};
    auto& [wake, output] = watched;
    while (wake.revents == 0 && !IsUnread(output)) {
      if (output.revents != 0) output.fd = -1;  // It was closed from the start.
      poll(watched.data(), watched.size(), -1);
    }
    stop.request_stop();
  }).detach();
}

}  // namespace

std::stop_token CatchInterrupts() {
  static auto& stop = *new std::stop_source;  // The thread outlives what is static.
  AwaitWakes(stop);
  struct sigaction action = {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = [](int) {};  // What is written fails, and what watches says why.
  sigaction(SIGPIPE, &action, nullptr);
  action.sa_handler = Note;
  for (const int signal : kInterrupts) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // As under nohup.
  }
  return stop.get_token();
}

LastWords::LastWords(const std::string& words)
    : words_(std::make_unique<const std::string>(words)) {
  g_last_words = words_.get();
}

LastWords::~LastWords() {
  // A handler that took them is reading, on its way to end the program.
  if (g_last_words.exchange(nullptr) == nullptr) static_cast<void>(words_.release());
}

absl::Status CheckInterrupted() {
  if (g_first_ns != 0) return absl::CancelledError("interrupted");
  pollfd output = {.fd = STDOUT_FILENO, .events = 0, .revents = 0};
  poll(&output, 1, 0);
  if (IsUnread(output)) return absl::CancelledError("nobody reads standard output any more");
  return absl::OkStatus();
}

}  // namespace ebbtide::cli
