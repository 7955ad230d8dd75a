// SPDX-License-Identifier: Apache-2.0
//
// What workers ask and what they are told, as plain values: the words between service/rpc, which
// knows protobuf, and the rest of the service, which does not. Spans borrow for the length of a
// call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "gpu/shape.h"
#include "service/model/geometry.h"

namespace ebbtide::service {

// A worker's array: row-major, little-endian, any alignment.
struct TensorView {
  gpu::Dtype dtype = gpu::Dtype::kF32;
  std::span<const int64_t> shape;
  std::span<const std::byte> bytes;
};

enum class Phase : uint8_t { kPrefill = 1, kDecode = 2 };
enum class TierName : uint8_t { kDevice = 1, kHost = 2, kRocksdb = 3 };

struct OpenArgs {
  std::string sequence = {};
  std::string model = {};
  std::string policy = {};  // Text forms; empty: the default.
  std::string prefill = {};
  std::string recall = {};
  uint32_t budget_tokens = 0;
  bool sends_queries = true;                           // Attend for each token.
  uint32_t chunk_tokens = 0;                           // Most tokens per call; 0: kChunkTokensMax.
  absl::Duration idle_timeout = absl::ZeroDuration();  // Zero: the server's default.
  friend bool operator==(const OpenArgs&, const OpenArgs&) = default;
};

struct OpenAnswer {
  std::string policy;
  std::string why;
  std::string prefill;
  std::string recall;
  uint32_t budget_tokens = 0;
  uint32_t protected_tokens = 0;
  uint32_t chunk_tokens = 0;
  uint64_t device_bytes = 0;
  uint64_t length = 0;
  absl::Duration idle_timeout;
};

// One sequence's part of a call. Append: k and v. Attend: q, and perhaps k and v to append first.
struct StepItem {
  std::string_view sequence;
  uint64_t first_index = 0;
  std::optional<TensorView> q = {};
  std::optional<TensorView> k = {};
  std::optional<TensorView> v = {};
  std::span<const int64_t> positions = {};  // [m]; empty: the indices
  gpu::Dtype output_dtype = gpu::Dtype::kF32;
  bool require_met = false;
};

struct StepCall {
  uint32_t layer = 0;
  Phase phase = Phase::kDecode;
  absl::Duration deadline = absl::InfiniteDuration();  // On the steady clock: Clock::SinceStart().
};

struct TouchedRung {
  std::string_view rung;  // Static.
  TierName tier = TierName::kHost;
  uint64_t pages = 0;
  uint64_t bytes = 0;
};

// A page that no tier has whole.
struct LostPage {
  uint32_t kv_head = 0;
  uint64_t first_index = 0;
  uint32_t tokens = 0;
  TierName tier = TierName::kHost;  // That should hold it.
  bool is_corrupt = false;          // Else it is missing.
  std::string_view reason() const { return is_corrupt ? "CORRUPT_PAGE" : "MISSING_PAGE"; }
  friend bool operator==(const LostPage&, const LostPage&) = default;
};

inline constexpr size_t kLostPagesNamed = 64;  // In one answer.

struct Certificate {
  std::vector<float> mass_bound;    // [m, query_heads]
  std::vector<float> error_bound;   // [m, query_heads]
  std::vector<uint8_t> met;         // [m]
  std::string_view not_met_reason;  // Of the first that is not. Static; "" where every one is.
};

struct StepAnswer {
  absl::Status status;
  uint64_t length = 0;
  uint64_t committed = 0;
  bool replayed = false;
  // Attend only:
  std::vector<std::byte> output;  // [m, query_heads, head_dim] in the asked dtype
  std::vector<float> lse;         // [m, query_heads]
  Certificate certificate;
  uint64_t absent_pages = 0;
  std::vector<TouchedRung> touched;
  std::vector<LostPage> lost;  // The first kLostPagesNamed.
};

enum class PageAnswer : uint8_t { kOk, kMissing, kCorrupt };

struct PageBytes {
  uint64_t first_index = 0;
  uint32_t tokens = 0;
  TierName tier = TierName::kDevice;
  PageAnswer state = PageAnswer::kMissing;
  std::vector<std::byte> k;  // [tokens, head_dim]
  std::vector<std::byte> v;
  std::vector<int64_t> positions;
};

// Tokens of lanes. One that is resident and has a copy below counts in both tiers.
struct TokensByTier {
  uint64_t device = 0;  // Resident.
  uint64_t host = 0;
  uint64_t rocksdb = 0;
  uint64_t open = 0;  // Without a copy below.
};

struct SequenceSummary {
  std::string sequence;
  std::string model;
  std::string policy;
  std::string recall;
  std::string prefill;
  uint64_t committed = 0;
  uint32_t budget_tokens = 0;
  uint64_t device_bytes = 0;
  absl::Duration idle;
  TokensByTier tokens;
};

struct LaneDescription {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint64_t length = 0;
  uint32_t resident = 0;
  uint32_t absent = 0;
  uint64_t demoted = 0;
};

struct TokenDescription {
  uint64_t index = 0;
  int64_t position = 0;
  bool resident = false;
  TierName tier = TierName::kDevice;
  float score = 0;
  std::string_view why;  // Static: "sink", "recent", "open block", "score".
};

struct DescribeArgs {
  std::string_view sequence;
  bool with_lanes = false;
  bool with_tokens = false;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
};

struct SequenceDescription {
  SequenceSummary summary;
  std::vector<uint64_t> layer_lengths;
  std::vector<LaneDescription> lanes;
  std::vector<TokenDescription> tokens;
};

struct TierReport {
  TierName tier = TierName::kDevice;
  uint64_t budget_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t blocks = 0;
  uint64_t tokens = 0;
  uint64_t corrupt_pages = 0;
  uint64_t metadata_bytes = 0;  // Lanes, digests, positions, score state.
  bool degraded = false;
  std::string degraded_why = {};
  std::string place = {};
};

using CountByReason = std::map<std::string, uint64_t>;

struct Stats {
  std::vector<TierReport> tiers;
  uint64_t sequences = 0;
  uint64_t tokens_appended = 0;
  uint64_t tokens_demoted = 0;
  CountByReason tokens_forgotten;
  uint64_t answers = 0;
  uint64_t answers_with_target = 0;
  CountByReason answers_not_met;
  uint64_t pages_recalled = 0;
  uint64_t bytes_recalled = 0;
  uint64_t corrupt_in_place = 0;  // Part of the host tier's corrupt_pages.
  uint64_t blocks_sealed = 0;
  uint64_t blocks_moved_down = 0;
  CountByReason refused;
  CountByReason pages_lost;
  CountByReason carries_failed;  // But for those that a tier did not take.
};

}  // namespace ebbtide::service
