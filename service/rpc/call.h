// SPDX-License-Identifier: Apache-2.0
//
// What gRPC knows of a call and we need: how long its caller waits, and how an error is told.

#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/status.h"

namespace ebbtide::service {

// Trailing metadata that carries an error's reason.
inline constexpr char kReasonKey[] = "ebbtide-reason";

// How long the engine may take: what is left to the caller, less a little for the way back so that
// an answer made at the last moment still arrives; `otherwise` where the caller named no deadline.
absl::Duration TimeLeft(const grpc::ServerContext& context, absl::Duration otherwise);

// With the reason in the trailing metadata.
grpc::Status ToGrpc(const absl::Status& status, grpc::ServerContext& context);

}  // namespace ebbtide::service
