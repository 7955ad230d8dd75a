// SPDX-License-Identifier: Apache-2.0
//
// H2O (arXiv:2306.14048): a token is worth the attention it drew from every query so far, averaged
// over the group. Sums in f64: in f32 a sum of 1e3 no longer notices 1e-5.

#include "service/policy/scorers/mass_of_parts.h"
#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class H2oScorer final : public Scorer {
 public:
  bool wants_logits() const override { return true; }

  void Observe(const Observation& observation, LaneMemory& memory,
               ScoreNotes& notes) const override {
    AddMass(observation, observation.lse, memory.mass.size(), notes.mass);
  }
  void Take(const ScoreNotes& notes, LaneMemory& memory) const noexcept override {
    notes.mass.AddTo(memory.mass);
  }

  bool is_fresh(const LaneMemory&) const override { return false; }

  absl::Status Score(std::span<const LaneToScore> lanes, const ScoringTools&,
                     std::span<std::vector<float>> score) const override {
    ScoreByMass(lanes, score);
    return absl::OkStatus();
  }
};

}  // namespace

std::unique_ptr<const Scorer> MakeH2o() {
  return std::make_unique<H2oScorer>();
}

}  // namespace ebbtide::service
