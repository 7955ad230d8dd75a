// SPDX-License-Identifier: Apache-2.0
//
// Calls that nobody meant well, to a real daemon: bytes that are no message, and messages whose
// fields are drawn from the extremes. The daemon answers each with a code of its own, stays up, and
// serves another worker as before.

#include <algorithm>
#include <fstream>
#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/dynamic_message.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.pb.h"
#include "ebbtide/v1/stats.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/grpc_probe.h"
#include "tests/support/random_seed.h"

namespace ebbtide {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

class Hostile {
 public:
  explicit Hostile(uint64_t seed) : random_(seed) {}

  size_t Below(size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random_);
  }

  void Fill(Message& message, int depth = 0) {
    const Descriptor& schema = *message.GetDescriptor();
    for (int i = 0; i < schema.field_count(); ++i) {
      const FieldDescriptor& field = *schema.field(i);
      if (field.is_map() || Below(8) == 0) continue;  // Some fields are left out.
      const size_t count = field.is_repeated() ? Below(4) : 1;
      for (size_t j = 0; j < count; ++j) SetField(message, field, depth);
    }
  }

  std::string Bytes() {
    std::string bytes(Below(200), '\0');
    for (char& byte : bytes) byte = static_cast<char>(Below(256));
    return bytes;
  }

 private:
  template <typename Number>
  Number Extreme() {
    const Number numbers[] = {0,
                              1,
                              2,
                              8,
                              32,
                              33,
                              512,
                              513,
                              static_cast<Number>(1 << 24),
                              static_cast<Number>(-1),
                              std::numeric_limits<Number>::max(),
                              std::numeric_limits<Number>::lowest()};
    return numbers[Below(std::size(numbers))];
  }

  template <typename Number>
  Number ExtremeFloat() {
    const Number numbers[] = {0,
                              Number{-0.0},
                              1,
                              Number{12.5},
                              100,
                              std::numeric_limits<Number>::quiet_NaN(),
                              std::numeric_limits<Number>::infinity(),
                              -std::numeric_limits<Number>::infinity(),
                              std::numeric_limits<Number>::max(),
                              std::numeric_limits<Number>::denorm_min()};
    return numbers[Below(std::size(numbers))];
  }

  // Names that exist are likely, so that calls get past the first check.
  std::string Text(const FieldDescriptor& field) {
    const std::string texts[] = {"victim", "victim", "model", "model", "",
                                 "auto",   "h2o",    "off",   "exact", "bounded(0)",
                                 "../..",  "\n",     "%s%n",  "é",     std::string(300, 'a')};
    if (field.type() == FieldDescriptor::TYPE_BYTES) return Bytes();
    return texts[Below(std::size(texts))];
  }

  // A tensor whose data fits its shape, or almost.
  void FillTensor(v1::Tensor& tensor) {
    const int64_t tokens = static_cast<int64_t>(Below(3)) + 1;
    for (const int64_t size : {tokens, int64_t{1}, int64_t{8}}) tensor.add_shape(size);
    tensor.set_dtype(v1::DTYPE_F32);
    tensor.set_data(std::string(static_cast<size_t>(tokens) * 32, '\0'));
    if (Below(4) == 0) tensor.set_shape(static_cast<int>(Below(3)), Extreme<int64_t>());
    if (Below(4) == 0) tensor.mutable_data()->append(Bytes());
    if (Below(8) == 0) tensor.set_dtype(static_cast<v1::Dtype>(Extreme<int>()));
  }

  void SetField(Message& message, const FieldDescriptor& field, int depth) {
    const Reflection& values = *message.GetReflection();
    const bool add = field.is_repeated();
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        Message* part =
            add ? values.AddMessage(&message, &field) : values.MutableMessage(&message, &field);
        auto* tensor = dynamic_cast<v1::Tensor*>(part);
        if (tensor != nullptr && Below(8) != 0) {
          FillTensor(*tensor);
        } else if (depth < 4) {
          Fill(*part, depth + 1);
        }
        return;
      }
      case FieldDescriptor::CPPTYPE_STRING:
        return add ? values.AddString(&message, &field, Text(field))
                   : values.SetString(&message, &field, Text(field));
      case FieldDescriptor::CPPTYPE_BOOL:
        return values.SetBool(&message, &field, Below(2) == 0);
      case FieldDescriptor::CPPTYPE_ENUM:
        return values.SetEnumValue(&message, &field,
                                   Below(8) == 0 ? Extreme<int>() : static_cast<int>(Below(4)));
      case FieldDescriptor::CPPTYPE_INT32:
        return values.SetInt32(&message, &field, Extreme<int32_t>());
      case FieldDescriptor::CPPTYPE_UINT32:
        return values.SetUInt32(&message, &field, Extreme<uint32_t>());
      case FieldDescriptor::CPPTYPE_INT64:
        return add ? values.AddInt64(&message, &field, Extreme<int64_t>())
                   : values.SetInt64(&message, &field, Extreme<int64_t>());
      case FieldDescriptor::CPPTYPE_UINT64:
        return values.SetUInt64(&message, &field, Extreme<uint64_t>());
      case FieldDescriptor::CPPTYPE_FLOAT:
        return values.SetFloat(&message, &field, ExtremeFloat<float>());
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return values.SetDouble(&message, &field, ExtremeFloat<double>());
    }
  }

  std::mt19937_64 random_;
};

std::vector<const google::protobuf::MethodDescriptor*> Methods() {
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (const auto* file :
       {v1::AppendRequest::descriptor()->file(), v1::GetStatsRequest::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        methods.push_back(file->service(i)->method(j));
      }
    }
  }
  return methods;
}

// The most memory that a process has held so far.
uint64_t PeakBytes(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  std::string word;
  uint64_t kib = 0;
  while (status >> word && word != "VmHWM:") {
  }
  EXPECT_TRUE(status >> kib);
  return kib << 10;
}

std::string PathOf(const google::protobuf::MethodDescriptor& method) {
  return "/" + method.service()->full_name() + "/" + method.name();
}

class HostileCallsTest : public testing::Test {
 protected:
  HostileCallsTest() {
    daemon_ = stand_.Serve({"--config", stand_.WriteConfig(stand_.SmallConfig())}, &said_);
    channel_ = test::ConnectTo(said_.value("target", "unix:/nowhere"));
    OpenVictim();
  }

  // "victim" of "model": one layer, one head of eight channels, f32.
  void OpenVictim() {
    v1::RegisterModelRequest model;
    model.set_model("model");
    v1::Geometry& geometry = *model.mutable_geometry();
    geometry.set_layers(1);
    geometry.set_query_heads(1);
    geometry.set_kv_heads(1);
    geometry.set_head_dim(8);
    geometry.set_dtype(v1::DTYPE_F32);
    v1::OpenSequenceRequest open;
    open.set_sequence("victim");
    open.set_model("model");
    open.mutable_budget()->set_tokens(256);
    std::string response;
    EXPECT_TRUE(test::CallRaw(channel_, "/ebbtide.v1.CacheService/RegisterModel",
                              model.SerializeAsString(), &response)
                    .ok());
    EXPECT_TRUE(test::CallRaw(channel_, "/ebbtide.v1.CacheService/OpenSequence",
                              open.SerializeAsString(), &response)
                    .ok());
  }

  void ExpectWell() {
    EXPECT_EQ(test::HealthOf(test::ConnectTo(said_.value("target", "")), ""), "SERVING")
        << daemon_->ReadStderr();
  }

  test::DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<test::DaemonProcess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(HostileCallsTest, MessagesOfExtremesAreAnswered) {
  test::ForEachSeed(4, [&](uint64_t seed) {
    Hostile hostile(seed);
    google::protobuf::MessageFactory& factory =
        *google::protobuf::MessageFactory::generated_factory();
    const auto methods = Methods();
    for (int i = 0; i < 500; ++i) {
      const auto& method = *methods[hostile.Below(methods.size())];
      const std::unique_ptr<Message> request(factory.GetPrototype(method.input_type())->New());
      hostile.Fill(*request);

      std::string response;
      const grpc::Status status =
          test::CallRaw(channel_, PathOf(method), request->SerializeAsString(), &response);

      ASSERT_NE(status.error_code(), grpc::StatusCode::INTERNAL) << status.error_message() << "\n"
                                                                 << PathOf(method) << "\n"
                                                                 << request->DebugString();
      ASSERT_NE(status.error_code(), grpc::StatusCode::UNKNOWN) << status.error_message();
    }
    ExpectWell();
  });
}

TEST_F(HostileCallsTest, BytesThatAreNoMessageAreAnswered) {
  test::ForEachSeed(4, [&](uint64_t seed) {
    Hostile hostile(seed);
    for (const auto* method : Methods()) {
      for (int i = 0; i < 50; ++i) {
        std::string response;
        const grpc::Status status =
            test::CallRaw(channel_, PathOf(*method), hostile.Bytes(), &response);
        ASSERT_NE(status.error_code(), grpc::StatusCode::INTERNAL) << status.error_message();
      }
    }
    ExpectWell();
  });
}

// Two bytes each on the wire, some hundred once they are parsed: 1 GiB for each of these calls.
TEST_F(HostileCallsTest, MessagesThatWouldSwellTakeNoMoreThanTheirBytes) {
  constexpr size_t kBytes = 16 << 20;
#if defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kMost = 32 * kBytes;  // It keeps what is freed for a while.
#else
  constexpr uint64_t kMost = 3 * kBytes;
#endif
  const std::string kinds[] = {
      {4 << 3 | 2, 0},             // An item,
      {14 << 3 | 2, 0},            // and unknown text
      {14 << 3 | 3, 14 << 3 | 4},  // and groups.
  };
  const uint64_t before = PeakBytes(daemon_->pid());

  for (const char* method : {"CacheService/Append", "StatsService/GetStats"}) {
    for (const std::string& kind : kinds) {
      std::string message;
      for (size_t i = 0; i < kBytes; i += kind.size()) message += kind;
      std::string response, reason;
      test::CallRaw(channel_, std::string("/ebbtide.v1.") + method, message, &response, &reason);
      EXPECT_EQ(reason, "TOO_MANY_FIELDS") << method;
    }
  }

  EXPECT_LT(PeakBytes(daemon_->pid()) - before, kMost);
  ExpectWell();
}

// Each would be a complaint of protobuf's.
TEST_F(HostileCallsTest, MessagesThatAreNoTextDoNotFillTheLog) {
  for (int i = 0; i < 200; ++i) {
    std::string response;
    EXPECT_EQ(
        test::CallRaw(channel_, "/ebbtide.v1.CacheService/CloseSequence", "\x0a\x01\xff", &response)
            .error_code(),
        grpc::StatusCode::INVALID_ARGUMENT);
  }

  const std::string log = daemon_->ReadStderr();
  EXPECT_THAT(log, testing::HasSubstr("\"event\":\"protobuf\""));
  EXPECT_LT(std::count(log.begin(), log.end(), '\n'), 50) << log;
}

}  // namespace
}  // namespace ebbtide
