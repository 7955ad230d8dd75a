// SPDX-License-Identifier: Apache-2.0
//
// The honest worker: plays a recorded model through a running daemon, call by call as an engine
// would, and holds every answer against the truth. Contract: tests/unit/client/player_test.cc.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cli/report.h"
#include "client/cli/trace.h"
#include "client/cli/truth.h"
#include "ebbtide/client.h"

namespace ebbtide::cli {

// What is varied between runs; all else is the same.
struct RunSpec {
  std::string policy = {};
  std::string recall = {};   // Empty: the daemon's default.
  std::string prefill = {};  // Empty: "exact".
  client::Budget budget = {};
  uint32_t chunk = 0;  // Tokens per prefill call; 0: what suits the prefill mode and the daemon.
  // What answers are held against where the recall mode has no target of its own.
  std::optional<double> target = {};
};

// What a run plays: a trace, and the truth of each of its layers.
struct ReplaySource {
  const Trace& trace;
  const std::vector<LayerTruth>& truths;
};

// Whether the daemon would take a run: opens its sequence and closes it again. What it refuses a
// run for at the start it refuses here, with its own codes.
//   kInvalidArgument  chunks beyond what the daemon or the prefill mode takes; names both
absl::Status Ask(const client::Client& client, const Trace& trace, const RunSpec& spec);

// Plays `source` once, in a sequence of its own that is closed at the end, whatever happened.
// `progress` hears the tokens played so far and may stop the run by an error.
//   kFailedPrecondition  the daemon answered less than the whole trace
//   kInvalidArgument     as Ask
// and the daemon's own codes.
absl::StatusOr<RunReport> Play(const client::Client& client, const ReplaySource& source,
                               const RunSpec& spec,
                               const std::function<absl::Status(uint64_t)>& progress);

// Tokens per prefill call that suit a mode: 512, or 128 for "blockwise(B)" and never above its B.
uint32_t ChunkFor(const std::string& prefill);

// The target of "bounded(tau)" or "estimated(tau)"; none for the other modes.
std::optional<double> TargetOf(const std::string& recall);

}  // namespace ebbtide::cli
