// SPDX-License-Identifier: Apache-2.0

#include "service/policy/lane_memory.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cpu/cpu_backend.h"
#include "service/model/lane.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

constexpr gpu::PageShape kShape = {.tokens = 16, .head_dim = 256, .dtype = gpu::Dtype::kF32};
constexpr int32_t kPages = 40;

// A lane full of rows that tell its number and their own.
struct FilledLane {
  explicit FilledLane(int number) : lane(kShape.tokens, kPages * kShape.tokens, 0) {
    memory.shape = kShape;
    memory.frames = frames.data();
    std::vector<int32_t> slots;
    lane.Append(kPages * kShape.tokens, &slots);
    for (size_t i = 0; i < slots.size(); ++i) {
      const std::vector<float> row(static_cast<size_t>(kShape.head_dim),
                                   static_cast<float>(number * 10000 + static_cast<int>(i)));
      std::memcpy(memory.key_slot(slots[i]), row.data(), kShape.row_bytes());
      std::memcpy(memory.value_slot(slots[i]), row.data(), kShape.row_bytes());
    }
  }

  std::vector<std::byte> frames = std::vector<std::byte>(kPages * kShape.page_bytes());
  Lane lane;
  LaneMemory memory;
};

// Of one page alone.
std::vector<std::byte> DigestOf(const FilledLane& filled, int32_t page) {
  std::vector<std::byte> bytes(kShape.page_bytes());
  for (int32_t t = 0; t < kShape.tokens; ++t) {
    const int32_t slot = filled.lane.slot_of(page * kShape.tokens + t);
    const size_t at = static_cast<size_t>(t) * kShape.row_bytes();
    std::memcpy(bytes.data() + at, filled.memory.key_slot(slot), kShape.row_bytes());
    std::memcpy(bytes.data() + kShape.half_bytes() + at, filled.memory.value_slot(slot),
                kShape.row_bytes());
  }
  std::vector<std::byte> digest(gpu::DigestBytes(kShape.head_dim));
  gpu::DigestCpu({.shape = kShape, .tokens = kShape.tokens, .page = bytes, .digest = digest});
  return digest;
}

// More bytes than are drawn at once, and a piece of a lane in between.
TEST(DigestCompletePagesTest, EveryPageGetsItsOwnDigestInOrder) {
  gpu::CpuBackend backend(2);
  const gpu::Device device = *gpu::Device::Open(backend);
  std::vector<std::unique_ptr<FilledLane>> lanes;
  std::vector<LaneToDigest> to_digest;
  for (int number = 0; number < 3; ++number) {
    lanes.push_back(std::make_unique<FilledLane>(number));
    to_digest.push_back({.lane = lanes.back()->lane, .memory = lanes.back()->memory});
  }
  ASSERT_GT(3 * kPages * kShape.page_bytes(), size_t{2} << 20);

  ASSERT_OK(DigestCompletePages(to_digest, device));
  ASSERT_OK(DigestCompletePages(to_digest, device));  // Nothing is left to do.

  for (const auto& filled : lanes) {
    ASSERT_EQ(filled->memory.digested_pages(), kPages);
    for (int32_t page = 0; page < kPages; ++page) {
      const auto digest = filled->memory.digest(page);
      EXPECT_EQ(std::vector<std::byte>(digest.begin(), digest.end()), DigestOf(*filled, page))
          << "page " << page;
    }
  }
}

TEST(FindWorkingFramesTest, LeavesOutFramesWithoutATokenAndKeepsTheOrder) {
  FilledLane filled(1);
  constexpr int32_t kTokens = kShape.tokens;
  for (int32_t index = kTokens; index < (kPages - 2) * kTokens; ++index) {
    if (index != 5 * kTokens + 3) filled.lane.Demote(index);
  }

  const WorkingFrames frames = FindWorkingFrames(filled.memory, filled.lane.slot_index());

  ASSERT_EQ(frames.extents.size(), 4U);
  ASSERT_EQ(frames.slot_index.size(), 4U * kTokens);
  const int32_t numbers[] = {0, 5, kPages - 2, kPages - 1};
  for (size_t i = 0; i < 4; ++i) {
    const gpu::Extent& extent = frames.extents[i];
    EXPECT_EQ(extent.slots, kTokens);
    EXPECT_EQ(extent.key, filled.memory.key_slot(numbers[i] * kTokens));
    EXPECT_EQ(extent.value, filled.memory.value_slot(numbers[i] * kTokens));
    EXPECT_EQ(extent.index, frames.slot_index.data() + i * kTokens);
  }
  EXPECT_EQ(frames.slot_index[0], 0);
  EXPECT_EQ(frames.slot_index[kTokens + 2], gpu::kNoToken);
  EXPECT_EQ(frames.slot_index[kTokens + 3], 5 * kTokens + 3);
  EXPECT_EQ(frames.slot_index[2 * kTokens], (kPages - 2) * kTokens);
}

// Though arrays move as they grow, none reserves more than its blocks were charged for.
TEST(MetadataBytesPerBlockTest, CoversWhatIsReserved) {
  gpu::CpuBackend backend(1);
  const gpu::Device device = *gpu::Device::Open(backend);
  FilledLane filled(1);
  const uint64_t per_block = MetadataBytesPerBlock(kShape, 1, true);
  const std::vector<float> norms(static_cast<size_t>(kShape.tokens), 1);
  for (uint64_t blocks = 1; blocks <= 300; ++blocks) {
    filled.memory.NoteTokens(norms, norms, true);
    if (blocks <= kPages) {
      const LaneToDigest lane{.lane = filled.lane, .memory = filled.memory};
      ASSERT_OK(DigestCompletePages({&lane, 1}, device));
    }
    const LaneMemory& memory = filled.memory;
    const uint64_t reserved = memory.score.capacity() * 4 + memory.mass.capacity() * 8 +
                              memory.digests.capacity() * sizeof(void*) +
                              memory.digests.size() * gpu::DigestBytes(kShape.head_dim);
    EXPECT_LE(reserved, std::max<uint64_t>(blocks, kPages) * per_block) << blocks;
  }
}

}  // namespace
}  // namespace ebbtide::service
