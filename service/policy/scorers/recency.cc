// SPDX-License-Identifier: Apache-2.0
//
// Recency with sinks (StreamingLLM, arXiv:2309.17453): a token is worth its index; the sinks are
// protected by the policy. Indices beyond 2^24 would share f32 scores, and ties leave oldest first.

#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class RecencyScorer final : public Scorer {
 public:
  bool is_fresh(const LaneMemory&) const override { return false; }

  absl::Status Score(std::span<const LaneToScore> lanes, const ScoringTools&,
                     std::span<std::vector<float>> score) const override {
    for (size_t l = 0; l < lanes.size(); ++l) {
      const std::span<const int32_t> slot_index = lanes[l].set.slot_index;
      for (size_t s = 0; s < slot_index.size(); ++s) {
        if (slot_index[s] != gpu::kNoToken) score[l][s] = static_cast<float>(slot_index[s]);
      }
    }
    return absl::OkStatus();
  }
};

}  // namespace

std::unique_ptr<const Scorer> MakeRecency() {
  return std::make_unique<RecencyScorer>();
}

}  // namespace ebbtide::service
