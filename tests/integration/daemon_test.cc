// SPDX-License-Identifier: Apache-2.0
//
// Real ebbtided processes: start, what they say, what they refuse, how they end and come back.

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/grpc_probe.h"

namespace ebbtide {
namespace {

namespace fs = std::filesystem;
using test::ComesTrue;
using test::DaemonProcess;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

class DaemonTest : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> Serve(const std::vector<std::string>& arguments) {
    return stand_.Serve(arguments, &said_);
  }
  std::unique_ptr<DaemonProcess> ServeSmall() {
    return Serve({"--config", stand_.WriteConfig(stand_.SmallConfig())});
  }
  std::shared_ptr<grpc::Channel> Connect() {
    return test::ConnectTo(said_.value("target", "unix:/nowhere"));
  }
  // Of a start that fails.
  int ExitCodeOf(const std::vector<std::string>& arguments) {
    return stand_.Start(arguments)->WaitForEnd();
  }

  test::DaemonStand stand_;
  nlohmann::json said_;
};

v1::GetServerInfoResponse InfoOf(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  EXPECT_TRUE(v1::StatsService::NewStub(channel)->GetServerInfo(&context, {}, &info).ok());
  return info;
}

uint64_t SequencesOf(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  v1::GetStatsResponse stats;
  EXPECT_TRUE(v1::StatsService::NewStub(channel)->GetStats(&context, {}, &stats).ok());
  return stats.sequences();
}

// One layer, one head of eight channels, f32.
grpc::Status RegisterTinyModel(v1::CacheService::Stub& cache) {
  grpc::ClientContext context;
  v1::RegisterModelRequest request;
  request.set_model("tiny");
  request.mutable_geometry()->set_layers(1);
  request.mutable_geometry()->set_query_heads(1);
  request.mutable_geometry()->set_kv_heads(1);
  request.mutable_geometry()->set_head_dim(8);
  request.mutable_geometry()->set_dtype(v1::DTYPE_F32);
  v1::RegisterModelResponse response;
  return cache.RegisterModel(&context, request, &response);
}

grpc::Status OpenTiny(v1::CacheService::Stub& cache, const std::string& sequence) {
  grpc::ClientContext context;
  v1::OpenSequenceRequest request;
  request.set_sequence(sequence);
  request.set_model("tiny");
  request.mutable_budget()->set_tokens(256);
  request.set_chunk_tokens(16);
  v1::OpenSequenceResponse response;
  return cache.OpenSequence(&context, request, &response);
}

void FillTensor(v1::Tensor& tensor, const std::vector<float>& values) {
  tensor.set_dtype(v1::DTYPE_F32);
  for (const int64_t size : {int64_t{1}, int64_t{1}, static_cast<int64_t>(values.size())}) {
    tensor.add_shape(size);
  }
  tensor.set_data(
      std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
}

TEST_F(DaemonTest, StartsWithNothingSaidInAnEmptyHome) {
  const auto daemon = Serve({});

  EXPECT_EQ(said_["event"], "serving");
  EXPECT_EQ(said_["config"], "defaults");
  EXPECT_EQ(said_["simulated_device"], true);
  EXPECT_EQ(said_["target"], "unix:" + stand_.path("ebbtide.sock"));
  EXPECT_EQ(said_["tiers"][2]["place"], stand_.path("home/.local/state/ebbtide/rocksdb"));
  const auto channel = Connect();
  EXPECT_EQ(test::HealthOf(channel, ""), "SERVING");
  EXPECT_EQ(test::HealthOf(channel, "ebbtide.v1.CacheService"), "SERVING");
  EXPECT_THAT(test::ReflectedServices(channel),
              AllOf(HasSubstr("ebbtide.v1.CacheService"), HasSubstr("ebbtide.v1.StatsService")));
  const v1::GetServerInfoResponse info = InfoOf(channel);
  EXPECT_EQ(info.boot_id(), said_["boot_id"]);
  EXPECT_EQ(info.boot_id().size(), 32);
  EXPECT_EQ(info.version(), said_["version"]);
  EXPECT_TRUE(info.simulated_device());
}

TEST_F(DaemonTest, FilesAreThisUsersAlone) {
  const auto daemon = ServeSmall();

  for (const char* name : {"e.sock", "rocksdb"}) {
    struct stat info = {};
    ASSERT_EQ(::stat(stand_.path(name).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 077, 0) << name;
  }
}

TEST_F(DaemonTest, AnswersOneTokenWithItsOwnValue) {
  const auto daemon = ServeSmall();
  const auto cache = v1::CacheService::NewStub(Connect());
  ASSERT_TRUE(RegisterTinyModel(*cache).ok());
  ASSERT_TRUE(OpenTiny(*cache, "a").ok());
  const std::vector<float> value = {1, -2, 3, -4, 5, -6, 7, -8};
  v1::AttendRequest request;
  request.set_phase(v1::PHASE_DECODE);
  v1::AttendItem& item = *request.add_items();
  item.set_sequence("a");
  FillTensor(*item.mutable_q(), {1, 0, 0, 0, 0, 0, 0, 0});
  FillTensor(*item.mutable_k(), {4, 0, 0, 0, 0, 0, 0, 0});
  FillTensor(*item.mutable_v(), value);

  grpc::ClientContext context;
  v1::AttendResponse response;
  const grpc::Status status = cache->Attend(&context, request, &response);

  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.boot_id(), said_["boot_id"]);
  ASSERT_EQ(response.results_size(), 1);
  const v1::AttendResult& result = response.results(0);
  ASSERT_EQ(result.status().code(), 0) << result.status().message();
  ASSERT_EQ(result.output().data().size(), 32);
  EXPECT_EQ(result.output().data(), item.v().data());
  EXPECT_THAT(result.lse(), ElementsAre(testing::FloatNear(4 / std::sqrt(8.0F), 1e-5F)));
  EXPECT_EQ(result.committed(), 1);
}

TEST_F(DaemonTest, BadConfigurationExitsWithEveryMistakeAndItsLine) {
  const std::string file = stand_.WriteConfig(
      "server:\n  threads: 0\nhots: {}\nsequences:\n  recall: perhaps\nhost: {budget: 1 parsec}\n");

  EXPECT_EQ(ExitCodeOf({"--config", file}), 2);
  EXPECT_THAT(stand_.Stderr(), AllOf(HasSubstr(file + ":2: server.threads: 0 is outside"),
                                     HasSubstr(file + ":3: hots: unknown field"),
                                     HasSubstr(file + ":5: sequences.recall: "),
                                     HasSubstr(file + ":6: host.budget: '1 parsec'")));
  EXPECT_EQ(ExitCodeOf({"--config", file, "--check-config"}), 2);
  EXPECT_EQ(ExitCodeOf({"--config", file, "--print-config"}), 2);
}

TEST_F(DaemonTest, ConfigurationThatCannotBeReadStopsTheStart) {
  EXPECT_EQ(ExitCodeOf({"--config", stand_.path("absent.yaml")}), 2);
  EXPECT_THAT(stand_.Stderr(), HasSubstr("absent.yaml: can't be read: No such file"));
  EXPECT_THAT(stand_.Stderr(), testing::Not(HasSubstr("sequences.recall")));
  EXPECT_EQ(ExitCodeOf({"--config", ""}), 2);
  EXPECT_EQ(ExitCodeOf({"--config", stand_.home()}), 2);
  EXPECT_THAT(stand_.Stderr(), HasSubstr("can't be read: it is a folder"));
}

TEST_F(DaemonTest, WithoutADeviceItIsSimulatedAndEverySurfaceSaysWhy) {
  const auto daemon = Serve({"--config", stand_.WriteConfig("device: {backend: auto}\n")});

  const std::string notes = said_["notes"].dump();
  EXPECT_THAT(notes, AllOf(HasSubstr("device tier is simulated"), HasSubstr("CUDA")));
  EXPECT_THAT(stand_.Stderr(), AllOf(HasSubstr("device tier is simulated"), HasSubstr("CUDA")));
  EXPECT_THAT(InfoOf(Connect()).backend(), StartsWith("cpu ("));
  EXPECT_THAT(InfoOf(Connect()).notes(0), HasSubstr("CUDA"));
}

TEST_F(DaemonTest, DeviceThatIsAskedForAndMissingStopsTheStart) {
  const std::string file = stand_.WriteConfig("device: {backend: cuda}\n");

  EXPECT_EQ(ExitCodeOf({"--config", file}), 1);

  EXPECT_THAT(stand_.Stderr(), AllOf(HasSubstr("ebbtided: device.backend: "), HasSubstr("CUDA")));
  EXPECT_EQ(ExitCodeOf({"--config", file, "--check-config"}), 0);
}

TEST_F(DaemonTest, WrongUsageExitsWithTwo) {
  EXPECT_EQ(ExitCodeOf({"--confg", "x"}), 2);
  EXPECT_EQ(ExitCodeOf({"serve"}), 2);
}

TEST_F(DaemonTest, PrintedConfigurationIsAccepted) {
  const auto printer = stand_.Start({"--print-config"});
  const std::string printed = printer->ReadAll();
  EXPECT_EQ(printer->WaitForEnd(), 0);
  EXPECT_THAT(printed, HasSubstr("# default: "));

  const auto checker = stand_.Start({"--check-config", "--config", stand_.WriteConfig(printed)});
  EXPECT_THAT(checker->ReadAll(), HasSubstr("ebbtide.yaml: no mistakes"));
  EXPECT_EQ(checker->WaitForEnd(), 0);
}

TEST_F(DaemonTest, HelpAndVersionExitWithZero) {
  const auto helper = stand_.Start({"--help"});
  EXPECT_THAT(helper->ReadAll(), AllOf(HasSubstr("--config FILE"), HasSubstr("Exit codes")));
  EXPECT_EQ(helper->WaitForEnd(), 0);
  const auto version = stand_.Start({"--version"});
  EXPECT_THAT(version->ReadAll(), StartsWith("ebbtided "));
  EXPECT_EQ(version->WaitForEnd(), 0);
}

class StopSignalTest : public DaemonTest, public testing::WithParamInterface<int> {};

TEST_P(StopSignalTest, EndsCleanlyAndRemovesTheSocket) {
  const auto daemon = ServeSmall();
  const auto cache = v1::CacheService::NewStub(Connect());
  ASSERT_TRUE(RegisterTinyModel(*cache).ok());
  ASSERT_TRUE(OpenTiny(*cache, "a").ok());

  daemon->Signal(GetParam());

  EXPECT_EQ(daemon->WaitForEnd(), 0) << daemon->ReadStderr();
  EXPECT_FALSE(fs::exists(stand_.path("e.sock")));
  EXPECT_THAT(stand_.Stderr(), HasSubstr("\"event\":\"stopped\""));
}

INSTANTIATE_TEST_SUITE_P(Signals, StopSignalTest, testing::Values(SIGTERM, SIGINT, SIGHUP),
                         [](const auto& test) { return ::sigabbrev_np(test.param); });

TEST_F(DaemonTest, LivesWhereFilesMayNotGrow) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto daemon = ServeSmall();  // Inherits the limit, which ends a process by SIGXFSZ.
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);

  EXPECT_EQ(test::HealthOf(Connect(), ""), "SERVING");
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->WaitForEnd(), 0) << daemon->ReadStderr();
}

TEST_F(DaemonTest, SecondDaemonOnTheSocketIsRefusedAndTheFirstGoesOn) {
  const auto first = ServeSmall();
  const auto channel = Connect();

  EXPECT_EQ(ExitCodeOf({"--config", stand_.WriteConfig(stand_.SmallConfig("e.sock", "rocksdb2"))}),
            1);

  EXPECT_THAT(stand_.Stderr(),
              AllOf(HasSubstr("ebbtided: server.listen: " + stand_.path("e.sock")),
                    HasSubstr("is listened at by process " + std::to_string(first->pid()))));
  EXPECT_EQ(InfoOf(channel).boot_id(), said_["boot_id"]);
  EXPECT_EQ(InfoOf(Connect()).boot_id(), said_["boot_id"]);
}

TEST_F(DaemonTest, SecondDaemonOnTheFolderIsRefusedAndTheFirstGoesOn) {
  const auto first = ServeSmall();

  EXPECT_EQ(ExitCodeOf({"--config", stand_.WriteConfig(stand_.SmallConfig("f.sock"))}), 1);

  EXPECT_THAT(stand_.Stderr(),
              AllOf(HasSubstr("ebbtided: rocksdb.path: "), HasSubstr(stand_.path("rocksdb"))));
  EXPECT_EQ(test::HealthOf(Connect(), ""), "SERVING");
}

TEST_F(DaemonTest, RestartsOnWhatAKilledOneLeft) {
  auto daemon = ServeSmall();
  const std::string first_boot = said_["boot_id"];
  {
    const auto cache = v1::CacheService::NewStub(Connect());
    ASSERT_TRUE(RegisterTinyModel(*cache).ok());
    ASSERT_TRUE(OpenTiny(*cache, "a").ok());
  }
  daemon->Signal(SIGKILL);
  EXPECT_EQ(daemon->WaitForEnd(), 128 + SIGKILL);
  ASSERT_TRUE(fs::exists(stand_.path("e.sock")));

  daemon = ServeSmall();

  EXPECT_NE(said_["boot_id"], first_boot);
  const auto cache = v1::CacheService::NewStub(Connect());
  grpc::ClientContext context;
  v1::TruncateRequest request;
  request.set_sequence("a");
  v1::TruncateResponse response;
  EXPECT_EQ(cache->Truncate(&context, request, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(context.GetServerTrailingMetadata(),
              testing::Contains(testing::Pair("ebbtide-reason", "SEQUENCE_UNKNOWN")));
}

TEST_F(DaemonTest, WrongCallsGetTheirCodes) {
  const auto daemon =
      Serve({"--config",
             stand_.WriteConfig("server: {listen: '127.0.0.1:0', message_bytes_max: 1048576}\n"
                                "rocksdb: {disabled: true}\nhost: {budget: 16MiB}\n"
                                "device: {budget: 16MiB}\n")});
  EXPECT_EQ(said_["tiers"].size(), 2);
  const auto channel = Connect();

  std::string response;
  EXPECT_EQ(test::CallRaw(channel, "/ebbtide.v1.CacheService/Append", std::string(2 << 20, '\0'),
                          &response)
                .error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(test::CallRaw(channel, "/ebbtide.v1.CacheService/Steal", "", &response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(test::CallRaw(channel, "/ebbtide.v2.CacheService/Append", "", &response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(test::HealthOf(channel, ""), "SERVING");
}

// Every address, path and size that can't be had ends the start with a line that names it.
TEST_F(DaemonTest, WhatCannotBeHadStopsTheStartByName) {
  std::ofstream(stand_.path("file")) << "not a folder";
  const auto listen = [&](const std::string& place) {
    return "server: {listen: '" + place + "'}\nrocksdb: {disabled: true}\nhost: {budget: 16MiB}\n" +
           "device: {budget: 16MiB}\n";
  };
  const std::pair<std::string, std::string> cases[] = {
      {listen("unix:" + stand_.path("absent/deeper/e.sock")), "server.listen: can't make"},
      {listen("unix:" + stand_.path("file/e.sock")), "server.listen: "},
      {listen("unix:" + stand_.path("file")), "server.listen: " + stand_.path("file")},
      {listen("unix:" + stand_.path("home")), "server.listen: " + stand_.path("home")},
      {stand_.SmallConfig("e.sock", "file"), "rocksdb.path: "},
      {stand_.SmallConfig("e.sock", "file/deeper"), "rocksdb.path: "},
  };
  for (const auto& [config, named] : cases) {
    fs::remove(stand_.path("stderr"));
    EXPECT_EQ(ExitCodeOf({"--config", stand_.WriteConfig(config)}), 1) << config;
    EXPECT_THAT(stand_.Stderr(), HasSubstr("ebbtided: " + named)) << config;
  }
  EXPECT_EQ(fs::file_size(stand_.path("file")), 12);
}

TEST_F(DaemonTest, SixteenWorkersStartAtOnce) {
  const auto daemon = ServeSmall();

  std::vector<std::thread> workers;
  for (int i = 0; i < 16; ++i) {
    workers.emplace_back([this, i] {
      const auto cache = v1::CacheService::NewStub(Connect());
      const grpc::Status registered = RegisterTinyModel(*cache);
      EXPECT_TRUE(registered.ok()) << registered.error_message();
      const grpc::Status opened = OpenTiny(*cache, "worker-" + std::to_string(i));
      EXPECT_TRUE(opened.ok()) << opened.error_message();
    });
  }
  for (std::thread& worker : workers) worker.join();

  EXPECT_EQ(SequencesOf(Connect()), 16);
}

TEST_F(DaemonTest, IdleSequenceIsClosedByTheSweep) {
  const auto daemon = Serve(
      {"--config", stand_.WriteConfig(stand_.SmallConfig() + "sequences: {idle_timeout_ms: 1}\n")});
  const auto channel = Connect();
  const auto cache = v1::CacheService::NewStub(channel);
  ASSERT_TRUE(RegisterTinyModel(*cache).ok());
  ASSERT_TRUE(OpenTiny(*cache, "a").ok());

  EXPECT_TRUE(ComesTrue([&] { return SequencesOf(channel) == 0; }));
  EXPECT_TRUE(ComesTrue([&] {
    return absl::StrContains(daemon->ReadStderr(), "sequence forgotten") &&
           absl::StrContains(daemon->ReadStderr(), R"("sequence":"a")");
  }));
}

}  // namespace
}  // namespace ebbtide
