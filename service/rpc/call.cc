// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/call.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <string>

#include "service/reason.h"

namespace ebbtide::service {

absl::Duration TimeLeft(const grpc::ServerContext& context, absl::Duration otherwise) {
  const gpr_timespec deadline = context.raw_deadline();
  if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0) {
    return otherwise;
  }
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
  const absl::Duration all = absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
  return all - std::clamp(all / 10, absl::Milliseconds(1), absl::Milliseconds(50));
}

grpc::Status ToGrpc(const absl::Status& status, grpc::ServerContext& context) {
  if (status.ok()) {
    return grpc::Status::OK;
  }
  const std::string reason = ReasonOf(status);
  if (!reason.empty()) {
    context.AddTrailingMetadata(kReasonKey, reason);
  }
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace ebbtide::service
