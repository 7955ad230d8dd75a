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

void AttendCpu(const AttendArgs& args) {
  CheckAttend(args);
  AttendPartial merged;
  AttendPartial partial;
  const std::vector<AttendPart> parts = SplitAttend(args);
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_first = parts[i].first_extent == 0;
    AttendPartCpu(args, parts[i], is_first ? merged : partial);
    if (!is_first) MergePartial(merged, partial);
    if (i + 1 == parts.size() || parts[i + 1].first_extent == 0) {
      StorePartial(args, parts[i], merged);
    }
  }
}

}  // namespace ebbtide::gpu
