// SPDX-License-Identifier: Apache-2.0
//
// The words a worker and its daemon share: tensors, models, sequences' options, answers. Plain
// values; nothing here talks to anyone. The wire they travel on is proto/ebbtide/v1/. Members are
// initialised so that designated initialisers may leave any of them out.

#pragma once

#include <array>
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

namespace ebbtide::client {

enum class Dtype : uint8_t { kUnspecified = 0, kF32 = 1, kF16 = 2, kBF16 = 3 };
enum class Tier : uint8_t { kUnspecified = 0, kDevice = 1, kHost = 2, kRocksdb = 3 };
enum class Phase : uint8_t { kPrefill = 1, kDecode = 2 };
enum class Queries : uint8_t { kEveryStep = 1, kNone = 2 };  // What the worker will send.

size_t DtypeBytes(Dtype dtype);
std::string_view DtypeName(Dtype dtype);  // "f32", "f16", "bf16"
std::string_view TierName(Tier tier);     // "device", "host", "rocksdb"

// The stable UPPER_SNAKE reason of an error that the daemon or this library answered, or "".
// docs/errors.md lists them.
std::string ErrorReason(const absl::Status& status);

// Somebody's dense array: row-major, little-endian. Looks, never owns.
struct TensorView {
  Dtype dtype = Dtype::kUnspecified;
  std::array<int64_t, 3> shape = {};  // [tokens, heads, head_dim]
  std::span<const std::byte> bytes = {};
};

// One that owns its bytes.
struct Tensor {
  Dtype dtype = Dtype::kUnspecified;
  std::vector<int64_t> shape = {};
  std::string bytes = {};

  std::span<const float> f32() const;  // Empty unless dtype is kF32.
};

// ---- models and sequences ----

struct Geometry {
  uint32_t layers = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  Dtype dtype = Dtype::kF16;  // Of keys and values as they are kept.
  float scale = 0;            // Of logits; 0: 1 / sqrt(head_dim).
  uint32_t page_tokens = 0;   // 0: 32.
};

struct Model {
  std::string name = {};
  Geometry geometry = {};
  std::string weights_fingerprint = {};  // Anything that tells two sets of weights apart.
};

struct RegisteredModel {
  Geometry geometry = {};  // With its defaults filled in.
  uint64_t page_bytes = 0;
  uint64_t record_bytes = 0;
};

// Slots per lane before a step's own tokens are added: `tokens`, or `percent` of a length of
// `of_tokens`. A lane holds the budget and that call's tokens.
struct Budget {
  uint32_t tokens = 0;
  double percent = 0;
  uint32_t of_tokens = 0;
};

struct SequenceOptions {
  std::string name = {};
  std::string model = {};
  std::string policy = {};  // Text form; empty: "auto".
  Budget budget = {};
  std::string prefill = {};  // "exact" (default) or "blockwise(B)".
  std::string recall =
      {};  // "off", "bounded(tau)", "estimated(tau)", "exact"; empty: the server's.
  Queries queries = Queries::kEveryStep;
  // Most tokens that one call will carry, reserved beside the budget; 0: the server's, 512.
  uint32_t chunk_tokens = 0;
  absl::Duration idle_timeout = {};  // Zero: the server's default.
};

// What the daemon made of the options.
struct OpenedSequence {
  std::string policy = {};
  std::string why = {};
  std::string prefill = {};
  std::string recall = {};
  uint32_t budget_tokens = 0;
  uint32_t protected_tokens = 0;
  uint32_t chunk_tokens = 0;  // The device holds budget + chunk slots per lane, and a page.
  uint64_t device_bytes = 0;
  uint64_t length = 0;  // Committed tokens; more than 0 where it was open already.
  absl::Duration idle_timeout = {};
};

// ---- a step ----

// What all items of one call share.
struct Step {
  uint32_t layer = 0;
  Phase phase = Phase::kDecode;
  bool prompt_end = false;  // The last prefill call of this turn; changes nothing yet.
};

struct AppendResult {
  absl::Status status = {};
  uint64_t length = 0;     // Tokens this layer holds.
  uint64_t committed = 0;  // Tokens every layer holds.
  bool replayed = false;   // The daemon had done it already: an answer was lost on its way.
};

// What was left out of an answer, bounded for the q, k, v it was given.
struct Certificate {
  std::vector<float> mass_bound = {};   // [m, query_heads]
  std::vector<float> error_bound = {};  // [m, query_heads] |o - o_full| in l2
  std::vector<bool> met = {};           // [m]
  std::string not_met_reason = {};
};

struct TouchedRung {
  std::string rung = {};
  Tier tier = Tier::kUnspecified;
  uint64_t pages = 0;
  uint64_t bytes = 0;
};

enum class PageState : uint8_t { kUnspecified = 0, kOk = 1, kMissing = 2, kCorrupt = 3 };

// A page that no tier has whole: left out of the answer, and within its bounds.
struct LostPage {
  uint32_t kv_head = 0;
  uint64_t first_index = 0;
  uint32_t tokens = 0;
  Tier tier = Tier::kUnspecified;
  PageState state = PageState::kUnspecified;  // kMissing or kCorrupt
};

struct AttendResult {
  absl::Status status = {};
  Tensor output = {};           // [m, query_heads, head_dim]
  std::vector<float> lse = {};  // [m, query_heads] natural log, over what was attended
  Certificate certificate = {};
  uint64_t absent_pages = 0;  // When the queries came, summed over kv heads.
  std::vector<TouchedRung> touched = {};
  std::vector<LostPage> lost = {};  // The first 64.
  uint64_t length = 0;
  uint64_t committed = 0;
  bool replayed = false;
};

struct Page {
  uint64_t first_index = 0;
  uint32_t tokens = 0;
  Tier tier = Tier::kUnspecified;
  PageState state = PageState::kUnspecified;
  std::string k = {};  // [tokens, head_dim] in the model's dtype; empty unless kOk
  std::string v = {};
  std::vector<int64_t> positions = {};
};

// ---- what anyone may watch ----

struct ServerInfo {
  std::string version = {};
  std::string boot_id = {};
  std::string backend = {};
  bool simulated_device = false;
  std::vector<std::string> transports = {};
  uint64_t message_bytes_max = 0;
  uint32_t chunk_tokens_max = 0;
  std::string default_recall = {};
  absl::Duration default_idle_timeout = {};
  absl::Duration uptime = {};
  std::vector<std::string> notes = {};
};

struct TierStats {
  Tier tier = Tier::kUnspecified;
  uint64_t budget_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t blocks = 0;
  uint64_t tokens = 0;  // Lane-tokens whose authoritative copy lies here.
  uint64_t corrupt_pages = 0;
  uint64_t metadata_bytes = 0;  // Host only: lanes, digests, positions, score state.
  bool degraded = false;
  std::string degraded_why = {};
  std::string place = {};
};

struct Stats {
  std::vector<TierStats> tiers = {};
  uint64_t sequences = 0;
  uint64_t tokens_appended = 0;
  uint64_t tokens_demoted = 0;
  std::map<std::string, uint64_t> tokens_forgotten = {};
  uint64_t answers = 0;
  uint64_t answers_with_target = 0;
  std::map<std::string, uint64_t> answers_not_met = {};
  uint64_t pages_recalled = 0;
  uint64_t bytes_recalled = 0;
  uint64_t blocks_sealed = 0;
  uint64_t blocks_moved_down = 0;
  std::map<std::string, uint64_t> refused = {};
  std::map<std::string, uint64_t> pages_lost = {};  // By reason; a page of an open sequence once.
  std::map<std::string, uint64_t> carries_failed = {};  // By reason; each is tried again.
};

// Lane-tokens, each counted once where its authoritative copy lies; `device` counts copies beside.
struct TokensByTier {
  uint64_t device = 0;
  uint64_t host = 0;
  uint64_t rocksdb = 0;
  uint64_t open = 0;
};

struct SequenceSummary {
  std::string name = {};
  std::string model = {};
  std::string policy = {};
  std::string recall = {};
  std::string prefill = {};
  uint64_t committed = 0;
  uint32_t budget_tokens = 0;
  uint64_t device_bytes = 0;
  absl::Duration idle = {};
  TokensByTier tokens = {};
};

struct LaneDescription {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint64_t length = 0;
  uint32_t resident = 0;
  uint32_t absent = 0;
  uint64_t demoted = 0;  // So far.
};

struct TokenDescription {
  uint64_t index = 0;
  int64_t position = 0;
  bool resident = false;
  Tier tier = Tier::kUnspecified;
  float score = 0;
  std::string why = {};
};

struct LaneId {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
};

struct DescribeOptions {
  std::string sequence = {};
  bool with_lanes = false;
  std::optional<LaneId> tokens_of = {};  // Tokens of this lane, one by one.
};

struct SequenceDescription {
  SequenceSummary summary = {};
  std::vector<uint64_t> layer_lengths = {};
  std::vector<LaneDescription> lanes = {};
  std::vector<TokenDescription> tokens = {};
};

}  // namespace ebbtide::client
