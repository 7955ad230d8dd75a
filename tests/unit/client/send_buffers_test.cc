// SPDX-License-Identifier: Apache-2.0

#include "client/cpp/src/send_buffers.h"

#include <memory>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace ebbtide::client {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(SendBuffersTest, ABufferIsUsedAgainOnceNobodyHoldsIt) {
  SendBuffers buffers;
  std::shared_ptr<uint8_t[]> first = buffers.Take(kMiB);
  std::shared_ptr<uint8_t[]> held = first;
  const uint8_t* const place = first.get();
  first.reset();

  const std::shared_ptr<uint8_t[]> other = buffers.Take(kMiB);
  EXPECT_NE(other.get(), held.get());

  held.reset();
  EXPECT_EQ(buffers.Take(kMiB - 10).get(), place);
}

TEST(SendBuffersTest, TheSmallestThatFitsIsTaken) {
  SendBuffers buffers;
  std::shared_ptr<uint8_t[]> large = buffers.Take(8 * kMiB);
  std::shared_ptr<uint8_t[]> middle = buffers.Take(2 * kMiB);
  std::shared_ptr<uint8_t[]> small = buffers.Take(kMiB);
  std::shared_ptr<uint8_t[]> other = buffers.Take(4 * kMiB);
  const uint8_t* const place = middle.get();
  large.reset();
  middle.reset();
  small.reset();
  other.reset();

  EXPECT_EQ(buffers.Take(2 * kMiB - 1).get(), place);
}

TEST(SendBuffersTest, NoMoreIsKeptThanTheBoundAndTheOldestGoesFirst) {
  SendBuffers buffers;
  constexpr size_t kEach = SendBuffers::kKeptBytesMax / 4;
  std::vector<std::shared_ptr<uint8_t[]>> taken;
  for (int i = 0; i < 6; ++i) taken.push_back(buffers.Take(kEach));
  std::vector<const uint8_t*> places;
  for (const auto& buffer : taken) places.push_back(buffer.get());
  for (auto& buffer : taken) buffer.reset();  // In order; the first two are let go.

  EXPECT_EQ(buffers.kept_bytes(), SendBuffers::kKeptBytesMax);
  std::set<const uint8_t*> again;
  for (auto& buffer : taken) buffer = buffers.Take(kEach);
  for (int i = 0; i < 4; ++i) again.insert(taken[static_cast<size_t>(i)].get());
  EXPECT_EQ(again, (std::set<const uint8_t*>{places.begin() + 2, places.end()}));
}

TEST(SendBuffersTest, OneBeyondTheBoundIsNotKept) {
  SendBuffers buffers;
  buffers.Take(SendBuffers::kKeptBytesMax + 1);

  EXPECT_EQ(buffers.kept_bytes(), 0);
}

TEST(SendBuffersTest, SmallOnesAreNotKept) {
  SendBuffers buffers;
  buffers.Take(SendBuffers::kStepBytes - 1);

  EXPECT_EQ(buffers.kept_bytes(), 0);
}

TEST(SendBuffersTest, ABufferOutlivesThePool) {
  std::shared_ptr<uint8_t[]> buffer;
  {
    SendBuffers buffers;
    buffer = buffers.Take(kMiB);
  }
  buffer[kMiB - 1] = 7;
  EXPECT_EQ(buffer[kMiB - 1], 7);
}

}  // namespace
}  // namespace ebbtide::client
