// SPDX-License-Identifier: Apache-2.0
//
// TOVA (arXiv:2401.06104): a token is worth the attention of the last query, averaged over the
// group (per kv head, where the original averages over the whole layer).

#include <algorithm>
#include <limits>
#include <vector>

#include "service/policy/scorers/mass_of_parts.h"
#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class TovaScorer final : public Scorer {
 public:
  bool wants_logits() const override { return true; }

  void Observe(const Observation& observation, LaneMemory& memory,
               ScoreNotes& notes) const override {
    std::vector<float> last(observation.lse.size(), -std::numeric_limits<float>::infinity());
    const auto queries = static_cast<size_t>(observation.queries);
    for (size_t row = queries - 1; row < last.size(); row += queries)
      last[row] = observation.lse[row];
    notes.mass.Clear();
    AddMass(observation, last, memory.mass.size(), notes.mass);
  }
  void Take(const ScoreNotes& notes, LaneMemory& memory) const noexcept override {
    std::ranges::fill(memory.mass, 0.0);
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

std::unique_ptr<const Scorer> MakeTova() {
  return std::make_unique<TovaScorer>();
}

}  // namespace ebbtide::service
