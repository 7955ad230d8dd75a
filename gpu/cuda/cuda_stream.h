// SPDX-License-Identifier: Apache-2.0
//
// A CUDA stream, with what launches on it need: lists that kernels read, carried over from the
// host, and scratch. Nothing here waits for the device but Wait. Tested by
// tests/unit/gpu/cuda_stream_test.cc.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/status_macros.h"
#include "gpu/backend.h"

namespace ebbtide::gpu {

// Thread-compatible. Destroying it waits.
class CudaStream final : public Stream {
 public:
  // 2,048 lanes of 4,096 slots, 4 rows and d = 128 take 67 MB.
  static constexpr size_t kScratchBytesMax = size_t{256} << 20;

  // Operations that would need more than `scratch_bytes_max` for all lanes at once take several
  // launches.
  //   kUnavailable  there is no device, or it failed
  static absl::StatusOr<std::unique_ptr<CudaStream>> Make(
      size_t scratch_bytes_max = kScratchBytesMax);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  absl::Status Wait() override;

  // A copy of `values` on the device, for launches from now until Wait. All lists of a launch go
  // over in one copy. A graph captured from the stream copies them again with each repeat, from the
  // same pinned memory: from then on the stream is the graph's alone, for Wait and whatever is run
  // next give that memory to other lists.
  template <class T>
  absl::StatusOr<const T*> Upload(std::span<const T> values) {
    EBBTIDE_ASSIGN_OR_RETURN(const Twin twin, TakeTwin(values.size_bytes()));
    if (!values.empty()) std::memcpy(twin.host, values.data(), values.size_bytes());
    return reinterpret_cast<const T*>(twin.device);
  }

  // Zeros that launches may write to, from now until Wait.
  template <class T>
  absl::StatusOr<T*> UploadZeros(size_t count) {
    EBBTIDE_ASSIGN_OR_RETURN(const Twin twin, TakeTwin(count * sizeof(T)));
    std::memset(twin.host, 0, count * sizeof(T));
    return reinterpret_cast<T*>(twin.device);
  }

  // Device memory for the next launch, and for those behind it until scratch is asked for again; it
  // holds anything. Launches of a stream follow each other, so all of them use the same.
  template <class T>
  absl::StatusOr<T*> Scratch(size_t count) {
    EBBTIDE_ASSIGN_OR_RETURN(std::byte * memory, TakeScratch(count * sizeof(T)));
    return reinterpret_cast<T*>(memory);
  }

  // For gpu/cuda/launch.h: before a launch, and after.
  absl::Status CarryUploads();
  void ReuseScratch() { scratch_used_ = 0; }
  size_t scratch_bytes_max() const { return scratch_bytes_max_; }
  // Of the device, that the stream holds: lists and scratch.
  size_t device_bytes() const;
  cudaStream_t handle() const { return handle_; }

 private:
  struct FreeDevice {
    void operator()(std::byte* memory) const;
  };
  struct FreeHost {
    void operator()(std::byte* memory) const;
  };
  using DeviceMemory = std::unique_ptr<std::byte, FreeDevice>;

  // The same bytes on both sides, at the same offsets.
  struct Staging {
    std::unique_ptr<std::byte, FreeHost> host;  // Pinned.
    DeviceMemory device;
    size_t bytes = 0;
    size_t used = 0;
    size_t carried = 0;
  };
  struct Twin {
    std::byte* host;
    std::byte* device;
  };

  CudaStream(cudaStream_t handle, size_t scratch_bytes_max)
      : handle_(handle), scratch_bytes_max_(scratch_bytes_max) {}
  absl::StatusOr<Twin> TakeTwin(size_t bytes);
  absl::StatusOr<std::byte*> TakeScratch(size_t bytes);

  cudaStream_t handle_;
  size_t scratch_bytes_max_;
  std::vector<Staging> staging_;  // Lists fill the last one.
  DeviceMemory scratch_;
  size_t scratch_bytes_ = 0;
  size_t scratch_used_ = 0;
  std::vector<DeviceMemory> outgrown_;  // Scratch that a launch may still use.
};

}  // namespace ebbtide::gpu
