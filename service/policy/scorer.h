// SPDX-License-Identifier: Apache-2.0
//
// A Scorer says how much each resident token of a lane is worth; larger stays. Each published idea
// is one file in scorers/. Tested by tests/unit/service/scorer_test.cc.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/executor.h"
#include "gpu/device.h"
#include "gpu/extent.h"
#include "service/policy/lane_memory.h"
#include "service/policy/policy.h"
#include "service/policy/score_notes.h"

namespace ebbtide::service {

// What of a lane was attended, with its logits: the working set, and pages recalled.
struct AttendedPart {
  std::span<const int32_t> index;  // [slots] token index, or gpu::kNoToken
  std::span<const float> logits;   // [group, queries, slots]
};

// One answer, as a scorer may look at it.
struct Observation {
  int group = 1;
  int queries = 1;
  std::span<const float> query;          // [group, queries, head_dim]
  std::span<const int32_t> query_index;  // [queries]
  std::span<const AttendedPart> parts;   // Empty unless the scorer wants logits.
  std::span<const float> lse;            // [group, queries] over all parts; -inf: not observed
  bool ends_prefill_call = false;
};

// A lane's working set between calls.
struct WorkingSet {
  float scale = 0;
  int group = 1;
  std::span<const gpu::Extent> extents;
  std::span<const int32_t> slot_index;  // [slots]
};

// A lane whose tokens are to be scored.
struct LaneToScore {
  WorkingSet set;
  LaneMemory& memory;
};

// What scoring may use.
struct ScoringTools {
  const gpu::Device& device;
  ParallelFor& parallel;  // What is done per lane in host memory.
};

// Thread-compatible and without state: a lane's state is in its LaneMemory.
class Scorer {
 public:
  virtual ~Scorer() = default;

  // Must Observe see the logits of every observed query?
  virtual bool wants_logits() const { return false; }
  // Notes what an answer's queries teach, beside what the call's answers before it taught; of
  // `memory` no more changes than the room that Take needs.
  virtual void Observe(const Observation&, LaneMemory& /*memory*/, ScoreNotes&) const {}
  // Takes a call's notes over into the lane's state. Cannot fail.
  virtual void Take(const ScoreNotes&, LaneMemory& /*memory*/) const noexcept {}
  // Is the score of memory.score still the latest? If so, Score need not be called.
  virtual bool is_fresh(const LaneMemory& memory) const = 0;
  // score[lane][s] of each slot that holds a token; 0 elsewhere. They come as zeros, as long as the
  // lane's slots. For bases that are weighted by values, not negative.
  //   kResourceExhausted, kUnavailable  as gpu::Device::Run
  virtual absl::Status Score(std::span<const LaneToScore> lanes, const ScoringTools& tools,
                             std::span<std::vector<float>> score) const = 0;
};

// A resolved policy with the scorer of its base.
struct Policy {
  explicit Policy(ResolvedPolicy as_resolved);
  const ResolvedPolicy resolved;
  const std::unique_ptr<const Scorer> scorer;
};

// Renews memory.score of every resident token of the lanes where it is stale: base, then value
// weighting.
//   kResourceExhausted, kUnavailable  as gpu::Device::Run; no score was changed
absl::Status RefreshScores(const Policy& policy, std::span<const LaneToScore> lanes,
                           const ScoringTools& tools);

// The tokens of each lane that leave so that at most `budget` stay resident, in the order they
// leave: unprotected tokens with index < candidate_end of the lowest (score, index). Scores are
// renewed where any have to leave.
//   length         tokens of each lane
//   candidate_end  first index that is not complete in every layer
//   kResourceExhausted, kUnavailable  as RefreshScores
struct ChoiceArgs {
  int32_t budget = 0;
  int32_t length = 0;
  int32_t candidate_end = 0;
};
absl::StatusOr<std::vector<std::vector<int32_t>>> ChooseVictims(const Policy& policy,
                                                                std::span<const LaneToScore> lanes,
                                                                const ChoiceArgs& args,
                                                                const ScoringTools& tools);

// Which of a lane's tokens no policy may choose: "sink", "recent", "open block", or "" for the
// others.
std::string_view ProtectionOf(const ResolvedPolicy& policy, int32_t index, int32_t length,
                              int32_t candidate_end);

}  // namespace ebbtide::service
