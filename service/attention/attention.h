// SPDX-License-Identifier: Apache-2.0
//
// Makes one answer: checks what a worker sent, takes the layer, lets victims go, appends, attends,
// recalls, certifies, scores, and commits. Tested by tests/unit/service/engine_test.cc and
// tests/simulation/.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/clock.h"
#include "base/executor.h"
#include "gpu/backend.h"
#include "service/attention/lane_answer.h"
#include "service/cache.h"
#include "service/calls.h"
#include "service/movement/mover.h"
#include "service/movement/page_source.h"

namespace ebbtide::service {

struct AttentionOptions {
  // What recall may keep of the queries that it answers at once: a call of more is answered in
  // several tiles of queries, each as a call of its own would be.
  uint64_t recall_bytes = uint64_t{256} << 20;
};

// Thread-safe.
class Attention {
 public:
  Attention(const AttentionOptions& options, Cache& cache, Mover& mover, Staging& staging,
            const LowerTiers& tiers, Clock& clock, ParallelFor& parallel, gpu::Backend& backend)
      : options_(options),
        cache_(cache),
        mover_(mover),
        staging_(staging),
        tiers_(tiers),
        clock_(clock),
        parallel_(parallel),
        backend_(backend) {}

  StepAnswer Step(const StepCall& call, const StepItem& item);

 private:
  struct Work;  // One item under way.
  class Hold;

  absl::Status TakeSlots(Work& work);
  absl::StatusOr<std::vector<std::vector<int32_t>>> FindVictims(Work& work);
  absl::Status PlaceBeforeDeadline(Work& work, std::span<const std::vector<int32_t>> victims);
  absl::Status AppendTokens(Work& work);
  absl::Status Answer(Work& work);
  absl::Status CountAnswer(const Work& work);
  // Queries of the call that are answered at once.
  int32_t TileOf(const Work& work) const;
  absl::Status AnswerTile(Work& work, int32_t first_query, int32_t queries);
  void WriteTile(Work& work, std::span<const LaneAnswer> lanes, int32_t first_query);
  void JudgeTile(Work& work, std::span<const LaneAnswer> lanes, int32_t first_query,
                 std::string_view stopped_by);
  void Observe(Work& work, std::span<const LaneAnswer> lanes, const LaneQuery& tile,
               int32_t first_query);
  static void TakeNotes(Work& work) noexcept;

  const AttentionOptions options_;
  Cache& cache_;
  Mover& mover_;
  Staging& staging_;
  const LowerTiers tiers_;
  Clock& clock_;
  ParallelFor& parallel_;
  gpu::Backend& backend_;
};

}  // namespace ebbtide::service
