// SPDX-License-Identifier: Apache-2.0

#include "base/log.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "base/background_writer.h"
#include "base/printable.h"

namespace ebbtide {
namespace {

struct LevelName {
  LogLevel level;
  std::string_view name;
  spdlog::level::level_enum spdlog_level;
};

constexpr std::array kLevels = {
    LevelName{LogLevel::kDebug, "debug", spdlog::level::debug},
    LevelName{LogLevel::kInfo, "info", spdlog::level::info},
    LevelName{LogLevel::kWarn, "warn", spdlog::level::warn},
    LevelName{LogLevel::kError, "error", spdlog::level::err},
};

const LevelName& NameOf(LogLevel level) {
  return kLevels[static_cast<size_t>(level)];
}

std::string JsonString(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string JsonBody(LogLevel level, std::string_view event,
                     std::initializer_list<LogField> fields) {
  std::string body =
      fmt::format(R"("level":"{}","event":{})", LogLevelName(level), JsonString(event));
  for (const LogField& field : fields) {
    body += fmt::format(",{}:{}", JsonString(field.name()),
                        field.is_literal() ? field.text() : JsonString(field.text()));
  }
  return body;
}

// One event is one line, whatever a value holds, and no terminal obeys it.
std::string TextBody(LogLevel level, std::string_view event,
                     std::initializer_list<LogField> fields) {
  std::string body = fmt::format("{:5} {}", LogLevelName(level), Printable(event));
  for (const LogField& field : fields) {
    const bool needs_quotes = field.text().empty() ||
                              field.text().find_first_of(" \"=\\") != std::string::npos ||
                              Printable(field.text()) != field.text();
    body += fmt::format(" {}={}", field.name(),
                        needs_quotes ? Printable(JsonString(field.text())) : field.text());
  }
  return body;
}

std::string Body(LogForm form, LogLevel level, std::string_view event,
                 std::initializer_list<LogField> fields) {
  return form == LogForm::kJson ? JsonBody(level, event, fields) : TextBody(level, event, fields);
}

// Bodies begin with the level: our names of levels are those of the configuration, not spdlog's.
std::unique_ptr<spdlog::formatter> MakeFormatter(LogForm form) {
  if (form == LogForm::kText) return std::make_unique<spdlog::pattern_formatter>("%H:%M:%S.%e %v");
  return std::make_unique<spdlog::pattern_formatter>(R"({"time":"%Y-%m-%dT%H:%M:%S.%fZ",%v})",
                                                     spdlog::pattern_time_type::utc);
}

std::string DroppedLine(LogForm form, uint64_t lines) {
  const std::string body =
      Body(form, LogLevel::kWarn, "log lines were dropped", {{"lines", lines}});
  spdlog::memory_buf_t line;
  MakeFormatter(form)->format({"", spdlog::level::warn, body}, line);
  return fmt::to_string(line);
}

// Whole lines to one file.
class FileSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  FileSink(int fd, LogForm form)
      : writer_(fd, [form](uint64_t lines) { return DroppedLine(form, lines); }) {}

  bool Flush(absl::Duration patience) { return writer_.Flush(patience); }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    writer_.Write({line.data(), line.size()});
  }
  void flush_() override {}  // Nothing is held back.

 private:
  BackgroundWriter writer_;
};

struct Logger {
  LogForm form = LogForm::kText;
  std::shared_ptr<FileSink> file;
  std::shared_ptr<spdlog::logger> lines;
};

std::shared_ptr<const Logger> MakeLogger(const LogOptions& options) {
  auto file = std::make_shared<FileSink>(options.fd, options.form);
  auto lines = std::make_shared<spdlog::logger>("", file);
  lines->set_level(NameOf(options.level).spdlog_level);
  lines->set_formatter(MakeFormatter(options.form));
  lines->set_error_handler([](const std::string&) {});  // spdlog's own waits for standard error.
  return std::make_shared<const Logger>(
      Logger{.form = options.form, .file = std::move(file), .lines = std::move(lines)});
}

// The logger in use, once there is one. Readers take it once per line, so that SetUpLog never pulls
// it from under one.
class Current {
 public:
  void Set(std::shared_ptr<const Logger> logger) ABSL_LOCKS_EXCLUDED(mu_) {
    const absl::MutexLock lock(&mu_);
    logger_.swap(logger);
  }
  std::shared_ptr<const Logger> Get() ABSL_LOCKS_EXCLUDED(mu_) {
    const absl::MutexLock lock(&mu_);
    return logger_;
  }
  std::shared_ptr<const Logger> GetOrMake() ABSL_LOCKS_EXCLUDED(mu_) {
    const absl::MutexLock lock(&mu_);
    if (logger_ == nullptr) logger_ = MakeLogger(LogOptions{});
    return logger_;
  }

 private:
  absl::Mutex mu_;
  std::shared_ptr<const Logger> logger_ ABSL_GUARDED_BY(mu_);
};

Current& TheLog() {
  static auto* const current = new Current;  // Never destroyed: other statics may log at the end.
  return *current;
}

}  // namespace

std::string_view LogLevelName(LogLevel level) {
  return NameOf(level).name;
}

absl::StatusOr<LogLevel> ParseLogLevel(std::string_view text) {
  for (const LevelName& level : kLevels) {
    if (level.name == text) {
      return level.level;
    }
  }
  return absl::InvalidArgumentError(
      fmt::format("log level '{}' is unknown; use debug, info, warn or error", text));
}

LogOptions LogOptionsFor(LogLevel level, int fd) {
  const bool is_watched = ::isatty(fd) == 1;
  return {.level = level, .form = is_watched ? LogForm::kText : LogForm::kJson, .fd = fd};
}

void SetUpLog(const LogOptions& options) {
  TheLog().Set(MakeLogger(options));
}

bool FlushLog(absl::Duration patience) {
  const std::shared_ptr<const Logger> logger = TheLog().Get();
  return logger == nullptr || logger->file->Flush(patience);
}

LogField::LogField(std::string_view name, std::string_view value) : name_(name), text_(value) {}

LogField::LogField(std::string_view name, bool value)
    : LogField(name, std::string(value ? "true" : "false"), Literal{}) {}

LogField::LogField(std::string_view name, double value)
    : name_(name),
      text_(fmt::format("{}", value)),
      is_literal_(std::isfinite(value)) {}  // JSON has no word for the others: they are quoted.

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  const std::shared_ptr<const Logger> logger = TheLog().GetOrMake();
  const spdlog::level::level_enum spdlog_level = NameOf(level).spdlog_level;
  if (!logger->lines->should_log(spdlog_level)) {
    return;
  }
  const std::string body = Body(logger->form, level, event, fields);
  logger->lines->log(spdlog_level, spdlog::string_view_t(body));
}

}  // namespace ebbtide
