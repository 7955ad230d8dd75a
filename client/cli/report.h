// SPDX-License-Identifier: Apache-2.0
//
// What a replay found out, as values, as JSON and as a table: the runs side by side where that is
// no wider than a wide terminal, else a row for each.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/json.h"
#include "client/cli/judge.h"

namespace ebbtide::cli {

// What was read beyond the working set, in decode, per step: summed over layers, mean over steps.
struct PerStep {
  double total = 0;
  std::map<std::string, double> by_rung = {};
  std::map<std::string, double> by_tier = {};
};

struct RunReport {
  std::string policy = {};  // As asked.
  std::string policy_resolved = {};
  std::string recall = {};  // As resolved.
  std::string prefill = {};
  uint32_t budget_tokens = 0;
  uint32_t protected_tokens = 0;
  uint64_t host_budget_bytes = 0;
  Summary rel_error = {};            // Decode, over (step, layer).
  Summary certified_rel_error = {};  // The same, as certified.
  Summary prefill_rel_error = {};
  double worst_head_rel_error = 0;      // Decode.
  uint64_t certificate_violations = 0;  // Per query token and head, prefill and decode.
  uint64_t not_met = 0;                 // Decode answers, per (step, layer).
  std::map<std::string, uint64_t> not_met_by_reason = {};
  std::optional<double> answers_above_target = {};  // Share of decode answers; none: no target.
  uint64_t bytes_checked = 0;
  uint64_t byte_mismatches = 0;
  uint64_t bytes_lost = 0;  // Named by the daemon as missing or corrupt.
  std::map<std::string, uint64_t> bytes_checked_by_tier = {};
  client::TokensByTier tokens = {};
  uint64_t demotions = 0;
  double absent_pages = 0;  // When the queries of a decode step came, summed over layers; mean.
  PerStep touched_pages = {};
  PerStep touched_bytes = {};
  Summary bound_over_error = {};  // Decode, of the heads with an error.
  Summary step_seconds = {};      // Decode: all layers' calls of a token.
  double wall_seconds = 0;

  bool has_steps() const { return rel_error.count > 0; }  // Else nothing was decoded.
  bool is_sound() const {
    return certificate_violations == 0 && byte_mismatches == 0 && bytes_lost == 0;
  }
};

struct ReplayReport {
  std::string trace = {};
  uint64_t steps = 0;  // Decoded tokens.
  std::vector<uint32_t> layers = {};
  uint64_t prompt_length = 0;
  std::string backend = {};  // The daemon's.
  bool simulated_device = false;
  std::vector<RunReport> runs = {};

  bool is_sound() const;
};

// "auto" resolved to a policy's names; others as asked.
std::string PolicyLabel(const RunReport& run);

Json ToJson(const ReplayReport& report);

// One column per run, or one row where the columns would be wider than 120 characters.
std::string RenderReport(const ReplayReport& report);

}  // namespace ebbtide::cli
