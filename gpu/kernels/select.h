// SPDX-License-Identifier: Apache-2.0
//
// Which tokens leave: the k lowest under a mask, in an order that every backend shares.
// Tested by tests/unit/gpu/select_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ebbtide::gpu {

struct SelectArgs {
  std::span<const float> score;       // [tokens] finite; larger stays
  std::span<const int32_t> index;     // [tokens] token indices, all different
  std::span<const uint8_t> eligible;  // [tokens] 1: may leave
  size_t count = 0;                   // How many leave; fewer where fewer are eligible.
};

// Positions in `score` of the tokens that leave, in the order they leave.
//
//   Math      ascending by (score, index), -0 = +0: of equal scores the older leaves first
//   Numerics  compares the f32 scores given; nothing is rounded
//   Repeats   the same on every backend, whatever the order of the input
//   Cost      reads each score once, then sorts `count`
//   Errors    none; a NaN score is a broken contract and stops the process (CUDA: the device)
std::vector<int32_t> SelectReference(const SelectArgs& args);
std::vector<int32_t> SelectCpu(const SelectArgs& args);

}  // namespace ebbtide::gpu
