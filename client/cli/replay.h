// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl replay`: what was asked for, and the runs it makes.

#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cli/player.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {

// As typed. Lists are separated by commas outside parentheses; every combination is one run.
struct ReplayArgs {
  std::vector<std::string> traces = {};
  std::string policies = {};
  std::string budget = {};    // "512" or "12.5%"; a blank may stand before the sign.
  std::string recalls = {};   // Empty: the daemon's default.
  std::string prefills = {};  // Empty: "exact".
  std::string layers = {};    // Empty: all recorded.
  std::string chunk = {};     // Empty: what suits the prefill mode.
};

// "a,b(c,d)" to "a" and "b(c,d)".
//   kInvalidArgument  an empty part, or parentheses that don't match
absl::StatusOr<std::vector<std::string>> SplitList(const std::string& option,
                                                   const std::string& text);

// "512", or "12.5%" or "12.5 %" of `tokens`. scripts/demo takes the same.
//   kInvalidArgument  neither, or beyond what the daemon takes
absl::StatusOr<client::Budget> ParseBudget(const std::string& text, uint64_t tokens);

// Every combination, policies slowest, prefill modes fastest.
absl::StatusOr<std::vector<RunSpec>> PlanRuns(const ReplayArgs& args, uint64_t trace_tokens);

// The truth of every layer of `trace`, on two threads at most.
//   kCancelled  a stop was asked for
absl::StatusOr<std::vector<LayerTruth>> ComputeTruths(const Trace& trace,
                                                      const std::stop_token& stop);

// Whether the daemon would take every run of `specs`, asked before anything that takes long.
absl::Status AskForRuns(const client::Client& client, const Trace& trace,
                        const std::vector<RunSpec>& specs);

// A report on `trace` that has no runs yet.
ReplayReport DescribeReplay(const Trace& trace, const std::string& path,
                            const client::ServerInfo& info);

// Plays every run of `specs` in turn, with a progress line.
absl::StatusOr<std::vector<RunReport>> PlayRuns(const client::Client& client,
                                                const ReplaySource& source,
                                                const std::vector<RunSpec>& specs);

absl::StatusOr<bool> RunReplay(const Common& common, const ReplayArgs& args);

}  // namespace ebbtide::cli
