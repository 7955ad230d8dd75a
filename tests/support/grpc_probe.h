// SPDX-License-Identifier: Apache-2.0
//
// What a stranger asks a gRPC server, without its generated code: health, the names of its
// services, raw bytes to any method, and why a call was refused.

#pragma once

#include <memory>
#include <string>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"

namespace ebbtide::test {

// Connected within ten seconds, or the test fails.
std::shared_ptr<grpc::Channel> ConnectTo(const std::string& target);

// Sends `request` to "/package.Service/Method" and waits, at most ten seconds. `reason`: of the
// error, where it has one.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string* response,
                     std::string* reason = nullptr);

// Why a call was refused, which came with its answer; "" where it does not say.
std::string ReasonOf(const grpc::ClientContext& context);

// "SERVING", "NOT_SERVING", or the name of the error.
std::string HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service);

// The answer of reflection to "list services", as it came: names stand in it in plain text.
std::string ReflectedServices(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace ebbtide::test
