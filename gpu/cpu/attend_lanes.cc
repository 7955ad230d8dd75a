// SPDX-License-Identifier: Apache-2.0

#include "gpu/cpu/attend_lanes.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "gpu/cpu/attend_part.h"

namespace ebbtide::gpu {
namespace {

// A block of rows of one lane, with its runs in order.
struct Block {
  const AttendArgs* args;
  std::span<const AttendPart> runs;
};

std::vector<Block> Blocks(std::span<const AttendArgs> lanes,
                          std::vector<std::vector<AttendPart>>& parts) {
  std::vector<Block> blocks;
  for (const AttendArgs& args : lanes) {
    CheckAttend(args);
    parts.push_back(SplitAttend(args));
  }
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    for (std::span<const AttendPart> rest = parts[lane]; !rest.empty();) {
      const std::span<const AttendPart> runs = FirstBlock(rest);
      blocks.push_back({&lanes[lane], runs});
      rest = rest.subspan(runs.size());
    }
  }
  return blocks;
}

// One block on all threads: a few runs each at a time, so that few partials are alive.
void AttendTogether(const Block& block, ParallelFor& threads) {
  constexpr size_t kRunsEach = 8;
  std::vector<AttendPartial> partial(
      std::min(block.runs.size(), kRunsEach * static_cast<size_t>(threads.threads())));
  AttendPartial merged;
  for (size_t first = 0; first < block.runs.size(); first += partial.size()) {
    const size_t count = std::min(partial.size(), block.runs.size() - first);
    threads.Run(static_cast<int>(count), [&](int i) {
      const auto run = static_cast<size_t>(i);
      AttendPartCpu(*block.args, block.runs[first + run], partial[run]);
    });
    for (size_t run = 0; run < count; ++run) {
      if (first + run == 0) {
        std::swap(merged, partial[0]);
      } else {
        MergePartial(merged, partial[run]);
      }
    }
  }
  StorePartial(*block.args, block.runs[0], merged);
}

}  // namespace

void AttendLanes(std::span<const AttendArgs> lanes, ParallelFor& threads) {
  std::vector<std::vector<AttendPart>> parts;
  std::vector<Block> blocks = Blocks(lanes, parts);
  size_t runs = 0;
  for (const Block& block : blocks) runs += block.runs.size();

  // A block longer than half a thread's share would keep the others waiting at the end.
  const size_t share = runs / (2 * static_cast<size_t>(threads.threads()));
  const auto is_long = [&](const Block& block) {
    return threads.threads() > 1 && block.runs.size() > std::max<size_t>(share, 1);
  };
  const auto whole = std::partition(blocks.begin(), blocks.end(), is_long);
  for (auto block = blocks.begin(); block != whole; ++block) AttendTogether(*block, threads);
  threads.Run(static_cast<int>(blocks.end() - whole), [&](int i) {
    const Block& block = *(whole + i);
    AttendBlock(*block.args, block.runs);
  });
}

}  // namespace ebbtide::gpu
