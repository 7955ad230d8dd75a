// SPDX-License-Identifier: Apache-2.0
//
// Answers of calls.h to messages. Nothing here can fail.
// Tested by tests/unit/service/convert_test.cc.

#pragma once

#include "absl/status/status.h"

#include "ebbtide/v1/cache.pb.h"
#include "ebbtide/v1/stats.pb.h"
#include "service/calls.h"

namespace ebbtide::service {

void WriteItemStatus(const absl::Status& status, v1::ItemStatus& message);
void WriteGeometry(const Geometry& geometry, v1::Geometry& message);
void WriteOpen(const OpenAnswer& answer, v1::OpenSequenceResponse& message);
void WriteAppend(const StepAnswer& answer, v1::AppendResult& message);
void WriteAttend(const StepAnswer& answer, const StepItem& item, v1::AttendResult& message);
void WritePage(const PageBytes& page, v1::Page& message);

void WriteStats(const Stats& stats, v1::GetStatsResponse& message);
void WriteSummary(const SequenceSummary& summary, v1::SequenceSummary& message);
void WriteDescription(const SequenceDescription& description,
                      v1::DescribeSequenceResponse& message);

}  // namespace ebbtide::service
