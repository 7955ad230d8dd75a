// SPDX-License-Identifier: Apache-2.0

#include "base/background_writer.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace ebbtide {
namespace {

constexpr size_t kBytesWaitingMax = size_t{1} << 20;
constexpr absl::Duration kEndWithin = absl::Seconds(1);

uint64_t LinesIn(std::string_view text) {
  return static_cast<uint64_t>(std::ranges::count(text, '\n'));
}

// Whether `fd` takes at least PIPE_BUF bytes at once within so many milliseconds; -1 is for ever.
bool IsReady(int fd, int patience_ms) {
  pollfd ready = {.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&ready, 1, patience_ms) == 1;
}

// Waits as long as it takes; returns what an error left unwritten.
std::string_view WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN) {  // Somebody else who has the file wants that.
      IsReady(fd, -1);
    } else if (errno != EINTR) {
      break;
    }
  }
  return text;
}

}  // namespace

struct BackgroundWriter::State {
  State(int file, SayDropped say) : fd(file), say_dropped(std::move(say)) {}

  void Run();
  uint64_t WriteBatch(std::string_view lines, uint64_t dropped_after);
  std::string_view WriteLines(std::string_view lines);

  const int fd;
  const SayDropped say_dropped;
  bool is_within_line = false;  // Of the thread: what the file took last has no end.
  absl::Mutex mu;
  std::string waiting ABSL_GUARDED_BY(mu);
  uint64_t dropped ABSL_GUARDED_BY(mu) = 0;  // After what waits.
  bool is_writing ABSL_GUARDED_BY(mu) = false;
  bool is_closing ABSL_GUARDED_BY(mu) = false;
  bool is_over ABSL_GUARDED_BY(mu) = false;
};

void BackgroundWriter::State::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return !waiting.empty() || is_closing;
  };
  std::string batch;
  while (true) {
    uint64_t dropped_after = 0;
    {
      const absl::MutexLock lock(&mu, absl::Condition(&has_work));
      if (waiting.empty()) {
        is_over = true;
        return;
      }
      batch.clear();
      batch.swap(waiting);
      dropped_after = std::exchange(dropped, 0);
      is_writing = true;
    }
    const uint64_t lost = WriteBatch(batch, dropped_after);
    const absl::MutexLock lock(&mu);
    dropped += lost;
    is_writing = false;
  }
}

// Returns how many lines are still to be told of.
uint64_t BackgroundWriter::State::WriteBatch(std::string_view lines, uint64_t dropped_after) {
  const std::string_view left = WriteLines(lines);
  const uint64_t lost = LinesIn(left) + dropped_after;
  if (dropped_after == 0 || !left.empty()) return lost;
  try {
    return WriteLines(say_dropped(dropped_after)).empty() ? 0 : lost;
  } catch (const std::exception&) {
    return lost;  // There is no memory for it now.
  }
}

// Ends what an error broke off before it goes on; returns what is left unwritten, as WriteAll.
std::string_view BackgroundWriter::State::WriteLines(std::string_view lines) {
  if (is_within_line && !WriteAll(fd, "\n").empty()) return lines;
  const std::string_view left = WriteAll(fd, lines);
  const std::string_view taken = lines.substr(0, lines.size() - left.size());
  is_within_line = !taken.empty() && !taken.ends_with('\n');
  return left;
}

BackgroundWriter::BackgroundWriter(int fd, SayDropped say_dropped)
    : state_(std::make_shared<State>(fd, std::move(say_dropped))),
      thread_([state = state_] { state->Run(); }) {}

BackgroundWriter::~BackgroundWriter() {
  bool is_over = false;
  {
    const absl::MutexLock lock(&state_->mu);
    state_->is_closing = true;
    is_over = state_->mu.AwaitWithTimeout(absl::Condition(&state_->is_over), kEndWithin);
  }
  if (is_over) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void BackgroundWriter::Write(std::string_view lines) noexcept {
  const absl::MutexLock lock(&state_->mu);
  try {
    if (lines.size() <= kBytesWaitingMax - std::min(kBytesWaitingMax, state_->waiting.size())) {
      state_->waiting.append(lines);
      return;
    }
  } catch (const std::exception&) {
  }
  state_->dropped += LinesIn(lines);
}

bool BackgroundWriter::Flush(absl::Duration patience) {
  const auto is_written = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return state_->waiting.empty() && !state_->is_writing;
  };
  const absl::MutexLock lock(&state_->mu);
  return state_->mu.AwaitWithTimeout(absl::Condition(&is_written), patience);
}

void WriteWithin(int fd, std::string_view text, absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (!text.empty()) {
    const absl::Duration left = std::max(end - absl::Now(), absl::ZeroDuration());
    if (!IsReady(fd, static_cast<int>(absl::ToInt64Milliseconds(left)))) return;
    const ssize_t count = ::write(fd, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace ebbtide
