// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/raw_service.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_format.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/support/proto_buffer_reader.h"

#include "base/bytes.h"
#include "base/status_macros.h"
#include "service/reason.h"
#include "service/rpc/call.h"

namespace ebbtide::service {
namespace {

const google::protobuf::ServiceDescriptor& FindService(const char* name) {
  const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
  EBBTIDE_CHECK(service != nullptr, "the service is in a .proto that is linked in");
  return *service;
}

absl::Status BadMessage(const google::protobuf::Message& request, uint64_t size) {
  return Refuse(
      absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
      absl::StrFormat("these %s are no %s: they break off, or are not what protobuf writes",
                      FormatBytes(size), request.GetTypeName()));
}

}  // namespace

RawService::RawService(const char* service, const Parts& parts)
    : descriptor_(FindService(service)), parts_(parts) {}

const std::string& RawService::NameOf(const google::protobuf::Descriptor& request,
                                      const google::protobuf::Descriptor& response) {
  for (int i = 0; i < descriptor_.method_count(); ++i) {
    const google::protobuf::MethodDescriptor& method = *descriptor_.method(i);
    if (method.input_type() != &request) continue;
    EBBTIDE_CHECK(method.output_type() == &response, "the method answers with its own response");
    return names_.emplace_back(absl::StrFormat("/%s/%s", descriptor_.full_name(), method.name()));
  }
  EBBTIDE_CHECK(false, "a method of the service takes the request");
}

bool RawService::is_complete() const {
  return names_.size() == static_cast<size_t>(descriptor_.method_count());
}

grpc::Status RawService::Answer(grpc::ServerContext& context, grpc::ByteBuffer& bytes,
                                const MessageLayout& layout, google::protobuf::Message& request,
                                const std::function<absl::Status(RawCall&)>& answer) {
  if (!bytes.Valid()) {
    // Not counted: most likely it was cut off on its way, and nobody is there to be told.
    return ToGrpc(
        Refuse(absl::StatusCode::kInvalidArgument, "BAD_MESSAGE",
               absl::StrFormat("the call has no message; send %s", request.GetTypeName())),
        context);
  }
  absl::StatusOr<Admission::Ticket> ticket = Admit(bytes.Length());
  if (!ticket.ok()) {
    return ToGrpc(parts_.refusals.Counted(ticket.status()), context);
  }
  if (const absl::Status read = Read(bytes, layout, *ticket, request); !read.ok()) {
    return ToGrpc(parts_.refusals.Counted(read), context);
  }
  bytes.Clear();
  RawCall call{.context = context, .ticket = *ticket};
  return ToGrpc(answer(call), context);
}

absl::StatusOr<Admission::Ticket> RawService::Admit(uint64_t bytes) {
  if (bytes > parts_.facts.message_bytes_max) {
    return Refuse(absl::StatusCode::kResourceExhausted, "MESSAGE_TOO_LARGE",
                  absl::StrFormat("the message has %s, over the limit of %s; send fewer items or "
                                  "tokens per call, or raise server.message_bytes_max",
                                  FormatBytes(bytes), FormatBytes(parts_.facts.message_bytes_max)));
  }
  return parts_.admission.Enter(bytes);
}

absl::Status RawService::Read(grpc::ByteBuffer& bytes, const MessageLayout& layout,
                              Admission::Ticket& ticket, google::protobuf::Message& request) {
  const uint64_t size = bytes.Length();
  const uint64_t limit = kParsedBytesBesides + kParsedTimesMax * size;
  grpc::ProtoBufferReader unparsed(&bytes);
  const std::optional<uint64_t> parsed_bytes =
      layout.ParsedBytes(unparsed, static_cast<int>(size), limit);
  if (!parsed_bytes.has_value()) return BadMessage(request, size);
  if (*parsed_bytes > limit) {
    return Refuse(absl::StatusCode::kInvalidArgument, "TOO_MANY_FIELDS",
                  absl::StrFormat("this message of %s holds so many items, numbers or unknown "
                                  "fields that it would take over %s once it is parsed; send "
                                  "fewer per call",
                                  FormatBytes(size), FormatBytes(limit)));
  }
  EBBTIDE_RETURN_IF_ERROR(
      ticket.Grow(*parsed_bytes - std::min(*parsed_bytes, size), "request, once it is parsed,"));
  grpc::ProtoBufferReader reader(&bytes);
  return request.ParseFromZeroCopyStream(&reader) ? absl::OkStatus() : BadMessage(request, size);
}

}  // namespace ebbtide::service
