// SPDX-License-Identifier: Apache-2.0
//
// The format is pinned by a golden record; then what a reader must refuse is tried bit by bit.

#include "storage/block_record.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::MakeGeometry;
using test::MakeRecord;
using test::StatusIs;
using testing::HasSubstr;

constexpr BlockKey kKey = {.sequence = 0x1122334455667788, .block = 3, .generation = 1};

std::span<const std::byte> PageOf(std::span<const std::byte> record, const RecordGeometry& geometry,
                                  uint32_t page) {
  return record.subspan(geometry.part_offset(page, PagePart::kExact), geometry.page_bytes);
}

template <typename T>
T LoadAt(const std::vector<std::byte>& bytes, size_t offset) {
  T value;
  std::memcpy(&value, &bytes[offset], sizeof(value));
  return value;
}

TEST(BlockRecordTest, ParsedHeaderSaysWhatWasFramed) {
  const RecordGeometry geometry = MakeGeometry(3, 2, 8192);
  std::vector<std::byte> record(geometry.record_bytes());
  std::vector<int64_t> positions(32);
  for (int i = 0; i < 32; ++i) positions[static_cast<size_t>(i)] = 1000 - 7 * i;  // Any order.

  FrameRecord(kKey, geometry, positions, record);
  ASSERT_OK_AND_ASSIGN(const RecordHeader header, ParseHeader(record));

  EXPECT_EQ(header.key, kKey);
  EXPECT_EQ(header.geometry, geometry);
  EXPECT_EQ(header.first_index, 96u);
  for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(header.position(i), positions[i]);
  for (uint32_t page = 0; page < geometry.pages(); ++page) {
    EXPECT_TRUE(PartIsIntact(header, page, PagePart::kExact, PageOf(record, geometry, page)));
  }
}

// Changing one of these numbers changes the format: raise kRecordVersion and say so in
// docs/formats/block_record.md.
TEST(BlockRecordTest, FormatIsAsWrittenDown) {
  const RecordGeometry geometry = MakeGeometry(2, 1, 640);
  const std::vector<std::byte> record = MakeRecord(kKey, geometry);

  EXPECT_EQ(record.size(), 8192u);
  EXPECT_EQ(std::memcmp(record.data(), "EBBBLOCK", 8), 0);
  EXPECT_EQ(LoadAt<uint64_t>(record, 8), 7290676625666061691u);
  EXPECT_EQ(LoadAt<uint32_t>(record, 16), 1u);     // version
  EXPECT_EQ(LoadAt<uint32_t>(record, 20), 4096u);  // header bytes
  EXPECT_EQ(LoadAt<uint64_t>(record, 24), 8192u);  // record bytes
  EXPECT_EQ(LoadAt<uint64_t>(record, 32), 0x1122334455667788u);
  EXPECT_EQ(LoadAt<uint32_t>(record, 40), 3u);                   // block
  EXPECT_EQ(LoadAt<uint32_t>(record, 44), 1u);                   // generation
  EXPECT_EQ(LoadAt<uint64_t>(record, 48), 0x0123456789abcdefu);  // model fingerprint
  EXPECT_EQ(LoadAt<uint32_t>(record, 56), 2u);                   // layers
  EXPECT_EQ(LoadAt<uint32_t>(record, 60), 1u);                   // kv heads
  EXPECT_EQ(LoadAt<uint32_t>(record, 64), 64u);                  // head dim
  EXPECT_EQ(LoadAt<uint32_t>(record, 68), 32u);                  // page tokens
  EXPECT_EQ(LoadAt<uint32_t>(record, 72), 2u);                   // dtype
  EXPECT_EQ(LoadAt<uint32_t>(record, 76), 640u);                 // page bytes
  EXPECT_EQ(LoadAt<uint64_t>(record, 80), 96u);                  // first index
  EXPECT_EQ(LoadAt<uint64_t>(record, 88), 0u);                   // reserved
  EXPECT_EQ(LoadAt<int64_t>(record, 96), 96);                    // positions
  EXPECT_EQ(LoadAt<int64_t>(record, 96 + 31 * 8), 127);
  EXPECT_EQ(LoadAt<uint64_t>(record, 352), 707672572256995618u);  // page checksums
  EXPECT_EQ(LoadAt<uint64_t>(record, 360), 12621220600935147118u);
  EXPECT_EQ(LoadAt<uint64_t>(record, 368), 0u);  // padding
}

TEST(BlockRecordTest, PagesOfWholeFourKibibytesAreAligned) {
  for (const uint32_t page_bytes : {4096u, 8192u, 16384u, 65536u}) {
    for (const uint32_t layers : {1u, 30u, 80u, 2000u}) {  // The last header is larger than 4 KiB.
      const RecordGeometry geometry = MakeGeometry(layers, 8, page_bytes);
      for (const uint32_t page : {0u, 1u, geometry.pages() - 1}) {
        EXPECT_EQ(geometry.part_offset(page, PagePart::kExact) % 4096, 0u);
      }
      EXPECT_EQ(geometry.record_bytes() % 4096, 0u);
      EXPECT_GE(geometry.header_bytes(), geometry.header_used_bytes());
      EXPECT_EQ(geometry.record_bytes(), geometry.part_offset(geometry.pages(), PagePart::kExact));
    }
  }
}

TEST(BlockRecordTest, FormsOfAPageLieApartAndAreCheckedApart) {
  const RecordGeometry geometry = MakeGeometry(2, 3, 4096, 1280, 1024);
  std::vector<std::byte> record = MakeRecord(kKey, geometry);
  record[geometry.part_offset(4, PagePart::kCoarse) + 7] ^= std::byte{1};

  ASSERT_OK_AND_ASSIGN(const RecordHeader header, ParseHeader(record));

  const auto part_of = [&](uint32_t page, PagePart part) {
    return std::span<const std::byte>(record).subspan(geometry.part_offset(page, part),
                                                      geometry.part_bytes(part));
  };
  EXPECT_TRUE(PartIsIntact(header, 4, PagePart::kExact, part_of(4, PagePart::kExact)));
  EXPECT_FALSE(PartIsIntact(header, 4, PagePart::kCoarse, part_of(4, PagePart::kCoarse)));
  EXPECT_TRUE(PartIsIntact(header, 4, PagePart::kFine, part_of(4, PagePart::kFine)));
  EXPECT_TRUE(PartIsIntact(header, 5, PagePart::kCoarse, part_of(5, PagePart::kCoarse)));
  EXPECT_EQ(geometry.part_offset(0, PagePart::kCoarse), geometry.part_offset(6, PagePart::kExact));
  EXPECT_EQ(geometry.record_bytes(), geometry.header_bytes() + 40960u);
}

TEST(BlockRecordTest, PaddingIsZeroedOverWhateverWasThere) {
  const RecordGeometry geometry = MakeGeometry(1, 1, 640);
  std::vector<std::byte> record(geometry.record_bytes(), std::byte{0xee});
  const std::vector<int64_t> positions(32);

  FrameRecord(kKey, geometry, positions, record);

  for (size_t i = geometry.header_used_bytes(); i < geometry.header_bytes(); ++i) {
    ASSERT_EQ(record[i], std::byte{0}) << i;
  }
  for (size_t i = geometry.part_offset(1, PagePart::kExact); i < record.size(); ++i) {
    ASSERT_EQ(record[i], std::byte{0}) << i;
  }
  EXPECT_EQ(record[geometry.part_offset(0, PagePart::kExact)], std::byte{0xee});
}

TEST(BlockRecordTest, HeaderMayBeKeptWithoutPaddingAndPages) {
  const RecordGeometry geometry = MakeGeometry(3, 2, 8192);
  const std::vector<std::byte> record = MakeRecord(kKey, geometry);

  const auto used = std::span(record).first(geometry.header_used_bytes());

  ASSERT_OK_AND_ASSIGN(const RecordHeader header, ParseHeader(used));
  EXPECT_TRUE(PartIsIntact(header, 5, PagePart::kExact, PageOf(record, geometry, 5)));
  EXPECT_THAT(ParseHeader(used.first(used.size() - 1)), StatusIs(absl::StatusCode::kDataLoss));
}

TEST(BlockRecordTest, EveryFlippedHeaderBitIsSeen) {
  const RecordGeometry geometry = MakeGeometry(2, 2, 4096);
  std::vector<std::byte> record = MakeRecord(kKey, geometry);
  for (size_t bit = 0; bit < geometry.header_bytes() * 8; ++bit) {
    const std::byte mask{static_cast<uint8_t>(1u << (bit % 8))};
    record[bit / 8] ^= mask;
    ASSERT_THAT(ParseHeader(record), StatusIs(absl::StatusCode::kDataLoss)) << "bit " << bit;
    record[bit / 8] ^= mask;
  }
  EXPECT_OK(ParseHeader(record));
}

TEST(BlockRecordTest, EveryFlippedPageBitIsSeen) {
  const RecordGeometry geometry = MakeGeometry(1, 2, 640);
  std::vector<std::byte> record = MakeRecord(kKey, geometry);
  ASSERT_OK_AND_ASSIGN(const RecordHeader header, ParseHeader(record));
  for (size_t bit = 0; bit < size_t{geometry.page_bytes} * 8; ++bit) {
    std::byte& byte = record[geometry.part_offset(1, PagePart::kExact) + bit / 8];
    const std::byte mask{static_cast<uint8_t>(1u << (bit % 8))};
    byte ^= mask;
    ASSERT_FALSE(PartIsIntact(header, 1, PagePart::kExact, PageOf(record, geometry, 1)))
        << "bit " << bit;
    byte ^= mask;
  }
}

TEST(BlockRecordTest, EveryCutIsSeen) {
  const RecordGeometry geometry = MakeGeometry(2, 2, 4096);
  const std::vector<std::byte> record = MakeRecord(kKey, geometry);

  for (size_t bytes = 0; bytes < geometry.header_used_bytes(); ++bytes) {
    ASSERT_THAT(ParseHeader(std::span(record).first(bytes)), StatusIs(absl::StatusCode::kDataLoss));
  }
}

TEST(BlockRecordTest, PageOfAnotherIdentityNeverPasses) {
  const std::vector<std::byte> page(4096, std::byte{7});
  const uint64_t checksum = PartChecksum({1, 2, 3}, 4, page);

  EXPECT_NE(checksum, PartChecksum({2, 2, 3}, 4, page));
  EXPECT_NE(checksum, PartChecksum({1, 3, 3}, 4, page));
  EXPECT_NE(checksum, PartChecksum({1, 2, 4}, 4, page));
  EXPECT_NE(checksum, PartChecksum({1, 2, 3}, 5, page));
  EXPECT_EQ(checksum, PartChecksum({1, 2, 3}, 4, page));
}

TEST(BlockRecordTest, SwappedPagesOfOneContentFail) {
  const RecordGeometry geometry = MakeGeometry(2, 1, 640);
  std::vector<std::byte> record(geometry.record_bytes());  // Both pages are zeros.
  const std::vector<int64_t> positions(32);
  FrameRecord(kKey, geometry, positions, record);
  ASSERT_OK_AND_ASSIGN(const RecordHeader header, ParseHeader(record));

  EXPECT_NE(header.part_checksum(0, PagePart::kExact), header.part_checksum(1, PagePart::kExact));
  EXPECT_FALSE(PartIsIntact(header, 2, PagePart::kExact, PageOf(record, geometry, 0)))
      << "past the last page";
  EXPECT_FALSE(PartIsIntact(header, 0, PagePart::kExact, PageOf(record, geometry, 0).first(639)))
      << "cut";
}

TEST(BlockRecordTest, AnotherVersionIsNamed) {
  std::vector<std::byte> record = MakeRecord(kKey, MakeGeometry(1, 1, 4096));
  record[16] = std::byte{2};

  EXPECT_THAT(ParseHeader(record),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("version 2, expected 1")));
}

TEST(BlockRecordTest, RandomBytesAreRefused) {
  test::ForEachSeed(10, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> bytes = MakeRecord(kKey, MakeGeometry(2, 2, 640));
    // Keep magic and version, so that the parser gets past them.
    for (size_t i = 20; i < bytes.size(); ++i) bytes[i] = std::byte(random());
    bytes.resize(random() % bytes.size());
    EXPECT_THAT(ParseHeader(bytes), StatusIs(absl::StatusCode::kDataLoss));
  });
}

TEST(RecordGeometryTest, EachFieldHasItsLimit) {
  const RecordGeometry good = MakeGeometry(32, 8, 16384);
  ASSERT_OK(good.Validate());
  const auto refused = [&](auto change, const std::string& message) {
    RecordGeometry bad = good;
    change(bad);
    EXPECT_THAT(bad.Validate(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  };

  refused([](auto& g) { g.layers = 0; }, "layers is 0, must be 1 to 4096");
  refused([](auto& g) { g.layers = 4097; }, "layers is 4097");
  refused([](auto& g) { g.kv_heads = 0; }, "kv_heads is 0");
  refused([](auto& g) { g.kv_heads = 4097; }, "kv_heads is 4097");
  refused([](auto& g) { g.layers = g.kv_heads = 4096; }, "layers * kv_heads is 16777216");
  refused([](auto& g) { g.head_dim = 0; }, "head_dim is 0");
  refused([](auto& g) { g.page_tokens = 0; }, "page_tokens is 0");
  refused([](auto& g) { g.page_tokens = 24; }, "page_tokens 24 is not a power of two");
  refused([](auto& g) { g.page_bytes = 0; }, "page_bytes is 0");
  refused([](auto& g) { g.page_bytes = 0xffffffff; }, "page_bytes is 4294967295");
  refused([](auto& g) { g.page_bytes = 16u << 20; }, "record bytes is 4294971392");
  refused([](auto& g) { g.coarse_bytes = 8; }, "both or neither must be 0");
  refused([](auto& g) { g.fine_bytes = 8; }, "both or neither must be 0");
}

TEST(CheckRecordTest, RecordMustBeTheKeysAndWhole) {
  const RecordGeometry geometry = MakeGeometry(2, 2, 4096);
  const std::vector<std::byte> record = MakeRecord(kKey, geometry);
  BlockKey other = kKey;
  other.generation = 9;
  std::vector<std::byte> longer = record;
  longer.resize(record.size() + 4096);

  ASSERT_OK_AND_ASSIGN(const RecordHeader header, CheckRecord(kKey, record));
  EXPECT_EQ(header.key, kKey);
  EXPECT_THAT(CheckRecord(other, record),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("generation 9: the record is of sequence 1234605616436508552")));
  EXPECT_THAT(CheckRecord(kKey, longer),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("24576 B given")));
  EXPECT_THAT(CheckRecord(kKey, std::span(record).first(4096)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("4096 B given")));
  EXPECT_THAT(CheckRecord(kKey, {}), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(BlockKeyTest, DebugStringNamesEveryPart) {
  EXPECT_EQ((BlockKey{7, 3, 0}).DebugString(), "sequence 7, block 3, generation 0");
}

}  // namespace
}  // namespace ebbtide::storage
