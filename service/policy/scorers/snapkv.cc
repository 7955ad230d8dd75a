// SPDX-License-Identifier: Apache-2.0
//
// SnapKV (arXiv:2404.14469): a token is worth the attention that a window of the last queries pays
// it within the working set, averaged over the group and max-pooled over neighbouring keepers.
// Renewed after each prefill call and every 16 queries of decode.

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/kernels/attend.h"
#include "gpu/kernels/mass.h"
#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class SnapKvScorer final : public Scorer {
 public:
  SnapKvScorer(int32_t window, int32_t kernel) : window_(window), kernel_(kernel) {}

  void Observe(const Observation& observation, LaneMemory& memory) const override {
    const auto head_dim = static_cast<size_t>(memory.shape.head_dim);
    const auto group = static_cast<size_t>(observation.group);
    const auto queries = static_cast<size_t>(observation.queries);
    memory.window_query.resize(static_cast<size_t>(window_) * group * head_dim);
    for (size_t m = 0; m < queries; ++m) {
      if (observation.lse[m] == -std::numeric_limits<float>::infinity()) continue;  // Not observed.
      const auto ring = static_cast<size_t>(memory.window_next);
      if (memory.window_index.size() <= ring) memory.window_index.resize(ring + 1);
      memory.window_index[ring] = observation.query_index[m];
      for (size_t g = 0; g < group; ++g) {
        std::ranges::copy(
            observation.query.subspan((g * queries + m) * head_dim, head_dim),
            memory.window_query.begin() + static_cast<ptrdiff_t>((ring * group + g) * head_dim));
      }
      memory.window_next = (memory.window_next + 1) % window_;
      ++memory.queries_since_refresh;
    }
    if (observation.ends_prefill_call || memory.queries_since_refresh >= kWindowRefreshQueries) {
      memory.is_score_stale = true;
    }
  }

  bool is_fresh(const LaneMemory& memory) const override { return !memory.is_score_stale; }

  void Score(const WorkingSet& set, LaneMemory& memory, std::span<float> score) const override {
    memory.queries_since_refresh = 0;
    const std::vector<double> mass = WindowMass(set, memory);

    std::vector<std::pair<int32_t, size_t>> order;  // (token index, slot)
    for (size_t s = 0; s < mass.size(); ++s) {
      if (set.slot_index[s] != gpu::kNoToken) order.emplace_back(set.slot_index[s], s);
    }
    std::ranges::sort(order);
    std::vector<float> by_index;
    for (const auto& [index, slot] : order) by_index.push_back(static_cast<float>(mass[slot]));
    std::vector<float> pooled(by_index.size());
    gpu::MaxPool({.kernel = kernel_, .mass = by_index, .pooled = pooled});
    for (size_t i = 0; i < order.size(); ++i) score[order[i].second] = pooled[i];
  }

 private:
  // The window's attention to each slot, softmax over the working set alone.
  std::vector<double> WindowMass(const WorkingSet& set, const LaneMemory& memory) const {
    const size_t slots = set.slot_index.size();
    const auto head_dim = static_cast<size_t>(memory.shape.head_dim);
    const auto group = static_cast<size_t>(set.group);
    const size_t queries = memory.window_index.size();
    std::vector<double> mass(slots, 0.0);
    if (queries == 0) return mass;

    std::vector<float> query(group * queries * head_dim);  // [group, queries, head_dim]
    for (size_t m = 0; m < queries; ++m) {
      for (size_t g = 0; g < group; ++g) {
        std::ranges::copy(
            std::span(memory.window_query).subspan((m * group + g) * head_dim, head_dim),
            query.begin() + static_cast<ptrdiff_t>((g * queries + m) * head_dim));
      }
    }
    std::vector<float> output(query.size());
    std::vector<float> lse(group * queries);
    std::vector<float> logits(group * queries * slots);
    gpu::AttendCpu({.dtype = memory.shape.dtype,
                    .head_dim = memory.shape.head_dim,
                    .group = set.group,
                    .queries = static_cast<int>(queries),
                    .scale = set.scale,
                    .extents = set.extents,
                    .query = query,
                    .query_index = memory.window_index,
                    .output = output,
                    .lse = lse,
                    .logits = logits});
    gpu::MassCpu({.group = set.group,
                  .queries = static_cast<int>(queries),
                  .slots = static_cast<int>(slots),
                  .logits = logits,
                  .lse = lse,
                  .mass = mass});
    return mass;
  }

  const int32_t window_;
  const int32_t kernel_;
};

}  // namespace

std::unique_ptr<const Scorer> MakeSnapKv(int32_t window, int32_t kernel) {
  return std::make_unique<SnapKvScorer>(window, kernel);
}

}  // namespace ebbtide::service
