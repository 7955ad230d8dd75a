// SPDX-License-Identifier: Apache-2.0

#include "service/model/lower_room.h"

#include <algorithm>
#include <vector>

namespace ebbtide::service {
namespace {

// Of a size that was first promised after the room was looked at: whatever holds a byte of it.
LowerRoom::Size Unseen(uint64_t record_bytes) {
  return {.host_cost_bytes = record_bytes, .run_bytes_below = record_bytes};
}

uint64_t RunsIn(uint64_t bytes, const LowerRoom::Size& size) {
  return size.run_bytes_below == 0 ? 0 : bytes / size.run_bytes_below;
}

}  // namespace

std::optional<uint64_t> LowerRoom::RecordsLeft(uint64_t record_bytes,
                                               const PromisedRecords& promised,
                                               uint64_t metadata_bytes) const {
  const auto size_of = [this](uint64_t bytes) {
    const auto found = sizes.find(bytes);
    return found == sizes.end() ? Unseen(bytes) : found->second;
  };
  uint64_t host_left = host_bytes - std::min(host_bytes, metadata_bytes);
  uint64_t below_left = below_bytes;
  PromisedRecords homeless;  // Those without a whole run of their own.
  for (const auto& [bytes, records] : promised) {
    const Size size = size_of(bytes);
    const uint64_t lacking = records - std::min(records, size.kept_below);
    const uint64_t runs = std::min(lacking / size.run_records_below, RunsIn(below_left, size));
    below_left -= runs * size.run_bytes_below;
    homeless[bytes] = lacking - runs * size.run_records_below;
  }
  uint64_t left = 0;
  for (const auto& [bytes, records] : homeless) {
    const Size size = size_of(bytes);
    const uint64_t in_host = std::min(records, host_left / size.host_cost_bytes);
    host_left -= in_host * size.host_cost_bytes;
    // The rest begins a run, and leaves the rest of it to its size.
    const uint64_t lacking = records - in_host;
    const uint64_t runs = (lacking + size.run_records_below - 1) / size.run_records_below;
    if (runs > RunsIn(below_left, size)) return std::nullopt;
    below_left -= runs * size.run_bytes_below;
    if (bytes == record_bytes) left += runs * size.run_records_below - lacking;
  }
  const Size size = size_of(record_bytes);
  const auto own = promised.find(record_bytes);
  const uint64_t taken = own == promised.end() ? 0 : own->second;
  return left + size.kept_below - std::min(size.kept_below, taken) +
         RunsIn(below_left, size) * size.run_records_below + host_left / size.host_cost_bytes;
}

}  // namespace ebbtide::service
