// SPDX-License-Identifier: Apache-2.0
//
// What ebbctl can do, one function per verb. Each prints its answer on stdout and says whether all
// is well; what failed outright is a status, kInvalidArgument where the command was wrong.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "ebbtide/client.h"

namespace ebbtide::cli {

enum class Output : uint8_t { kTable, kJson };

// What every verb is told.
struct Common {
  std::string socket = {};  // Empty: client::DefaultTarget().
  Output output = Output::kTable;
};

struct DescribeArgs {
  std::string sequence = {};
  std::string lane = {};  // "LAYER/KV_HEAD"; empty: all lanes.
  bool with_tokens = false;
};

absl::StatusOr<bool> RunStatus(const Common& common);
absl::StatusOr<bool> RunTiers(const Common& common);
absl::StatusOr<bool> RunSequences(const Common& common);
absl::StatusOr<bool> RunDescribe(const Common& common, const DescribeArgs& args);
absl::StatusOr<bool> RunConfigCheck(const Common& common, const std::string& file);

// "3/1" to layer 3, kv head 1.
//   kInvalidArgument  anything else
absl::StatusOr<client::LaneId> ParseLane(const std::string& text);

// `description` with no other lane than `lane`.
//   kInvalidArgument  it has no such lane; names those it has
absl::StatusOr<client::SequenceDescription> OnlyLane(client::SequenceDescription description,
                                                     client::LaneId lane);

// What the verbs print, from what the daemon answered.
std::string RenderTiers(const client::Stats& stats);
std::string RenderStatus(const client::ServerInfo& info, const client::Stats& stats);
std::string RenderSequences(const std::vector<client::SequenceSummary>& sequences);
std::string RenderDescription(const client::SequenceDescription& description);

// A line per thing that is not as it should be; empty: all is well.
std::vector<std::string> Complaints(const client::Stats& stats);

// Writes to stdout, whole, but for what a terminal would obey.
void Print(const std::string& text);

}  // namespace ebbtide::cli
