// SPDX-License-Identifier: Apache-2.0
//
// How a block is framed at rest: a header that says whose it is and what shape it has, with a
// checksum of itself and one of every page, then the pages at fixed offsets.
// docs/formats/block_record.md is its page. Tested by tests/unit/storage/block_record_test.cc,
// fuzzed by tests/fuzz/block_record_fuzz.cc.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/bytes.h"
#include "storage/block_key.h"

namespace ebbtide::storage {

// O_DIRECT's unit. Pages whose size is a multiple of it start aligned and can be read alone.
inline constexpr uint64_t kRecordAlignment = 4096;
inline constexpr uint32_t kRecordVersion = 1;

// The forms that a page's bytes come in. What they mean is decided above (gpu/kernels/codes.h):
// here they are runs of bytes with a checksum each, and can be read alone.
enum class PagePart : uint8_t { kExact, kCoarse, kFine };

// What a record takes of a tier. Records of one size are alike to it.
struct RecordSize {
  uint64_t bytes = 0;              // Pages, header and padding: a multiple of kRecordAlignment.
  uint64_t header_used_bytes = 0;  // Of which an index keeps a copy.
  friend auto operator<=>(const RecordSize&, const RecordSize&) = default;
};

// What shape the blocks of one model have. Everything a reader must agree on before it may use
// bytes.
struct RecordGeometry {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t page_tokens = 0;
  uint32_t dtype = 0;         // gpu::Dtype's number
  uint32_t page_bytes = 0;    // Of kExact.
  uint32_t coarse_bytes = 0;  // Of kCoarse and kFine; both 0 where pages have but the exact form.
  uint32_t fine_bytes = 0;
  uint64_t model_fingerprint = 0;  // XXH3 of namespace, model, weights fingerprint and geometry

  uint32_t pages() const { return layers * kv_heads; }
  uint64_t header_used_bytes() const;  // Fixed fields, positions and checksums, without padding.
  uint64_t header_bytes() const { return RoundUp(header_used_bytes(), kRecordAlignment); }
  // Number of checksums: a part of a page is numbered part * pages() + page.
  uint32_t parts() const { return coarse_bytes > 0 ? 3 * pages() : pages(); }
  uint32_t part_number(uint32_t page, PagePart part) const {
    return static_cast<uint32_t>(part) * pages() + page;
  }
  uint32_t part_bytes(PagePart part) const {
    return part == PagePart::kExact    ? page_bytes
           : part == PagePart::kCoarse ? coarse_bytes
                                       : fine_bytes;
  }
  // All pages exactly, then all coarse parts, then all fine ones.
  uint64_t part_offset(uint32_t page, PagePart part) const;
  uint64_t record_bytes() const {
    return RoundUp(part_offset(0, PagePart::kFine) + uint64_t{pages()} * fine_bytes,
                   kRecordAlignment);
  }
  RecordSize size() const {
    return {.bytes = record_bytes(), .header_used_bytes = header_used_bytes()};
  }
  // kInvalidArgument names the field, its value and its limit. The sizes above hold only for a
  // geometry that passes; none of them can overflow then.
  absl::Status Validate() const;
  friend bool operator==(const RecordGeometry&, const RecordGeometry&) = default;
};

// A view of a record's parsed header; positions and checksums stay where they lie.
struct RecordHeader {
  BlockKey key;
  RecordGeometry geometry;
  uint64_t first_index = 0;
  std::span<const std::byte> part_checksums;  // [parts] little-endian u64, unaligned
  std::span<const std::byte> positions;       // [page_tokens] little-endian i64, unaligned

  uint64_t part_checksum(uint32_t page, PagePart part) const;
  int64_t position(uint32_t token) const;
};

// XXH3-64 of a part of a page, bound to its identity: the seed is drawn from the key and the part's
// number, so a part of another block, lane, form or generation never passes.
uint64_t PartChecksum(const BlockKey& key, uint32_t part_number, std::span<const std::byte> bytes);

// Writes the header over the first header_bytes() of `record` and zeroes the padding at its end.
// The parts must lie in place already; their checksums are computed here.
//   geometry   valid
//   positions  [page_tokens]
//   record     record_bytes() long
void FrameRecord(const BlockKey& key, const RecordGeometry& geometry,
                 std::span<const int64_t> positions, std::span<std::byte> record);

// Reads and checks a header; all of header_used_bytes() must be there, padding and pages may be
// missing. `bytes` may come from outside: anything may be wrong with it.
//   kDataLoss  not a record, another version, a length that contradicts itself, or a checksum that
//              fails
absl::StatusOr<RecordHeader> ParseHeader(std::span<const std::byte> bytes);

// What a tier asks of a record before it takes it: a sound header, the identity of `key`, and all
// of its bytes. Pages are not hashed: their checksums go along and are tested on the way back.
//   kInvalidArgument  names the key and what is wrong
absl::StatusOr<RecordHeader> CheckRecord(const BlockKey& key, std::span<const std::byte> record);

// Is `bytes` the part of page `page` that `header` speaks of? False for what the record lacks.
bool PartIsIntact(const RecordHeader& header, uint32_t page, PagePart part,
                  std::span<const std::byte> bytes);

}  // namespace ebbtide::storage
