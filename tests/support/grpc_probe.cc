// SPDX-License-Identifier: Apache-2.0

#include "tests/support/grpc_probe.h"

#include <chrono>
#include <vector>

#include "absl/synchronization/notification.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"

namespace ebbtide::test {
namespace {

constexpr std::chrono::seconds kPatience(10);

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

std::string FromBuffer(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (buffer.Dump(&slices).ok()) {
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
  }
  return bytes;
}

}  // namespace

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // Otherwise channels to one target share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  EXPECT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + kPatience)) << target;
  return channel;
}

grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string* response, std::string* reason) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const grpc::ByteBuffer sent = ToBuffer(request);
  grpc::ByteBuffer received;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &sent, &received,
                 [&](const grpc::Status& result) {
                   status = result;
                   done.Notify();
                 });
  done.WaitForNotification();
  *response = FromBuffer(received);
  if (reason != nullptr) *reason = ReasonOf(context);
  return status;
}

std::string ReasonOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("ebbtide-reason");
  return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
}

std::string HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request;
  if (!service.empty()) {  // Field 1, a string.
    request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  }
  std::string response;
  const grpc::Status status = CallRaw(channel, "/grpc.health.v1.Health/Check", request, &response);
  if (!status.ok()) {
    return status.error_code() == grpc::StatusCode::NOT_FOUND ? "NOT_FOUND"
                                                              : status.error_message();
  }
  if (response == std::string("\x08\x01")) {  // Field 1, an enum.
    return "SERVING";
  }
  return response == std::string("\x08\x02") ? "NOT_SERVING" : "UNKNOWN";
}

std::string ReflectedServices(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  grpc::CompletionQueue queue;
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(nullptr);
  EXPECT_TRUE(next());
  call->Write(ToBuffer("\x3a\x01*"), nullptr);  // Field 7, list_services.
  EXPECT_TRUE(next());
  grpc::ByteBuffer received;
  call->Read(&received, nullptr);
  EXPECT_TRUE(next());
  grpc::Status status;
  call->WritesDone(nullptr);
  next();
  call->Finish(&status, nullptr);
  next();
  EXPECT_TRUE(status.ok()) << status.error_message();
  return FromBuffer(received);
}

}  // namespace ebbtide::test
