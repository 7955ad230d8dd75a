// SPDX-License-Identifier: Apache-2.0
//
// Text to Config: what defaults come from, that every mistake is found with its line, and that what
// is printed reads back the same. The machine and the user are made up.

#include "service/config/load_config.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"

#include "base/printable.h"
#include "ebbtide/v1/config.pb.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::service {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;

Surroundings Laptop() {
  return {.memory_bytes = 8 * kGiB,
          .cpus = 4,
          .uid = 1000,
          .home = "/home/ada",
          .runtime_folder = "/run/user/1000",
          .state_folder = "",
          .disk = [](const std::string&) {
            return DiskSpace{.capacity_bytes = 500 * kGiB, .free_bytes = 100 * kGiB};
          }};
}

auto MistakeAt(int line, const std::string& part) {
  return AllOf(Field(&ConfigMistake::line, line), Field(&ConfigMistake::message, HasSubstr(part)));
}

std::vector<ConfigMistake> MistakesOf(std::string_view text) {
  return LoadConfig(text, Laptop()).mistakes;
}

void ForEachField(const std::function<void(const std::string& path)>& visit) {
  const google::protobuf::Descriptor& root = *v1::Config::descriptor();
  for (int i = 0; i < root.field_count(); ++i) {
    const google::protobuf::Descriptor& section = *root.field(i)->message_type();
    for (int j = 0; j < section.field_count(); ++j) {
      visit(root.field(i)->name() + "." + section.field(j)->name());
    }
  }
}

TEST(LoadConfigTest, NothingSaidGivesDefaultsOfTheMachine) {
  const LoadedConfig loaded = LoadConfig("", Laptop());

  ASSERT_THAT(loaded.mistakes, IsEmpty());
  EXPECT_EQ(loaded.config.server.listen.socket_path, "/run/user/1000/ebbtide.sock");
  EXPECT_EQ(loaded.config.server.listen.socket_mode, 0600);
  EXPECT_EQ(loaded.config.server.threads, 4);
  EXPECT_EQ(loaded.config.server.message_bytes_max, 268435456);
  EXPECT_EQ(loaded.config.device.budget_bytes, 409 * kMiB);
  EXPECT_EQ(loaded.config.device.backend, BackendChoice::kCpu);
  EXPECT_EQ(loaded.config.host.budget_bytes, 2 * kGiB);
  EXPECT_FALSE(loaded.config.rocksdb.disabled);
  EXPECT_EQ(loaded.config.rocksdb.path, "/home/ada/.local/state/ebbtide/rocksdb");
  EXPECT_EQ(loaded.config.rocksdb.budget_bytes, 10 * kGiB);
  EXPECT_EQ(loaded.config.sequences.idle_timeout, absl::Minutes(10));
}

TEST(LoadConfigTest, DefaultsOfALargeMachineAreCapped) {
  Surroundings server = Laptop();
  server.memory_bytes = 512 * kGiB;
  server.disk = [](const std::string&) {
    return DiskSpace{.capacity_bytes = 4096 * kGiB, .free_bytes = 4000 * kGiB};
  };

  const Config config = LoadConfig("", server).config;

  EXPECT_EQ(config.device.budget_bytes, kGiB);
  EXPECT_EQ(config.host.budget_bytes, 4 * kGiB);
  EXPECT_EQ(config.rocksdb.budget_bytes, 16 * kGiB);
}

TEST(LoadConfigTest, UserWithoutFoldersGetsOneInTmp) {
  Surroundings bare = Laptop();
  bare.home = bare.runtime_folder = "";

  const Config config = LoadConfig("", bare).config;

  EXPECT_EQ(config.server.listen.socket_path, "/tmp/ebbtide-1000/ebbtide.sock");
  EXPECT_EQ(config.rocksdb.path, "/tmp/ebbtide-1000/rocksdb");
}

TEST(LoadConfigTest, StateFolderWinsOverHome) {
  Surroundings surroundings = Laptop();
  surroundings.state_folder = "/var/lib/ada";

  EXPECT_EQ(LoadConfig("", surroundings).config.rocksdb.path, "/var/lib/ada/ebbtide/rocksdb");
}

TEST(LoadConfigTest, EveryFieldIsRead) {
  const LoadedConfig loaded = LoadConfig(R"(
server:
  listen: 127.0.0.1:50051
  threads: 3
  log_level: warn
  message_bytes_max: 1048576
  socket_mode: "0660"
  calls_in_flight_max: 5
  call_deadline_ms: 1500
  drain_ms: 0
device:
  budget: 32MiB
  backend: auto
host:
  budget: 0.5GiB
rocksdb:
  disabled: true
  path: /data/ebbtide
  budget: 2GiB
sequences:
  idle_timeout_ms: 1000
  recall: exact
)",
                                         Laptop());

  ASSERT_THAT(loaded.mistakes, IsEmpty());
  const ServerConfig server = {
      .listen = {.socket_path = "", .socket_mode = 0660, .host = "127.0.0.1", .port = 50051},
      .threads = 3,
      .log_level = LogLevel::kWarn,
      .message_bytes_max = kMiB,
      .calls_in_flight_max = 5,
      .call_deadline = absl::Milliseconds(1500),
      .drain = absl::ZeroDuration()};
  const Config expected = {
      .server = server,
      .device = {.budget_bytes = 32 * kMiB, .backend = BackendChoice::kAuto},
      .host = {.budget_bytes = 512 * kMiB},
      .rocksdb = {.disabled = true, .path = "/data/ebbtide", .budget_bytes = 2 * kGiB},
      .sequences = {.idle_timeout = absl::Seconds(1), .recall = "exact"}};
  EXPECT_EQ(loaded.config, expected);
}

TEST(LoadConfigTest, CudaDeviceHasMemoryOfItsOwn) {
  const LoadedConfig loaded =
      LoadConfig("device: {backend: cuda, budget: 100GiB}\nhost: {budget: 7GiB}\n", Laptop());

  ASSERT_THAT(loaded.mistakes, IsEmpty());
  EXPECT_EQ(loaded.config.device.backend, BackendChoice::kCuda);
  EXPECT_EQ(loaded.config.device.budget_bytes, 100 * kGiB);
}

TEST(LoadConfigTest, JsonIsReadToo) {
  const LoadedConfig loaded =
      LoadConfig(R"({"server": {"threads": 2}, "host": {"budget": "64MiB"}})", Laptop());

  ASSERT_THAT(loaded.mistakes, IsEmpty());
  EXPECT_EQ(loaded.config.server.threads, 2);
  EXPECT_EQ(loaded.config.host.budget_bytes, 64 * kMiB);
}

TEST(LoadConfigTest, OriginOfEachValueIsKept) {
  const LoadedConfig loaded = LoadConfig("host:\n  budget: 64MiB\n", Laptop());

  EXPECT_EQ(loaded.origins.at("host.budget"), "line 2");
  EXPECT_EQ(loaded.origins.at("device.budget"), "default: min(5 % of 8 GiB of memory, 1 GiB)");
  ForEachField(
      [&](const std::string& path) { EXPECT_TRUE(loaded.origins.contains(path)) << path; });
}

TEST(LoadConfigTest, AllMistakesAreListedInOrderOfLine) {
  const auto mistakes = MistakesOf(R"(server:
  listen: 10.0.0.1:50051
  thread: 2
  log_level: loud
host:
  budget: 64 gigs
rocksdb:
  path: data
  disabled: maybe
sequences:
  idle_timeout_ms: -1
)");

  EXPECT_THAT(
      mistakes,
      ElementsAre(MistakeAt(2, "server.listen: host '10.0.0.1' is not loopback"),
                  MistakeAt(3, "server.thread: unknown field; did you mean server.threads?"),
                  MistakeAt(4, "server.log_level: "), MistakeAt(6, "host.budget: '64 gigs'"),
                  MistakeAt(8, "rocksdb.path: 'data' must be absolute"),
                  MistakeAt(9, "rocksdb.disabled: 'maybe' is neither true nor false"),
                  MistakeAt(11, "sequences.idle_timeout_ms: '-1' is not a whole number")));
}

TEST(LoadConfigTest, EveryKeyMisspeltByOneLetterIsRefusedWithTheRightOne) {
  ForEachField([](const std::string& path) {
    const size_t dot = path.find('.');
    const std::string text = path.substr(0, dot) + ":\n  " + path.substr(dot + 1) + "x: 1\n";

    EXPECT_THAT(MistakesOf(text),
                ElementsAre(MistakeAt(2, "unknown field; did you mean " + path + "?")))
        << text;
  });
}

// The limits of a field as docs/configuration.md lists them.
std::map<std::string, std::string> LimitsOfThePage() {
  std::ifstream page(std::string(EBBTIDE_SOURCE_DIR) + "/docs/configuration.md");
  std::map<std::string, std::string> limits;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| `")) continue;
    const std::vector<std::string> cells = absl::StrSplit(line, " | ");
    limits[cells[0].substr(3, cells[0].size() - 4)] = cells[2];
  }
  return limits;
}

TEST(LoadConfigTest, WhatIsNoNumberIsToldTheLimitsOfItsField) {
  const std::map<std::string, std::string> limits = LimitsOfThePage();
  int numbers = 0;
  ForEachField([&](const std::string& path) {
    const size_t dot = path.find('.');
    const auto& field = *v1::Config::descriptor()
                             ->FindFieldByName(path.substr(0, dot))
                             ->message_type()
                             ->FindFieldByName(path.substr(dot + 1));
    const auto type = field.cpp_type();
    using google::protobuf::FieldDescriptor;
    if (type != FieldDescriptor::CPPTYPE_UINT32 && type != FieldDescriptor::CPPTYPE_UINT64) return;
    ++numbers;
    for (const char* value : {"many", "-1", "1e1", "1.5", "99999999999999999999"}) {
      const std::string text =
          path.substr(0, dot) + ":\n  " + path.substr(dot + 1) + ": " + value + "\n";

      EXPECT_THAT(MistakesOf(text),
                  ElementsAre(MistakeAt(2, path + ": '" + value + "' is not a whole number from " +
                                               limits.at(path) + " in plain digits")));
    }
  });
  EXPECT_GT(numbers, 0);
}

// Each would be right beside another value of the mistaken field.
TEST(LoadConfigTest, NoLimitIsDrawnFromAMistakenField) {
  for (const std::string rocksdb :
       {"path: data", "path: ''", "path: [a]", "pth: /data", "path: /a, path: /b"}) {
    EXPECT_THAT(MistakesOf("rocksdb: {" + rocksdb + ", budget: 501GiB}"), testing::SizeIs(1))
        << rocksdb;
  }
  for (const std::string device : {"backend: cudda", "backend: [cuda]", "backnd: cuda"}) {
    EXPECT_THAT(MistakesOf("device: {" + device + ", budget: 100GiB}"), testing::SizeIs(1))
        << device;
  }
  EXPECT_THAT(MistakesOf("host: {budget: 64 gigs}\ndevice: {budget: 7900MiB}"),
              ElementsAre(MistakeAt(1, "host.budget: '64 gigs' is not a size")));
  EXPECT_THAT(MistakesOf("hots: {budget: 64MiB}\ndevice: {budget: 7900MiB}"),
              ElementsAre(MistakeAt(1, "hots: unknown field")));
}

TEST(LoadConfigTest, AnUnknownLimitIsNamedInWords) {
  EXPECT_THAT(
      MistakesOf("rocksdb: {path: data, budget: 1kB}"),
      ElementsAre(MistakeAt(1, "rocksdb.path: "),
                  MistakeAt(1, "rocksdb.budget: 1kB is outside 64 MiB to the disk's size")));
  EXPECT_THAT(
      MistakesOf("device: {backend: cuda, budget: 0}"),
      ElementsAre(MistakeAt(1, "device.budget: 0 is outside 1 MiB to the device's memory")));
  Surroundings diskless = Laptop();
  diskless.disk = [](const std::string&) { return DiskSpace{}; };

  const LoadedConfig loaded = LoadConfig("rocksdb: {budget: 1kB}", diskless);

  EXPECT_THAT(loaded.mistakes, ElementsAre(MistakeAt(1, "outside 64 MiB to the disk's size")));
  EXPECT_EQ(LoadConfig("", diskless).origins.at("rocksdb.budget"),
            "default: the disk's size is not known");
}

TEST(LoadConfigTest, KeyAtTheWrongLevelNamesItsPlace) {
  EXPECT_THAT(MistakesOf("threads: 2\n"),
              ElementsAre(MistakeAt(1, "threads: unknown field; did you mean server.threads?")));
}

TEST(LoadConfigTest, KeyGivenTwiceIsRefusedWithBothLines) {
  EXPECT_THAT(MistakesOf("host:\n  budget: 64MiB\n  budget: 32MiB\n"),
              ElementsAre(MistakeAt(3, "host.budget: given twice, first in line 2")));
  EXPECT_THAT(MistakesOf("host:\n  budget: 64MiB\nhost:\n  budget: 32MiB\n"),
              ElementsAre(MistakeAt(3, "host: given twice, first in line 1")));
  EXPECT_THAT(MistakesOf("{\"host\": {\"budget\": \"64MiB\", \"budget\": \"32MiB\"}}"),
              ElementsAre(MistakeAt(1, "host.budget: given twice, first in line 1")));
}

struct BadValue {
  std::string text;
  std::string mistake;
  friend std::ostream& operator<<(std::ostream& os, const BadValue& value) {
    return os << value.text;
  }
};

class BadValueTest : public testing::TestWithParam<BadValue> {};

TEST_P(BadValueTest, IsRefusedOnItsLine) {
  EXPECT_THAT(MistakesOf(GetParam().text), ElementsAre(MistakeAt(1, GetParam().mistake)));
}

INSTANTIATE_TEST_SUITE_P(
    Values, BadValueTest,
    testing::Values(
        BadValue{"host: {budget: 0}", "host.budget: 0 is outside 1 MiB to 8 GiB"},
        BadValue{"host: {budget: -1}", "host.budget: '-1' is not a size"},
        BadValue{"host: {budget: 1e10}", "host.budget: '1e10' is not a size"},
        BadValue{"host: {budget: 10 gib}", "host.budget: '10 gib' is not a size"},
        BadValue{"host: {budget: 9GiB}", "host.budget: 9GiB is outside 1 MiB to 8 GiB"},
        BadValue{"host: {budget: 7900MiB}", "exceed the 8 GiB"},
        BadValue{"device: {budget: 100GiB}", "device.budget: 100GiB is outside 1 MiB to 8 GiB"},
        BadValue{"device: {backend: gpu}", "device.backend: 'gpu' must be auto, cpu or cuda"},
        BadValue{"host: {budget: [1]}", "host.budget: has no value"},
        BadValue{"host: {budget: }", "host.budget: has no value"},
        BadValue{"host: 4GiB", "host: expected a mapping"},
        BadValue{"rocksdb: {budget: 501GiB}", "rocksdb.budget: 501GiB is outside"},
        BadValue{"rocksdb: {path: ''}", "rocksdb.path: is empty"},
        BadValue{"rocksdb: {path: \"/a\\x07\"}", "rocksdb.path: '/a\\x07' holds a control"},
        BadValue{"server: {listen: \"unix:/a\\x9b\"}", "'unix:/a\\xc2\\x9b' holds"},
        BadValue{"server: {threads: 0}", "server.threads: 0 is outside 1 to 1024"},
        BadValue{"server: {threads: 2000}", "server.threads: 2000 is outside 1 to 1024"},
        BadValue{"server: {threads: 1e1}", "server.threads: '1e1' is not a whole number"},
        BadValue{"server: {threads: 99999999999}", "is not a whole number"},
        BadValue{"server: {message_bytes_max: 4294967296}", "is outside"},
        BadValue{"server: {calls_in_flight_max: 0}", "is outside 1 to 4096"},
        BadValue{"server: {call_deadline_ms: 0}", "is outside 1 to 86400000"},
        BadValue{"server: {socket_mode: 0666}", "server.socket_mode: must be"},
        BadValue{"server: {listen: ''}", "server.listen: is empty"},
        BadValue{"server: {listen: 'unix:a.sock'}", "needs the absolute path"},
        BadValue{"server: {listen: 'unix:/run/'}", "needs the absolute path"},
        BadValue{"server: {listen: 'unix:/run/50%.sock'}", "has '%', and gRPC could not connect"},
        BadValue{"server: {listen: 'unix:/run/\xc3\xa9.sock'}", R"(has '\xc3', and gRPC)"},
        BadValue{"server: {listen: 'unix:/run/a,b.sock'}", "has ',', and gRPC could not connect"},
        BadValue{"server: {listen: 'unix:/" + std::string(107, 'a') + "'}",
                 "has 108 bytes, over the system's limit of 107"},
        BadValue{"server: {listen: 50051}", "is neither unix:/PATH nor HOST:PORT"},
        BadValue{"server: {listen: '0.0.0.0:1'}", "is not loopback"},
        BadValue{"server: {listen: '127.0.0.1:65536'}", "port '65536'"},
        BadValue{"server: {listen: '127.0.0.1:'}", "port ''"},
        BadValue{"server: {log_level: WARN}", "server.log_level: "},
        BadValue{"sequences: {idle_timeout_ms: 0}", "is outside 1 to 2592000000"},
        BadValue{"[1, 2]", "the file: expected a mapping"},
        BadValue{"? [a]\n: 1", "a key must be a plain word"},
        BadValue{"server: {threads: 2", "not YAML: "},
        BadValue{"<<: {server: 1}", "<<: unknown field"}),
    [](const auto& test) { return "Value" + std::to_string(test.index); });

TEST(LoadConfigTest, TextBeyondTheFirstDocumentIsRefused) {
  EXPECT_THAT(MistakesOf("host:\n  budget: 64MiB\n---\nhost:\n  budget: 32MiB\n"),
              ElementsAre(MistakeAt(3, "text beyond the first YAML document")));
  EXPECT_THAT(MistakesOf(",a"), ElementsAre(MistakeAt(1, "text beyond the first YAML document")));
}

TEST(LoadConfigTest, FileOverTheLimitIsRefused) {
  EXPECT_THAT(MistakesOf("# " + std::string(64 << 10, 'a')),
              ElementsAre(MistakeAt(0, "the file has 65538 bytes, over the limit of 65536")));
}

TEST(LoadConfigTest, LoopbackAddressesAreListenedAt) {
  for (const char* listen : {"127.0.0.1:0", "127.9.9.9:1", "[::1]:50051", "localhost:50051"}) {
    EXPECT_THAT(MistakesOf(std::string("server: {listen: '") + listen + "'}"), IsEmpty()) << listen;
  }
}

TEST(LoadConfigTest, ExplicitFileThatCannotBeReadIsAMistake) {
  const test::TempFolder folder;

  EXPECT_THAT(LoadConfigFile(folder.path() / "absent.yaml", Laptop()).mistakes,
              ElementsAre(MistakeAt(0, "can't be read: No such file or directory")));
  EXPECT_THAT(LoadConfigFile("", Laptop()).mistakes,
              ElementsAre(MistakeAt(0, "can't be read: No such file or directory")));
  EXPECT_THAT(LoadConfigFile(folder.path(), Laptop()).mistakes,
              ElementsAre(MistakeAt(0, "can't be read: it is a folder")));
}

TEST(LoadConfigTest, MistakesOfAFileNameIt) {
  const test::TempFolder folder;
  const std::string path = folder.path() / "e.yaml";
  std::ofstream(path) << "\nhots: {}\n";

  EXPECT_EQ(FormatMistakes(path, LoadConfigFile(path, Laptop()).mistakes),
            path + ":2: hots: unknown field; did you mean host?\n");
}

// Else an escape sequence in a file or its name would run in the terminal of who checks it, and a
// line end would make two mistakes of one.
TEST(LoadConfigTest, MistakesShowNothingThatATerminalObeys) {
  for (const std::string text :
       {"server: {listen: \"a\\e[31m\\n\"}", "server: {listen: \"unix:/a\xe9\"}",
        "server: {log_level: \"\\e[31m\\n\"}", "device: {backend: \"\\e[31m\\n\"}",
        "device: {budget: \"\\e[31m\\n\xe9\"}", "host: {budget: \"1\xe9\"}",
        "rocksdb: {path: \"a\xe9\"}", "\"\\e[31m\\n\": 1", "server: {\"\\e\xe9\": 1}",
        "server: {threads: \"\\e\xe9\"}", "rocksdb: {disabled: \"\\e\xe9\"}", "server: \"\\\x1b\"",
        "server: \x1b[31m", "server: *\x1b[31m"}) {
    const std::vector<ConfigMistake> mistakes = MistakesOf(text);
    const std::string shown = FormatMistakes("\x1b\n\xe9.yaml", mistakes);

    EXPECT_THAT(mistakes, testing::Not(IsEmpty())) << text;
    EXPECT_EQ(PrintableLines(shown), shown);
    EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), std::ssize(mistakes)) << shown;
    EXPECT_THAT(shown, testing::StartsWith("\\x1b\\x0a\\xe9.yaml:"));
  }
}

// A default is as much others' text as a file is.
TEST(LoadConfigTest, AFolderOfTheEnvironmentIsHeldToTheSame) {
  Surroundings surroundings = Laptop();
  surroundings.state_folder = "/var/caf\xe9";

  EXPECT_THAT(LoadConfig("", surroundings).mistakes,
              ElementsAre(MistakeAt(0, "rocksdb.path: '/var/caf\\xe9/ebbtide/rocksdb' holds")));
  EXPECT_THAT(LoadConfig("rocksdb: {path: /data}", surroundings).mistakes, IsEmpty());
}

TEST(PrintConfigTest, ReadsBackToTheSameConfig) {
  const std::vector<std::string> texts = {
      "", "server: {listen: '[::1]:7', socket_mode: '0660', log_level: debug, drain_ms: 0}",
      "rocksdb: {disabled: true, path: '/a \"b\" \\c', budget: 67108865}",
      "host: {budget: 1.5GiB}\nsequences: {recall: \"off\", idle_timeout_ms: 7}"};
  for (const std::string& text : texts) {
    const LoadedConfig loaded = LoadConfig(text, Laptop());
    ASSERT_THAT(loaded.mistakes, IsEmpty()) << text;

    const LoadedConfig again = LoadConfig(PrintConfig(loaded.config, loaded.origins), Laptop());

    EXPECT_THAT(again.mistakes, IsEmpty());
    EXPECT_EQ(again.config, loaded.config) << PrintConfig(loaded.config, loaded.origins);
  }
}

TEST(PrintConfigTest, SaysWhereEachValueComesFrom) {
  const LoadedConfig loaded = LoadConfig("host:\n  budget: 64MiB\n", Laptop());

  const std::string text = PrintConfig(loaded.config, loaded.origins);

  EXPECT_THAT(text, HasSubstr("host:\n  budget: \"64MiB\"  # line 2\n"));
  EXPECT_THAT(text, HasSubstr("  threads: 4  # default: the CPUs this process may use\n"));
}

TEST(ConfigurationPageTest, ListsExactlyTheFieldsOfTheSchema) {
  std::ifstream page(std::string(EBBTIDE_SOURCE_DIR) + "/docs/configuration.md");
  std::set<std::string> listed;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("| `") && line.find('.') != std::string::npos) {
      listed.insert(line.substr(3, line.find('`', 3) - 3));
    }
  }
  std::set<std::string> fields;
  ForEachField([&](const std::string& path) { fields.insert(path); });

  EXPECT_EQ(listed, fields);
}

}  // namespace
}  // namespace ebbtide::service
