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

#include "base/status_macros.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/window.h"
#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class SnapKvScorer final : public Scorer {
 public:
  SnapKvScorer(int32_t window, int32_t kernel) : window_(window), kernel_(kernel) {}

  void Observe(const Observation& observation, LaneMemory& memory,
               ScoreNotes& notes) const override {
    const auto head_dim = static_cast<size_t>(memory.shape.head_dim);
    const auto group = static_cast<size_t>(observation.group);
    const auto queries = static_cast<size_t>(observation.queries);
    const auto window = static_cast<size_t>(window_);
    memory.window_query.resize(window * group * head_dim);
    memory.window_index.reserve(window);
    notes.query.resize(window * group * head_dim);
    notes.query_index.resize(window);
    for (size_t m = 0; m < queries; ++m) {
      if (observation.lse[m] == -std::numeric_limits<float>::infinity()) continue;  // Not observed.
      const auto ring = static_cast<size_t>(notes.queries++ % window_);
      notes.query_index[ring] = observation.query_index[m];
      for (size_t g = 0; g < group; ++g) {
        std::ranges::copy(
            observation.query.subspan((g * queries + m) * head_dim, head_dim),
            notes.query.begin() + static_cast<ptrdiff_t>((ring * group + g) * head_dim));
      }
    }
    notes.ends_prefill_call |= observation.ends_prefill_call;
  }

  void Take(const ScoreNotes& notes, LaneMemory& memory) const noexcept override {
    const size_t row = notes.query.size() / static_cast<size_t>(window_);
    for (int32_t n = std::max(0, notes.queries - window_); n < notes.queries; ++n) {
      const auto from = static_cast<size_t>(n % window_);
      const auto to = static_cast<size_t>((memory.window_next + n) % window_);
      if (memory.window_index.size() <= to) memory.window_index.resize(to + 1);  // There is room.
      memory.window_index[to] = notes.query_index[from];
      std::ranges::copy(std::span(notes.query).subspan(from * row, row),
                        memory.window_query.begin() + static_cast<ptrdiff_t>(to * row));
    }
    memory.window_next = (memory.window_next + notes.queries) % window_;
    memory.queries_since_refresh += notes.queries;
    if (notes.ends_prefill_call || memory.queries_since_refresh >= kWindowRefreshQueries) {
      memory.is_score_stale = true;
    }
  }

  bool is_fresh(const LaneMemory& memory) const override { return !memory.is_score_stale; }

  absl::Status Score(std::span<const LaneToScore> lanes, const ScoringTools& tools,
                     std::span<std::vector<float>> score) const override {
    // Per lane: the window's rows, and what they draw within the working set alone.
    struct Window {
      std::vector<float> query;  // [group, queries, head_dim]
      std::vector<float> mass;   // [slots]
    };
    std::vector<Window> windows(lanes.size());
    std::vector<gpu::WindowArgs> asked;
    for (size_t l = 0; l < lanes.size(); ++l) {
      const auto& [set, memory] = lanes[l];
      if (memory.window_index.empty()) continue;  // Nothing asked yet: all tokens are alike.
      Window& window = windows[l];
      window.query = WindowQueries(memory, set.group);
      window.mass.resize(set.slot_index.size());
      asked.push_back({.dtype = memory.shape.dtype,
                       .head_dim = memory.shape.head_dim,
                       .group = set.group,
                       .queries = static_cast<int>(memory.window_index.size()),
                       .scale = set.scale,
                       .extents = set.extents,
                       .query = window.query,
                       .query_index = memory.window_index,
                       .mass = window.mass});
    }
    if (asked.empty()) return absl::OkStatus();
    EBBTIDE_RETURN_IF_ERROR(tools.device.Run(asked));
    tools.parallel.Run(static_cast<int>(lanes.size()), [&](int lane) {
      const auto l = static_cast<size_t>(lane);
      if (!windows[l].mass.empty()) Pool(lanes[l].set.slot_index, windows[l].mass, score[l]);
    });
    return absl::OkStatus();
  }

 private:
  static std::vector<float> WindowQueries(const LaneMemory& memory, int group) {
    const auto head_dim = static_cast<size_t>(memory.shape.head_dim);
    const auto groups = static_cast<size_t>(group);
    const size_t queries = memory.window_index.size();
    std::vector<float> rows(groups * queries * head_dim);
    for (size_t m = 0; m < queries; ++m) {
      for (size_t g = 0; g < groups; ++g) {
        std::ranges::copy(
            std::span(memory.window_query).subspan((m * groups + g) * head_dim, head_dim),
            rows.begin() + static_cast<ptrdiff_t>((g * queries + m) * head_dim));
      }
    }
    return rows;
  }

  // Max-pooled over neighbouring keepers, in order of index.
  void Pool(std::span<const int32_t> slot_index, std::span<const float> mass,
            std::span<float> score) const {
    std::vector<std::pair<int32_t, size_t>> order;  // (token index, slot)
    for (size_t s = 0; s < mass.size(); ++s) {
      if (slot_index[s] != gpu::kNoToken) order.emplace_back(slot_index[s], s);
    }
    std::ranges::sort(order);
    std::vector<float> by_index;
    for (const auto& [index, slot] : order) by_index.push_back(mass[slot]);
    std::vector<float> pooled(by_index.size());
    gpu::MaxPool({.kernel = kernel_, .mass = by_index, .pooled = pooled});
    for (size_t i = 0; i < order.size(); ++i) score[order[i].second] = pooled[i];
  }

  const int32_t window_;
  const int32_t kernel_;
};

}  // namespace

std::unique_ptr<const Scorer> MakeSnapKv(int32_t window, int32_t kernel) {
  return std::make_unique<SnapKvScorer>(window, kernel);
}

}  // namespace ebbtide::service
