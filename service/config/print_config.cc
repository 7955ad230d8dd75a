// SPDX-License-Identifier: Apache-2.0
//
// A Config as YAML, field by field in the order of its schema, so that a field can't be forgotten.

#include <iterator>

#include "absl/strings/str_format.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

#include "ebbtide/v1/config.pb.h"
#include "service/config/listen.h"
#include "service/config/load_config.h"

namespace ebbtide::service {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// To the byte, unlike FormatBytes.
std::string ExactSize(uint64_t bytes) {
  constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  while (unit + 1 < std::size(kUnits) && bytes > 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrFormat("%d%s", bytes, kUnits[unit]);
}

const char* BackendName(BackendChoice backend) {
  switch (backend) {
    case BackendChoice::kAuto:
      return "auto";
    case BackendChoice::kCpu:
      return "cpu";
    case BackendChoice::kCuda:
      return "cuda";
  }
  return "auto";
}

uint64_t ToMilliseconds(absl::Duration duration) {
  return static_cast<uint64_t>(absl::ToInt64Milliseconds(duration));
}

v1::Config ToProto(const Config& config) {
  v1::Config proto;
  v1::Config::Server& server = *proto.mutable_server();
  server.set_listen(FormatListen(config.server.listen));
  server.set_threads(config.server.threads);
  server.set_log_level(std::string(LogLevelName(config.server.log_level)));
  server.set_message_bytes_max(config.server.message_bytes_max);
  server.set_socket_mode(absl::StrFormat("%04o", config.server.listen.socket_mode));
  server.set_calls_in_flight_max(config.server.calls_in_flight_max);
  server.set_call_deadline_ms(ToMilliseconds(config.server.call_deadline));
  server.set_drain_ms(ToMilliseconds(config.server.drain));
  proto.mutable_device()->set_budget(ExactSize(config.device.budget_bytes));
  proto.mutable_device()->set_backend(BackendName(config.device.backend));
  proto.mutable_host()->set_budget(ExactSize(config.host.budget_bytes));
  proto.mutable_rocksdb()->set_disabled(config.rocksdb.disabled);
  proto.mutable_rocksdb()->set_path(config.rocksdb.path);
  proto.mutable_rocksdb()->set_budget(ExactSize(config.rocksdb.budget_bytes));
  proto.mutable_sequences()->set_idle_timeout_ms(ToMilliseconds(config.sequences.idle_timeout));
  proto.mutable_sequences()->set_recall(config.sequences.recall);
  return proto;
}

std::string QuotedYaml(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
    }
    quoted += c;
  }
  return quoted + "\"";
}

std::string ScalarText(const Message& message, const FieldDescriptor& field) {
  const google::protobuf::Reflection& values = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return QuotedYaml(values.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return values.GetBool(message, &field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrFormat("%d", values.GetUInt32(message, &field));
    default:
      return absl::StrFormat("%d", values.GetUInt64(message, &field));
  }
}

}  // namespace

std::string PrintConfig(const Config& config, const ConfigOrigins& origins) {
  const v1::Config proto = ToProto(config);
  std::string text;
  for (int i = 0; i < proto.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& section = *proto.GetDescriptor()->field(i);
    const Message& message = proto.GetReflection()->GetMessage(proto, &section);
    text += section.name() + ":\n";
    for (int j = 0; j < message.GetDescriptor()->field_count(); ++j) {
      const FieldDescriptor& field = *message.GetDescriptor()->field(j);
      const auto origin = origins.find(section.name() + "." + field.name());
      text += absl::StrFormat("  %s: %s%s\n", field.name(), ScalarText(message, field),
                              origin == origins.end() ? "" : "  # " + origin->second);
    }
  }
  return text;
}

}  // namespace ebbtide::service
