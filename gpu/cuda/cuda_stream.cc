// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/cuda_stream.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/bytes.h"
#include "gpu/cuda/cuda_memory.h"
#include "gpu/cuda/cuda_status.h"

namespace ebbtide::gpu {
namespace {

constexpr size_t kStagingBytes = size_t{1} << 20;   // Lists of some thousand lanes.
constexpr size_t kScratchBytes = size_t{16} << 20;  // Partials of a decode step.
constexpr size_t kAlignment = 256;                  // cudaMalloc's own.

}  // namespace

void CudaStream::FreeDevice::operator()(std::byte* memory) const {
  FreeDeviceMemory()(memory);
}
void CudaStream::FreeHost::operator()(std::byte* memory) const {
  FreePinnedMemory()(memory);
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaStream::Make(size_t scratch_bytes_max) {
  cudaStream_t handle = nullptr;
  EBBTIDE_RETURN_IF_ERROR(
      CudaStatus("stream", cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)));
  return std::unique_ptr<CudaStream>(new CudaStream(handle, scratch_bytes_max));
}

CudaStream::~CudaStream() {
  (void)cudaStreamSynchronize(handle_);
  (void)cudaStreamDestroy(handle_);
}

absl::Status CudaStream::Wait() {
  EBBTIDE_RETURN_IF_ERROR(CudaStatus("wait", cudaStreamSynchronize(handle_)));
  outgrown_.clear();
  if (staging_.size() > 1) staging_.erase(staging_.begin(), staging_.end() - 1);
  if (!staging_.empty()) staging_.back().used = staging_.back().carried = 0;
  return absl::OkStatus();
}

size_t CudaStream::device_bytes() const {
  return std::accumulate(staging_.begin(), staging_.end(), scratch_bytes_,
                         [](size_t sum, const Staging& staging) { return sum + staging.bytes; });
}

absl::StatusOr<CudaStream::Twin> CudaStream::TakeTwin(size_t bytes) {
  bytes = RoundUp(bytes, kAlignment);
  if (staging_.empty() || staging_.back().bytes - staging_.back().used < bytes) {
    // Twice the last, so that a stream soon has one that holds all between two waits.
    const size_t last = staging_.empty() ? kStagingBytes / 2 : staging_.back().bytes;
    Staging more{.host = nullptr, .device = nullptr, .bytes = std::max(2 * last, bytes)};
    EBBTIDE_ASSIGN_OR_RETURN(PinnedMemory host, AllocatePinned(more.bytes));
    more.host.reset(host.release());
    EBBTIDE_ASSIGN_OR_RETURN(auto device, AllocateDevice(more.bytes));
    more.device.reset(device.release());
    staging_.push_back(std::move(more));
  }
  Staging& staging = staging_.back();
  const Twin twin{staging.host.get() + staging.used, staging.device.get() + staging.used};
  staging.used += bytes;
  return twin;
}

absl::Status CudaStream::CarryUploads() {
  for (Staging& staging : staging_) {
    if (staging.carried == staging.used) continue;
    EBBTIDE_RETURN_IF_ERROR(CudaStatus(
        "upload", cudaMemcpyAsync(
                      staging.device.get() + staging.carried, staging.host.get() + staging.carried,
                      staging.used - staging.carried, cudaMemcpyHostToDevice, handle_)));
    staging.carried = staging.used;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> CudaStream::TakeScratch(size_t bytes) {
  bytes = RoundUp(bytes, kAlignment);
  if (scratch_bytes_ - scratch_used_ < bytes) {
    // Twice the last, up to what one launch may take, unless more is needed or less is free.
    size_t wanted = std::max({2 * scratch_bytes_, bytes, kScratchBytes});
    wanted = std::max(std::min(wanted, scratch_bytes_max_), bytes);
    absl::StatusOr<gpu::DeviceMemory> room = AllocateDevice(wanted);
    if (absl::IsResourceExhausted(room.status()) && wanted > bytes) {
      wanted = bytes;
      room = AllocateDevice(wanted);
    }
    EBBTIDE_ASSIGN_OR_RETURN(auto memory, std::move(room));
    outgrown_.push_back(std::move(scratch_));
    scratch_.reset(memory.release());
    scratch_bytes_ = wanted;
    scratch_used_ = 0;
  }
  std::byte* const memory = scratch_.get() + scratch_used_;
  scratch_used_ += bytes;
  return memory;
}

}  // namespace ebbtide::gpu
