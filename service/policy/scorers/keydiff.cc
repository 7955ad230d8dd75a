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
  bool is_fresh(const LaneMemory&) const override { return false; }

  absl::Status Score(std::span<const LaneToScore> lanes, const ScoringTools& tools,
                     std::span<std::vector<float>> score) const override {
    std::vector<gpu::GeometryArgs> args;
    for (size_t l = 0; l < lanes.size(); ++l) {
      args.push_back({.dtype = lanes[l].memory.shape.dtype,
                      .head_dim = lanes[l].memory.shape.head_dim,
                      .extents = lanes[l].set.extents,
                      .score = score[l]});
    }
    return tools.device.Run(args);
  }
};

}  // namespace

std::unique_ptr<const Scorer> MakeKeyDiff() {
  return std::make_unique<KeyDiffScorer>();
}

}  // namespace ebbtide::service
