// SPDX-License-Identifier: Apache-2.0
//
// ebbctl as people run it, where arguments and files hold bytes that are no text: JSON does not
// take them, and terminals obey some.

#include <nlohmann/json.hpp>

#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cli/daemon_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::cli {
namespace {

using nlohmann::json;
using test::IsOkAndHolds;
using testing::AllOf;
using testing::HasSubstr;

class OddBytesTest : public testing::Test {
 protected:
  // The exit code of ebbctl with these arguments, in the shell's words.
  absl::StatusOr<int> Ebbctl(const std::string& arguments) const {
    const std::string command = EBBCTL_PATH " " + arguments + " > " + out_ + " 2> " + err_;
    return RunToEnd({.program = "/bin/sh", .arguments = {"-c", command}});
  }

  static std::string Text(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  std::string Out() const { return Text(out_); }
  std::string Err() const { return Text(err_); }

  test::TempFolder folder_;
  const std::string out_ = (folder_.path() / "out").string();
  const std::string err_ = (folder_.path() / "err").string();
};

TEST_F(OddBytesTest, ConfigCheckListsMistakesOfBytesThatAreNoUtf8) {
  const std::string file = (folder_.path() / "bad.yaml").string();
  const std::string odd = (folder_.path() / "caf\xe9.yaml").string();
  const std::string odd_shown = (folder_.path() / "caf\\xe9.yaml").string();
  struct Case {
    std::string file, shown, text, message;
  };
  for (const Case& bad :
       {Case{file, file, "server:\n  listen: \"unix:/run/caf\xe9.sock\"\n",
             "server.listen: 'unix:/run/caf\\xe9.sock' holds"},
        Case{file, file, "server:\n  listen: \"unix:/run/\xc3.sock\"\n",
             "server.listen: 'unix:/run/\\xc3.sock' holds"},
        Case{file, file, "rocksdb:\n  path: \"rel\xe9\"\n", "rocksdb.path: 'rel\\xe9' holds"},
        Case{odd, odd_shown, "host:\n  budget: 0\n", "host.budget: 0 is outside"}}) {
    std::ofstream(bad.file) << bad.text;

    EXPECT_THAT(Ebbctl("config check -o json " + bad.file), IsOkAndHolds(2)) << Err();
    EXPECT_EQ(Err(), "ebbctl: " + bad.shown + " has mistakes\n");
    const json answer = json::parse(Out(), nullptr, /*allow_exceptions=*/false);
    ASSERT_EQ(answer["mistakes"].size(), 1U) << Out();
    EXPECT_EQ(answer["mistakes"][0]["line"], 2) << answer;
    EXPECT_THAT(answer["mistakes"][0]["message"], testing::StartsWith(bad.message));

    EXPECT_THAT(Ebbctl("config check " + bad.file), IsOkAndHolds(2));
    EXPECT_THAT(Err(), testing::StartsWith(bad.shown + ":2: " + bad.message));
    EXPECT_THAT(Err(), testing::EndsWith("ebbctl: " + bad.shown + " has mistakes\n"));
  }
  std::ofstream(odd) << "host:\n  budget: 2MiB\n";
  EXPECT_THAT(Ebbctl("config check -o json " + odd), IsOkAndHolds(0)) << Err();
  EXPECT_THAT(Ebbctl("config check " + odd), IsOkAndHolds(0)) << Err();
  EXPECT_EQ(Out(), odd_shown + ": no mistakes\n");
}

TEST_F(OddBytesTest, WhatItQuotesNoTerminalObeys) {
  for (const char* arguments : {"tiers --socket '\x1b[31m'", "tiers --socket '\x1b[31m:1'",
                                "'\x1b[31m'", "tiers '--\x1b[31m'", "describe s --lane '\x1b[31m'",
                                "demo --trace '\x1b[31m'", "config check '\x1b[31m'"}) {
    EXPECT_THAT(Ebbctl(arguments), IsOkAndHolds(testing::Ne(0)));
    EXPECT_THAT(Err(), AllOf(HasSubstr("\\x1b[31m"), testing::Not(HasSubstr("\x1b")))) << arguments;
  }
}

}  // namespace
}  // namespace ebbtide::cli
