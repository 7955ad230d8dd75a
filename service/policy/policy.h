// SPDX-License-Identifier: Apache-2.0
//
// Who leaves, by name: a policy is a base score, a value weighting and a protection; recall and
// prefill say what an answer may leave out. One text form for people and configuration; its grammar
// is in docs/policies.md. Tested by tests/unit/service/policy_test.cc.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebbtide::service {

// Those that score by attention, and so need queries, come last.
enum class BaseScore : uint8_t { kStreaming, kKeyDiff, kH2o, kTova, kSnapKv };
enum class ValueWeighting : uint8_t { kNone, kCaote, kFastCaote };

struct PolicySpec {
  BaseScore base = BaseScore::kSnapKv;
  ValueWeighting weighting = ValueWeighting::kNone;
  int32_t sinks = 4;    // StreamingLLM, arXiv:2309.17453
  int32_t recent = -1;  // -1: min(128, budget / 4)
  int32_t window = 32;  // snapkv: queries that vote (arXiv:2404.14469, LongBench practice)
  int32_t kernel = 7;   // snapkv: width of the max pool

  bool needs_queries() const { return base >= BaseScore::kH2o; }
  bool is_windowed() const { return base == BaseScore::kSnapKv; }
  friend bool operator==(const PolicySpec&, const PolicySpec&) = default;
};

inline constexpr int kWindowRefreshQueries = 16;  // A windowed score is renewed so often in decode.

// Reads "snapkv(window=32)+caote", "streaming(sinks=4)", "h2o(recent=64)+fastcaote", …
//   kInvalidArgument  names the word that is wrong and those that would be right
absl::StatusOr<PolicySpec> ParsePolicy(std::string_view text);
// The same in full, e.g. "snapkv(sinks=4,recent=128,window=32,kernel=7)+caote".
std::string PolicyText(const PolicySpec& spec);

struct ResolvedPolicy {
  PolicySpec spec;
  std::string why;
  int32_t protected_tokens = 0;
};

// What `text` ("" and "auto" included) means for a worker that sends queries or none, at a budget.
//   kInvalidArgument  POLICY_INVALID, POLICY_NEEDS_QUERIES, BUDGET_TOO_SMALL (with both numbers)
absl::StatusOr<ResolvedPolicy> ResolvePolicy(std::string_view text, bool sends_queries,
                                             int32_t budget_tokens, int page_tokens);

enum class PrefillMode : uint8_t { kExact, kBlockwise };

struct PrefillSpec {
  PrefillMode mode = PrefillMode::kExact;
  int32_t block_tokens = 0;  // blockwise: most tokens per call.
};

absl::StatusOr<PrefillSpec> ParsePrefill(std::string_view text);  // "" is "exact".
std::string PrefillText(const PrefillSpec& spec);

enum class RecallMode : uint8_t { kOff, kBounded, kEstimated, kExact };

struct RecallSpec {
  RecallMode mode = RecallMode::kOff;
  double tau = 0;  // bounded, estimated: the target's relative error.
};

absl::StatusOr<RecallSpec> ParseRecall(std::string_view text);
std::string RecallText(const RecallSpec& spec);

}  // namespace ebbtide::service
