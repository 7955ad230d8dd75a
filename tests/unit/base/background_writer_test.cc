// SPDX-License-Identifier: Apache-2.0
//
// The writer faces a pipe: one that is read, one that is full, one that nobody has any more.

#include "base/background_writer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/temp_folder.h"

namespace ebbtide {
namespace {

using testing::EndsWith;

constexpr absl::Duration kLong = absl::Seconds(30);

std::string Dropped(uint64_t lines) {
  return absl::StrCat("dropped ", lines, "\n");
}

class BackgroundWriterTest : public testing::Test {
 protected:
  BackgroundWriterTest() {
    EXPECT_EQ(::pipe2(ends_.data(), O_CLOEXEC), 0);
    ::signal(SIGPIPE, SIG_IGN);
  }
  ~BackgroundWriterTest() override {
    CloseReader();
    ::close(in());
    ::signal(SIGPIPE, SIG_DFL);
  }

  int in() const { return ends_[1]; }
  void CloseReader() {
    if (ends_[0] >= 0) ::close(ends_[0]);
    ends_[0] = -1;
  }

  // Until what was read ends in `end`.
  std::string ReadUntil(const std::string& end) const {
    std::string text;
    std::array<char, 4096> bytes;
    while (!text.ends_with(end)) {
      const ssize_t count = ::read(ends_[0], bytes.data(), bytes.size());
      if (count <= 0) break;
      text.append(bytes.data(), static_cast<size_t>(count));
    }
    return text;
  }

  void FillPipe() const {
    ::fcntl(in(), F_SETFL, O_NONBLOCK);
    const std::string block(4096, '\n');
    while (::write(in(), block.data(), block.size()) > 0) {
    }
    ::fcntl(in(), F_SETFL, 0);
  }

 private:
  std::array<int, 2> ends_ = {-1, -1};
};

TEST_F(BackgroundWriterTest, LinesComeInOrder) {
  BackgroundWriter writer(in(), Dropped);

  writer.Write("one\n");
  writer.Write("two\nthree\n");

  EXPECT_TRUE(writer.Flush(kLong));
  EXPECT_EQ(ReadUntil("three\n"), "one\ntwo\nthree\n");
}

TEST_F(BackgroundWriterTest, EndWaitsForWhatIsNotWritten) {
  std::string all;
  {
    BackgroundWriter writer(in(), Dropped);
    for (int i = 0; i < 100; ++i) {
      writer.Write(absl::StrCat(i, "\n"));
      absl::StrAppend(&all, i, "\n");
    }
  }
  EXPECT_EQ(ReadUntil("99\n"), all);
}

TEST_F(BackgroundWriterTest, FullPipeHoldsNobodyUpAndWhatIsDroppedIsCounted) {
  FillPipe();
  BackgroundWriter writer(in(), Dropped);
  const std::string line = std::string(1023, 'x') + "\n";
  constexpr uint64_t kLines = 4096;  // 4 MiB, where one may wait and one be on its way.

  for (uint64_t i = 0; i < kLines; ++i) writer.Write(line);

  EXPECT_FALSE(writer.Flush(absl::ZeroDuration()));
  std::string text;
  std::thread reader([&] { text = ReadUntil("last\n"); });
  EXPECT_TRUE(writer.Flush(kLong));
  writer.Write("last\n");
  reader.join();
  uint64_t written = 0;
  uint64_t dropped = 0;
  for (const absl::string_view came : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    absl::string_view number = came;
    uint64_t lines = 0;
    if (came.size() == line.size() - 1) ++written;
    if (absl::ConsumePrefix(&number, "dropped ") && absl::SimpleAtoi(number, &lines)) {
      EXPECT_GE(written, kLines / 4) << "told before they were missing";
      dropped += lines;
    }
  }
  EXPECT_GE(dropped, kLines / 4);
  EXPECT_EQ(written + dropped, kLines);
}

TEST_F(BackgroundWriterTest, EndDoesNotWaitForAFullPipeForEver) {
  FillPipe();
  {
    BackgroundWriter writer(in(), Dropped);
    writer.Write("late\n");
  }
  EXPECT_THAT(ReadUntil("late\n"), EndsWith("\nlate\n")) << "and yet it is written";
}

// A disk that is full, and then is not.
TEST_F(BackgroundWriterTest, LineThatIsBrokenOffIsEnded) {
  const test::TempFolder folder;
  const std::string path = (folder.path() / "log").string();
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {.rlim_cur = 8, .rlim_max = before.rlim_max};
  {
    BackgroundWriter writer(file, Dropped);
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    writer.Write("one\ntwo three\nfour\n");
    EXPECT_TRUE(writer.Flush(kLong));
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    writer.Write("five\n");
  }
  ::signal(SIGXFSZ, SIG_DFL);
  ::close(file);

  std::ifstream written(path);
  const std::string text(std::istreambuf_iterator<char>(written), {});
  EXPECT_EQ(text, "one\ntwo \nfive\ndropped 2\n");
}

TEST_F(BackgroundWriterTest, PipeWithoutReaderLosesLinesAndNothingElse) {
  CloseReader();
  BackgroundWriter writer(in(), Dropped);

  writer.Write("one\n");
  EXPECT_TRUE(writer.Flush(kLong));
  writer.Write("two\n");
  EXPECT_TRUE(writer.Flush(kLong));
}

TEST_F(BackgroundWriterTest, FullPipeThatDoesNotBlockIsWaitedFor) {
  FillPipe();
  ::fcntl(in(), F_SETFL, O_NONBLOCK);
  BackgroundWriter writer(in(), Dropped);

  writer.Write("late\n");

  EXPECT_FALSE(writer.Flush(absl::Milliseconds(10)));
  EXPECT_THAT(ReadUntil("late\n"), EndsWith("\nlate\n"));
}

TEST_F(BackgroundWriterTest, LastWordsAreWrittenAsFarAsTheyAreTaken) {
  WriteWithin(in(), "goodbye\n", kLong);
  EXPECT_EQ(ReadUntil("goodbye\n"), "goodbye\n");

  FillPipe();
  WriteWithin(in(), "goodbye\n", absl::Milliseconds(1));
}

}  // namespace
}  // namespace ebbtide
