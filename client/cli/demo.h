// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl demo`: a daemon of its own, a recorded model, a budget far too small, and what becomes of
// the answers and of every byte.

#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

#include "client/cli/report.h"
#include "client/cli/trace.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {

struct DemoArgs {
  std::string trace = {};  // Empty: the recorded one of the source tree.
  std::string budget = "12.5%";
};

// What the demo's daemon is told.
struct DemoPlan {
  std::string folder;  // Its own; everything it writes lies there.
  uint64_t device_budget_bytes = 0;
  uint64_t host_budget_bytes = 0;
  uint64_t rocksdb_budget_bytes = 0;

  std::string socket() const { return "unix:" + folder + "/ebbtide.sock"; }
  std::string config_file() const { return folder + "/ebbtided.yaml"; }
  std::string log_file() const { return folder + "/ebbtided.log"; }
  std::string config() const;  // The file's text.
};

// The host tier takes a quarter of what `trace` needs, and the digests of the rest, so that most of
// it lies in RocksDB.
DemoPlan PlanDemo(const Trace& trace, const std::string& folder);

// The trace that the source tree holds, seen from the program's folder or from the current one.
//   kNotFound  names what was looked for, and --trace
absl::StatusOr<std::string> FindDemoTrace();

// One line per run; then where the bytes are, and the verdict.
std::string RenderDemo(const Trace& trace, const ReplayReport& report);

absl::StatusOr<bool> RunDemo(const Common& common, const DemoArgs& args);

}  // namespace ebbtide::cli
