// SPDX-License-Identifier: Apache-2.0

#include "service/policy/score_notes.h"

#include <algorithm>

#include "gpu/extent.h"

namespace ebbtide::service {

void DrawnMass::Add(std::span<const int32_t> index, std::span<const double> drawn, size_t length) {
  if (by_token_.empty() && index_.size() + index.size() > length) {
    std::vector<double> all(length);
    AddTo(all);
    Clear();
    by_token_ = std::move(all);
  }
  for (size_t s = 0; s < index.size(); ++s) {
    if (index[s] == gpu::kNoToken) continue;
    if (by_token_.empty()) {
      index_.push_back(index[s]);
      drawn_.push_back(drawn[s]);
    } else {
      by_token_[static_cast<size_t>(index[s])] += drawn[s];
    }
  }
}

void DrawnMass::AddTo(std::span<double> mass) const noexcept {
  for (size_t i = 0; i < by_token_.size(); ++i) mass[i] += by_token_[i];
  for (size_t i = 0; i < index_.size(); ++i) mass[static_cast<size_t>(index_[i])] += drawn_[i];
}

void DrawnMass::Clear() {
  index_.clear();
  drawn_.clear();
  by_token_.clear();
}

}  // namespace ebbtide::service
