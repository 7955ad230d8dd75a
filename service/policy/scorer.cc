// SPDX-License-Identifier: Apache-2.0

#include "service/policy/scorer.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "gpu/kernels/damage.h"
#include "gpu/kernels/select.h"
#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

// The mean value of the working set, which FastCAOTE puts in place of the output.
std::vector<float> UniformWeights(std::span<const int32_t> slot_index) {
  const auto tokens =
      std::ranges::count_if(slot_index, [](int32_t i) { return i != gpu::kNoToken; });
  std::vector<float> weights(slot_index.size(), 0.0F);
  for (size_t s = 0; s < weights.size(); ++s) {
    if (slot_index[s] != gpu::kNoToken) weights[s] = 1.0F / static_cast<float>(tokens);
  }
  return weights;
}

// A base score, normalised over the working set, as if it were attention.
struct BaseAttention {
  std::vector<float> logit;   // [slots] -inf for 0
  std::vector<float> weight;  // [slots] of the centre
  std::vector<float> centre;  // [head_dim]
};

// Nothing where nothing was observed yet: all tokens are alike.
std::optional<BaseAttention> AsAttention(ValueWeighting weighting, const LaneToScore& lane,
                                         std::span<const float> score) {
  double total = 0;
  for (const float s : score) total += s;
  if (!(total > 0)) return std::nullopt;

  BaseAttention base{.logit = std::vector<float>(score.size()),
                     .weight = std::vector<float>(score.size()),
                     .centre = std::vector<float>(static_cast<size_t>(lane.memory.shape.head_dim))};
  for (size_t s = 0; s < score.size(); ++s) {
    base.weight[s] = static_cast<float>(score[s] / total);
    base.logit[s] = static_cast<float>(std::log(score[s] / total));
  }
  if (weighting == ValueWeighting::kFastCaote) base.weight = UniformWeights(lane.set.slot_index);
  return base;
}

// Turns base scores into the output error that each token's removal would cause, were the score,
// normalised over the working set, the attention (CAOTE's meta use, docs/policies.md).
absl::Status WeighByValues(ValueWeighting weighting, std::span<const LaneToScore> lanes,
                           const ScoringTools& tools, std::span<std::vector<float>> score) {
  std::vector<std::optional<BaseAttention>> bases(lanes.size());
  tools.parallel.Run(static_cast<int>(lanes.size()), [&](int lane) {
    const auto l = static_cast<size_t>(lane);
    bases[l] = AsAttention(weighting, lanes[l], score[l]);
  });
  const float lse = 0;
  std::vector<gpu::WeightedValueArgs> centres;
  std::vector<gpu::DamageArgs> damages;
  for (size_t l = 0; l < lanes.size(); ++l) {
    if (!bases[l].has_value()) continue;
    const gpu::PageShape& shape = lanes[l].memory.shape;
    centres.push_back({.dtype = shape.dtype,
                       .head_dim = shape.head_dim,
                       .rows = 1,
                       .extents = lanes[l].set.extents,
                       .weight = bases[l]->weight,
                       .output = bases[l]->centre});
    damages.push_back({.dtype = shape.dtype,
                       .head_dim = shape.head_dim,
                       .rows = 1,
                       .extents = lanes[l].set.extents,
                       .logits = bases[l]->logit,
                       .lse = {&lse, 1},
                       .centre = bases[l]->centre,
                       .damage = score[l]});
  }
  if (damages.empty()) return absl::OkStatus();
  EBBTIDE_RETURN_IF_ERROR(tools.device.Run(centres));
  return weighting == ValueWeighting::kCaote ? tools.device.Run(damages)
                                             : tools.device.Run(gpu::FastDamage{damages});
}

// The victims of a lane that is over its budget, by its latest scores.
std::vector<int32_t> LowestOf(const Policy& policy, const LaneToScore& lane,
                              const ChoiceArgs& args) {
  std::vector<int32_t> index;
  std::vector<float> score;
  std::vector<uint8_t> eligible;
  for (const int32_t i : lane.set.slot_index) {
    if (i == gpu::kNoToken) continue;
    index.push_back(i);
    score.push_back(lane.memory.score[static_cast<size_t>(i)]);
    eligible.push_back(
        ProtectionOf(policy.resolved, i, args.length, args.candidate_end).empty() ? 1 : 0);
  }
  std::vector<int32_t> victims =
      gpu::SelectCpu({.score = score,
                      .index = index,
                      .eligible = eligible,
                      .count = index.size() - static_cast<size_t>(args.budget)});
  for (int32_t& victim : victims) victim = index[static_cast<size_t>(victim)];
  return victims;
}

std::unique_ptr<const Scorer> MakeScorer(const PolicySpec& spec) {
  switch (spec.base) {
    case BaseScore::kStreaming:
      return MakeRecency();
    case BaseScore::kKeyDiff:
      return MakeKeyDiff();
    case BaseScore::kH2o:
      return MakeH2o();
    case BaseScore::kTova:
      return MakeTova();
    case BaseScore::kSnapKv:
      return MakeSnapKv(spec.window, spec.kernel);
  }
  EBBTIDE_CHECK(false, "every base has a scorer");
}

}  // namespace

Policy::Policy(ResolvedPolicy as_resolved)
    : resolved(std::move(as_resolved)), scorer(MakeScorer(resolved.spec)) {}

absl::Status RefreshScores(const Policy& policy, std::span<const LaneToScore> lanes,
                           const ScoringTools& tools) {
  std::vector<LaneToScore> stale;
  std::vector<std::vector<float>> score;
  for (const LaneToScore& lane : lanes) {
    if (policy.scorer->is_fresh(lane.memory)) continue;
    stale.push_back(lane);
    score.emplace_back(lane.set.slot_index.size(), 0.0F);
  }
  if (stale.empty()) return absl::OkStatus();

  EBBTIDE_RETURN_IF_ERROR(policy.scorer->Score(stale, tools, score));
  const ValueWeighting weighting = policy.resolved.spec.weighting;
  if (weighting != ValueWeighting::kNone)
    EBBTIDE_RETURN_IF_ERROR(WeighByValues(weighting, stale, tools, score));
  for (size_t l = 0; l < stale.size(); ++l) {
    LaneMemory& memory = stale[l].memory;
    for (size_t s = 0; s < score[l].size(); ++s) {
      const int32_t index = stale[l].set.slot_index[s];
      if (index != gpu::kNoToken) memory.score[static_cast<size_t>(index)] = score[l][s];
    }
    memory.queries_since_refresh = 0;
    memory.is_score_stale = false;
  }
  return absl::OkStatus();
}

std::string_view ProtectionOf(const ResolvedPolicy& policy, int32_t index, int32_t length,
                              int32_t candidate_end) {
  if (index < policy.spec.sinks) return "sink";
  if (index >= length - (policy.protected_tokens - policy.spec.sinks)) return "recent";
  if (index >= candidate_end) return "open block";
  return "";
}

absl::StatusOr<std::vector<std::vector<int32_t>>> ChooseVictims(const Policy& policy,
                                                                std::span<const LaneToScore> lanes,
                                                                const ChoiceArgs& args,
                                                                const ScoringTools& tools) {
  std::vector<std::vector<int32_t>> victims(lanes.size());
  if (args.length <= args.budget) return victims;  // However many of them are resident.
  std::vector<size_t> over_budget;
  std::vector<LaneToScore> to_score;
  for (size_t l = 0; l < lanes.size(); ++l) {
    const auto resident = std::ranges::count_if(lanes[l].set.slot_index,
                                                [](int32_t i) { return i != gpu::kNoToken; });
    if (resident <= args.budget) continue;
    over_budget.push_back(l);
    to_score.push_back(lanes[l]);
  }
  if (to_score.empty()) return victims;
  EBBTIDE_RETURN_IF_ERROR(RefreshScores(policy, to_score, tools));
  tools.parallel.Run(static_cast<int>(over_budget.size()), [&](int i) {
    const size_t l = over_budget[static_cast<size_t>(i)];
    victims[l] = LowestOf(policy, lanes[l], args);
  });
  return victims;
}

}  // namespace ebbtide::service
