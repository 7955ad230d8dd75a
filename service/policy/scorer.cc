// SPDX-License-Identifier: Apache-2.0

#include "service/policy/scorer.h"

#include <algorithm>
#include <cmath>
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

// Turns a base score into the output error its removal would cause, were the score, normalised over
// the working set, the attention (CAOTE's meta use, docs/policies.md).
void WeighByValues(ValueWeighting weighting, const WorkingSet& set, const LaneMemory& memory,
                   std::span<float> score) {
  double total = 0;
  for (const float s : score) total += s;
  if (!(total > 0)) return;  // Nothing observed yet: all alike.

  std::vector<float> weight(score.size());
  std::vector<float> logit(score.size());
  for (size_t s = 0; s < score.size(); ++s) {
    weight[s] = static_cast<float>(score[s] / total);
    logit[s] = static_cast<float>(std::log(score[s] / total));  // -inf for 0: weight 0.
  }
  const std::vector<float> centre_weight =
      weighting == ValueWeighting::kCaote ? weight : UniformWeights(set.slot_index);

  std::vector<float> centre(static_cast<size_t>(memory.shape.head_dim));
  gpu::WeightedValueCpu({.dtype = memory.shape.dtype,
                         .head_dim = memory.shape.head_dim,
                         .rows = 1,
                         .extents = set.extents,
                         .weight = centre_weight,
                         .output = centre});
  const float lse = 0;
  const gpu::DamageArgs args{.dtype = memory.shape.dtype,
                             .head_dim = memory.shape.head_dim,
                             .rows = 1,
                             .extents = set.extents,
                             .logits = logit,
                             .lse = {&lse, 1},
                             .centre = centre,
                             .damage = score};
  if (weighting == ValueWeighting::kCaote) {
    gpu::DamageCpu(args);
  } else {
    gpu::FastDamageCpu(args);
  }
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

void RefreshScores(const Policy& policy, const WorkingSet& set, LaneMemory& memory) {
  if (policy.scorer->is_fresh(memory)) return;

  std::vector<float> score(set.slot_index.size(), 0.0F);
  policy.scorer->Score(set, memory, score);
  const ValueWeighting weighting = policy.resolved.spec.weighting;
  if (weighting != ValueWeighting::kNone) WeighByValues(weighting, set, memory, score);
  for (size_t s = 0; s < score.size(); ++s) {
    const int32_t index = set.slot_index[s];
    if (index != gpu::kNoToken) memory.score[static_cast<size_t>(index)] = score[s];
  }
  memory.is_score_stale = false;
}

std::string_view ProtectionOf(const ResolvedPolicy& policy, int32_t index, int32_t length,
                              int32_t candidate_end) {
  if (index < policy.spec.sinks) return "sink";
  if (index >= length - (policy.protected_tokens - policy.spec.sinks)) return "recent";
  if (index >= candidate_end) return "open block";
  return "";
}

std::vector<int32_t> ChooseVictims(const Policy& policy, const WorkingSet& set,
                                   const ChoiceArgs& args, LaneMemory& memory) {
  std::vector<int32_t> index;
  for (const int32_t i : set.slot_index) {
    if (i != gpu::kNoToken) index.push_back(i);
  }
  if (static_cast<int32_t>(index.size()) <= args.budget) return {};
  RefreshScores(policy, set, memory);

  std::vector<float> score;
  std::vector<uint8_t> eligible;
  for (const int32_t i : index) {
    score.push_back(memory.score[static_cast<size_t>(i)]);
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

}  // namespace ebbtide::service
