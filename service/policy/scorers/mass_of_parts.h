// SPDX-License-Identifier: Apache-2.0
//
// Adds the attention that an answer's queries paid to memory.mass, by token index.

#pragma once

#include <span>

#include "service/policy/scorer.h"

namespace ebbtide::service {

// `lse` [group, queries] as in the observation; rows with -inf add nothing.
void AddMass(const Observation& observation, std::span<const float> lse, LaneMemory& memory);

// memory.mass of each slot's token as an f32 score.
void ScoreByMass(const WorkingSet& set, const LaneMemory& memory, std::span<float> score);

}  // namespace ebbtide::service
