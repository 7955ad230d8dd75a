// SPDX-License-Identifier: Apache-2.0
//
// Climbs the ladder of an answer's absent pages until its target is met: digests first, then
// low-bit forms, then exact bytes, each only where the one before leaves doubt. Decides and asks;
// pages are fetched by service/movement. Tested by tests/unit/service/recall_trace_test.cc.

#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "base/clock.h"
#include "base/executor.h"
#include "gpu/device.h"
#include "service/attention/lane_answer.h"
#include "service/calls.h"
#include "service/movement/page_source.h"
#include "service/policy/policy.h"

namespace ebbtide::service {

std::string_view RungName(Rung rung);  // "digest", "coarse", "fine", "exact"

// What one step of one layer may use.
struct RecallTools {
  PageSource& source;
  ParallelFor& parallel;
  const gpu::Device& device;
  Clock& clock;
  absl::Duration deadline;
  gpu::Dtype output_dtype = gpu::Dtype::kF32;  // That outputs will be rounded to.
  bool reads_exactly = false;                  // At once, though the mode would climb.
};

struct RecallResult {
  absl::Status status;          // kUnavailable: the device failed.
  std::string_view stopped_by;  // What first kept the target from being pursued; "" where nothing.
  std::vector<TouchedRung> touched;
  std::vector<LostPage> lost;
  // What the reads cost, and what reading every absent page exactly at once would have.
  uint64_t spent = 0;
  uint64_t exact = 0;
};

// `lanes` are the kv heads of one layer, resident tokens attended. Leaves every lane composed.
RecallResult Recall(const RecallSpec& spec, std::span<LaneAnswer> lanes, const RecallTools& tools);

}  // namespace ebbtide::service
