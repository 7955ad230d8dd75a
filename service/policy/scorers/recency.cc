// SPDX-License-Identifier: Apache-2.0
//
// Recency with sinks (StreamingLLM, arXiv:2309.17453): a token is worth its index; the sinks are
// protected by the policy. Indices beyond 2^24 would share f32 scores, and ties leave oldest first.

#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class RecencyScorer final : public Scorer {
 public:
  void Observe(const Observation&, LaneMemory&) const override {}
  bool is_fresh(const LaneMemory&) const override { return false; }

  void Score(const WorkingSet& set, LaneMemory&, std::span<float> score) const override {
    for (size_t s = 0; s < score.size(); ++s) {
      score[s] = set.slot_index[s] == gpu::kNoToken ? 0.0F : static_cast<float>(set.slot_index[s]);
    }
  }
};

}  // namespace

std::unique_ptr<const Scorer> MakeRecency() {
  return std::make_unique<RecencyScorer>();
}

}  // namespace ebbtide::service
