// SPDX-License-Identifier: Apache-2.0
//
// The test support keeps its own promises, or no test above it means anything.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/stepped_executor.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(SteppedExecutorTest, JobsWaitUntilTold) {
  SteppedExecutor executor;
  std::vector<std::string> ran;
  ASSERT_OK(executor.Submit("first", [&] { ran.push_back("first"); }));
  ASSERT_OK(executor.Submit("second", [&] { ran.push_back("second"); }));
  EXPECT_EQ(executor.next_name(), "first");
  EXPECT_EQ(executor.waiting(), 2u);

  EXPECT_TRUE(executor.RunNext());

  EXPECT_THAT(ran, ElementsAre("first"));
  EXPECT_EQ(executor.next_name(), "second");
}

TEST(SteppedExecutorTest, RunAllRunsWhatJobsSubmit) {
  SteppedExecutor executor;
  ASSERT_OK(executor.Submit("outer", [&] { ASSERT_OK(executor.Submit("inner", [] {})); }));

  EXPECT_EQ(executor.RunAll(), 2u);

  EXPECT_FALSE(executor.RunNext());
}

TEST(SteppedExecutorTest, FullQueueRefuses) {
  SteppedExecutor executor(1);
  ASSERT_OK(executor.Submit("fits", [] {}));

  EXPECT_THAT(executor.Submit("late", [] {}),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("late")));
}

TEST(StatusMatchersTest, CodeAndMessageAreBothCompared) {
  const absl::Status aborted = absl::AbortedError("length is 7");

  EXPECT_THAT(aborted, StatusIs(absl::StatusCode::kAborted));
  EXPECT_THAT(aborted, StatusIs(absl::StatusCode::kAborted, HasSubstr("7")));
  EXPECT_THAT(aborted, Not(StatusIs(absl::StatusCode::kInternal)));
  EXPECT_THAT(aborted, Not(StatusIs(absl::StatusCode::kAborted, HasSubstr("8"))));
  EXPECT_THAT(aborted, Not(IsOk()));
  EXPECT_THAT(absl::StatusOr<int>(aborted), StatusIs(absl::StatusCode::kAborted));
}

TEST(StatusMatchersTest, ValueIsCompared) {
  EXPECT_THAT(absl::StatusOr<int>(3), IsOkAndHolds(3));
  EXPECT_THAT(absl::StatusOr<int>(3), Not(IsOkAndHolds(4)));
  EXPECT_THAT(absl::StatusOr<int>(absl::AbortedError("")), Not(IsOkAndHolds(3)));
}

TEST(StatusMatchersTest, FailureShowsTheStatus) {
  EXPECT_NONFATAL_FAILURE(EXPECT_OK(absl::AbortedError("length is 7")), "length is 7");
}

// Sets a variable for the length of a test.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) {
      before_ = before;
    }
    setenv(name, value, 1);
  }
  ~ScopedVariable() { setenv(name_, before_.c_str(), 1); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  std::string before_;
};

TEST(RandomSeedTest, GivenSeedIsTheOnlyOne) {
  const ScopedVariable seed("EBBTIDE_SEED", "42");

  EXPECT_EQ(RandomSeed(), 42u);
  EXPECT_THAT(RandomSeeds(5), ElementsAre(42u));
}

TEST(RandomSeedTest, FactorMultipliesTheCount) {
  const ScopedVariable seed("EBBTIDE_SEED", "");
  const ScopedVariable factor("EBBTIDE_SEED_FACTOR", "3");

  EXPECT_EQ(RandomSeeds(5).size(), 15u);
}

TEST(RandomSeedTest, FreshSeedsDiffer) {
  const ScopedVariable seed("EBBTIDE_SEED", "");

  EXPECT_NE(RandomSeed(), RandomSeed());
}

TEST(TempFolderTest, IsThereAndGoneAfterwards) {
  std::filesystem::path path;
  {
    const TempFolder folder;
    path = folder.path();
    std::ofstream(path / "file") << "bytes";
    EXPECT_TRUE(std::filesystem::exists(path / "file"));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace ebbtide::test
