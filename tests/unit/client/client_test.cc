// SPDX-License-Identifier: Apache-2.0
//
// The library against a daemon that loses answers, falls silent, restarts or is not there.

#include "ebbtide/client.h"

#include <array>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/fake_daemon.h"

namespace ebbtide::client {
namespace {

using absl::StatusCode;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kUnavailable = 14;  // gRPC's numbers.
constexpr int kFailedPrecondition = 9;

class ClientTest : public testing::Test {
 protected:
  Client Connect(ClientOptions options = {}) {
    absl::StatusOr<Client> client = Client::Connect(daemon_.target(), options);
    EXPECT_OK(client);
    return *std::move(client);
  }

  Sequence Open(const Client& client, const std::string& name) {
    absl::StatusOr<Sequence> sequence =
        client.OpenSequence({.name = name, .model = "m", .budget = {.tokens = 64}});
    EXPECT_OK(sequence);
    return *std::move(sequence);
  }

  // `tokens` tokens of one head of one channel.
  TensorView Tokens(int64_t tokens) const {
    return {.dtype = Dtype::kF32,
            .shape = {tokens, 1, 1},
            .bytes = std::as_bytes(std::span(values_).first(static_cast<size_t>(tokens)))};
  }

  int CallsNamed(const std::string& name) const {
    int count = 0;
    for (const SeenCall& call : daemon_.calls()) count += call.name == name ? 1 : 0;
    return count;
  }

  const std::array<float, 8> values_ = {1, 2, 3, 4, 5, 6, 7, 8};
  test::TempFolder folder_;
  FakeDaemon daemon_{(folder_.path() / "s").string()};
};

TEST_F(ClientTest, ConnectLearnsTheBootId) {
  EXPECT_EQ(Connect().boot_id(), "boot-1");
}

TEST_F(ClientTest, NobodyAtTheEndpointNamesItAndTheFix) {
  const std::string target = "unix:" + (folder_.path() / "nobody").string();

  const absl::Status status = Client::Connect(target).status();

  EXPECT_THAT(status, StatusIs(StatusCode::kUnavailable,
                               AllOf(HasSubstr(target), HasSubstr("start `ebbtided`"))));
  EXPECT_EQ(ErrorReason(status), "UNREACHABLE");
}

TEST_F(ClientTest, WhoSetsNoTimeLimitWaitsAsLongAsItTakes) {
  const Client client = Connect({.connect_timeout = absl::InfiniteDuration(),
                                 .control_timeout = absl::InfiniteDuration(),
                                 .data_timeout = absl::InfiniteDuration()});
  const Sequence sequence = Open(client, "s");

  EXPECT_OK(sequence.Append({.layer = 0}, {.k = Tokens(3), .v = Tokens(3)}).status());
}

TEST_F(ClientTest, ALostAppendIsRepeatedAndTakenOnce) {
  const Client client = Connect();
  const Sequence sequence = Open(client, "s");
  daemon_.LoseAnswers(2);

  ASSERT_OK_AND_ASSIGN(const AppendResult result,
                       sequence.Append({.layer = 0}, {.k = Tokens(3), .v = Tokens(3)}));

  EXPECT_TRUE(result.replayed);
  EXPECT_EQ(result.length, 3U);
  EXPECT_EQ(daemon_.appended(), 3U);
  EXPECT_EQ(CallsNamed("Append"), 3);
}

TEST_F(ClientTest, ALostOpenIsRepeated) {
  const Client client = Connect();
  daemon_.LoseAnswers(1);

  EXPECT_EQ(Open(client, "s").opened().budget_tokens, 64U);

  EXPECT_EQ(CallsNamed("OpenSequence"), 2);
}

TEST_F(ClientTest, AttemptsAreBounded) {
  const Client client = Connect({.attempts_max = 3});
  const Sequence sequence = Open(client, "s");
  daemon_.LoseAnswers(100);

  EXPECT_THAT(sequence.Append({.layer = 0}, {.k = Tokens(1), .v = Tokens(1)}),
              StatusIs(StatusCode::kUnavailable, HasSubstr("Append: no daemon answers")));

  EXPECT_EQ(CallsNamed("Append"), 3);
  EXPECT_EQ(daemon_.appended(), 1U);
}

TEST_F(ClientTest, AnItemStillInFlightAfterALostAnswerIsAskedForAgainAlone) {
  const Client client = Connect();
  const std::array<Sequence, 2> open = {Open(client, "a"), Open(client, "b")};
  const std::array<AttendItem, 2> items = {{
      {.sequence = &open[0], .q = Tokens(1), .k = Tokens(1), .v = Tokens(1)},
      {.sequence = &open[1], .q = Tokens(2), .k = Tokens(2), .v = Tokens(2)},
  }};
  daemon_.LoseAnswers(1);
  daemon_.HoldItem(1, 2);

  ASSERT_OK_AND_ASSIGN(const std::vector<AttendResult> results, client.Attend({}, items));

  ASSERT_EQ(results.size(), 2U);
  EXPECT_OK(results[0].status);
  EXPECT_OK(results[1].status);
  EXPECT_EQ(results[0].output.f32().size(), 1U);
  EXPECT_EQ(results[1].output.f32().size(), 2U);
  EXPECT_EQ(daemon_.appended(), 3U);
  std::vector<int> item_counts;
  for (const SeenCall& call : daemon_.calls()) {
    if (call.name == "Attend") item_counts.push_back(call.items);
  }
  EXPECT_EQ(item_counts, (std::vector<int>{2, 2, 1, 1}));
}

TEST_F(ClientTest, AnItemInFlightOfAnotherCallerIsNotWaitedFor) {
  const Client client = Connect();
  const Sequence sequence = Open(client, "s");
  daemon_.HoldItem(0, 1);

  const absl::Status status =
      sequence.Append({.layer = 0}, {.k = Tokens(1), .v = Tokens(1)}).status();

  EXPECT_THAT(status, StatusIs(StatusCode::kUnavailable));
  EXPECT_EQ(ErrorReason(status), "CALL_IN_FLIGHT");
  EXPECT_EQ(CallsNamed("Append"), 1);
}

TEST_F(ClientTest, SilenceEndsAtTheDeadline) {
  const Client client = Connect({.data_timeout = absl::Milliseconds(50)});
  const Sequence sequence = Open(client, "s");
  daemon_.FallSilent();

  EXPECT_THAT(sequence.Append({.layer = 0}, {.k = Tokens(1), .v = Tokens(1)}),
              StatusIs(StatusCode::kDeadlineExceeded, HasSubstr("the same call again is safe")));
}

// Without a time limit: nothing else would end the call.
TEST_F(ClientTest, AStopEndsTheCallUnderWayAndNoOtherIsMade) {
  std::stop_source stop;
  const Client client =
      Connect({.data_timeout = absl::InfiniteDuration(), .stop = stop.get_token()});
  const Sequence sequence = Open(client, "s");
  daemon_.FallSilent();
  std::thread interrupter([&] {
    daemon_.AwaitCalls("Append", 1);
    stop.request_stop();
  });

  const absl::Status append =
      sequence.Append({.layer = 0}, {.k = Tokens(1), .v = Tokens(1)}).status();
  const absl::Status stats = client.GetServerInfo().status();

  interrupter.join();
  EXPECT_THAT(append, StatusIs(StatusCode::kCancelled, HasSubstr("Append at ")));
  EXPECT_THAT(stats, StatusIs(StatusCode::kCancelled, HasSubstr("GetServerInfo at ")));
  EXPECT_EQ(CallsNamed("GetServerInfo"), 1);  // The first hello.
}

// Which would last longer than any test may.
TEST_F(ClientTest, AStopEndsTheWaitForAnotherAttempt) {
  std::stop_source stop;
  const Client client = Connect({.control_timeout = absl::InfiniteDuration(),
                                 .backoff_first = absl::Hours(1),
                                 .stop = stop.get_token()});
  const Client other = Connect();
  daemon_.LoseAnswers(1);
  std::thread interrupter([&] {
    daemon_.AwaitCalls("RegisterModel", 1);
    for (int i = 0; i < 100; ++i)
      EXPECT_OK(other.GetServerInfo());  // It has its answer long since.
    stop.request_stop();
  });

  EXPECT_THAT(client.RegisterModel({.name = "m"}), StatusIs(StatusCode::kCancelled));

  interrupter.join();
  EXPECT_EQ(CallsNamed("RegisterModel"), 1);
}

// The daemon carries out what has reached it: only who hears of the sequence can close it.
TEST_F(ClientTest, ASequenceThatOpensDuringAStopIsThereToBeClosed) {
  std::stop_source stop;
  const Client client = Connect({.stop = stop.get_token()});
  daemon_.FallSilent();
  std::thread interrupter([&] {
    daemon_.AwaitCalls("OpenSequence", 1);
    stop.request_stop();
    daemon_.Speak();
  });

  const absl::StatusOr<Sequence> sequence = client.OpenSequence({.name = "s", .model = "m"});

  interrupter.join();
  ASSERT_OK(sequence);
  EXPECT_EQ(daemon_.open_sequences(), 1);
  EXPECT_OK(sequence->Close());
  EXPECT_EQ(daemon_.open_sequences(), 0);
}

TEST_F(ClientTest, AnOpenThatIsNotAnsweredAfterAStopEndsAndSaysThatItMayBeOpen) {
  std::stop_source stop;
  const Client client =
      Connect({.control_timeout = absl::InfiniteDuration(), .stop = stop.get_token()});
  daemon_.FallSilent();
  std::thread interrupter([&] {
    daemon_.AwaitCalls("OpenSequence", 1);
    stop.request_stop();
  });

  EXPECT_THAT(client.OpenSequence({.name = "s", .model = "m"}),
              StatusIs(StatusCode::kDeadlineExceeded, HasSubstr("it may or may not have been")));

  interrupter.join();
}

TEST_F(ClientTest, NothingIsOpenedAfterAStop) {
  std::stop_source stop;
  const Client client = Connect({.stop = stop.get_token()});
  stop.request_stop();

  EXPECT_THAT(client.OpenSequence({.name = "s", .model = "m"}), StatusIs(StatusCode::kCancelled));

  EXPECT_EQ(CallsNamed("OpenSequence"), 0);
}

TEST_F(ClientTest, WhoStopsMayStillCloseAndWaitsForTheCallGivenUp) {
  std::stop_source stop;
  const Client client = Connect({.stop = stop.get_token()});
  const Sequence sequence = Open(client, "s");
  stop.request_stop();
  daemon_.RefuseNext(kUnavailable, "CALL_IN_FLIGHT", "layer 0 is being called", 20);

  EXPECT_OK(sequence.Close());

  EXPECT_EQ(CallsNamed("CloseSequence"), 21);
}

TEST_F(ClientTest, ARestartIsToldApartFromAnUnknownSequence) {
  const Client client = Connect({.attempts_max = 20});
  const Sequence sequence = Open(client, "s");
  daemon_.Restart("boot-2");

  const absl::Status append =
      sequence.Append({.layer = 0}, {.k = Tokens(1), .v = Tokens(1)}).status();
  const absl::Status truncate = sequence.Truncate(0).status();

  EXPECT_THAT(append, StatusIs(StatusCode::kAborted, AllOf(HasSubstr("boot-1"), HasSubstr("boot-2"),
                                                           HasSubstr("open it again"))));
  EXPECT_EQ(ErrorReason(append), "DAEMON_RESTARTED");
  EXPECT_EQ(ErrorReason(truncate), "DAEMON_RESTARTED");
  EXPECT_EQ(client.boot_id(), "boot-2");
}

TEST_F(ClientTest, ASequenceOpenedAfterARestartWorks) {
  const Client client = Connect({.attempts_max = 20});
  daemon_.Restart("boot-2");
  const Sequence sequence = Open(client, "s");

  EXPECT_OK(sequence.Append({.layer = 0}, {.k = Tokens(1), .v = Tokens(1)}));
}

TEST_F(ClientTest, TheSameNameInANewRunIsNotTakenForTheOldSequence) {
  const Client client = Connect({.attempts_max = 20});
  const Sequence old = Open(client, "s");
  daemon_.Restart("boot-2");
  Open(client, "s");

  EXPECT_EQ(ErrorReason(old.Truncate(0).status()), "DAEMON_RESTARTED");
}

TEST_F(ClientTest, TheDaemonsOwnErrorsPassAsTheyCame) {
  const Client client = Connect();
  daemon_.RefuseNext(kFailedPrecondition, "GEOMETRY_DIFFERS", "model \"m\": layers 3, not 2");

  const absl::Status status = client.RegisterModel({.name = "m"}).status();

  EXPECT_THAT(status, StatusIs(StatusCode::kFailedPrecondition, "model \"m\": layers 3, not 2"));
  EXPECT_EQ(ErrorReason(status), "GEOMETRY_DIFFERS");
}

TEST_F(ClientTest, AnAnswerNotMetIsNotAskedForAgain) {
  const Client client = Connect();
  const Sequence sequence = Open(client, "s");
  daemon_.RefuseNext(kUnavailable, "NOT_MET", "tau 0.02 can't be met");

  EXPECT_THAT(sequence.Attend({}, {.q = Tokens(1)}), StatusIs(StatusCode::kUnavailable));

  EXPECT_EQ(CallsNamed("Attend"), 1);
}

TEST_F(ClientTest, TokensOfABusyLayerAreWaitedFor) {
  const Client client = Connect({.attempts_max = 2});
  daemon_.RefuseNext(kUnavailable, "CALL_IN_FLIGHT", "layer 0 is being called", 50);

  ASSERT_OK_AND_ASSIGN(const SequenceDescription description,
                       client.DescribeSequence({.sequence = "s", .tokens_of = LaneId{}}));

  EXPECT_EQ(description.summary.name, "s");
  EXPECT_EQ(CallsNamed("DescribeSequence"), 51);
}

TEST_F(ClientTest, WhoNeverFindsTheLayerAtRestIsToldSo) {
  const Client client = Connect({.control_timeout = absl::Seconds(1)});
  daemon_.RefuseNext(kUnavailable, "CALL_IN_FLIGHT", "layer 7 is being called", 1000);

  const absl::Status status =
      client.DescribeSequence({.sequence = "s", .tokens_of = LaneId{.layer = 7}}).status();

  EXPECT_THAT(status,
              StatusIs(StatusCode::kUnavailable,
                       AllOf(HasSubstr("sequence \"s\": layer 7 was being called at each of"),
                             HasSubstr("ask again when its worker rests"))));
  EXPECT_EQ(ErrorReason(status), "CALL_IN_FLIGHT");
}

TEST_F(ClientTest, AMessageBeyondTheLimitIsRefusedWithBothNumbers) {
  daemon_.set_message_bytes_max(64);
  const Client client = Connect();

  const absl::Status status = client.RegisterModel({.name = std::string(100, 'm')}).status();

  EXPECT_THAT(status, StatusIs(StatusCode::kResourceExhausted, HasSubstr("takes 64 at most")));
  EXPECT_EQ(CallsNamed("RegisterModel"), 0);
}

TEST_F(ClientTest, AllPagesOfAListAreRead) {
  ASSERT_OK_AND_ASSIGN(const std::vector<SequenceSummary> sequences, Connect().ListSequences());

  ASSERT_EQ(sequences.size(), 2U);
  EXPECT_EQ(sequences[0].name, "a");
  EXPECT_EQ(sequences[1].name, "b");
}

}  // namespace
}  // namespace ebbtide::client
