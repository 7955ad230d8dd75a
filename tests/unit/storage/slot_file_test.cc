// SPDX-License-Identifier: Apache-2.0
//
// Slots by hand, then at random against a plain set of who owns what; and the bytes in them.

#include "storage/rocksdb/slot_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/faulty_file_calls.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::storage {
namespace {

using test::StatusIs;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr SlotSize kSlot = {.bytes = 16384, .entry_bytes = 2176};
constexpr uint64_t kSlotBytes = kSlot.bytes;
constexpr uint64_t kSegmentBytes = 4 * kSlotBytes;
constexpr uint64_t kChargeBytes = 4 * (kSlot.bytes + kSlot.entry_bytes);
constexpr uint64_t kBudgetBytes = 64 * kChargeBytes;

class SlotFilesTest : public testing::Test {
 protected:
  size_t Files() const {
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_->path())) {
      files += entry.path().filename().string().starts_with("slots-") ? 1u : 0u;
    }
    return files;
  }

  SlotPlace Take(const SlotSize& size = kSlot) {
    const auto place = slots_->Allocate(size);
    EXPECT_OK(place);
    return place.ok() ? *place : SlotPlace{};
  }

  test::TempFolder temp_;
  test::FaultyFileCalls calls_;
  ByteBudget budget_{kBudgetBytes};
  std::unique_ptr<TierFolder> folder_ = *TierFolder::Take(temp_.path(), calls_);
  std::optional<SlotFiles> slots_{
      std::in_place, *folder_,
      SlotFiles::Options{.segment_bytes_max = kSegmentBytes, .calls = calls_, .budget = budget_}};
};

TEST_F(SlotFilesTest, WhatCannotBeDeletedStaysChargedUntilItCan) {
  const SlotPlace first = Take();
  const uint64_t used = budget_.used_bytes();
  calls_.unlink_error = EIO;
  slots_->Free(first);

  EXPECT_EQ(Files(), 1u);
  EXPECT_EQ(budget_.used_bytes(), used);
  EXPECT_THAT(slots_->DeleteLeftOver(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("cannot delete"), HasSubstr("1 slot files"))));
  EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));
  const TierRoom room = slots_->Room({&kSlot, 1});
  EXPECT_EQ(room.free_bytes, budget_.free_bytes());  // Nobody is promised what may never go.

  calls_.unlink_error = 0;
  EXPECT_OK(slots_->Probe());
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

TEST_F(SlotFilesTest, WhatIsHalfMadeAndCannotBeDeletedStaysChargedUntilItCan) {
  calls_.allocate_error = EIO;
  calls_.unlink_error = EIO;

  EXPECT_THAT(slots_->Allocate(kSlot),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no room")));

  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(slots_->Probe(),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cannot delete")));
    EXPECT_EQ(Files(), 1u);
    EXPECT_EQ(budget_.used_bytes(), kChargeBytes);
  }
  calls_.allocate_error = 0;
  calls_.unlink_error = 0;
  EXPECT_OK(slots_->Probe());
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

// Its file of the same name is another's.
TEST_F(SlotFilesTest, NothingIsDeletedInAFolderThatIsAnothersByNow) {
  const SlotPlace place = Take();
  const std::filesystem::path file = slots_->Find(place.segment) != nullptr
                                         ? folder_->segment_path(kSlotBytes, place.segment)
                                         : std::filesystem::path();
  const std::filesystem::path path = folder_->path();
  std::filesystem::rename(path, path.string() + ".away");
  std::filesystem::create_directory(path);
  std::ofstream(file) << "another's";

  slots_->Free(place);

  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_THAT(slots_->DeleteLeftOver(), StatusIs(absl::StatusCode::kUnavailable));
  slots_.reset();
  EXPECT_TRUE(std::filesystem::exists(file));
  std::filesystem::remove_all(path.string() + ".away");
}

// Its files come back with it.
TEST_F(SlotFilesTest, SlotFileInAFolderThatIsAwayStaysChargedUntilItIsDeleted) {
  const SlotPlace place = Take();
  const std::filesystem::path away = folder_->path().string() + ".away";
  std::filesystem::rename(folder_->path(), away);

  slots_->Free(place);

  EXPECT_EQ(budget_.used_bytes(), kChargeBytes);
  EXPECT_THAT(slots_->DeleteLeftOver(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("vanished")));
  std::filesystem::rename(away, folder_->path());
  EXPECT_OK(slots_->DeleteLeftOver());
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

TEST_F(SlotFilesTest, SlotFileThatIsGoneIsGivenBack) {
  const SlotPlace place = Take();
  std::filesystem::remove_all(folder_->path());

  slots_->Free(place);

  EXPECT_EQ(budget_.used_bytes(), 0u);
  EXPECT_OK(slots_->DeleteLeftOver());
}

TEST_F(SlotFilesTest, ProbeTriesAllThatAWriteNeeds) {
  EXPECT_OK(slots_->Probe());
  for (std::atomic<int> test::FaultyFileCalls::*const error :
       {&test::FaultyFileCalls::open_error, &test::FaultyFileCalls::allocate_error,
        &test::FaultyFileCalls::write_error, &test::FaultyFileCalls::read_error,
        &test::FaultyFileCalls::unlink_error}) {
    calls_.*error = EIO;
    EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));
    calls_.*error = 0;
    EXPECT_OK(slots_->Probe());
    EXPECT_EQ(Files(), 0u);
    EXPECT_EQ(budget_.used_bytes(), 0u);
  }
}

// Where a smaller file would fit: to whom else is the disk well?
TEST_F(SlotFilesTest, ProbeTriesWhatWasNotMade) {
  constexpr SlotSize kLarge = {.bytes = 3 * kSegmentBytes};
  calls_.room_bytes = kSegmentBytes;
  EXPECT_OK(slots_->Probe());
  EXPECT_THAT(slots_->Allocate(kLarge), StatusIs(absl::StatusCode::kUnavailable));

  EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));

  calls_.room_bytes = kLarge.bytes;
  EXPECT_OK(slots_->Probe());
  EXPECT_EQ(Files(), 0u);
  calls_.room_bytes = kSegmentBytes;
  EXPECT_OK(slots_->Probe());  // Nothing has failed since.

  EXPECT_THAT(slots_->Allocate(kLarge), StatusIs(absl::StatusCode::kUnavailable));
  for (int second = 0; second < 60; ++second) {
    EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));
  }
  EXPECT_OK(slots_->Probe());  // Others may need less.
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

TEST_F(SlotFilesTest, WhatIsMadeSinceIsNotWhatWasNotMade) {
  calls_.room_bytes = kSegmentBytes - 1;
  EXPECT_THAT(slots_->Allocate(kSlot), StatusIs(absl::StatusCode::kUnavailable));
  calls_.room_bytes = kSegmentBytes;
  Take();

  calls_.room_bytes = kSegmentBytes - 1;

  EXPECT_OK(slots_->Probe());
}

// Whose segment is no larger than the usual one, on a disk that others fill.
TEST_F(SlotFilesTest, ProbeIsWellAfterAMinuteWhereTheLeastIs) {
  for (const off_t room_bytes : {off_t{4096}, off_t{0}}) {
    if (room_bytes == 0) Take();  // Three slots of its segment are free.
    calls_.room_bytes = room_bytes;
    EXPECT_THAT(slots_->Allocate({.bytes = 2 * kSlotBytes}),
                StatusIs(absl::StatusCode::kUnavailable));

    for (int second = 0; second < 60; ++second) {
      EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));
    }

    EXPECT_OK(slots_->Probe());
    calls_.room_bytes = kSegmentBytes;
  }
  calls_.write_error = EIO;
  EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));
}

TEST_F(SlotFilesTest, ProbeThatMemoryRanOutForLeavesNothing) {
  for (std::atomic<bool> test::FaultyFileCalls::*const throws :
       {&test::FaultyFileCalls::open_throws, &test::FaultyFileCalls::write_throws}) {
    calls_.*throws = true;
    EXPECT_THROW(static_cast<void>(slots_->Probe()), std::bad_alloc);
    calls_.*throws = false;

    EXPECT_EQ(Files(), 0u);
    EXPECT_EQ(budget_.used_bytes(), 0u);
  }
  for (int i = 0; i < 64 * 4; ++i) Take();
}

TEST_F(SlotFilesTest, ProbeTriesASlotThatIsThereWhereTheBudgetLeavesNoOther) {
  Take();
  ASSERT_TRUE(budget_.TryCharge(budget_.free_bytes()));
  calls_.write_error = EIO;

  EXPECT_THAT(slots_->Probe(), StatusIs(absl::StatusCode::kUnavailable));

  for (int i = 1; i < 4; ++i) Take();  // None is there any more, and that is no fault.
  EXPECT_OK(slots_->Probe());
}

TEST_F(SlotFilesTest, SegmentIsMadeOnNeedAndDeletedWhenEmpty) {
  EXPECT_EQ(Files(), 0u);
  std::vector<SlotPlace> places;
  for (int i = 0; i < 5; ++i) places.push_back(Take());
  EXPECT_EQ(Files(), 2u);
  EXPECT_EQ(budget_.used_bytes(), 2 * kChargeBytes);

  for (int i = 0; i < 4; ++i) slots_->Free(places[static_cast<size_t>(i)]);
  EXPECT_EQ(Files(), 1u);
  EXPECT_EQ(budget_.used_bytes(), kChargeBytes);

  slots_->Free(places[4]);
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

TEST_F(SlotFilesTest, FullestSegmentIsFilledFirst) {
  std::vector<SlotPlace> places;
  for (int i = 0; i < 8; ++i) places.push_back(Take());
  slots_->Free(places[0]);
  slots_->Free(places[1]);
  slots_->Free(places[6]);

  EXPECT_EQ(Take(), places[6]);
  EXPECT_EQ(Take(), places[0]);
}

TEST_F(SlotFilesTest, EachSizeHasItsOwnSegments) {
  const SlotPlace small = Take(kSlot);
  const SlotPlace large = Take({.bytes = 2 * kSlotBytes});
  const SlotPlace longer_than_a_segment = Take({.bytes = 3 * kSegmentBytes});

  EXPECT_NE(small.segment, large.segment);
  EXPECT_EQ(slots_->Find(small.segment)->shape().slots, 4u);
  EXPECT_EQ(slots_->Find(large.segment)->shape().slots, 2u);
  EXPECT_EQ(slots_->Find(longer_than_a_segment.segment)->shape().slots, 1u);
  EXPECT_EQ(slots_->Find(999), nullptr);
}

TEST_F(SlotFilesTest, BudgetRefusesTheSegmentThatPassesIt) {
  for (uint64_t i = 0; i < 64 * 4; ++i) Take();

  EXPECT_THAT(slots_->Allocate(kSlot),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("over budget"),
                             HasSubstr(absl::StrCat(" 0 B of ", kBudgetBytes, " B free")))));
  EXPECT_EQ(budget_.used_bytes(), kBudgetBytes);
}

TEST_F(SlotFilesTest, FullDiskIsNamedAndLeavesNothing) {
  calls_.allocate_error = ENOSPC;

  EXPECT_THAT(slots_->Allocate(kSlot),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(temp_.path().string()), HasSubstr("No space left"))));
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
  calls_.allocate_error = 0;
  EXPECT_OK(slots_->Allocate(kSlot));
}

// Nobody waits for a segment that is not made any more.
TEST_F(SlotFilesTest, SegmentThatMemoryRanOutForIsTriedAgain) {
  calls_.open_throws = true;
  EXPECT_THROW((void)slots_->Allocate(kSlot), std::bad_alloc);
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);

  calls_.open_throws = false;
  EXPECT_OK(slots_->Allocate(kSlot));
  EXPECT_EQ(budget_.used_bytes(), kChargeBytes);
}

TEST_F(SlotFilesTest, BrokenDiskIsUnavailable) {
  calls_.open_error = EIO;

  EXPECT_THAT(slots_->Allocate(kSlot), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

TEST_F(SlotFilesTest, FileSystemWithoutFallocateIsUsedAllTheSame) {
  calls_.allocate_error = EOPNOTSUPP;

  EXPECT_OK(slots_->Allocate(kSlot));
}

TEST_F(SlotFilesTest, FreedSlotIsNotReusedWhileAReaderMayLookAtIt) {
  const SlotPlace place = Take();
  const SlotPlace other = Take();
  {
    const SlotFiles::Reading reading(*slots_);
    slots_->Free(place);
    EXPECT_NE(Take(), place);
    const SlotFiles::Reading later(*slots_);  // Began after: it does not hold the slot back.
  }
  EXPECT_EQ(Take(), place);
  EXPECT_NE(other, place);
}

TEST_F(SlotFilesTest, LaterReaderHoldsNothingBack) {
  const SlotPlace place = Take();
  std::optional<SlotFiles::Reading> early(*slots_);
  slots_->Free(place);
  const SlotFiles::Reading late(*slots_);
  EXPECT_EQ(Files(), 1u);

  early.reset();

  EXPECT_EQ(Files(), 0u);
}

TEST_F(SlotFilesTest, WrittenSlotReadsBackFromAnyMemory) {
  calls_.short_transfers = true;
  for (const size_t shift : {0u, 8u}) {  // On 4 KiB and beside it.
    const SlotPlace place = Take();
    IoBuffers buffers;
    const auto source = buffers.Lend(kSlotBytes + shift);
    const auto target = buffers.Lend(kSlotBytes);
    for (size_t i = 0; i < kSlotBytes; ++i) {
      source.bytes()[shift + i] = std::byte{static_cast<uint8_t>(i * 7 + place.slot)};
    }
    const auto record = source.bytes().subspan(shift, kSlotBytes);
    const std::shared_ptr<Segment> segment = slots_->Find(place.segment);

    ASSERT_OK(segment->Write(place.slot, record));

    const auto into = target.bytes().first(kSlotBytes);
    ASSERT_OK_AND_ASSIGN(const uint64_t read, segment->Read(place.slot, 0, into));
    EXPECT_EQ(read, kSlotBytes);
    EXPECT_TRUE(std::equal(into.begin(), into.end(), record.begin()));
  }
}

TEST_F(SlotFilesTest, CutFileIsReadAsFarAsItGoes) {
  const SlotPlace place = Take();
  const std::shared_ptr<Segment> segment = slots_->Find(place.segment);
  std::filesystem::resize_file(folder_->segment_path(kSlotBytes, place.segment), 8192);
  IoBuffers buffers;
  const auto buffer = buffers.Lend(kSlotBytes);

  ASSERT_OK_AND_ASSIGN(const uint64_t read,
                       segment->Read(place.slot, 4096, buffer.bytes().first(8192)));

  EXPECT_EQ(read, 4096u);
}

TEST_F(SlotFilesTest, RandomUseHasOneOwnerForEachSlot) {
  test::ForEachSeed(5, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<SlotPlace> held;
    std::set<std::pair<uint32_t, uint32_t>> owned;
    std::vector<std::unique_ptr<SlotFiles::Reading>> readings;
    for (int step = 0; step < 1500; ++step) {
      const uint64_t choice = random() % 100;
      if (choice < 45) {
        const auto place = slots_->Allocate({.bytes = kSlotBytes * (1 + random() % 3)});
        if (!place.ok()) {
          ASSERT_THAT(place, StatusIs(absl::StatusCode::kResourceExhausted));
          continue;
        }
        ASSERT_TRUE(owned.insert({place->segment, place->slot}).second) << "two owners";
        held.push_back(*place);
      } else if (choice < 90 && !held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        owned.erase({held.back().segment, held.back().slot});
        slots_->Free(held.back());
        held.pop_back();
      } else if (choice < 95 || readings.empty()) {
        readings.push_back(std::make_unique<SlotFiles::Reading>(*slots_));
      } else {
        readings.erase(readings.begin() + static_cast<ptrdiff_t>(random() % readings.size()));
      }
      ASSERT_LE(budget_.used_bytes(), kBudgetBytes);
    }
    readings.clear();
    for (const SlotPlace& place : held) slots_->Free(place);
    ASSERT_EQ(budget_.used_bytes(), 0u);
    ASSERT_EQ(Files(), 0u);
  });
}

TEST_F(SlotFilesTest, ThreadsShareOneNewSegment) {
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) threads.emplace_back([this] { Take(); });
  }

  EXPECT_EQ(Files(), 1u);
}

// Slots of the size that could be taken in all.
uint64_t SlotsIn(const SlotFiles& files) {
  const TierRoom room = files.Room({&kSlot, 1});
  const SizeRoom& size = room.sizes.front();
  return size.slots_made + room.free_bytes / size.segment_bytes * size.segment_slots;
}

TEST_F(SlotFilesTest, RoomIsNoneTheLessWhileAFileIsMadeOrDeleted) {
  std::vector<uint64_t> looks;
  calls_.on_open = calls_.on_unlink = [&] { looks.push_back(SlotsIn(*slots_)); };

  slots_->Free(Take());

  EXPECT_THAT(looks, ElementsAre(64 * 4, 64 * 4));
  calls_.on_open = nullptr;
  calls_.allocate_error = ENOSPC;
  EXPECT_FALSE(slots_->Allocate(kSlot).ok());
  EXPECT_EQ(SlotsIn(*slots_), 64U * 4);
}

TEST_F(SlotFilesTest, LostSlotIsNoRoomUntilItIsFreed) {
  const SlotPlace lost = Take();
  const SlotPlace held = Take();

  slots_->Lose(lost);

  SizeRoom size = slots_->Room({&kSlot, 1}).sizes.front();
  EXPECT_EQ(size.slots_made, 3u);
  EXPECT_EQ(size.slots_used, 1u);
  slots_->Free(held);
  EXPECT_EQ(Files(), 1u);  // It may be named still.
  slots_->Free(lost);
  EXPECT_EQ(Files(), 0u);
  EXPECT_EQ(SlotsIn(*slots_), 64U * 4);
  size = slots_->Room({&kSlot, 1}).sizes.front();
  EXPECT_EQ(size.slots_made, 0u);
}

TEST_F(SlotFilesTest, SlotFileThatIsBeingDeletedIsRoomForTheNext) {
  std::vector<SlotPlace> places;
  for (uint64_t i = 0; i < 64 * 4; ++i) places.push_back(Take());
  absl::Notification is_answered;
  std::jthread other;
  calls_.on_unlink = [&] {
    if (other.joinable()) return;
    other = std::jthread([&] {
      EXPECT_OK(slots_->Allocate(kSlot));
      is_answered.Notify();
    });
    // It is refused at once, or waits for us.
    is_answered.WaitForNotificationWithTimeout(absl::Milliseconds(50));
  };

  for (size_t i = 0; i < 4; ++i) slots_->Free(places[i]);

  is_answered.WaitForNotification();
  other.join();
  calls_.on_unlink = nullptr;  // More is deleted at the end.
}

class SlotFilesDeathTest : public SlotFilesTest {
 protected:
  SlotFilesDeathTest() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(SlotFilesDeathTest, FreeingTwiceIsABrokenContract) {
  const SlotPlace place = Take();
  Take();
  slots_->Free(place);

  EXPECT_DEATH(slots_->Free(place), "a slot is freed once");
}

}  // namespace
}  // namespace ebbtide::storage
