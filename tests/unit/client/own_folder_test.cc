// SPDX-License-Identifier: Apache-2.0
//
// Folders of programs that end well, and of ones that are killed while others still write there.

#include "client/cli/own_folder.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/status_macros.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::cli {
namespace {

void FillWithFiles(const std::string& folder) {
  std::filesystem::create_directories(folder + "/a/b");
  for (const char* name : {"/one", "/a/two", "/a/b/three"}) std::ofstream(folder + name) << "text";
}

TEST(OwnFolderTest, GoesWithItsOwner) {
  std::string path;
  {
    ASSERT_OK_AND_ASSIGN(OwnFolder made, OwnFolder::Make("ebbtide-test"));
    const OwnFolder folder = std::move(made);
    path = folder.path();
    FillWithFiles(path);
    EXPECT_THAT(path, testing::HasSubstr("/ebbtide-test-"));
  }

  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(OwnFolderTest, IsForItsOwnerAlone) {
  ASSERT_OK_AND_ASSIGN(const OwnFolder folder, OwnFolder::Make("ebbtide-test"));

  EXPECT_EQ(std::filesystem::status(folder.path()).permissions(), std::filesystem::perms{0700});
}

TEST(OwnFolderTest, GoesWhenItsProgramIsKilled) {
  for (const int signal : {SIGKILL, SIGINT, SIGQUIT, SIGABRT}) {
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // The guard becomes ours to wait for.
    std::array<int, 2> pipe_ends = {};
    ASSERT_EQ(pipe(pipe_ends.data()), 0);
    const pid_t program = fork();
    if (program == 0) {
      prctl(PR_SET_DUMPABLE, 0);  // No core for the signals that would leave one.
      const auto folder = OwnFolder::Make("ebbtide-test");
      EBBTIDE_CHECK(folder.ok(), "a folder can be made");
      FillWithFiles(folder->path());
      const std::string line = folder->path() + "\n";
      EBBTIDE_CHECK(write(pipe_ends[1], line.data(), line.size()) > 0, "the test listens");
      while (true) pause();
    }
    close(pipe_ends[1]);
    std::string path(200, '\0');
    path.resize(static_cast<size_t>(read(pipe_ends[0], path.data(), path.size())));
    ASSERT_THAT(path, testing::EndsWith("\n"));
    path.pop_back();
    EXPECT_TRUE(std::filesystem::exists(path));

    kill(program, signal);

    ASSERT_EQ(waitpid(program, nullptr, 0), program);
    int status = 0;
    EXPECT_GT(waitpid(-1, &status, 0), 0);
    EXPECT_EQ(status, 0);
    EXPECT_FALSE(std::filesystem::exists(path)) << "after signal " << signal;
    close(pipe_ends[0]);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
  }
}

}  // namespace
}  // namespace ebbtide::cli
