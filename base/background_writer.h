// SPDX-License-Identifier: Apache-2.0
//
// Text to a file that may stop taking it: a pipe that nobody reads, a disk that hangs. Whoever
// writes never waits; a thread of the writer's own does. spdlog's asynchronous logger has such a
// thread, and waits for it without limit where the logger ends.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/time/time.h"

namespace ebbtide {

// Thread-safe.
class BackgroundWriter {
 public:
  // The line that says that so many lines were dropped. Called on the writer's thread.
  using SayDropped = std::function<std::string(uint64_t lines)>;

  // `fd` outlives the process's use of it: what hangs in it may hang there after the writer's end.
  // Throws std::system_error where no thread is to be had.
  BackgroundWriter(int fd, SayDropped say_dropped);
  // Waits a second for what is not written yet.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Whole lines, in order. They are dropped where 1 MiB waits already, where there is no memory or
  // where the file refuses them, which may break one off: what is written next begins a line of its
  // own. How many were dropped is written as soon as the file takes it.
  void Write(std::string_view lines) noexcept;

  // Waits until all is written or dropped, at most `patience`; returns whether it is.
  bool Flush(absl::Duration patience);

 private:
  struct State;

  const std::shared_ptr<State> state_;  // The thread's too, which may outlive this.
  std::thread thread_;
};

// Writes `text` as far as `fd` takes it within `patience`, for those who are about to end.
void WriteWithin(int fd, std::string_view text, absl::Duration patience);

}  // namespace ebbtide
