// SPDX-License-Identifier: Apache-2.0
//
// Messages of workers and watchers to the values of calls.h, with every check that needs the
// message alone; what needs a model or a sequence is checked behind the engine. Tensors are looked
// at where the message holds them, never copied. Tested by tests/unit/service/convert_test.cc.
//
// Errors are kInvalidArgument with a reason of docs/errors.md unless said otherwise.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "ebbtide/v1/cache.pb.h"
#include "ebbtide/v1/stats.pb.h"
#include "service/calls.h"

namespace ebbtide::service {

inline constexpr size_t kNameBytesMax = 256;
inline constexpr int kItemsMax = 4096;  // Of one Append or Attend.
inline constexpr uint32_t kListPageSizeMax = 1000;

// 1 to 256 bytes of printable ASCII. `what` names the field in the message, `reason` the refusal.
absl::Status CheckName(std::string_view what, std::string_view name,
                       std::string_view reason = "NAME_INVALID");
// The same, or nothing: policies, modes and fingerprints.
absl::Status CheckText(std::string_view what, std::string_view text,
                       std::string_view reason = "NAME_INVALID");

// With its defaults filled in. Limits are left to Geometry::Validate.
absl::StatusOr<Geometry> ReadGeometry(const v1::Geometry& message);

absl::StatusOr<OpenArgs> ReadOpen(const v1::OpenSequenceRequest& message);

// An Append or Attend, its items sorted into what can be carried out and what can't.
struct StepRequest {
  StepCall call;
  std::vector<StepItem> items;  // Those without a refusal, in order; they borrow the message.
  std::vector<absl::Status> refusals;  // One for every item of the message, in order.
  uint64_t answer_bytes = 0;           // What the answers will take on the wire, about.
};

absl::StatusOr<StepRequest> ReadAppend(const v1::AppendRequest& message);
absl::StatusOr<StepRequest> ReadAttend(const v1::AttendRequest& message);

absl::StatusOr<DescribeArgs> ReadDescribe(const v1::DescribeSequenceRequest& message);

struct ListArgs {
  std::string after;  // List what follows this name.
  size_t limit = 0;
};
absl::StatusOr<ListArgs> ReadList(const v1::ListSequencesRequest& message);

// The token that ReadList reads back as `after`.
std::string PageToken(std::string_view after);

}  // namespace ebbtide::service
