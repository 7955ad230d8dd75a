// SPDX-License-Identifier: Apache-2.0

#include "gpu/cpu/attend_part.h"

#include <algorithm>

#include "gpu/cpu/merge_row.h"

namespace ebbtide::gpu {
namespace {

// Runs of whole extents, each the shortest that reaches kAttendRunSlots.
std::vector<AttendPart> Runs(const AttendArgs& args) {
  std::vector<AttendPart> runs(1);
  for (size_t i = 0; i < args.extents.size(); ++i) {
    if (runs.back().slots >= kAttendRunSlots) {
      runs.push_back({.first_extent = i, .first_slot = runs.back().first_slot + runs.back().slots});
    }
    ++runs.back().extents;
    runs.back().slots += static_cast<size_t>(args.extents[i].slots);
  }
  return runs;
}

}  // namespace

std::vector<AttendPart> SplitAttend(const AttendArgs& args) {
  const std::vector<AttendPart> runs = Runs(args);
  const size_t rows = args.lse.size();
  std::vector<AttendPart> parts;
  parts.reserve(runs.size() * (rows / kAttendBlockRows + 1));
  for (size_t row = 0; row < rows; row += kAttendBlockRows) {
    for (AttendPart part : runs) {
      part.first_row = row;
      part.rows = std::min(kAttendBlockRows, rows - row);
      parts.push_back(part);
    }
  }
  return parts;
}

void MergePartial(AttendPartial& into, const AttendPartial& part) {
  if (into.lse.empty()) return;
  const size_t head_dim = into.output.size() / into.lse.size();
  for (size_t row = 0; row < into.lse.size(); ++row) {
    const JoinedRow joined = JoinRow(into.lse[row], part.lse[row]);
    MergeRow(joined, {&part.output[row * head_dim], head_dim},
             {&into.output[row * head_dim], head_dim});
    into.lse[row] = joined.lse;
  }
}

void StorePartial(const AttendArgs& args, const AttendPart& part, const AttendPartial& partial) {
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  std::copy(partial.output.begin(), partial.output.end(), &args.output[part.first_row * head_dim]);
  std::transform(partial.lse.begin(), partial.lse.end(), &args.lse[part.first_row],
                 [](double lse) { return static_cast<float>(lse); });
}

std::span<const AttendPart> FirstBlock(std::span<const AttendPart> parts) {
  size_t runs = 1;
  while (runs < parts.size() && parts[runs].first_row == parts[0].first_row) ++runs;
  return parts.first(runs);
}

void AttendBlock(const AttendArgs& args, std::span<const AttendPart> runs) {
  AttendPartial merged;
  AttendPartial partial;
  AttendPartCpu(args, runs[0], merged);
  for (const AttendPart& run : runs.subspan(1)) {
    AttendPartCpu(args, run, partial);
    MergePartial(merged, partial);
  }
  StorePartial(args, runs[0], merged);
}

void AttendCpu(const AttendArgs& args) {
  CheckAttend(args);
  const std::vector<AttendPart> parts = SplitAttend(args);
  for (std::span<const AttendPart> rest = parts; !rest.empty();) {
    const std::span<const AttendPart> runs = FirstBlock(rest);
    AttendBlock(args, runs);
    rest = rest.subspan(runs.size());
  }
}

}  // namespace ebbtide::gpu
