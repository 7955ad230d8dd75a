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
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

absl::Status CheckInterrupted() {
  return g_interrupted == 0 ? absl::OkStatus() : absl::CancelledError("interrupted");
}

}  // namespace ebbtide::cli
