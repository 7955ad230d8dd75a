// SPDX-License-Identifier: Apache-2.0
//
// Progress lines: rare enough to cost nothing, often enough to reassure.

#include "client/cli/progress.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

#include "client/cli/units.h"

namespace ebbtide::cli {
namespace {

constexpr absl::Duration kQuiet = absl::Seconds(1);
constexpr absl::Duration kTerminalEvery = absl::Milliseconds(100);
constexpr absl::Duration kLogEvery = absl::Seconds(5);

}  // namespace

Progress::Progress(std::string what, uint64_t total, std::FILE* stream, bool is_terminal,
                   Clock& clock)
    : what_(std::move(what)),
      total_(total),
      stream_(stream),
      is_terminal_(is_terminal),
      clock_(clock),
      start_(clock.SinceStart()),
      next_(start_ + (is_terminal ? kQuiet : kLogEvery)) {}

Progress::~Progress() {
  if (written_width_ == 0) return;
  absl::FPrintF(stream_, "\r%s\r", std::string(written_width_, ' '));
  std::fflush(stream_);
}

void Progress::Update(uint64_t done) {
  const absl::Duration now = clock_.SinceStart();
  if (now < next_) return;
  next_ = now + (is_terminal_ ? kTerminalEvery : kLogEvery);
  const uint64_t percent = total_ == 0 ? 100 : std::min<uint64_t>(100, 100 * done / total_);
  std::string line = absl::StrFormat("%s: %u %% (%s of %s, %s)", what_, percent, FormatCount(done),
                                     FormatCount(total_), FormatElapsed(now - start_));
  if (is_terminal_) {
    const size_t width = line.size();
    line.append(written_width_ > width ? written_width_ - width : 0, ' ');
    absl::FPrintF(stream_, "\r%s", line);
    written_width_ = width;
  } else {
    absl::FPrintF(stream_, "%s\n", line);
  }
  std::fflush(stream_);
}

}  // namespace ebbtide::cli
