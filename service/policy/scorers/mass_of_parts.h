// SPDX-License-Identifier: Apache-2.0
//
// Adds the attention that an answer's queries paid to memory.mass, by token index.

#pragma once

#include <span>
#include <vector>

#include "service/policy/scorer.h"

namespace ebbtide::service {

// `lse` [group, queries] as in the observation; rows with -inf add nothing.
void AddMass(const Observation& observation, std::span<const float> lse, LaneMemory& memory);

// memory.mass of each slot's token as an f32 score.
void ScoreByMass(std::span<const LaneToScore> lanes, std::span<std::vector<float>> score);

}  // namespace ebbtide::service
