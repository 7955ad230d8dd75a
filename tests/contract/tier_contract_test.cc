// SPDX-License-Identifier: Apache-2.0
//
// Every promise of storage/tier.h, run for every tier. A new tier joins with one line in kTiers and
// a way to damage what it holds.

#include <atomic>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/block_record.h"
#include "storage/tier.h"
#include "tests/contract/tier_under_test.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::MakeGeometry;
using test::MakeRecord;
using test::PatternPage;
using test::StatusIs;
using testing::Each;
using testing::HasSubstr;

constexpr std::byte kCanary{0xa5};

class TierContract : public testing::TestWithParam<TierCase> {
 protected:
  Tier& tier() { return under_test_->tier(); }
  uint64_t budget_bytes() const { return GetParam().budget_bytes; }

  absl::Status Write(const BlockKey& key, const RecordGeometry& geometry, uint64_t salt = 0) {
    const std::vector<std::byte> record = MakeRecord(key, geometry, salt);
    const BlockWrite write = {.key = key, .record = record};
    return tier().Write({&write, 1});
  }

  absl::Status Erase(const BlockKey& key) { return tier().Erase({&key, 1}); }

  // What a read of one page into canary bytes left behind.
  struct PageAnswer {
    PageState state;
    std::vector<std::byte> bytes;
  };
  PageAnswer ReadPage(const BlockKey& key, uint32_t page, const RecordGeometry& geometry) {
    std::vector<std::byte> bytes(geometry.page_bytes, kCanary);
    PageRead read = {.key = key, .page = page, .into = bytes};
    EXPECT_OK(tier().Read({&read, 1}, absl::InfiniteDuration()));
    return {read.state, bytes};
  }

  void ExpectHeld(const BlockKey& key, const RecordGeometry& geometry, uint64_t salt = 0) {
    for (uint32_t page = 0; page < geometry.pages(); ++page) {
      const PageAnswer answer = ReadPage(key, page, geometry);
      ASSERT_EQ(answer.state, PageState::kOk) << key.DebugString() << " page " << page;
      ASSERT_EQ(answer.bytes, PatternPage(key, page, geometry.page_bytes, salt))
          << key.DebugString() << " page " << page;
    }
  }

  void ExpectMissing(const BlockKey& key, const RecordGeometry& geometry) {
    const PageAnswer answer = ReadPage(key, 0, geometry);
    EXPECT_EQ(answer.state, PageState::kMissing) << key.DebugString();
    EXPECT_THAT(answer.bytes, Each(kCanary));
  }

  TierRoom Room(const RecordGeometry& geometry) {
    const RecordSize size = geometry.size();
    return tier().Room({&size, 1});
  }
  // Records of the geometry that the tier could hold, beside others that it holds.
  uint64_t RoomFor(const RecordGeometry& geometry) {
    const TierRoom room = Room(geometry);
    const SizeRoom& size = room.sizes[0];
    return size.slots_made + room.free_bytes / size.segment_bytes * size.segment_slots;
  }

  // Writes blocks 0, 1, … of `sequence` until one is refused, and says how many were taken.
  uint32_t Fill(uint64_t sequence, const RecordGeometry& geometry) {
    for (uint32_t block = 0;; ++block) {
      const absl::Status status = Write({sequence, block, 0}, geometry);
      if (!status.ok()) {
        EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("budget")));
        return block;
      }
      if (tier().Usage().used_bytes > budget_bytes()) {
        ADD_FAILURE() << "over budget after " << block + 1 << " blocks";
        return block;
      }
    }
  }

  const RecordGeometry geometry_ = MakeGeometry(2, 2, 16384);
  std::unique_ptr<TierUnderTest> under_test_ = GetParam().make(GetParam().budget_bytes);
};

TEST_P(TierContract, MissIsAnAnswerNotAnError) {
  ExpectMissing({9, 9, 9}, geometry_);
}

TEST_P(TierContract, WhatIsWrittenIsReadBack) {
  ASSERT_OK(Write({1, 2, 3}, geometry_));

  ExpectHeld({1, 2, 3}, geometry_);
  EXPECT_EQ(tier().Usage().blocks, 1u);
}

TEST_P(TierContract, PagesOfAnySizeComeBack) {
  // Below, at, beside and above the 4 KiB that direct reads go by; the last is a whole record.
  for (const uint32_t page_bytes : {8u, 640u, 4095u, 4096u, 4104u, 10240u, 65536u}) {
    const RecordGeometry geometry = MakeGeometry(3, 2, page_bytes);
    ASSERT_OK(Write({page_bytes, 0, 0}, geometry));
  }
  for (const uint32_t page_bytes : {8u, 640u, 4095u, 4096u, 4104u, 10240u, 65536u}) {
    ExpectHeld({page_bytes, 0, 0}, MakeGeometry(3, 2, page_bytes));
  }
}

TEST_P(TierContract, BatchAnswersEachPageOnItsOwn) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  ASSERT_OK(Write({2, 0, 0}, geometry_));
  under_test_->FlipPageByte({2, 0, 0}, 1, geometry_);
  const std::vector<BlockKey> keys = {{1, 0, 0}, {3, 0, 0}, {2, 0, 0}, {2, 0, 0}, {1, 0, 0}};
  const std::vector<uint32_t> pages = {3, 0, 1, 2, 0};
  std::vector<std::vector<std::byte>> bytes(keys.size(),
                                            std::vector<std::byte>(geometry_.page_bytes, kCanary));
  std::vector<PageRead> reads;
  for (size_t i = 0; i < keys.size(); ++i) {
    reads.push_back({.key = keys[i], .page = pages[i], .into = bytes[i]});
  }

  ASSERT_OK(tier().Read(reads, absl::InfiniteDuration()));

  EXPECT_EQ(reads[0].state, PageState::kOk);
  EXPECT_EQ(reads[1].state, PageState::kMissing);
  EXPECT_EQ(reads[2].state, PageState::kCorrupt);
  EXPECT_EQ(reads[3].state, PageState::kOk);
  EXPECT_EQ(reads[4].state, PageState::kOk);
  EXPECT_EQ(bytes[0], PatternPage({1, 0, 0}, 3, geometry_.page_bytes));
  EXPECT_EQ(bytes[3], PatternPage({2, 0, 0}, 2, geometry_.page_bytes));
  EXPECT_EQ(bytes[4], PatternPage({1, 0, 0}, 0, geometry_.page_bytes));
}

TEST_P(TierContract, AProbeOfATierThatIsWellChangesNothing) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  const TierUsage before = tier().Usage();

  EXPECT_OK(tier().Probe());
  while (Write({before.blocks + tier().Usage().blocks, 0, 0}, geometry_).ok()) {
  }
  const TierUsage full = tier().Usage();
  EXPECT_OK(tier().Probe()) << "a budget that is used up is no fault of the medium";

  EXPECT_EQ(tier().Usage().used_bytes, full.used_bytes);
  EXPECT_EQ(tier().Usage().blocks, full.blocks);
  ExpectHeld({1, 0, 0}, geometry_);
}

TEST_P(TierContract, OneReadTakesAllPagesOfARecordInAnyOrder) {
  const RecordGeometry geometry = MakeGeometry(4, 4, 10240);
  ASSERT_OK(Write({5, 0, 0}, geometry));
  std::vector<std::vector<std::byte>> bytes(geometry.pages(),
                                            std::vector<std::byte>(geometry.page_bytes, kCanary));
  std::vector<PageRead> reads;
  for (uint32_t i = 0; i < geometry.pages(); ++i) {
    const uint32_t page = i * 7 % geometry.pages();
    reads.push_back({.key = {5, 0, 0}, .page = page, .into = bytes[page]});
  }

  ASSERT_OK(tier().Read(reads, absl::InfiniteDuration()));

  for (uint32_t page = 0; page < geometry.pages(); ++page) {
    EXPECT_EQ(bytes[page], PatternPage({5, 0, 0}, page, geometry.page_bytes)) << page;
  }
}

TEST_P(TierContract, EachFormOfAPageIsReadAlone) {
  const RecordGeometry geometry = MakeGeometry(3, 2, 4096, 1280, 1024);
  ASSERT_OK(Write({5, 0, 0}, geometry));

  for (const PagePart part : {PagePart::kExact, PagePart::kCoarse, PagePart::kFine}) {
    for (uint32_t page = 0; page < geometry.pages(); ++page) {
      std::vector<std::byte> bytes(geometry.part_bytes(part), kCanary);
      PageRead read = {.key = {5, 0, 0}, .page = page, .part = part, .into = bytes};
      ASSERT_OK(tier().Read({&read, 1}, absl::InfiniteDuration()));
      EXPECT_EQ(read.state, PageState::kOk);
      EXPECT_EQ(bytes, PatternPage({5, 0, 0}, geometry.part_number(page, part),
                                   geometry.part_bytes(part)));
    }
  }
}

TEST_P(TierContract, ReadNeedsRoomForExactlyOnePage) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  std::vector<std::byte> bytes(geometry_.page_bytes + 1);
  PageRead longer = {.key = {1, 0, 0}, .page = 0, .into = bytes};
  PageRead shorter = {.key = {1, 0, 0}, .page = 0, .into = std::span(bytes).first(100)};

  EXPECT_THAT(tier().Read({&longer, 1}, absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("16385 B")));
  EXPECT_THAT(tier().Read({&shorter, 1}, absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("100 B")));
}

TEST_P(TierContract, ReadPastTheLastPageIsRefused) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  std::vector<std::byte> bytes(geometry_.page_bytes);
  PageRead read = {.key = {1, 0, 0}, .page = geometry_.pages(), .into = bytes};

  EXPECT_THAT(tier().Read({&read, 1}, absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("page 4")));
}

TEST_P(TierContract, WriteReplacesTheOlderRecord) {
  ASSERT_OK(Write({1, 0, 0}, geometry_, /*salt=*/1));
  const uint64_t used_bytes = tier().Usage().used_bytes;

  ASSERT_OK(Write({1, 0, 0}, geometry_, /*salt=*/2));

  ExpectHeld({1, 0, 0}, geometry_, /*salt=*/2);
  EXPECT_EQ(tier().Usage().blocks, 1u);
  EXPECT_EQ(tier().Usage().used_bytes, used_bytes);
}

TEST_P(TierContract, ReplacementMayHaveAnotherSize) {
  const RecordGeometry larger = MakeGeometry(4, 4, 16384);
  ASSERT_OK(Write({1, 0, 0}, geometry_));

  ASSERT_OK(Write({1, 0, 0}, larger, /*salt=*/7));

  ExpectHeld({1, 0, 0}, larger, /*salt=*/7);
}

TEST_P(TierContract, EveryPartOfTheKeyNamesAnotherBlock) {
  const std::vector<BlockKey> keys = {{1, 1, 1}, {2, 1, 1}, {1, 2, 1}, {1, 1, 2}};
  ASSERT_OK(Write(keys[0], geometry_));
  for (size_t i = 1; i < keys.size(); ++i) ExpectMissing(keys[i], geometry_);

  for (const BlockKey& key : keys) ASSERT_OK(Write(key, geometry_));

  for (const BlockKey& key : keys) ExpectHeld(key, geometry_);
}

TEST_P(TierContract, WriteUnderAnotherKeyIsRefused) {
  const std::vector<std::byte> record = MakeRecord({1, 0, 0}, geometry_);
  const BlockWrite write = {.key = {1, 0, 1}, .record = record};

  EXPECT_THAT(tier().Write({&write, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("generation 1")));
  ExpectMissing({1, 0, 1}, geometry_);
  ExpectMissing({1, 0, 0}, geometry_);
}

TEST_P(TierContract, WriteOfWhatIsNoRecordIsRefused) {
  const std::vector<std::byte> record = MakeRecord({1, 0, 0}, geometry_);
  std::vector<std::byte> damaged = record;
  damaged[40] ^= std::byte{1};  // The block number in the header.
  const std::vector<std::byte> zeros(8192);
  const BlockWrite nothing = {.key = {1, 0, 0}, .record = {}};
  const BlockWrite zero = {.key = {1, 0, 0}, .record = zeros};
  const BlockWrite cut = {.key = {1, 0, 0}, .record = std::span(record).first(record.size() - 1)};
  const BlockWrite flipped = {.key = {1, 0, 0}, .record = damaged};

  for (const BlockWrite& write : {nothing, zero, cut, flipped}) {
    EXPECT_THAT(tier().Write({&write, 1}), StatusIs(absl::StatusCode::kInvalidArgument));
  }
  ExpectMissing({1, 0, 0}, geometry_);
}

TEST_P(TierContract, DamagedPageIsCorruptAndItsNeighboursAreRead) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));

  under_test_->FlipPageByte({1, 0, 0}, 2, geometry_);

  EXPECT_EQ(ReadPage({1, 0, 0}, 2, geometry_).state, PageState::kCorrupt);
  EXPECT_EQ(tier().Usage().corrupt_pages, 1u);
  for (const uint32_t page : {0u, 1u, 3u}) {
    EXPECT_EQ(ReadPage({1, 0, 0}, page, geometry_).bytes,
              PatternPage({1, 0, 0}, page, geometry_.page_bytes));
  }
  EXPECT_EQ(tier().Usage().corrupt_pages, 1u);
}

TEST_P(TierContract, DamagedBlockIsSoundAgainOnceRewritten) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  under_test_->FlipPageByte({1, 0, 0}, 0, geometry_);
  ASSERT_EQ(ReadPage({1, 0, 0}, 0, geometry_).state, PageState::kCorrupt);

  ASSERT_OK(Write({1, 0, 0}, geometry_));

  ExpectHeld({1, 0, 0}, geometry_);
}

TEST_P(TierContract, EraseForgets) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  ASSERT_OK(Write({2, 0, 0}, geometry_));

  ASSERT_OK(Erase({1, 0, 0}));

  ExpectMissing({1, 0, 0}, geometry_);
  ExpectHeld({2, 0, 0}, geometry_);
  EXPECT_EQ(tier().Usage().blocks, 1u);
}

TEST_P(TierContract, EraseOfWhatIsNotHeldIsIgnored) {
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  const std::vector<BlockKey> keys = {{7, 0, 0}, {1, 0, 0}, {1, 0, 0}};

  EXPECT_OK(tier().Erase(keys));
  EXPECT_OK(tier().Erase({}));

  EXPECT_EQ(tier().Usage().blocks, 0u);
}

TEST_P(TierContract, ErasedBytesComeBack) {
  const uint64_t empty_bytes = tier().Usage().used_bytes;
  const uint32_t blocks = Fill(1, geometry_);
  ASSERT_GT(blocks, 2u);
  for (uint32_t block = 0; block < blocks; ++block) ASSERT_OK(Erase({1, block, 0}));

  EXPECT_EQ(tier().Usage().used_bytes, empty_bytes);
  EXPECT_EQ(tier().Usage().blocks, 0u);
  EXPECT_EQ(Fill(2, geometry_), blocks);
}

TEST_P(TierContract, EmptyTierTakesAsManyRecordsAsItHasRoomFor) {
  // The last two have headers that count: one of many small pages, one of nothing but header.
  const RecordGeometry geometries[] = {
      MakeGeometry(2, 2, 16384), MakeGeometry(2, 2, 4096), MakeGeometry(2, 2, 40960),
      MakeGeometry(32, 8, 1024, 256, 512), MakeGeometry(32, 32, 8)};
  for (const RecordGeometry& geometry : geometries) {
    const uint64_t sequence = geometry.pages() * uint64_t{geometry.page_bytes};
    const uint64_t room = RoomFor(geometry);
    EXPECT_GE(Room(geometry).sizes[0].segment_bytes,
              Room(geometry).sizes[0].segment_slots * geometry.record_bytes());

    const uint32_t blocks = Fill(sequence, geometry);

    EXPECT_EQ(blocks, room) << geometry.pages() << " pages of " << geometry.page_bytes << " B";
    EXPECT_EQ(tier().Usage().budget_bytes, budget_bytes());
    EXPECT_EQ(tier().Usage().blocks, blocks);
    for (uint32_t block = 0; block < blocks; ++block) ASSERT_OK(Erase({sequence, block, 0}));
  }
}

// An index keeps the header: what is alike in bytes alone is of two sizes.
TEST_P(TierContract, RecordsOfUnlikeHeadersKeepTheirRoomApart) {
  const RecordGeometry few = MakeGeometry(1, 2, 8192);
  const RecordGeometry many = MakeGeometry(8, 32, 64);
  ASSERT_EQ(few.record_bytes(), many.record_bytes());
  ASSERT_NE(few.size(), many.size());
  const uint32_t fews = Fill(1, few);
  for (uint32_t block = 0; block < fews / 2; ++block) ASSERT_OK(Erase({1, block, 0}));
  const uint64_t room = RoomFor(many);
  EXPECT_GT(room, 0u);

  EXPECT_EQ(Fill(2, many), room);

  EXPECT_EQ(Room(many).sizes[0].slots_used, room);
  EXPECT_EQ(Room(few).sizes[0].slots_used, fews - fews / 2);
}

// Where records of another size came and went in no order, as where nothing did.
TEST_P(TierContract, RoomIsThatBesideRecordsOfOtherSizes) {
  const RecordGeometry small = MakeGeometry(2, 2, 4096);
  const RecordGeometry large = MakeGeometry(2, 2, 40960);
  const uint32_t smalls = Fill(1, small);
  for (uint32_t block = 0; block < smalls; ++block) {
    if (block % 3 == 0 || block <= smalls / 4) continue;
    ASSERT_OK(Erase({1, block, 0}));
  }
  const uint64_t small_room = RoomFor(small);
  const uint64_t large_room = RoomFor(large);
  const uint64_t held = Room(small).sizes[0].slots_used;
  EXPECT_EQ(held, tier().Usage().blocks);

  const uint32_t larges = Fill(2, large);

  EXPECT_EQ(larges, large_room);
  EXPECT_EQ(Room(large).sizes[0].slots_used, larges);
  EXPECT_EQ(Room(small).sizes[0].slots_used, held);
  // What is left for the small ones is what the large ones could not have, as it says.
  const uint64_t rest = RoomFor(small);
  EXPECT_LE(rest, small_room);
  EXPECT_EQ(held + Fill(3, small), rest);
  const RecordSize sizes[] = {small.size(), large.size()};
  const TierRoom full = tier().Room(sizes);
  for (const SizeRoom& size : full.sizes) {
    EXPECT_EQ(size.slots_used, size.slots_made);
    EXPECT_LT(full.free_bytes, size.segment_bytes);
  }
}

TEST_P(TierContract, WriteThatMayBeginNoSegmentTakesAFreeSlotOrNothing) {
  const auto write = [&](uint32_t block) {
    const BlockKey key = {1, block, 0};
    const std::vector<std::byte> record = MakeRecord(key, geometry_, 0);
    const BlockWrite no_segment = {.key = key, .record = record, .may_begin_segment = false};
    return tier().Write({&no_segment, 1});
  };
  EXPECT_THAT(write(1), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no")));
  ExpectMissing({1, 1, 0}, geometry_);
  EXPECT_EQ(Room(geometry_).sizes[0].segments_begun, 0u);
  ASSERT_OK(Write({1, 0, 0}, geometry_));
  const TierRoom begun = Room(geometry_);
  EXPECT_EQ(begun.sizes[0].segments_begun, 1u);
  EXPECT_EQ(begun.sizes[0].slots_used, 1u);
  const auto slots = static_cast<uint32_t>(begun.sizes[0].slots_made);

  for (uint32_t block = 1; block < slots; ++block) EXPECT_OK(write(block));

  EXPECT_THAT(write(slots), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no")));
  EXPECT_EQ(Room(geometry_).sizes[0].slots_used, slots);
  EXPECT_EQ(Room(geometry_).sizes[0].slots_made, slots);
  EXPECT_EQ(Room(geometry_).free_bytes, begun.free_bytes);
  for (uint32_t block = 0; block < slots; ++block) ExpectHeld({1, block, 0}, geometry_);
}

TEST_P(TierContract, RefusedWriteChangesNothing) {
  const uint32_t blocks = Fill(1, geometry_);
  const RecordGeometry larger = MakeGeometry(4, 8, 65536);

  EXPECT_THAT(Write({1, 0, 0}, larger, /*salt=*/5),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("free")));

  ExpectHeld({1, 0, 0}, geometry_);
  ExpectMissing({1, blocks, 0}, geometry_);
  EXPECT_EQ(tier().Usage().blocks, blocks);
}

TEST_P(TierContract, FullTierGoesOnServing) {
  const uint32_t blocks = Fill(1, geometry_);

  for (uint32_t round = 0; round < 3 * blocks; ++round) {
    ASSERT_THAT(Write({2, round, 0}, geometry_), StatusIs(absl::StatusCode::kResourceExhausted));
  }

  for (uint32_t block = 0; block < blocks; ++block) ExpectHeld({1, block, 0}, geometry_);
}

TEST_P(TierContract, PlaceOfAnErasedBlockShowsOnlyItsNewOwner) {
  const uint32_t blocks = Fill(1, geometry_);
  for (uint32_t round = 0; round < 4 * blocks; ++round) {
    ASSERT_OK(Erase({1 + round / blocks, round % blocks, 0}));
    const BlockKey key = {2 + round / blocks, round % blocks, 0};
    ASSERT_OK(Write(key, geometry_));
    ExpectHeld(key, geometry_);
  }
}

TEST_P(TierContract, PinOfWhatIsNotHeldIsNull) {
  EXPECT_EQ(tier().Pin({1, 0, 0}), nullptr);
}

// From here a tier whose medium is not memory has nothing to pin, and says so by null.
class TierPinContract : public TierContract {
 protected:
  void SetUp() override {
    ASSERT_OK(Write({1, 0, 0}, geometry_));
    pin_ = tier().Pin({1, 0, 0});
    ASSERT_NE(pin_, nullptr);
  }

  bool PinnedIs(uint64_t salt) const {
    const std::vector<std::byte> record = MakeRecord({1, 0, 0}, geometry_, salt);
    return std::equal(pin_->begin(), pin_->end(), record.begin(), record.end());
  }

  BlockPin pin_;
};

TEST_P(TierPinContract, PinShowsTheWholeRecord) {
  EXPECT_TRUE(PinnedIs(0));
}

TEST_P(TierPinContract, PinnedBytesOutliveErasureAndStayCharged) {
  const uint64_t used_bytes = tier().Usage().used_bytes;

  ASSERT_OK(Erase({1, 0, 0}));

  ExpectMissing({1, 0, 0}, geometry_);
  EXPECT_TRUE(PinnedIs(0));
  EXPECT_EQ(tier().Usage().used_bytes, used_bytes);
  pin_.reset();
  EXPECT_LT(tier().Usage().used_bytes, used_bytes);
}

TEST_P(TierPinContract, PinnedBytesOutliveReplacement) {
  ASSERT_OK(Write({1, 0, 0}, geometry_, /*salt=*/1));

  EXPECT_TRUE(PinnedIs(0));
  ExpectHeld({1, 0, 0}, geometry_, /*salt=*/1);
}

TEST_P(TierPinContract, NoWriteTouchesPinnedBytes) {
  ASSERT_OK(Erase({1, 0, 0}));

  Fill(2, geometry_);

  EXPECT_TRUE(PinnedIs(0));
}

TEST_P(TierPinContract, EveryPinCounts) {
  BlockPin second = tier().Pin({1, 0, 0});
  ASSERT_OK(Erase({1, 0, 0}));
  const uint64_t used_bytes = tier().Usage().used_bytes;

  second.reset();

  EXPECT_TRUE(PinnedIs(0));
  EXPECT_EQ(tier().Usage().used_bytes, used_bytes);
}

TEST_P(TierPinContract, PinnedBytesOutliveTheTier) {
  under_test_->DestroyTier();

  EXPECT_TRUE(PinnedIs(0));
}

// Several threads write, read and erase the same few blocks. Whatever is read is one of the
// contents that were written, whole.
class TierConcurrencyContract : public TierContract {
 protected:
  static constexpr uint64_t kSalts = 3;
  static constexpr uint32_t kBlocks = 5;
  static constexpr int kRounds = 300;

  // Is `bytes` page `page` as some write left it?
  bool IsSomeContent(const BlockKey& key, uint32_t page, std::span<const std::byte> bytes) const {
    for (uint64_t salt = 0; salt < kSalts; ++salt) {
      const auto expected = PatternPage(key, page, geometry_.page_bytes, salt);
      if (std::equal(bytes.begin(), bytes.end(), expected.begin(), expected.end())) return true;
    }
    return false;
  }

  void WriteMany(uint32_t start) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      const absl::Status status =
          Write({1, (start + round) % kBlocks, 0}, geometry_, (start + round) % kSalts);
      // Full for a moment is an answer: replacement needs room for both.
      if (!absl::IsResourceExhausted(status)) {
        EXPECT_OK(status);
      }
    }
  }

  void EraseMany(uint32_t start) {
    for (uint32_t round = 0; round < kRounds / 4; ++round) {
      EXPECT_OK(Erase({1, (start + round * 3) % kBlocks, 0}));
    }
  }

  void ReadMany(uint32_t start) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      const BlockKey key = {1, (start + round) % kBlocks, 0};
      const uint32_t page = round % geometry_.pages();
      const PageAnswer answer = ReadPage(key, page, geometry_);
      EXPECT_NE(answer.state, PageState::kCorrupt);
      if (answer.state == PageState::kOk) {
        EXPECT_TRUE(IsSomeContent(key, page, answer.bytes));
      }
    }
  }

  void PinMany(uint32_t start) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      const BlockKey key = {1, (start + round) % kBlocks, 0};
      const BlockPin pin = tier().Pin(key);
      if (pin == nullptr) continue;
      const auto header = ParseHeader(*pin);
      ASSERT_OK(header);
      EXPECT_EQ(header->key, key);
      const uint32_t page = round % geometry_.pages();
      EXPECT_TRUE(PartIsIntact(
          *header, page, PagePart::kExact,
          pin->subspan(geometry_.part_offset(page, PagePart::kExact), geometry_.page_bytes)));
    }
  }
};

TEST_P(TierConcurrencyContract, ReadersSeeWholeRecordsWhileOthersWriteAndErase) {
  {
    std::vector<std::jthread> threads;
    threads.emplace_back([this] { WriteMany(0); });
    threads.emplace_back([this] { WriteMany(2); });
    threads.emplace_back([this] { EraseMany(1); });
    threads.emplace_back([this] { ReadMany(0); });
    threads.emplace_back([this] { ReadMany(3); });
    threads.emplace_back([this] { PinMany(1); });
  }

  EXPECT_LE(tier().Usage().used_bytes, budget_bytes());
  EXPECT_EQ(tier().Usage().corrupt_pages, 0u);
  for (uint32_t block = 0; block < kBlocks; ++block) ASSERT_OK(Erase({1, block, 0}));
  EXPECT_EQ(tier().Usage().blocks, 0u);
}

std::vector<TierCase> MemoryTiers() {
  std::vector<TierCase> tiers = AllTiers();
  std::erase_if(tiers, [](const TierCase& tier) { return !tier.is_memory; });
  return tiers;
}

const auto kName = [](const auto& test) { return test.param.name; };
INSTANTIATE_TEST_SUITE_P(EveryTier, TierContract, testing::ValuesIn(AllTiers()), kName);
INSTANTIATE_TEST_SUITE_P(MemoryTiers, TierPinContract, testing::ValuesIn(MemoryTiers()), kName);
INSTANTIATE_TEST_SUITE_P(EveryTier, TierConcurrencyContract, testing::ValuesIn(AllTiers()), kName);

}  // namespace
}  // namespace ebbtide::storage
