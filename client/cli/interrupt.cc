// SPDX-License-Identifier: Apache-2.0
//
// One flag, set by the handler.

#include "client/cli/interrupt.h"

#include <csignal>

namespace ebbtide::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

void Note(int) {
  g_interrupted = 1;
}

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = Note;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, &action, nullptr);
  action.sa_flags |= static_cast<int>(SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // As under nohup.
  }
}

absl::Status CheckInterrupted() {
  return g_interrupted == 0 ? absl::OkStatus() : absl::CancelledError("interrupted");
}

}  // namespace ebbtide::cli
