// SPDX-License-Identifier: Apache-2.0

#include "storage/block_record.h"

#if defined(__x86_64__)
#include <xxh_x86dispatch.h>  // The widest vectors this CPU has: twice the baseline's rate.
#endif
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"

namespace ebbtide::storage {
namespace {

static_assert(std::endian::native == std::endian::little,
              "records are little-endian and are read in place");

constexpr std::array<char, 8> kMagic = {'E', 'B', 'B', 'B', 'L', 'O', 'C', 'K'};

// The fixed fields as they lie in a record; docs/formats/block_record.md is this table in words.
struct FixedFields {
  std::array<char, 8> magic;
  uint64_t header_checksum;  // XXH3-64 of everything after this field, without the padding.
  uint32_t version;
  uint32_t header_bytes;
  uint64_t record_bytes;
  uint64_t sequence;
  uint32_t block;
  uint32_t generation;
  uint64_t model_fingerprint;
  uint32_t layers;
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t page_tokens;
  uint32_t dtype;
  uint32_t page_bytes;
  uint64_t first_index;
  uint32_t coarse_bytes;
  uint32_t fine_bytes;
};
static_assert(sizeof(FixedFields) == 96);
static_assert(offsetof(FixedFields, header_checksum) == 8);
static_assert(offsetof(FixedFields, version) == 16);
static_assert(offsetof(FixedFields, header_bytes) == 20);
static_assert(offsetof(FixedFields, record_bytes) == 24);
static_assert(offsetof(FixedFields, sequence) == 32);
static_assert(offsetof(FixedFields, block) == 40);
static_assert(offsetof(FixedFields, generation) == 44);
static_assert(offsetof(FixedFields, model_fingerprint) == 48);
static_assert(offsetof(FixedFields, layers) == 56);
static_assert(offsetof(FixedFields, kv_heads) == 60);
static_assert(offsetof(FixedFields, head_dim) == 64);
static_assert(offsetof(FixedFields, page_tokens) == 68);
static_assert(offsetof(FixedFields, dtype) == 72);
static_assert(offsetof(FixedFields, page_bytes) == 76);
static_assert(offsetof(FixedFields, first_index) == 80);
static_assert(offsetof(FixedFields, coarse_bytes) == 88);
static_assert(offsetof(FixedFields, fine_bytes) == 92);

constexpr size_t kChecksummedFrom = offsetof(FixedFields, version);

// Limits of version 1: far above any model we know, low enough that no size below can overflow.
constexpr uint32_t kLayersMax = 4096;
constexpr uint32_t kKvHeadsMax = 4096;
constexpr uint32_t kPagesMax = 1u << 17;
constexpr uint32_t kHeadDimMax = 4096;
constexpr uint32_t kPageTokensMax = 1024;
constexpr uint32_t kPageBytesMax = 16u << 20;
constexpr uint64_t kRecordBytesMax = uint64_t{1} << 30;

uint64_t Hash(std::span<const std::byte> bytes, uint64_t seed) {
#if defined(__x86_64__)
  return XXH3_64bits_withSeed_dispatch(bytes.data(), bytes.size(), seed);
#else
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
#endif
}

template <typename T>
T LoadAt(std::span<const std::byte> bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

absl::Status CheckRange(std::string_view field, uint64_t value, uint64_t max) {
  if (value >= 1 && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("record geometry: ", absl::string_view(field.data(), field.size()), " is ",
                   value, ", must be 1 to ", max));
}

absl::Status Damaged(std::string_view what, uint64_t value, uint64_t expected) {
  return absl::DataLossError(
      absl::StrCat("block record: ", absl::string_view(what.data(), what.size()), " ", value,
                   ", expected ", expected));
}

RecordGeometry GeometryOf(const FixedFields& fields) {
  return {.layers = fields.layers,
          .kv_heads = fields.kv_heads,
          .head_dim = fields.head_dim,
          .page_tokens = fields.page_tokens,
          .dtype = fields.dtype,
          .page_bytes = fields.page_bytes,
          .coarse_bytes = fields.coarse_bytes,
          .fine_bytes = fields.fine_bytes,
          .model_fingerprint = fields.model_fingerprint};
}

// Do the lengths a header states agree with its geometry and with each other?
absl::Status CheckLengths(const FixedFields& fields, const RecordGeometry& geometry) {
  if (absl::Status status = geometry.Validate(); !status.ok()) {
    return absl::DataLossError(absl::StrCat("block record: ", status.message()));
  }
  if (fields.header_bytes != geometry.header_bytes()) {
    return Damaged("header bytes", fields.header_bytes, geometry.header_bytes());
  }
  if (fields.record_bytes != geometry.record_bytes()) {
    return Damaged("record bytes", fields.record_bytes, geometry.record_bytes());
  }
  const uint64_t first_index = uint64_t{fields.block} * geometry.page_tokens;
  if (fields.first_index != first_index) {
    return Damaged("first index", fields.first_index, first_index);
  }
  return absl::OkStatus();
}

// The first is, and each equals the next: libc compares faster than a loop here would.
bool IsZero(std::span<const std::byte> bytes) {
  return bytes.empty() || (bytes.front() == std::byte{0} &&
                           std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

}  // namespace

uint64_t RecordGeometry::header_used_bytes() const {
  return sizeof(FixedFields) + uint64_t{page_tokens} * sizeof(int64_t) +
         uint64_t{parts()} * sizeof(uint64_t);
}

uint64_t RecordGeometry::part_offset(uint32_t page, PagePart part) const {
  uint64_t offset = header_bytes() + uint64_t{page} * part_bytes(part);
  if (part != PagePart::kExact) offset += uint64_t{pages()} * page_bytes;
  if (part == PagePart::kFine) offset += uint64_t{pages()} * coarse_bytes;
  return offset;
}

absl::Status RecordGeometry::Validate() const {
  EBBTIDE_RETURN_IF_ERROR(CheckRange("layers", layers, kLayersMax));
  EBBTIDE_RETURN_IF_ERROR(CheckRange("kv_heads", kv_heads, kKvHeadsMax));
  EBBTIDE_RETURN_IF_ERROR(CheckRange("layers * kv_heads", pages(), kPagesMax));
  EBBTIDE_RETURN_IF_ERROR(CheckRange("head_dim", head_dim, kHeadDimMax));
  EBBTIDE_RETURN_IF_ERROR(CheckRange("page_tokens", page_tokens, kPageTokensMax));
  if (!std::has_single_bit(page_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("record geometry: page_tokens ", page_tokens, " is not a power of two"));
  }
  EBBTIDE_RETURN_IF_ERROR(CheckRange("page_bytes", page_bytes, kPageBytesMax));
  if ((coarse_bytes > 0) != (fine_bytes > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("record geometry: coarse_bytes is ",
                                                   coarse_bytes, " and fine_bytes ", fine_bytes,
                                                   ", both or neither must be 0"));
  }
  if (coarse_bytes > 0) {
    EBBTIDE_RETURN_IF_ERROR(CheckRange("coarse_bytes", coarse_bytes, kPageBytesMax));
    EBBTIDE_RETURN_IF_ERROR(CheckRange("fine_bytes", fine_bytes, kPageBytesMax));
  }
  return CheckRange("record bytes", record_bytes(), kRecordBytesMax);
}

uint64_t RecordHeader::part_checksum(uint32_t page, PagePart part) const {
  return LoadAt<uint64_t>(part_checksums, geometry.part_number(page, part));
}

int64_t RecordHeader::position(uint32_t token) const {
  return LoadAt<int64_t>(positions, token);
}

uint64_t PartChecksum(const BlockKey& key, uint32_t part_number, std::span<const std::byte> bytes) {
  struct Identity {
    uint64_t sequence;
    uint32_t block;
    uint32_t generation;
    uint64_t part_number;
  };
  static_assert(sizeof(Identity) == 24);  // No padding: every byte hashed has a value.
  const Identity identity = {key.sequence, key.block, key.generation, part_number};
  return Hash(bytes, Hash(std::as_bytes(std::span(&identity, 1)), 0));
}

void FrameRecord(const BlockKey& key, const RecordGeometry& geometry,
                 std::span<const int64_t> positions, std::span<std::byte> record) {
  EBBTIDE_CHECK(geometry.Validate().ok(), "a record is framed with a valid geometry");
  EBBTIDE_CHECK(positions.size() == geometry.page_tokens, "one position for each token of a page");
  EBBTIDE_CHECK(record.size() == geometry.record_bytes(), "a record has its geometry's size");

  FixedFields fields = {.magic = kMagic,
                        .header_checksum = 0,
                        .version = kRecordVersion,
                        .header_bytes = static_cast<uint32_t>(geometry.header_bytes()),
                        .record_bytes = geometry.record_bytes(),
                        .sequence = key.sequence,
                        .block = key.block,
                        .generation = key.generation,
                        .model_fingerprint = geometry.model_fingerprint,
                        .layers = geometry.layers,
                        .kv_heads = geometry.kv_heads,
                        .head_dim = geometry.head_dim,
                        .page_tokens = geometry.page_tokens,
                        .dtype = geometry.dtype,
                        .page_bytes = geometry.page_bytes,
                        .first_index = uint64_t{key.block} * geometry.page_tokens,
                        .coarse_bytes = geometry.coarse_bytes,
                        .fine_bytes = geometry.fine_bytes};
  std::memcpy(record.data(), &fields, sizeof(fields));
  std::byte* next = record.data() + sizeof(fields);
  std::memcpy(next, positions.data(), positions.size_bytes());
  next += positions.size_bytes();
  for (uint32_t number = 0; number < geometry.parts(); ++number) {
    const auto part = static_cast<PagePart>(number / geometry.pages());
    const uint64_t offset = geometry.part_offset(number % geometry.pages(), part);
    const uint64_t checksum =
        PartChecksum(key, number, record.subspan(offset, geometry.part_bytes(part)));
    std::memcpy(next, &checksum, sizeof(checksum));
    next += sizeof(checksum);
  }
  std::fill(next, record.data() + geometry.header_bytes(), std::byte{0});
  const uint64_t parts_end =
      geometry.part_offset(0, PagePart::kFine) + uint64_t{geometry.pages()} * geometry.fine_bytes;
  std::fill(record.begin() + static_cast<ptrdiff_t>(parts_end), record.end(), std::byte{0});

  fields.header_checksum =
      Hash(record.subspan(kChecksummedFrom, geometry.header_used_bytes() - kChecksummedFrom), 0);
  std::memcpy(record.data() + offsetof(FixedFields, header_checksum), &fields.header_checksum,
              sizeof(fields.header_checksum));
}

absl::StatusOr<RecordHeader> ParseHeader(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(FixedFields)) {
    return Damaged("bytes", bytes.size(), sizeof(FixedFields));
  }
  const auto fields = LoadAt<FixedFields>(bytes, 0);
  if (fields.magic != kMagic) return absl::DataLossError("block record: no magic number");
  if (fields.version != kRecordVersion) return Damaged("version", fields.version, kRecordVersion);
  const RecordGeometry geometry = GeometryOf(fields);
  EBBTIDE_RETURN_IF_ERROR(CheckLengths(fields, geometry));
  const uint64_t used_bytes = geometry.header_used_bytes();
  if (bytes.size() < used_bytes) return Damaged("bytes", bytes.size(), used_bytes);
  const uint64_t checksum = Hash(bytes.subspan(kChecksummedFrom, used_bytes - kChecksummedFrom), 0);
  if (fields.header_checksum != checksum) {
    return Damaged("header checksum", fields.header_checksum, checksum);
  }
  const uint64_t padding_end = std::min<uint64_t>(bytes.size(), geometry.header_bytes());
  if (!IsZero(bytes.subspan(used_bytes, padding_end - used_bytes))) {
    return absl::DataLossError("block record: header padding is not zero");
  }
  const size_t positions_bytes = geometry.page_tokens * sizeof(int64_t);
  return RecordHeader{
      .key = {.sequence = fields.sequence, .block = fields.block, .generation = fields.generation},
      .geometry = geometry,
      .first_index = fields.first_index,
      .part_checksums =
          bytes.subspan(sizeof(FixedFields) + positions_bytes, geometry.parts() * sizeof(uint64_t)),
      .positions = bytes.subspan(sizeof(FixedFields), positions_bytes)};
}

absl::StatusOr<RecordHeader> CheckRecord(const BlockKey& key, std::span<const std::byte> record) {
  absl::StatusOr<RecordHeader> header = ParseHeader(record);
  if (!header.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("write of ", key.DebugString(), ": ", header.status().message()));
  }
  if (header->key != key) {
    return absl::InvalidArgumentError(absl::StrCat(
        "write of ", key.DebugString(), ": the record is of ", header->key.DebugString()));
  }
  if (record.size() != header->geometry.record_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("write of ", key.DebugString(), ": ",
                                                   record.size(), " B given, its header says ",
                                                   header->geometry.record_bytes(), " B"));
  }
  return header;
}

bool PartIsIntact(const RecordHeader& header, uint32_t page, PagePart part,
                  std::span<const std::byte> bytes) {
  const RecordGeometry& geometry = header.geometry;
  return page < geometry.pages() && !bytes.empty() && bytes.size() == geometry.part_bytes(part) &&
         PartChecksum(header.key, geometry.part_number(page, part), bytes) ==
             header.part_checksum(page, part);
}

}  // namespace ebbtide::storage
