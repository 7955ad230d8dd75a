// SPDX-License-Identifier: Apache-2.0
//
// The attention that an answer's queries paid, by token, for scorers that add it up.

#pragma once

#include <span>
#include <vector>

#include "service/policy/scorer.h"

namespace ebbtide::service {

// `lse` [group, queries] as in the observation; rows with -inf add nothing. `length`: of the lane.
void AddMass(const Observation& observation, std::span<const float> lse, size_t length,
             DrawnMass& mass);

// memory.mass of each slot's token as an f32 score.
void ScoreByMass(std::span<const LaneToScore> lanes, std::span<std::vector<float>> score);

}  // namespace ebbtide::service
