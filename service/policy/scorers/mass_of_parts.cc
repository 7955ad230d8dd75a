// SPDX-License-Identifier: Apache-2.0

#include "service/policy/scorers/mass_of_parts.h"

#include <vector>

#include "gpu/kernels/mass.h"

namespace ebbtide::service {

void AddMass(const Observation& observation, std::span<const float> lse, LaneMemory& memory) {
  std::vector<double> drawn;
  for (const AttendedPart& part : observation.parts) {
    drawn.assign(part.index.size(), 0.0);
    gpu::MassCpu({.group = observation.group,
                  .queries = observation.queries,
                  .slots = static_cast<int>(part.index.size()),
                  .logits = part.logits,
                  .lse = lse,
                  .mass = drawn});
    for (size_t s = 0; s < drawn.size(); ++s) {
      if (part.index[s] != gpu::kNoToken)
        memory.mass[static_cast<size_t>(part.index[s])] += drawn[s];
    }
  }
}

void ScoreByMass(const WorkingSet& set, const LaneMemory& memory, std::span<float> score) {
  for (size_t s = 0; s < score.size(); ++s) {
    const int32_t index = set.slot_index[s];
    score[s] =
        index == gpu::kNoToken ? 0.0F : static_cast<float>(memory.mass[static_cast<size_t>(index)]);
  }
}

}  // namespace ebbtide::service
