// SPDX-License-Identifier: Apache-2.0
//
// The example of docs/worker.md as its readers run it: against a daemon, and against none.

#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/grpc_probe.h"

namespace ebbtide {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

class AttendExampleTest : public testing::Test {
 protected:
  std::unique_ptr<test::DaemonProcess> Example(const std::string& target) const {
    return std::make_unique<test::DaemonProcess>(
        test::DaemonSetup{.program = ATTEND_EXAMPLE_PATH,
                          .arguments = {target},
                          .environment = {},
                          .stderr_file = stand_.path("example.err")});
  }

  test::DaemonStand stand_;
};

TEST_F(AttendExampleTest, EveryAnswerIsProvenAndTheSequenceClosed) {
  nlohmann::json said;
  const auto daemon = stand_.Serve({"--config", stand_.WriteConfig(stand_.SmallConfig())}, &said);
  const std::string target = said.value("target", "");

  const auto example = Example(target);
  std::istringstream lines(example->ReadAll());
  ASSERT_EQ(example->WaitForEnd(), 0) << example->ReadStderr();

  std::vector<std::pair<int, int>> places;
  for (std::string line; std::getline(lines, line);) {
    int token = 0;
    int layer = 0;
    int pages = 0;
    double error = 0;
    int end = 0;
    std::sscanf(line.c_str(),
                "token %d layer %d: off by at most %lf of its length, met; %d pages absent%n",
                &token, &layer, &error, &pages, &end);
    ASSERT_EQ(static_cast<size_t>(end), line.size()) << line;
    places.emplace_back(token, layer);
    EXPECT_GT(error, 0) << line;
    EXPECT_LE(error, 0.02) << line;  // bounded(0.02)
    EXPECT_GT(pages, 0) << line;
  }
  EXPECT_THAT(places, ElementsAre(Pair(1024, 0), Pair(1024, 1), Pair(1025, 0), Pair(1025, 1),
                                  Pair(1026, 0), Pair(1026, 1), Pair(1027, 0), Pair(1027, 1)));
  grpc::ClientContext context;
  v1::GetStatsResponse stats;
  ASSERT_TRUE(v1::StatsService::NewStub(test::ConnectTo(target))
                  ->GetStats(&context, v1::GetStatsRequest(), &stats)
                  .ok());
  EXPECT_EQ(stats.sequences(), 0U);
  EXPECT_THAT(stats.tokens_forgotten(), ElementsAre(Pair("CLOSED", 1028 * 2 * 2)));
  EXPECT_EQ(stats.answers_with_target(), 8U);
}

TEST_F(AttendExampleTest, WithoutADaemonItSaysSoAndFails) {
  const std::string target = "unix:" + stand_.path("nobody.sock");

  const auto example = Example(target);

  EXPECT_EQ(example->WaitForEnd(), 1);
  EXPECT_THAT(example->ReadStderr(), HasSubstr("attend_example: no daemon answers at " + target));
}

}  // namespace
}  // namespace ebbtide
