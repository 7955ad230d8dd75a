// SPDX-License-Identifier: Apache-2.0
//
// Can the bytes of a record from outside hurt its reader? Parses them as they are, then again with
// a header checksum that fits, so that what lies behind the checksum is reached too.

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "storage/block_record.h"

namespace {

using ebbtide::storage::ParseHeader;
using ebbtide::storage::RecordGeometry;
using ebbtide::storage::RecordHeader;

// Reads all that a parsed header lets a reader reach.
void UseHeader(const RecordHeader& header, std::span<const std::byte> bytes) {
  uint64_t sum = 0;
  for (uint32_t token = 0; token < header.geometry.page_tokens; ++token) {
    sum += static_cast<uint64_t>(header.position(token));
  }
  for (uint32_t page = 0; page < header.geometry.pages(); ++page) {
    sum += header.part_checksum(page, ebbtide::storage::PagePart::kExact);
    const uint64_t offset = header.geometry.part_offset(page, ebbtide::storage::PagePart::kExact);
    if (offset + header.geometry.page_bytes <= bytes.size()) {
      sum += ebbtide::storage::PartIsIntact(header, page, ebbtide::storage::PagePart::kExact,
                                            bytes.subspan(offset, header.geometry.page_bytes));
    }
  }
  volatile uint64_t sink = sum;
  static_cast<void>(sink);
}

void Parse(std::span<const std::byte> bytes) {
  const auto header = ParseHeader(bytes);
  if (!header.ok()) return;
  if (!header->geometry.Validate().ok()) std::abort();
  if (bytes.size() < header->geometry.header_used_bytes()) std::abort();
  UseHeader(*header, bytes);
}

template <typename T>
T Load(const std::vector<std::byte>& bytes, size_t offset) {
  T value;
  std::memcpy(&value, &bytes[offset], sizeof(value));
  return value;
}

template <typename T>
void Store(std::vector<std::byte>& bytes, size_t offset, T value) {
  std::memcpy(&bytes[offset], &value, sizeof(value));
}

// The same identity and geometry with everything that depends on them as it should be; offsets from
// docs/formats/block_record.md. Only what no repair can help is left to refuse.
std::vector<std::byte> Repaired(std::span<const std::byte> bytes) {
  std::vector<std::byte> repaired(bytes.begin(), bytes.end());
  repaired.resize(std::max<size_t>(repaired.size(), 96));
  const RecordGeometry geometry = {.layers = Load<uint32_t>(repaired, 56) % 64,
                                   .kv_heads = Load<uint32_t>(repaired, 60) % 64,
                                   .head_dim = Load<uint32_t>(repaired, 64),
                                   .page_tokens = Load<uint32_t>(repaired, 68) % 128,
                                   .dtype = Load<uint32_t>(repaired, 72),
                                   .page_bytes = Load<uint32_t>(repaired, 76) % 8192,
                                   .coarse_bytes = Load<uint32_t>(repaired, 88) % 2048,
                                   .fine_bytes = Load<uint32_t>(repaired, 92) % 2048,
                                   .model_fingerprint = Load<uint64_t>(repaired, 48)};
  std::memcpy(repaired.data(), "EBBBLOCK", 8);
  Store(repaired, 16, ebbtide::storage::kRecordVersion);
  Store(repaired, 20, static_cast<uint32_t>(geometry.header_bytes()));
  Store(repaired, 24, geometry.record_bytes());
  Store(repaired, 56, geometry.layers);
  Store(repaired, 60, geometry.kv_heads);
  Store(repaired, 68, geometry.page_tokens);
  Store(repaired, 76, geometry.page_bytes);
  Store(repaired, 80, uint64_t{Load<uint32_t>(repaired, 40)} * geometry.page_tokens);
  Store(repaired, 88, geometry.coarse_bytes);
  Store(repaired, 92, geometry.fine_bytes);
  const uint64_t end = std::min<uint64_t>(geometry.header_used_bytes(), repaired.size());
  Store(repaired, 8, uint64_t{XXH3_64bits(&repaired[16], end - 16)});
  return repaired;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  Parse(bytes);
  Parse(Repaired(bytes));
  return 0;
}
