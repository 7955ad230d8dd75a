// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl config check`: asks the daemon's own parser, so that there is one and not two.

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "base/printable.h"
#include "base/status_macros.h"
#include "client/cli/daemon_process.h"
#include "client/cli/json.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {
namespace {

constexpr int kExitMistakes = 2;  // The daemon's (service/main.cc).

// "FILE:LINE: MESSAGE", or "FILE: MESSAGE" of what is in no line.
Json Mistake(const std::string& file, absl::string_view text) {
  absl::ConsumePrefix(&text, Printable(file) + ":");  // As the daemon shows it.
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(": ", 1));
  uint32_t line = 0;
  if (absl::SimpleAtoi(parts.first, &line)) {
    return {{"line", line}, {"message", std::string(parts.second)}};
  }
  absl::ConsumePrefix(&text, " ");
  return {{"line", nullptr}, {"message", std::string(text)}};
}

Json Answer(const std::string& file, bool is_ok, const std::string& output) {
  Json mistakes = Json::array();
  if (!is_ok) {
    for (const absl::string_view line : absl::StrSplit(output, '\n', absl::SkipEmpty())) {
      mistakes.push_back(Mistake(file, line));
    }
  }
  return {{"file", file}, {"ok", is_ok}, {"mistakes", mistakes}};
}

}  // namespace

absl::StatusOr<bool> RunConfigCheck(const Common& common, const std::string& file) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::string daemon, FindDaemon());
  std::string output;
  EBBTIDE_ASSIGN_OR_RETURN(
      const int exit_code,
      RunToEnd({.program = daemon, .arguments = {"--config", file, "--check-config"}}, &output));
  const bool is_answer = exit_code == 0 || exit_code == kExitMistakes;
  if (common.output == Output::kJson && is_answer) {
    PrintJson(Answer(file, exit_code == 0, output));
  } else if (exit_code == 0) {
    Print(output);
  } else {
    std::fputs(output.c_str(), stderr);
  }
  if (exit_code == 0) return true;
  if (is_answer) return absl::InvalidArgumentError(absl::StrFormat("%s has mistakes", file));
  return absl::InternalError(
      absl::StrFormat("%s --check-config ended with exit code %d", daemon, exit_code));
}

}  // namespace ebbtide::cli
