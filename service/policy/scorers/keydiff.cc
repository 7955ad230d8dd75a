// SPDX-License-Identifier: Apache-2.0
//
// KeyDiff (arXiv:2504.15364): the less a key resembles the mean unit key of the working set, the
// more it is worth. Needs no queries.

#include "gpu/kernels/geometry.h"
#include "service/policy/scorers/scorers.h"

namespace ebbtide::service {
namespace {

class KeyDiffScorer final : public Scorer {
 public:
  void Observe(const Observation&, LaneMemory&) const override {}
  bool is_fresh(const LaneMemory&) const override { return false; }

  void Score(const WorkingSet& set, LaneMemory& memory, std::span<float> score) const override {
    gpu::KeyDiffCpu({.dtype = memory.shape.dtype,
                     .head_dim = memory.shape.head_dim,
                     .extents = set.extents,
                     .score = score});
  }
};

}  // namespace

std::unique_ptr<const Scorer> MakeKeyDiff() {
  return std::make_unique<KeyDiffScorer>();
}

}  // namespace ebbtide::service
