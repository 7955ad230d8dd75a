// SPDX-License-Identifier: Apache-2.0

#include "tests/support/record_pattern.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace ebbtide::test {
namespace {

uint64_t Mix(uint64_t value) {  // splitmix64's finaliser
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

void FillPattern(const BlockKey& key, uint32_t page, uint64_t salt, std::span<std::byte> bytes) {
  uint64_t state = Mix(key.sequence + 1) ^ Mix((uint64_t{key.block} << 32) + key.generation + 2) ^
                   Mix((salt << 20) + page + 3);
  for (size_t at = 0; at < bytes.size(); at += sizeof(state)) {
    state = Mix(state + 0x9e3779b97f4a7c15);
    std::memcpy(&bytes[at], &state, std::min(sizeof(state), bytes.size() - at));
  }
}

}  // namespace

RecordGeometry MakeGeometry(uint32_t layers, uint32_t kv_heads, uint32_t page_bytes,
                            uint32_t coarse_bytes, uint32_t fine_bytes) {
  return {.layers = layers,
          .kv_heads = kv_heads,
          .head_dim = 64,
          .page_tokens = 32,
          .dtype = 2,
          .page_bytes = page_bytes,
          .coarse_bytes = coarse_bytes,
          .fine_bytes = fine_bytes,
          .model_fingerprint = 0x0123456789abcdef};
}

std::vector<std::byte> PatternPage(const BlockKey& key, uint32_t page, uint32_t page_bytes,
                                   uint64_t salt) {
  std::vector<std::byte> bytes(page_bytes);
  FillPattern(key, page, salt, bytes);
  return bytes;
}

std::vector<std::byte> MakeRecord(const BlockKey& key, const RecordGeometry& geometry,
                                  uint64_t salt) {
  std::vector<std::byte> record(geometry.record_bytes());
  for (uint32_t number = 0; number < geometry.parts(); ++number) {
    const auto part = static_cast<storage::PagePart>(number / geometry.pages());
    const uint64_t offset = geometry.part_offset(number % geometry.pages(), part);
    FillPattern(key, number, salt, std::span(record).subspan(offset, geometry.part_bytes(part)));
  }
  std::vector<int64_t> positions(geometry.page_tokens);
  std::iota(positions.begin(), positions.end(), int64_t{key.block} * geometry.page_tokens);
  FrameRecord(key, geometry, positions, record);
  return record;
}

}  // namespace ebbtide::test
