// SPDX-License-Identifier: Apache-2.0
//
// ebbctl as people run it: the program itself, against daemons that it starts or finds. Exit codes,
// what is printed, and what is left behind.

#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cli/daemon_process.h"
#include "client/cli/demo.h"
#include "client/cli/replay.h"
#include "client/cli/verbs.h"
#include "tests/support/comes_true.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::cli {
namespace {

using nlohmann::json;
using test::IsOkAndHolds;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr char kTrace[] = EBBTIDE_TRACES "/smollm2-opticks-256.safetensors";

class EbbctlTest : public testing::Test {
 protected:
  // ebbctl with these arguments, in the shell's words; its folder for temporary files is `tmp_`.
  CommandLine Ebbctl(const std::string& arguments) const {
    return {.program = "/bin/sh",
            .arguments = {"-c", "echo $$ > " + pid_ + "; TMPDIR='" + tmp_.string() +
                                    "' exec " EBBCTL_PATH " " + arguments + " > " + out_ + " 2> " +
                                    err_}};
  }

  // What ebbctl with these arguments ends with where nobody reads what it prints.
  int ExitCodeUnread(const std::string& arguments) const {
    const std::string gate = (folder_.path() / "gate").string();
    const std::string code = (folder_.path() / "code").string();
    const std::string script = ": > " + gate + "; { while [ -e " + gate + " ]; do :; done; " +
                               EBBCTL_PATH " " + arguments + " 2> " + err_ + "; echo $? > " + code +
                               "; } | { exec < /dev/null; rm " + gate + "; }";
    EXPECT_OK(RunToEnd({.program = "/bin/sh", .arguments = {"-c", script}}).status());
    return std::stoi(Text(code));
  }

  // To the ebbctl that was started last.
  void Signal(int signal) const { kill(std::stoi(Text(pid_)), signal); }

  static std::string Text(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }

  std::string Out() const { return Text(out_); }
  std::string Err() const { return Text(err_); }

  // A daemon at `socket_` that answers.
  std::unique_ptr<DaemonProcess> StartDaemon() {
    const std::string config = (folder_.path() / "c.yaml").string();
    const std::string log = (folder_.path() / "daemon.log").string();
    std::ofstream(config) << "server: {listen: '" << socket_ << "'}\n"
                          << "device: {budget: 8MiB}\nhost: {budget: 2MiB}\n"
                          << "rocksdb: {path: " << (folder_.path() / "r").string()
                          << ", budget: 64MiB}\n";
    absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon =
        DaemonProcess::Start({.program = EBBTIDED_PATH, .arguments = {"--config", config}}, log);
    EXPECT_OK(daemon);
    bool has_ended = false;
    const auto answers = [&] { return *RunToEnd(Ebbctl("status --socket " + socket_)) == 0; };
    EXPECT_TRUE(test::ComesTrue(
        [&] { return answers() || (has_ended = (*daemon)->EndsWithin(absl::Milliseconds(20))); }));
    EXPECT_FALSE(has_ended) << Text(log);
    return *std::move(daemon);
  }

  // Sequence "s" of one lane, which holds one token.
  client::Sequence OpenWithAToken() const {
    const client::Client client = *client::Client::Connect(socket_);
    EXPECT_OK(client.RegisterModel(
        {.name = "m", .geometry = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64}}));
    const client::Sequence sequence =
        *client.OpenSequence({.name = "s", .model = "m", .budget = {.tokens = 256}});
    const std::vector<std::byte> zeros(2 * 64);
    const client::TensorView token = {
        .dtype = client::Dtype::kF16, .shape = {1, 1, 64}, .bytes = zeros};
    EXPECT_OK(sequence.Append({.phase = client::Phase::kPrefill}, {.k = token, .v = token}));
    return sequence;
  }

  // One lane of 2^20 tokens of one channel.
  void WriteLongTrace() const {
    constexpr uint64_t kTokens = 1 << 20;
    json header = {{"__metadata__",
                    {{"format", "ebbtide.trace.v1"},
                     {"model", "long"},
                     {"text", "none"},
                     {"layers", "[0]"},
                     {"query_heads", "1"},
                     {"kv_heads", "1"},
                     {"head_dim", "1"},
                     {"prompt_length", "1"},
                     {"scale", "1"}}}};
    uint64_t begin = 0;
    for (const char* tensor : {"layer0.q", "layer0.k", "layer0.v"}) {
      header[tensor] = {{"dtype", "F16"},
                        {"shape", {kTokens, 1, 1}},
                        {"data_offsets", {begin, begin + 2 * kTokens}}};
      begin += 2 * kTokens;
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(long_trace_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << text << std::string(begin, '\0');
  }

  json Replay(const std::string& arguments) {
    EXPECT_THAT(RunToEnd(Ebbctl("replay " + std::string(kTrace) + " -o json --socket " + socket_ +
                                " " + arguments)),
                IsOkAndHolds(0))
        << Err();
    return json::parse(Out(), nullptr, /*allow_exceptions=*/false);
  }

  test::TempFolder folder_;
  const std::filesystem::path tmp_ = folder_.path() / "tmp";
  const std::string out_ = (folder_.path() / "out").string();
  const std::string err_ = (folder_.path() / "err").string();
  const std::string pid_ = (folder_.path() / "pid").string();
  const std::string long_trace_ = (folder_.path() / "long.safetensors").string();
  const std::string socket_ = "unix:" + (folder_.path() / "s").string();
  const bool has_tmp_ = std::filesystem::create_directory(tmp_);
};

TEST_F(EbbctlTest, TheDemoIsSoundAndLeavesNothingBehind) {
  ASSERT_THAT(RunToEnd(Ebbctl("demo --budget 50% -o json --trace " + std::string(kTrace))),
              IsOkAndHolds(0))
      << Err();

  const json report = json::parse(Out());
  ASSERT_EQ(report["runs"].size(), 5U);
  for (const json& run : report["runs"]) {
    EXPECT_EQ(run["certificate_violations"], 0) << run;
    EXPECT_EQ(run["byte_mismatches"], 0) << run;
    EXPECT_EQ(run["bytes_checked"], 2 * 256 * 3 * 64 * 2 * 2) << run;
    EXPECT_GT(run["demotions"], 0) << run;
  }
  EXPECT_TRUE(std::filesystem::is_empty(tmp_));
}

TEST_F(EbbctlTest, AnInterruptedDemoLeavesNothingBehind) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> demo,
                       DaemonProcess::Start(Ebbctl("demo"), "/dev/null"));
  ASSERT_TRUE(test::ComesTrue(
      [&] { return !std::filesystem::is_empty(tmp_) || demo->EndsWithin(absl::Milliseconds(5)); }));
  ASSERT_TRUE(demo->IsRunning());

  EXPECT_THAT(demo->Stop(kLong),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("ended with exit code 1")));

  EXPECT_THAT(Err(), HasSubstr("interrupted"));
  EXPECT_TRUE(std::filesystem::is_empty(tmp_));
}

// Of one layer whose exact attention takes the better part of an hour.
TEST_F(EbbctlTest, AnInterruptIsSeenInTheMiddleOfALayer) {
  WriteLongTrace();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> demo,
                       DaemonProcess::Start(Ebbctl("demo --trace " + long_trace_), "/dev/null"));
  ASSERT_TRUE(
      test::ComesTrue([&] { return !Out().empty() || demo->EndsWithin(absl::Milliseconds(5)); }));
  ASSERT_TRUE(demo->IsRunning());  // The truth is next.

  EXPECT_THAT(demo->Stop(kLong),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("ended with exit code 1")));

  EXPECT_THAT(Err(), HasSubstr("interrupted"));
  EXPECT_TRUE(std::filesystem::is_empty(tmp_));
}

TEST_F(EbbctlTest, ADemoThatIsKilledOrInterruptedTwiceLeavesNothingBehind) {
  WriteLongTrace();
  for (const char* signals : {"-TERM $!; kill -TERM", "-HUP $!; kill -TERM", "-KILL"}) {
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // What it leaves behind becomes ours.
    const std::string script = "TMPDIR='" + tmp_.string() + "' " EBBCTL_PATH " demo --trace " +
                               long_trace_ + " > " + out_ + " 2> " + err_ + " & while [ ! -s " +
                               out_ + " ] && kill -0 $!; do :; done; kill " + signals +
                               " $!; wait $!";
    std::filesystem::remove(out_);

    EXPECT_THAT(RunToEnd({.program = "/bin/sh", .arguments = {"-c", script}}),
                IsOkAndHolds(testing::Ne(0)));

    while (waitpid(-1, nullptr, 0) > 0) {
    }
    EXPECT_TRUE(std::filesystem::is_empty(tmp_)) << signals;
    prctl(PR_SET_CHILD_SUBREAPER, 0);
  }
}

// However often it is told at once: `timeout` tells its child, and then their group.
TEST_F(EbbctlTest, AnInterruptedReplayClosesItsSequence) {
  const auto daemon = StartDaemon();
  ASSERT_OK_AND_ASSIGN(const client::Client client, client::Client::Connect(socket_));
  std::string policies = "h2o";
  for (int run = 1; run < 60; ++run) policies += ",h2o";  // Some tenths of a second each.
  const std::string arguments = "replay " + std::string(kTrace) + " --socket " + socket_ +
                                " --policy " + policies + " --budget 50% --recall exact";
  for (const int signals : {1, 100}) {
    ASSERT_OK_AND_ASSIGN(const client::Stats before, client.GetStats());
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> replay,
                         DaemonProcess::Start(Ebbctl(arguments), "/dev/null"));
    ASSERT_TRUE(test::ComesTrue([&] {
      EXPECT_FALSE(replay->EndsWithin(absl::ZeroDuration())) << Err();
      return client.GetStats()->answers >= before.answers + 3;
    }));

    for (int i = 0; i < signals; ++i) Signal(SIGTERM);

    ASSERT_TRUE(replay->EndsWithin(kLong));
    EXPECT_THAT(replay->Stop(kLong),
                StatusIs(absl::StatusCode::kInternal, HasSubstr("ended with exit code 1")));
    EXPECT_EQ(Err(), "ebbctl: interrupted\n");
    EXPECT_THAT(client.ListSequences(), IsOkAndHolds(testing::IsEmpty())) << signals;
  }
  EXPECT_OK(daemon->Stop(kLong));
}

// The daemon hangs, so that the sequence can't be closed.
TEST_F(EbbctlTest, AReplayThatIsInterruptedTwiceSaysWhatItLeavesOpen) {
  const auto daemon = StartDaemon();
  const std::string log = Text((folder_.path() / "daemon.log").string());
  const std::string key = "\"pid\":";
  ASSERT_NE(log.find(key), std::string::npos) << log;
  const pid_t daemon_pid = std::stoi(log.substr(log.find(key) + key.size()));
  ASSERT_OK_AND_ASSIGN(const client::Client client, client::Client::Connect(socket_));
  std::string policies = "h2o";
  for (int run = 1; run < 60; ++run) policies += ",h2o";
  ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<DaemonProcess> replay,
      DaemonProcess::Start(Ebbctl("replay " + std::string(kTrace) + " --socket " + socket_ +
                                  " --policy " + policies + " --budget 50% --recall exact"),
                           "/dev/null"));
  ASSERT_TRUE(test::ComesTrue([&] {
    EXPECT_FALSE(replay->EndsWithin(absl::ZeroDuration())) << Err();
    return client.GetStats()->answers >= 3;
  }));

  ASSERT_EQ(kill(daemon_pid, SIGSTOP), 0);
  while (!replay->EndsWithin(absl::Milliseconds(10))) Signal(SIGTERM);

  EXPECT_THAT(replay->Stop(kLong),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("ended with exit code 143")));
  EXPECT_THAT(Err(), testing::ContainsRegex(
                         "sequence \"replay-[0-9]+-[0-9]+\", where it is open, is left to its idle "
                         "time-out: a second signal ended its replay\n"));
  ASSERT_EQ(kill(daemon_pid, SIGCONT), 0);
  EXPECT_OK(daemon->Stop(kLong));
}

// A sequence that opens meanwhile is closed.
TEST_F(EbbctlTest, AReplayThatIsInterruptedWhileItAsksLeavesNothingOpen) {
  const auto daemon = StartDaemon();
  ASSERT_OK_AND_ASSIGN(const client::Client client, client::Client::Connect(socket_));
  std::string policies = "h2o";
  for (int run = 1; run < 500; ++run) policies += ",h2o";
  for (int i = 0; i < 20; ++i) {
    ASSERT_OK_AND_ASSIGN(
        const std::unique_ptr<DaemonProcess> replay,
        DaemonProcess::Start(Ebbctl("replay " + std::string(kTrace) + " --socket " + socket_ +
                                    " --policy " + policies + " --budget 50%"),
                             "/dev/null"));
    ASSERT_TRUE(test::ComesTrue([&] {
      EXPECT_FALSE(replay->EndsWithin(absl::ZeroDuration())) << Err();
      return !client.ListSequences()->empty();
    }));

    Signal(SIGTERM);

    ASSERT_TRUE(replay->EndsWithin(kLong));
    ASSERT_EQ(Err(), "ebbctl: interrupted\n");
    ASSERT_THAT(client.ListSequences(), IsOkAndHolds(testing::IsEmpty())) << i;
  }
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, ADemoWhoseTerminalGoesLeavesNothingBehind) {
  const std::string tmp = "'" + tmp_.string() + "'";
  const std::string script = "TMPDIR=" + tmp + " " EBBCTL_PATH " demo > /dev/null 2> " + err_ +
                             " & while [ -z \"$(ls " + tmp +
                             ")\" ] && kill -0 $!; do :; done; kill -HUP $!; wait $!";

  EXPECT_THAT(RunToEnd({.program = "/bin/sh", .arguments = {"-c", script}}), IsOkAndHolds(1));

  EXPECT_THAT(Err(), HasSubstr("interrupted"));
  EXPECT_TRUE(std::filesystem::is_empty(tmp_));
}

// Long before it would write again.
TEST_F(EbbctlTest, ADemoThatNobodyReadsLeavesNothingBehind) {
  WriteLongTrace();
  const std::string script = "TMPDIR='" + tmp_.string() +
                             "' timeout -s KILL 60 " EBBCTL_PATH " demo --trace " + long_trace_ +
                             " 2> " + err_ + " | head -c 1";

  ASSERT_OK(RunToEnd({.program = "/bin/sh", .arguments = {"-c", script}}).status());

  EXPECT_EQ(Err(), "ebbctl: nobody reads standard output any more\n");
  EXPECT_TRUE(std::filesystem::is_empty(tmp_));
}

TEST_F(EbbctlTest, EveryVerbSaysThatNobodyReadsIt) {
  const auto daemon = StartDaemon();
  for (const std::string& arguments : std::vector<std::string>{
           "--help", "--version", "replay --help", "status --socket " + socket_,
           "tiers -o json --socket " + socket_, "sequences --socket " + socket_}) {
    EXPECT_EQ(ExitCodeUnread(arguments), 1) << arguments;
    EXPECT_EQ(Err(), "ebbctl: nobody reads standard output any more\n") << arguments;
  }
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, WhatFailsOfItselfSaysSoThoughNobodyReads) {
  std::ofstream(long_trace_) << "no trace at all";
  for (const auto& [arguments, exit_code, reason] :
       std::vector<std::tuple<std::string, int, std::string>>{
           {"status --socket " + socket_, 1, "no daemon answers at " + socket_},
           {"replay " + long_trace_ + " --policy h2o --budget 50%", 2, "not a safetensors file?"},
           {"demo --trace " + long_trace_, 2, "not a safetensors file?"},
           {"stauts", 2, "\"stauts\" is no verb"}}) {
    EXPECT_EQ(ExitCodeUnread(arguments), exit_code) << arguments;
    EXPECT_THAT(Err(), HasSubstr(reason)) << arguments;
    EXPECT_THAT(Err(), testing::Not(HasSubstr("nobody reads"))) << arguments;
  }
}

TEST_F(EbbctlTest, WhatWasReplayedBeforeAFailureIsPrinted) {
  const auto daemon = StartDaemon();
  std::string trace = Text(kTrace);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, trace.data(), sizeof(header_bytes));
  trace.replace(sizeof(header_bytes) + header_bytes, 2, "\xff\x7f");  // A NaN.
  std::ofstream(long_trace_, std::ios::binary) << trace;
  const std::string traces = std::string(kTrace) + " " + long_trace_;

  EXPECT_THAT(RunToEnd(Ebbctl("replay -o json --policy h2o --budget 50% --socket " + socket_ + " " +
                              traces)),
              IsOkAndHolds(2));

  EXPECT_THAT(Err(), AllOf(HasSubstr(long_trace_), HasSubstr("holds nan")));
  const json report = json::parse(Out(), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(report.is_array()) << Out();
  ASSERT_EQ(report.size(), 1U);
  EXPECT_EQ(report[0]["trace"], kTrace);
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, ABudgetOfEverythingIsFullAttentionUnderEveryPolicy) {
  const auto daemon = StartDaemon();

  const json report =
      Replay("--budget 100% --policy streaming,snapkv+caote,h2o --recall off,exact");

  ASSERT_EQ(report["runs"].size(), 6U);
  for (const json& run : report["runs"]) {
    EXPECT_EQ(run["demotions"], 0) << run;
    EXPECT_EQ(run["rel_error"], report["runs"][0]["rel_error"]) << run;
    EXPECT_LT(run["rel_error"]["max"], 1e-5) << run;
    EXPECT_EQ(run["not_met"]["count"], 0) << run;
  }
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, BoundedRecallReachesItsTargetInEveryAnswer) {
  const auto daemon = StartDaemon();

  const json report = Replay("--budget 50% --policy snapkv+caote --recall 'bounded(0.02)'");

  ASSERT_EQ(report["runs"].size(), 1U);
  const json& run = report["runs"][0];
  EXPECT_GT(run["demotions"], 0) << run;
  EXPECT_EQ(run["not_met"]["count"], 0) << run;
  EXPECT_EQ(run["answers_above_target"], 0.0) << run;
  EXPECT_EQ(run["certificate_violations"], 0) << run;
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, StatusSaysWellOnlyOfADaemonThatAnswers) {
  EXPECT_THAT(RunToEnd(Ebbctl("status --socket " + socket_)), IsOkAndHolds(1));
  EXPECT_THAT(Err(), HasSubstr("no daemon answers at " + socket_));

  const auto daemon = StartDaemon();
  EXPECT_THAT(RunToEnd(Ebbctl("status -o json --socket " + socket_)), IsOkAndHolds(0));
  const json status = json::parse(Out());
  EXPECT_EQ(status["endpoint"], socket_);
  EXPECT_EQ(status["tiers"].size(), 3U);

  const CommandLine to_a_full_disk = {.program = "/bin/sh",
                                      .arguments = {"-c", "exec " EBBCTL_PATH " status --socket " +
                                                              socket_ + " >/dev/full 2> " + err_}};
  EXPECT_THAT(RunToEnd(to_a_full_disk), IsOkAndHolds(1));
  EXPECT_THAT(Err(), HasSubstr("standard output did not take all"));
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, AWrongCommandLineIsTwo) {
  for (const char* arguments : {"", "stauts", "describe", "replay", "replay x --policy h2o",
                                "status -o yaml", "status --socket nowhere"}) {
    EXPECT_THAT(RunToEnd(Ebbctl(arguments)), IsOkAndHolds(2)) << arguments << ": " << Err();
    EXPECT_EQ(Err().find_first_of(std::string("\0\1", 2)), std::string::npos) << arguments;
  }
}

TEST_F(EbbctlTest, ATraceThatIsNoneIsTwoWhateverIsWrongWithIt) {
  const std::string cut = (folder_.path() / "cut").string();
  std::ofstream(cut, std::ios::binary) << Text(kTrace).substr(0, 10000);
  const std::string empty = (folder_.path() / "empty").string();
  std::ofstream(empty).close();
  for (const auto& [trace, mistake] : std::vector<std::pair<std::string, std::string>>{
           {(folder_.path() / "none").string(), "can't be read: No such file"},
           {empty + "/none", "can't be read: Not a directory"},
           {folder_.path().string(), "is a folder"},
           {empty, "0 bytes are too few"},
           {cut, "and the file holds "}}) {
    for (const std::string& command :
         {"replay " + trace + " --policy h2o --budget 50%", "demo --trace " + trace}) {
      EXPECT_THAT(RunToEnd(Ebbctl(command)), IsOkAndHolds(2)) << command;
      EXPECT_THAT(Err(), AllOf(HasSubstr(trace), HasSubstr(mistake))) << command;
    }
  }
}

// Though nobody could be asked.
TEST_F(EbbctlTest, AMistakeIsNamedWithItsLimitBeforeADaemonIsAsked) {
  const std::string replay =
      "replay " + std::string(kTrace) + " --policy h2o --socket " + socket_ + " ";
  for (const auto& [arguments, mistake] : std::vector<std::pair<std::string, std::string>>{
           {replay + "--budget 50% --layers 7,22,7", "--layers \"7,22,7\": layer 7 is named twice"},
           {replay + "--budget 50% --layers ''", "--layers: \"\" says nothing; give layers"},
           {replay + "--budget 50% --recall ''", "--recall: \"\" says nothing; give a recall mode"},
           {replay + "--budget 50% --prefill ''", "--prefill: \"\" says nothing; give a prefill"},
           {replay + "--budget 50% --chunk ''", "--chunk: \"\" says nothing; give tokens"},
           {replay + "--budget 50% --chunk 0", "--chunk \"0\": give the tokens of a prefill call"},
           {replay + "--budget 4294967296", "--budget \"4294967296\": give 1 to 16,777,216 tokens"},
           {"demo --trace ''", "--trace: \"\" says nothing; give a file"},
           {"describe s --lane ''", "--lane: \"\" says nothing; give LAYER/KV_HEAD"},
           {"describe ''", "SEQUENCE: \"\" says nothing; give a name"},
           {"status --socket ''", "--socket: \"\" says nothing; give unix:PATH or HOST:PORT"}}) {
    EXPECT_THAT(RunToEnd(Ebbctl(arguments)), IsOkAndHolds(2)) << arguments;
    EXPECT_THAT(Err(), testing::StartsWith("ebbctl: " + mistake)) << arguments;
  }
}

TEST_F(EbbctlTest, AWordThatIsNoVerbIsNamedBesideThoseThatAre) {
  for (const auto& [arguments, answer] : std::vector<std::pair<const char*, const char*>>{
           {"nosuch", "ebbctl: \"nosuch\" is no verb; say one of status, tiers, sequences, "},
           {"", "ebbctl: no verb; say one of status, tiers, sequences, describe, config, replay, "},
           {"--nosuch", "ebbctl: --nosuch is no option; say one of status, tiers, "},
           {"config nosuch", "ebbctl: config: \"nosuch\" is no verb; say one of check\n"},
           {"config", "ebbctl: config: no verb; say one of check\n"},
           {"describe", "ebbctl: SEQUENCE is required\n"},
           {"status -o yaml", "ebbctl: --output: "}}) {
    EXPECT_THAT(RunToEnd(Ebbctl(arguments)), IsOkAndHolds(2)) << arguments;
    EXPECT_THAT(Err(), testing::StartsWith(answer)) << arguments;
  }
}

TEST_F(EbbctlTest, BothProgramsAreOfOneVersion) {
  const std::string script = "c=$(" EBBCTL_PATH " --version) && d=$(" EBBTIDED_PATH
                             " --version) && echo \"$c\" > " +
                             out_ + " && [ \"ebbtided ${c#ebbctl }\" = \"$d\" ]";

  EXPECT_THAT(RunToEnd({.program = "/bin/sh", .arguments = {"-c", script}}), IsOkAndHolds(0));

  EXPECT_THAT(Out(), testing::MatchesRegex("ebbctl [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

// Exact attention of the long trace takes the better part of an hour, and comes after.
TEST_F(EbbctlTest, WhatTheDaemonRefusesIsFoundBeforeAnythingLong) {
  const auto daemon = StartDaemon();
  WriteLongTrace();
  const std::string replay = "replay --socket " + socket_ + " ";
  const std::string missing = (folder_.path() / "missing").string();
  for (const auto& [arguments, exit_code] : std::vector<std::pair<std::string, int>>{
           {replay + long_trace_ + " --budget 512 --policy h2o,nosuch", 2},
           {replay + long_trace_ + " --budget 512 --policy h2o --recall off,nosuch", 2},
           {replay + long_trace_ + " --budget 1 --policy h2o", 2},
           {replay + long_trace_ + " " + missing + " --budget 512 --policy h2o", 2},
           {"demo --trace " + long_trace_ + " --budget 1", 2},
           {"demo --trace " + long_trace_ + " --budget x", 2}}) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> process,
                         DaemonProcess::Start(Ebbctl(arguments), "/dev/null"));
    ASSERT_TRUE(process->EndsWithin(kLong)) << arguments;
    EXPECT_THAT(process->Stop(kLong),
                StatusIs(absl::StatusCode::kInternal,
                         testing::EndsWith("exit code " + std::to_string(exit_code))))
        << arguments << ": " << Err();
    EXPECT_EQ(Out(), "");
  }
  ASSERT_OK_AND_ASSIGN(const client::Client client, client::Client::Connect(socket_));
  EXPECT_THAT(client.ListSequences(), IsOkAndHolds(testing::IsEmpty()));
  EXPECT_OK(daemon->Stop(kLong));
}

// The names of `fields` that `page` does not have between backticks. What lies below a name of
// `by_name` is named by the daemon: reasons, rungs, tiers.
void CollectMissing(const json& fields, const std::string& page,
                    std::vector<std::string>& missing) {
  static const std::set<std::string> by_name = {
      "by_reason",       "by_rung", "by_tier",    "bytes_checked_by_tier", "tokens_forgotten",
      "answers_not_met", "refused", "pages_lost", "carries_failed"};
  if (fields.is_array() && !fields.empty()) CollectMissing(fields.front(), page, missing);
  if (!fields.is_object()) return;
  for (const auto& [name, value] : fields.items()) {
    if (page.find("`" + name + "`") == std::string::npos) missing.push_back(name);
    if (!by_name.contains(name)) CollectMissing(value, page, missing);
  }
}

TEST_F(EbbctlTest, EveryVerbAndEveryFieldIsOnItsPage) {
  const std::string page = Text(EBBTIDE_SOURCE_DIR "/docs/ebbctl.md");
  ASSERT_THAT(RunToEnd(Ebbctl("--help")), IsOkAndHolds(0));
  std::istringstream help(Out().substr(Out().find("Subcommands:\n")));
  std::vector<std::string> verbs;
  std::string line;
  std::getline(help, line);
  while (std::getline(help, line) && line.starts_with("  ")) {
    verbs.push_back(line.substr(2, line.find(' ', 2) - 2));
  }
  EXPECT_THAT(verbs, testing::Contains("replay"));
  for (const std::string& verb : verbs) EXPECT_THAT(page, HasSubstr("| `ebbctl " + verb));

  const auto daemon = StartDaemon();
  std::vector<std::string> missing;
  CollectMissing(Replay("--budget 50% --policy h2o --recall exact"), page, missing);
  ASSERT_THAT(RunToEnd(Ebbctl("status -o json --socket " + socket_)), IsOkAndHolds(0));
  CollectMissing(json::parse(Out()), page, missing);
  ASSERT_THAT(RunToEnd(Ebbctl("config check -o json " + folder_.path().string())), IsOkAndHolds(2));
  CollectMissing(json::parse(Out()), page, missing);
  const client::Sequence sequence = OpenWithAToken();
  for (const char* verb : {"sequences", "describe s --lane 0/0 --tokens"}) {
    ASSERT_THAT(RunToEnd(Ebbctl(std::string(verb) + " -o json --socket " + socket_)),
                IsOkAndHolds(0));
    const json answer = json::parse(Out());
    const json& object = answer.is_array() ? answer.at(0) : answer;
    EXPECT_TRUE(answer.is_array() || !object["token_list"].empty()) << answer;
    CollectMissing(object, page, missing);
  }

  EXPECT_THAT(missing, testing::IsEmpty());
  EXPECT_OK(daemon->Stop(kLong));
}

// Scripts in a tree where nothing can be built: what comes after their arguments ends with 3.
class ScriptTest : public EbbctlTest {
 protected:
  ScriptTest() {
    const std::filesystem::path scripts = folder_.path() / "scripts";
    std::filesystem::create_directory(scripts);
    for (const char* script : {"demo", "test", "common.sh"}) {
      std::filesystem::copy_file(std::string(EBBTIDE_SOURCE_DIR "/scripts/") + script,
                                 scripts / script);
    }
    std::ofstream(scripts / "bootstrap") << "#!/bin/sh\nexit 3\n";
    std::filesystem::permissions(scripts / "bootstrap", std::filesystem::perms::owner_all);
  }

  // "demo --budget 5%"
  absl::StatusOr<int> Run(const std::string& command) const {
    const std::string script =
        "cd '" + tmp_.string() + "' && ../scripts/" + command + " > " + out_ + " 2> " + err_;
    return RunToEnd({.program = "/bin/sh", .arguments = {"-c", script}});
  }
};

TEST_F(ScriptTest, AWrongArgumentIsFoundBeforeAnythingIsBuilt) {
  for (const auto& [command, mistake] : std::vector<std::pair<const char*, const char*>>{
           {"demo --bogus", "unknown argument '--bogus'"},
           {"demo --budget 5% bogus", "unknown argument 'bogus'"},
           {"demo --budget", "--budget needs a value"},
           {"demo --budget nonsense", "--budget 'nonsense': give 1 to 16,777,216 tokens"},
           {"demo --budget=0", "--budget '0': give 1 to 16,777,216 tokens"},
           {"demo --budget 0.0%", "--budget '0.0%': give 1 to 16,777,216 tokens"},
           {"demo --budget 101%", "--budget '101%': give 1 to 16,777,216 tokens"},
           {"demo --budget %", "--budget '%': give 1 to 16,777,216 tokens"},
           {"demo --budget -1", "--budget '-1': give 1 to 16,777,216 tokens"},
           {"demo --trace missing", "there is no file "},
           {"demo -o yaml", "-o: table or json"},
           {"demo -o=json", "'-o=json': say -o json"},
           {"test --bogus", "unknown argument '--bogus'"},
           {"test bogus", "unknown argument 'bogus'"},
           {"test -R", "-R needs a value"},
           {"test --no-bootstrap -R x --bogus", "unknown argument '--bogus'"}}) {
    EXPECT_THAT(Run(command), IsOkAndHolds(2)) << command;
    EXPECT_THAT(Err(), AllOf(HasSubstr(mistake), HasSubstr(" --help"))) << command;
  }
}

TEST_F(ScriptTest, ARightArgumentIsTaken) {
  for (const char* command :
       {"demo", "demo --budget 512", "demo --budget=12.5%", "demo --budget 100%",
        "demo --budget .5%", "demo -o json --output=table", "test", "test -R Lane -LE slow",
        "test --rerun-failed --repeat until-fail:3"}) {
    EXPECT_THAT(Run(command), IsOkAndHolds(3)) << command << ": " << Err();
  }
}

TEST_F(ScriptTest, TheDemoAndItsScriptAgreeOnABudget) {
  for (const char* budget :
       {"1",      "0512",   "16777216", "16777217", "99999999", "4294967296", "100%",
        "100.0%", "100.5%", "50 %",     "50  %",    " 50%",     "5.%",        ".5%",
        ".%",     "%",      "1.2.3%",   "1e1%",     "+5",       "0",          "00%"}) {
    const bool is_taken = ParseBudget(budget, 4096).ok();
    EXPECT_THAT(Run("demo --budget '" + std::string(budget) + "'"), IsOkAndHolds(is_taken ? 3 : 2))
        << budget << ": " << Err();
  }
}

TEST_F(ScriptTest, HelpIsAllThatIsAskedForWhereverItStands) {
  for (const char* command : {"demo --help", "demo -h", "demo --budget 5% --help", "test --help",
                              "test -R Lane --help"}) {
    EXPECT_THAT(Run(command), IsOkAndHolds(0)) << command;
    const std::string script = std::string(command).substr(0, 4);
    EXPECT_THAT(Out(), testing::StartsWith("Usage: scripts/" + script + " [--")) << command;
    EXPECT_EQ(Err(), "");
  }
}

TEST_F(ScriptTest, WhatTheDemoTakesTheDemosScriptTakes) {
  std::ofstream(tmp_ / "trace") << "text";
  ASSERT_THAT(RunToEnd(Ebbctl("demo --help")), IsOkAndHolds(0));
  const std::string help = Out();
  std::string options;
  for (size_t at = 0; (at = help.find("\n  --", at)) != std::string::npos;) {
    at += 3;
    const std::string option = help.substr(at, help.find(' ', at) - at);
    options += option + (option == "--trace" ? " trace " : " 5% ");
  }
  EXPECT_THAT(options, AllOf(HasSubstr("--trace trace"), HasSubstr("--budget 5%")));

  EXPECT_THAT(Run("demo " + options), IsOkAndHolds(3)) << options << Err();
  EXPECT_THAT(Run("demo -o json --budget=512 --trace='" + std::string(kTrace) + "'"),
              IsOkAndHolds(3))
      << Err();
}

// Of the demo's model, so that the examples do where people try them first.
TEST_F(EbbctlTest, TheHelpsExamplesNameALaneThatIsThere) {
  ASSERT_OK_AND_ASSIGN(const std::string path, FindDemoTrace());
  ASSERT_OK_AND_ASSIGN(const Trace trace, ReadTrace(path, {}));
  for (const char* arguments : {"--help", "describe --help"}) {
    ASSERT_THAT(RunToEnd(Ebbctl(arguments)), IsOkAndHolds(0));
    const std::string help = Out();
    const std::string option = "describe chat-17 --lane ";
    const size_t at = help.find(option);
    ASSERT_NE(at, std::string::npos) << help;
    const size_t begin = at + option.size();

    ASSERT_OK_AND_ASSIGN(const client::LaneId lane,
                         ParseLane(help.substr(begin, help.find(' ', begin) - begin)));

    EXPECT_LT(lane.layer, trace.layers.size());
    EXPECT_LT(lane.kv_head, trace.kv_heads);
  }
}

TEST_F(EbbctlTest, ALaneThatIsNotThereIsAWrongArgument) {
  const auto daemon = StartDaemon();
  ASSERT_OK_AND_ASSIGN(const client::Client client, client::Client::Connect(socket_));
  ASSERT_OK(client.RegisterModel(
      {.name = "m", .geometry = {.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 64}}));
  ASSERT_OK(client.OpenSequence({.name = "s", .model = "m", .budget = {.tokens = 256}}));

  for (const char* tokens : {"", " --tokens", " -o json"}) {
    EXPECT_THAT(RunToEnd(Ebbctl("describe s --socket " + socket_ + " --lane 0/1" + tokens)),
                IsOkAndHolds(0))
        << Err();
    for (const char* lane : {"15/0", "0/2"}) {
      EXPECT_THAT(RunToEnd(Ebbctl("describe s --socket " + socket_ + " --lane " + lane + tokens)),
                  IsOkAndHolds(2));
      EXPECT_EQ(Out(), "");
      EXPECT_THAT(Err(), AllOf(HasSubstr(std::string("lane ") + lane),
                               HasSubstr("has layers 0 to 0 and kv heads 0 to 1")));
    }
  }
  EXPECT_OK(daemon->Stop(kLong));
}

// Who finds a mistake of the caller's, this program or the daemon, makes no difference.
TEST_F(EbbctlTest, WhatTheDaemonFindsWrongWithTheCommandIsTwoAsWell) {
  const auto daemon = StartDaemon();
  for (const char* options : {"--policy nosuch --budget 128", "--policy h2o --budget 1",
                              "--policy h2o --budget 128 --recall nosuch",
                              "--policy h2o --budget 128 --prefill nosuch"}) {
    EXPECT_THAT(
        RunToEnd(Ebbctl("replay " + std::string(kTrace) + " --socket " + socket_ + " " + options)),
        IsOkAndHolds(2))
        << options << ": " << Err();
  }
  EXPECT_THAT(RunToEnd(Ebbctl("describe nobody --socket " + socket_)), IsOkAndHolds(1));
  EXPECT_OK(daemon->Stop(kLong));
}

TEST_F(EbbctlTest, ConfigCheckAsksTheDaemonsParser) {
  const std::string file = (folder_.path() / "bad.yaml").string();
  std::ofstream(file) << "server:\n  listn: x\n";

  EXPECT_THAT(RunToEnd(Ebbctl("config check " + file)), IsOkAndHolds(2));
  EXPECT_THAT(Err(), HasSubstr(file + ":2: server.listn: unknown field"));
  EXPECT_THAT(
      RunToEnd({.program = EBBTIDED_PATH, .arguments = {"--check-config", "--config", file}}),
      IsOkAndHolds(2));
  EXPECT_THAT(RunToEnd(Ebbctl("config check " + file + ".none")), IsOkAndHolds(2));

  std::ofstream(file) << "host:\n  budget: 2MiB\n";
  EXPECT_THAT(RunToEnd(Ebbctl("config check " + file)), IsOkAndHolds(0)) << Err();
  EXPECT_EQ(Out(), file + ": no mistakes\n");
  EXPECT_EQ(ExitCodeUnread("config check " + file), 1);
  EXPECT_EQ(Err(), "ebbctl: nobody reads standard output any more\n");
}

TEST_F(EbbctlTest, ConfigCheckAnswersInJsonToo) {
  const std::string file = (folder_.path() / "bad.yaml").string();
  const std::string none = file + ".none";
  std::ofstream(file) << "server:\n  listn: x\nhosts: 1\n";

  EXPECT_THAT(RunToEnd(Ebbctl("config check -o json " + file)), IsOkAndHolds(2));
  EXPECT_EQ(Err(), "ebbctl: " + file + " has mistakes\n");
  const json answer = json::parse(Out(), nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(answer["file"], file);
  EXPECT_EQ(answer["ok"], false);
  ASSERT_EQ(answer["mistakes"].size(), 2U) << answer;
  EXPECT_EQ(answer["mistakes"][0]["line"], 2) << answer;
  EXPECT_THAT(answer["mistakes"][0]["message"], testing::StartsWith("server.listn: unknown field"));
  EXPECT_EQ(answer["mistakes"][1]["line"], 3) << answer;

  EXPECT_THAT(RunToEnd(Ebbctl("config check -o json " + none)), IsOkAndHolds(2));
  const json of_none = json::parse(Out(), nullptr, /*allow_exceptions=*/false);
  ASSERT_EQ(of_none["mistakes"].size(), 1U) << of_none;
  EXPECT_TRUE(of_none["mistakes"][0]["line"].is_null()) << of_none;

  std::ofstream(file) << "host:\n  budget: 2MiB\n";
  EXPECT_THAT(RunToEnd(Ebbctl("config check -o json " + file)), IsOkAndHolds(0)) << Err();
  EXPECT_EQ(json::parse(Out()), (json{{"file", file}, {"ok", true}, {"mistakes", json::array()}}));
}

}  // namespace
}  // namespace ebbtide::cli
