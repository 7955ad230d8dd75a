// SPDX-License-Identifier: Apache-2.0

#include "service/policy/scorers/mass_of_parts.h"

#include <vector>

#include "gpu/kernels/mass.h"

namespace ebbtide::service {

void AddMass(const Observation& observation, std::span<const float> lse, size_t length,
             DrawnMass& mass) {
  std::vector<double> drawn;
  for (const AttendedPart& part : observation.parts) {
    drawn.assign(part.index.size(), 0.0);
    gpu::MassCpu({.group = observation.group,
                  .queries = observation.queries,
                  .slots = static_cast<int>(part.index.size()),
                  .logits = part.logits,
                  .lse = lse,
                  .mass = drawn});
    mass.Add(part.index, drawn, length);
  }
}

void ScoreByMass(std::span<const LaneToScore> lanes, std::span<std::vector<float>> score) {
  for (size_t l = 0; l < lanes.size(); ++l) {
    const std::span<const int32_t> slot_index = lanes[l].set.slot_index;
    for (size_t s = 0; s < slot_index.size(); ++s) {
      if (slot_index[s] == gpu::kNoToken) continue;
      score[l][s] = static_cast<float>(lanes[l].memory.mass[static_cast<size_t>(slot_index[s])]);
    }
  }
}

}  // namespace ebbtide::service
