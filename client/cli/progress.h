// SPDX-License-Identifier: Apache-2.0
//
// How far something long has come, on stderr: one line rewritten on a terminal, a line every few
// seconds elsewhere, nothing at all for what takes less than a second.

#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/time/time.h"

#include "base/clock.h"

namespace ebbtide::cli {

// Thread-compatible.
class Progress {
 public:
  // Writes to `stream`, whose owner outlives this.
  Progress(std::string what, uint64_t total, std::FILE* stream, bool is_terminal, Clock& clock);
  ~Progress();  // Wipes the line it wrote on a terminal.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(uint64_t done);

 private:
  const std::string what_;
  const uint64_t total_;
  std::FILE* const stream_;
  const bool is_terminal_;
  Clock& clock_;
  const absl::Duration start_;
  absl::Duration next_;
  size_t written_width_ = 0;
};

}  // namespace ebbtide::cli
