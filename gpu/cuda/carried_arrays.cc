// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/carried_arrays.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include "base/bytes.h"
#include "base/status_macros.h"
#include "gpu/cuda/cuda_status.h"

namespace ebbtide::gpu {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kChunkBytes = size_t{1} << 20;

}  // namespace

const std::byte* CarriedArrays::In(const std::byte* array, size_t bytes, Reads reads) {
  if (IsInReach(array, bytes, reads)) return array;
  if (const auto* const result = FindResult(array, bytes)) {
    return DeviceAt(result->second) + (array - result->first);
  }
  return Upload({array, bytes});
}

const std::byte* CarriedArrays::Upload(std::span<const std::byte> array) {
  bytes_ += array.size();
  const absl::StatusOr<const std::byte*> there = stream_.Upload(array);
  room_.Update(there.status());
  return there.ok() ? *there : nullptr;
}

std::byte* CarriedArrays::Out(std::byte* array, size_t bytes, Use use) {
  if (IsInReach(array, bytes)) return array;
  if (const auto* const result = FindResult(array, bytes)) {
    const auto offset = static_cast<size_t>(array - result->first);
    const Run run{result->second.chunk, result->second.first + offset, bytes};
    Append(back_, run);
    return DeviceAt(run);
  }
  const Run run = TakeRoom(bytes);
  if (!room_.ok()) return nullptr;
  results_.emplace(array, run);
  new_results_.push_back(array);
  Append(back_, run);
  if (use == Use::kReadAndWritten) {
    std::memcpy(HostAt(run), array, bytes);
    Append(over_, run);
  }
  return DeviceAt(run);
}

const std::pair<std::byte* const, CarriedArrays::Run>* CarriedArrays::FindResult(
    const std::byte* array, size_t bytes) const {
  if (results_.empty()) return nullptr;
  // The last result that starts before the array's end.
  auto found = results_.lower_bound(const_cast<std::byte*>(array) + bytes);
  if (found == results_.begin()) return nullptr;
  --found;
  const std::byte* const end = found->first + found->second.bytes;
  if (!std::less<>()(array, end)) return nullptr;
  EBBTIDE_CHECK(!std::less<>()(array, found->first) && bytes <= static_cast<size_t>(end - array),
                "an array lies within a result that was not waited for, or apart from it");
  return &*found;
}

CarriedArrays::Run CarriedArrays::TakeRoom(size_t bytes) {
  bytes_ += bytes;
  if (chunks_.empty() || chunks_.back().bytes - chunks_.back().used < bytes) {
    // Twice the last, so that a stream soon has one that holds all between two waits.
    const size_t last = chunks_.empty() ? kChunkBytes / 2 : chunks_.back().bytes;
    Chunk more{.host = nullptr, .device = nullptr, .bytes = std::max(2 * last, bytes)};
    absl::StatusOr<PinnedMemory> host = AllocatePinned(more.bytes);
    room_.Update(host.status());
    absl::StatusOr<DeviceMemory> device = AllocateDevice(more.bytes);
    room_.Update(device.status());
    if (!room_.ok()) return {};
    more.host = *std::move(host);
    more.device = *std::move(device);
    chunks_.push_back(std::move(more));
  }
  Chunk& chunk = chunks_.back();
  const Run run{chunks_.size() - 1, chunk.used, bytes};
  chunk.used = std::min<size_t>(RoundUp(chunk.used + bytes, kAlignment), chunk.bytes);
  return run;
}

// Joins what lies side by side, so that it is one copy; the gap between two holds nothing.
void CarriedArrays::Append(std::vector<Run>& runs, const Run& run) {
  if (!runs.empty() && runs.back().chunk == run.chunk &&
      RoundUp(runs.back().first + runs.back().bytes, kAlignment) == run.first) {
    runs.back().bytes = run.first + run.bytes - runs.back().first;
  } else {
    runs.push_back(run);
  }
}

void CarriedArrays::InRows(const std::byte*& rows, size_t count, size_t row_bytes, size_t& stride) {
  if (count == 0 || IsInReach(rows, (count - 1) * stride + row_bytes)) return;
  std::vector<std::byte> dense(count * row_bytes);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(&dense[i * row_bytes], rows + i * stride, row_bytes);
  }
  rows = Upload(dense);
  stride = row_bytes;
}

void CarriedArrays::In(std::span<const std::byte* const>& list, size_t row_bytes) {
  std::vector<std::byte*>& rows = rows_.emplace_back();
  rows.reserve(list.size());
  for (const std::byte* const row : list) {
    rows.push_back(const_cast<std::byte*>(In(row, row_bytes)));  // Given on as const.
  }
  list = rows;
}

void CarriedArrays::Out(std::span<std::byte* const>& list, size_t row_bytes) {
  std::vector<std::byte*>& rows = rows_.emplace_back();
  rows.reserve(list.size());
  for (std::byte* const row : list) rows.push_back(Out(row, row_bytes, Use::kWritten));
  list = rows;
}

void CarriedArrays::In(std::span<const Extent>& extents, ExtentPart part, size_t row_bytes,
                       Reads reads) {
  std::vector<Extent>& placed = extents_.emplace_back(extents.begin(), extents.end());
  for (Extent& extent : placed) {
    const size_t bytes = static_cast<size_t>(extent.slots) * row_bytes;
    extent.key = part == ExtentPart::kValues ? nullptr : In(extent.key, bytes, reads);
    extent.value = part == ExtentPart::kKeys ? nullptr : In(extent.value, bytes, reads);
  }
  // Indices are no results, and those of neighbours usually lie side by side: one piece.
  for (size_t first = 0, end = 0; first < placed.size(); first = end) {
    const int32_t* const index = placed[first].index;
    size_t slots = 0;
    for (; end < placed.size() && placed[end].index == index + slots; ++end) {
      slots += static_cast<size_t>(placed[end].slots);
    }
    const auto indices = std::as_bytes(std::span(index, slots));
    if (IsInReach(indices.data(), indices.size())) continue;
    const auto* there = reinterpret_cast<const int32_t*>(Upload(indices));
    for (size_t i = first; i < end; ++i) {
      placed[i].index = there;
      there += placed[i].slots;
    }
  }
  extents = placed;
}

size_t CarriedArrays::device_bytes() const {
  return std::accumulate(chunks_.begin(), chunks_.end(), size_t{0},
                         [](size_t sum, const Chunk& chunk) { return sum + chunk.bytes; });
}

absl::Status CarriedArrays::CarryOver() {
  EBBTIDE_RETURN_IF_ERROR(room_);
  for (const Run& run : over_) {
    EBBTIDE_RETURN_IF_ERROR(CudaStatus("carrying results over",
                                       cudaMemcpyAsync(DeviceAt(run), HostAt(run), run.bytes,
                                                       cudaMemcpyHostToDevice, stream_.handle())));
  }
  over_.clear();
  return absl::OkStatus();
}

absl::Status CarriedArrays::CarryBack() {
  for (const Run& run : back_) {
    EBBTIDE_RETURN_IF_ERROR(CudaStatus("carrying results back",
                                       cudaMemcpyAsync(HostAt(run), DeviceAt(run), run.bytes,
                                                       cudaMemcpyDeviceToHost, stream_.handle())));
  }
  new_results_.clear();
  Abandon();  // There is nothing left to be undone.
  return absl::OkStatus();
}

void CarriedArrays::Abandon() {
  for (std::byte* const array : new_results_) results_.erase(array);
  new_results_.clear();
  over_.clear();
  back_.clear();
  extents_.clear();
  rows_.clear();
  room_ = absl::OkStatus();
}

void CarriedArrays::Forget() {
  Abandon();
  results_.clear();
}

void CarriedArrays::Deliver() {
  for (const auto& [array, run] : results_) std::memcpy(array, HostAt(run), run.bytes);
  results_.clear();
  if (chunks_.size() > 1) chunks_.erase(chunks_.begin(), chunks_.end() - 1);
  if (!chunks_.empty()) chunks_.back().used = 0;
  bytes_ = 0;
}

}  // namespace ebbtide::gpu
