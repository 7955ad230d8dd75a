// SPDX-License-Identifier: Apache-2.0
//
// One lane with its memory, filled by hand: what scorers look at, without a cache around it. Keys
// and values are f32 rows of two channels.

#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/executor.h"
#include "gpu/cpu/cpu_backend.h"
#include "gpu/device.h"
#include "gpu/extent.h"
#include "service/model/lane.h"
#include "service/policy/lane_memory.h"
#include "service/policy/scorer.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::test {

using Row = std::array<float, 2>;

inline constexpr float kUnseen = -std::numeric_limits<float>::infinity();

class ScoredLane {
 public:
  static constexpr int kPage = 16;
  static constexpr int kSlots = 128;
  static constexpr int32_t kLinger = -kPage;  // Slots are taken again at once.
  static constexpr float kScale = 1.0F;

  explicit ScoredLane(int group = 1) : group_(group), lane_(kPage, kSlots, kLinger) {
    memory_.shape = {.tokens = kPage, .head_dim = 2, .dtype = gpu::Dtype::kF32};
    frames_.resize(kSlots / kPage * memory_.shape.page_bytes());
    memory_.frames = frames_.data();
  }
  ScoredLane(const ScoredLane&) = delete;
  ScoredLane& operator=(const ScoredLane&) = delete;

  int32_t length() const { return lane_.length(); }
  service::LaneMemory& memory() { return memory_; }
  service::Lane& lane() { return lane_; }

  void Append(const Row& key, const Row& value) {
    std::vector<int32_t> slot;
    lane_.Append(1, &slot);
    std::memcpy(memory_.key_slot(slot.front()), key.data(), sizeof key);
    std::memcpy(memory_.value_slot(slot.front()), value.data(), sizeof value);
    const float norm = std::hypot(value[0], value[1]);
    memory_.NoteTokens({&norm, 1}, {&norm, 1}, true);
  }
  void Remove(int32_t index) { lane_.Demote(index); }

  service::WorkingSet set() {
    frames_in_use_ = service::FindWorkingFrames(memory_, lane_.slot_index());
    return {.scale = kScale,
            .group = group_,
            .extents = frames_in_use_.extents,
            .slot_index = frames_in_use_.slot_index};
  }

  // What an answer to `query` [group, queries] shows: logits of all resident tokens not after each
  // query's own index, and their log-sum-exp.
  struct Answer {
    int group = 1;
    std::vector<float> query;
    std::vector<int32_t> query_index;
    std::vector<int32_t> index;
    std::vector<float> logits;
    std::vector<float> lse;
    std::vector<service::AttendedPart> parts;
    bool ends_prefill_call = false;

    service::Observation Seen() {
      parts = {{.index = index, .logits = logits}};
      return {.group = group,
              .queries = static_cast<int>(query_index.size()),
              .query = query,
              .query_index = query_index,
              .parts = parts,
              .lse = lse,
              .ends_prefill_call = ends_prefill_call};
    }
  };
  Answer AnswerTo(const std::vector<Row>& query, const std::vector<int32_t>& query_index) const {
    Answer answer{.group = group_,
                  .query = {},
                  .query_index = query_index,
                  .index = {lane_.slot_index().begin(), lane_.slot_index().end()},
                  .logits = {},
                  .lse = {},
                  .parts = {}};
    for (size_t row = 0; row < query.size(); ++row) {
      answer.query.insert(answer.query.end(), query[row].begin(), query[row].end());
      double total = 0;
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        const int32_t index = lane_.slot_index()[static_cast<size_t>(slot)];
        if (index == gpu::kNoToken || index > query_index[row % query_index.size()]) {
          answer.logits.push_back(kUnseen);
          continue;
        }
        Row key;
        std::memcpy(key.data(), memory_.key_slot(slot), sizeof key);
        answer.logits.push_back(kScale * (query[row][0] * key[0] + query[row][1] * key[1]));
        total += std::exp(static_cast<double>(answer.logits.back()));
      }
      answer.lse.push_back(static_cast<float>(std::log(total)));
    }
    return answer;
  }

  // As one call's only answer.
  void Observe(const service::Policy& policy, const service::Observation& observation) {
    service::ScoreNotes notes;
    policy.scorer->Observe(observation, memory_, notes);
    policy.scorer->Take(notes, memory_);
  }
  // Score of each resident token, by index; what is absent keeps its last.
  std::vector<float> Scores(const service::Policy& policy) {
    const service::LaneToScore lane{.set = set(), .memory = memory_};
    EXPECT_OK(service::RefreshScores(policy, {&lane, 1}, tools_));
    return memory_.score;
  }
  // The base score of each slot of the working frames.
  std::vector<float> BaseScores(const service::Policy& policy) {
    const service::LaneToScore lane{.set = set(), .memory = memory_};
    std::vector<float> score(lane.set.slot_index.size(), 0.0F);
    EXPECT_OK(policy.scorer->Score({&lane, 1}, tools_, {&score, 1}));
    return score;
  }
  std::vector<int32_t> Victims(const service::Policy& policy, const service::ChoiceArgs& args) {
    const service::LaneToScore lane{.set = set(), .memory = memory_};
    const auto victims = service::ChooseVictims(policy, {&lane, 1}, args, tools_);
    EXPECT_OK(victims.status());
    return victims->front();
  }
  std::vector<int32_t> Victims(const service::Policy& policy, int32_t budget) {
    return Victims(policy, {.budget = budget, .length = length(), .candidate_end = length()});
  }

 private:
  const int group_;
  service::Lane lane_;
  service::LaneMemory memory_;
  std::vector<std::byte> frames_;
  service::WorkingFrames frames_in_use_;
  gpu::CpuBackend backend_{1};
  gpu::Device device_ = *gpu::Device::Open(backend_);
  ParallelFor parallel_{1};
  service::ScoringTools tools_{.device = device_, .parallel = parallel_};
};

// `text` with the protection given, where the text does not say.
inline service::Policy MakePolicy(const std::string& text, int32_t protected_tokens = 0) {
  service::ResolvedPolicy resolved;
  resolved.spec = *service::ParsePolicy(text);
  resolved.protected_tokens = resolved.spec.sinks + protected_tokens;
  return service::Policy(resolved);
}

}  // namespace ebbtide::test
