// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/page_runs.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/support/record_pattern.h"

namespace ebbtide::storage {
namespace {

using test::MakeGeometry;
using testing::ElementsAre;
using testing::IsEmpty;

ByteRange PlaceOf(const RecordGeometry& geometry, uint32_t page) {
  return {.offset = geometry.part_offset(page, PagePart::kExact), .bytes = geometry.page_bytes};
}

std::vector<PageRun> Plan(const RecordGeometry& geometry, std::vector<uint32_t> pages) {
  std::vector<ByteRange> wanted;
  for (const uint32_t page : pages) wanted.push_back(PlaceOf(geometry, page));
  return PlanPageRuns(wanted);
}

TEST(PageRunsTest, NothingAskedIsNothingRead) {
  EXPECT_THAT(Plan(MakeGeometry(4, 4, 8192), {}), IsEmpty());
}

TEST(PageRunsTest, AlignedPageIsReadAlone) {
  const RecordGeometry geometry = MakeGeometry(4, 4, 8192);

  EXPECT_THAT(Plan(geometry, {3}),
              ElementsAre(PageRun{
                  .begin = 4096 + 3 * 8192, .end = 4096 + 4 * 8192, .first = 0, .last = 1}));
}

TEST(PageRunsTest, OddPageIsReadWithTheUnitsItTouches) {
  const RecordGeometry geometry = MakeGeometry(4, 4, 10240);

  EXPECT_THAT(Plan(geometry, {1}),  // Bytes 14336 to 24576.
              ElementsAre(PageRun{.begin = 12288, .end = 24576, .first = 0, .last = 1}));
}

TEST(PageRunsTest, NeighboursAreReadTogether) {
  const RecordGeometry geometry = MakeGeometry(4, 4, 8192);

  EXPECT_THAT(Plan(geometry, {0, 1, 2, 2}),
              ElementsAre(PageRun{.begin = 4096, .end = 4096 + 3 * 8192, .first = 0, .last = 4}));
}

TEST(PageRunsTest, ShortGapIsReadThroughAndALongOneIsNot) {
  const RecordGeometry geometry = MakeGeometry(16, 4, 16384);

  // Four pages of 16 KiB are 64 KiB; five are more.
  EXPECT_EQ(Plan(geometry, {0, 5}).size(), 1u);
  EXPECT_EQ(Plan(geometry, {0, 6}).size(), 2u);
}

TEST(PageRunsTest, RunsAreNoLongerThanTheirLimit) {
  const RecordGeometry geometry = MakeGeometry(64, 4, 16384);
  std::vector<uint32_t> all(geometry.pages());
  for (uint32_t page = 0; page < geometry.pages(); ++page) all[page] = page;

  const std::vector<PageRun> runs = Plan(geometry, all);

  EXPECT_EQ(runs.size(), 4u);
  for (const PageRun& run : runs) EXPECT_EQ(run.end - run.begin, kRunBytesMax);
}

TEST(PageRunsTest, PageLongerThanTheLimitIsOneRun) {
  const RecordGeometry geometry = MakeGeometry(2, 1, 4 << 20);

  EXPECT_THAT(Plan(geometry, {1}),
              ElementsAre(PageRun{
                  .begin = 4096 + (4 << 20), .end = 4096 + (8 << 20), .first = 0, .last = 1}));
}

TEST(PageRunsTest, RandomPagesAreEachInTheirRun) {
  test::ForEachSeed(50, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto page_bytes = static_cast<uint32_t>(1 + random() % 70000);
    const RecordGeometry geometry =
        MakeGeometry(static_cast<uint32_t>(1 + random() % 40),
                     static_cast<uint32_t>(1 + random() % 4), page_bytes);
    std::vector<uint32_t> pages;
    for (uint32_t page = 0; page < geometry.pages(); ++page) {
      for (uint64_t times = random() % 3; times > 0; --times) pages.push_back(page);
    }

    size_t next = 0;
    uint64_t previous_end = 0;
    for (const PageRun& run : Plan(geometry, pages)) {
      ASSERT_EQ(run.first, next);
      ASSERT_LT(run.first, run.last);
      ASSERT_EQ(run.begin % kRecordAlignment, 0u);
      ASSERT_EQ(run.end % kRecordAlignment, 0u);
      ASSERT_LE(run.end, geometry.record_bytes());
      ASSERT_LE(run.end - run.begin, std::max<uint64_t>(kRunBytesMax, page_bytes + 8192));
      for (size_t i = run.first; i < run.last; ++i) {
        ASSERT_LE(run.begin, PlaceOf(geometry, pages[i]).offset);
        ASSERT_GE(run.end, PlaceOf(geometry, pages[i]).offset + page_bytes);
      }
      // Two runs share at most the unit in which one page ends and the next begins.
      ASSERT_LE(previous_end, run.begin + kRecordAlignment);
      previous_end = run.end;
      next = run.last;
    }
    ASSERT_EQ(next, pages.size());
  });
}

}  // namespace
}  // namespace ebbtide::storage
