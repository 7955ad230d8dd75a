// SPDX-License-Identifier: Apache-2.0
//
// A handler may do next to nothing: it sets a flag and wakes a thread, which asks for the stop.

#include "client/cli/interrupt.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <thread>

namespace ebbtide::cli {
namespace {

constexpr std::array kInterrupts = {SIGINT, SIGTERM, SIGHUP};

volatile std::sig_atomic_t g_interrupted = 0;
int g_wake = -1;

// Lets the next of them, whichever it is, end the program.
void Release() {
  for (const int signal : kInterrupts) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
  }
}

void Note(int signal) {
  const int error = errno;
  g_interrupted = 1;
  if (signal != SIGPIPE) Release();
  const uint64_t one = 1;
  static_cast<void>(!write(g_wake, &one, sizeof(one)));
  errno = error;
}

// Lives as long as the process: a signal may come at any time.
void AwaitWakes(std::stop_source& stop) {
  g_wake = eventfd(0, EFD_CLOEXEC);
  if (g_wake < 0) return;
  std::thread([&stop] {
    uint64_t wakes = 0;
    while (read(g_wake, &wakes, sizeof(wakes)) < 0 && errno == EINTR) {
    }
    stop.request_stop();
  }).detach();
}

}  // namespace

std::stop_token CatchInterrupts() {
  static auto& stop = *new std::stop_source;  // The thread outlives what is static.
  AwaitWakes(stop);
  struct sigaction action = {};
  action.sa_handler = Note;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, &action, nullptr);
  for (const int signal : kInterrupts) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // As under nohup.
  }
  return stop.get_token();
}

absl::Status CheckInterrupted() {
  return g_interrupted == 0 ? absl::OkStatus() : absl::CancelledError("interrupted");
}

}  // namespace ebbtide::cli
