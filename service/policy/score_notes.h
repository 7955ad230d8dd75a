// SPDX-License-Identifier: Apache-2.0
//
// What a call's answers teach about the tokens of a lane, kept beside the lane's memory until the
// call is certain: one that ends halfway has taught nothing, and the same call again teaches all of
// it, once. Tested by tests/unit/service/scorer_test.cc and broken_calls_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ebbtide::service {

// Attention that tokens drew. Little of it stays as it came; what would be longer than the lane is
// added up by token.
class DrawnMass {
 public:
  // Of a lane of `length` tokens: what the token of each slot drew; gpu::kNoToken drew nothing.
  void Add(std::span<const int32_t> index, std::span<const double> drawn, size_t length);
  // mass[i] += what token i drew. Cannot fail.
  void AddTo(std::span<double> mass) const noexcept;
  void Clear();

 private:
  std::vector<int32_t> index_;
  std::vector<double> drawn_;     // By place in index_.
  std::vector<double> by_token_;  // Empty, or [length].
};

struct ScoreNotes {
  DrawnMass mass;  // h2o, tova.
  // snapkv: how many queries there were. The last of them, a window's worth, are kept in a ring:
  // query n of the call at n % window.
  int32_t queries = 0;
  std::vector<float> query;          // [window, group, head_dim]
  std::vector<int32_t> query_index;  // [window]
  bool ends_prefill_call = false;
};

}  // namespace ebbtide::service
