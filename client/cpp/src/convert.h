// SPDX-License-Identifier: Apache-2.0
//
// Between the client's plain values and the messages on the wire. Nothing is judged here: the
// daemon checks.

#pragma once

#include "ebbtide/client.h"
#include "ebbtide/v1/cache.pb.h"
#include "ebbtide/v1/stats.pb.h"

namespace ebbtide::client {

v1::RegisterModelRequest ToWire(const Model& model);
v1::OpenSequenceRequest ToWire(const SequenceOptions& options);
// All but the tensors' data (encode.h).
void ToWire(const AppendItem& item, v1::AppendItem* wire);
void ToWire(const AttendItem& item, v1::AttendItem* wire);

// Answers give up their bytes.
RegisteredModel FromWire(const v1::RegisterModelResponse& wire);
OpenedSequence FromWire(const v1::OpenSequenceResponse& wire);
AppendResult FromWire(v1::AppendResult&& wire);
AttendResult FromWire(v1::AttendResult&& wire);
Page FromWire(v1::Page&& wire);
ServerInfo FromWire(const v1::GetServerInfoResponse& wire);
Stats FromWire(const v1::GetStatsResponse& wire);
SequenceSummary FromWire(const v1::SequenceSummary& wire);
SequenceDescription FromWire(const v1::DescribeSequenceResponse& wire);

}  // namespace ebbtide::client
