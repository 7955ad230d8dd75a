// SPDX-License-Identifier: Apache-2.0
//
// Ctrl-C as an answer instead of an end: what runs long is told to stop, and leaves in order.
// Contract: tests/unit/client/interrupt_test.cc.

#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"

namespace ebbtide::cli {

// From now on the first SIGINT, SIGTERM or SIGHUP asks for a stop, and so does that nobody reads
// standard output any more. Another signal within half a second is the same one; a later one ends
// the program as usual.
std::stop_token CatchInterrupts();

// While it lives, a signal that ends the program says `words` on standard error first. One at a
// time.
class LastWords {
 public:
  explicit LastWords(const std::string& words);
  ~LastWords();
  LastWords(const LastWords&) = delete;
  LastWords& operator=(const LastWords&) = delete;

 private:
  std::unique_ptr<const std::string> words_;
};

// kCancelled once one came, or where nobody reads; says which.
absl::Status CheckInterrupted();

}  // namespace ebbtide::cli
