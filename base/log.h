// SPDX-License-Identifier: Apache-2.0
//
// The daemon's log: one line per event, to standard error. Text where a person watches, JSON lines
// otherwise. It knows no metrics; what happens often is counted there and logged once. Nobody waits
// for whoever reads it (background_writer.h).

#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ebbtide {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarn, kError };

enum class LogForm : uint8_t { kText, kJson };

// "debug", "info", "warn", "error".
std::string_view LogLevelName(LogLevel level);
//   kInvalidArgument  any other word
absl::StatusOr<LogLevel> ParseLogLevel(std::string_view text);

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogForm form = LogForm::kText;
  int fd = 2;  // Standard error. Stays open as long as the process logs.
};

// Text at `level` on a terminal, JSON lines anywhere else.
LogOptions LogOptionsFor(LogLevel level, int fd);

// Thread-safe. Before the first call the log is text at kInfo on standard error.
void SetUpLog(const LogOptions& options);

// Waits until every line so far is written or dropped, at most `patience`; returns whether it is.
// For those who end the process, which takes what is not written with it.
bool FlushLog(absl::Duration patience);

// One named value of an event. Numbers stay numbers in JSON.
class LogField {
 public:
  LogField(std::string_view name, std::string_view value);
  LogField(std::string_view name, const char* value) : LogField(name, std::string_view(value)) {}
  LogField(std::string_view name, const std::string& value)
      : LogField(name, std::string_view(value)) {}
  LogField(std::string_view name, bool value);
  LogField(std::string_view name, double value);
  template <std::integral Integer>
  LogField(std::string_view name, Integer value)
      : LogField(name, std::to_string(value), Literal{}) {}

  const std::string& name() const { return name_; }
  const std::string& text() const { return text_; }
  bool is_literal() const { return is_literal_; }  // A number or truth value: no quotes in JSON.

 private:
  struct Literal {};
  LogField(std::string_view name, std::string text, Literal)
      : name_(name), text_(std::move(text)), is_literal_(true) {}

  std::string name_;
  std::string text_;
  bool is_literal_ = false;
};

// Writes one line; returns at once where `level` is below the log's. Thread-safe. Never under a
// lock. A line that finds 1 MiB waiting to be written is dropped, and the log says how many were.
//   Log(LogLevel::kWarn, "tier is degraded", {{"tier", "rocksdb"}, {"free_bytes", free_bytes}});
void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

}  // namespace ebbtide
