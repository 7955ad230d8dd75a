// SPDX-License-Identifier: Apache-2.0
//
// A service of gRPC whose requests come as bytes. Generated services parse a request before anybody
// can look at it; here it is admitted by its length, then looked through, then parsed. Knows no
// method of its own. Tested by tests/unit/service/raw_service_test.cc.

#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/impl/service_type.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/method_handler.h"
#include "grpcpp/support/status.h"

#include "service/rpc/admission.h"
#include "service/rpc/parsed_bytes.h"
#include "service/rpc/refusals.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

// Once parsed, a message may take so many times its bytes, and so much besides. The fullest calls
// that keep to every other limit stay below (4096 items, each with every field and with 512 tokens
// of two bytes).
inline constexpr uint64_t kParsedTimesMax = 4;
inline constexpr uint64_t kParsedBytesBesides = uint64_t{8} << 20;

// What a method has of its call beside the messages.
struct RawCall {
  grpc::ServerContext& context;
  Admission::Ticket& ticket;
};

// Thread-safe.
class RawService : public grpc::Service {
 public:
  struct Parts {
    const ServerFacts& facts;
    Admission& admission;
    Refusals& refusals;
  };

 protected:
  template <typename Request, typename Response>
  using Method = std::function<absl::Status(RawCall&, const Request&, Response&)>;

  // `service`: of a .proto, e.g. "ebbtide.v1.CacheService". Borrows what it is given.
  RawService(const char* service, const Parts& parts);

  // The method of the service that takes a Request. Called by constructors, once for each method.
  template <typename Request, typename Response>
  void Add(Method<Request, Response> method);

  // Every method of the service was added.
  bool is_complete() const;

 private:
  const std::string& NameOf(const google::protobuf::Descriptor& request,
                            const google::protobuf::Descriptor& response);

  // Admits the call, parses its request, and lets `answer` do the rest.
  grpc::Status Answer(grpc::ServerContext& context, grpc::ByteBuffer& bytes,
                      const MessageLayout& layout, google::protobuf::Message& request,
                      const std::function<absl::Status(RawCall&)>& answer);

  //   kResourceExhausted  MESSAGE_TOO_LARGE, SERVER_BUSY
  //   kUnavailable        SHUTTING_DOWN
  absl::StatusOr<Admission::Ticket> Admit(uint64_t bytes);

  //   kInvalidArgument    BAD_MESSAGE, TOO_MANY_FIELDS
  //   kResourceExhausted  SERVER_BUSY
  static absl::Status Read(grpc::ByteBuffer& bytes, const MessageLayout& layout,
                           Admission::Ticket& ticket, google::protobuf::Message& request);

  const google::protobuf::ServiceDescriptor& descriptor_;
  const Parts parts_;
  std::list<std::string> names_;  // gRPC borrows them.
};

template <typename Request, typename Response>
void RawService::Add(Method<Request, Response> method) {
  const std::string& name = NameOf(*Request::descriptor(), *Response::descriptor());
  const auto layout = std::make_shared<const MessageLayout>(*Request::descriptor());
  // As generated code does, but for the request's type.
  using Handler = grpc::internal::RpcMethodHandler<RawService, grpc::ByteBuffer, Response,
                                                   grpc::ByteBuffer, google::protobuf::MessageLite>;
  auto answer = [layout, method = std::move(method)](RawService* self, grpc::ServerContext* context,
                                                     const grpc::ByteBuffer* bytes,
                                                     Response* response) {
    Request request;
    // gRPC holds the bytes for this call alone, and would keep them until it ends.
    return self->Answer(*context, const_cast<grpc::ByteBuffer&>(*bytes), *layout, request,
                        [&](RawCall& call) { return method(call, request, *response); });
  };
  AddMethod(new grpc::internal::RpcServiceMethod(
      name.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, new Handler(std::move(answer), this)));
}

}  // namespace ebbtide::service
