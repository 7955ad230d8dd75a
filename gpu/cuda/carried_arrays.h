// SPDX-License-Identifier: Apache-2.0
//
// The caller's arrays where a device can work on them: inputs are carried over before a launch,
// results back after it, and into the caller's memory once the stream was waited for. What the
// device reaches already is left where it is. Knows no operation (gpu/cuda/bring.h does).
// Tested by tests/unit/gpu/backend_test.cc and cuda_backend_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "gpu/cuda/cuda_memory.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/device_ranges.h"
#include "gpu/extent.h"

namespace ebbtide::gpu {

// What of extents an operation reads, beside their indices.
enum class ExtentPart : uint8_t { kKeys, kValues, kKeysAndValues };

// How often a launch reads what it was given. Host memory that is read more than once is carried
// over: it would cross the bus each time.
enum class Reads : uint8_t { kOnce, kOften };

// For each launch: arrays are brought, CarryOver, the launch, CarryBack; where one of these fails,
// Abandon. After the stream's Wait: Deliver. A failure to make room is what CarryOver answers.
//
// An input that lies within a result not yet delivered is taken from it, on the device: batches of
// a stream see what those before them wrote. Thread-compatible.
class CarriedArrays {
 public:
  explicit CarriedArrays(CudaStream& stream) : stream_(stream) {}
  CarriedArrays(const CarriedArrays&) = delete;
  CarriedArrays& operator=(const CarriedArrays&) = delete;

  // What the device reaches, for all that is brought from now on.
  void SetReach(std::shared_ptr<const DeviceRanges::Ranges> ranges) { ranges_ = std::move(ranges); }

  // Each replaces an array by one that the device reaches.
  template <class T>
  void In(std::span<const T>& array) {
    const std::byte* const there =
        In(reinterpret_cast<const std::byte*>(array.data()), array.size_bytes());
    array = {reinterpret_cast<const T*>(there), array.size()};
  }
  template <class T>
  void Out(std::span<T>& array) {
    array = Results(array, Use::kWritten);
  }
  template <class T>
  void InOut(std::span<T>& array) {
    array = Results(array, Use::kReadAndWritten);
  }
  // One number that may be unwanted.
  void Out(float*& number) {
    if (number != nullptr) number = Results(std::span(number, 1), Use::kWritten).data();
  }
  // `count` rows, `stride` bytes apart; dense afterwards where they were not in reach.
  void InRows(const std::byte*& rows, size_t count, size_t row_bytes, size_t& stride);
  // Lists of rows or of extents, whose arrays are replaced. What of an extent is not read is not
  // looked at, and null afterwards.
  void In(std::span<const std::byte* const>& list, size_t row_bytes);
  void Out(std::span<std::byte* const>& list, size_t row_bytes);
  void In(std::span<const Extent>& extents, ExtentPart part, size_t row_bytes,
          Reads reads = Reads::kOften);

  absl::Status CarryOver();
  absl::Status CarryBack();
  void Abandon();  // What was brought since the last CarryBack.
  void Deliver();
  void Forget();  // All results: Deliver will leave the caller's memory alone.

  // Carried since Deliver, in either direction.
  size_t bytes() const { return bytes_; }
  // Of the device, that results are kept in.
  size_t device_bytes() const;

 private:
  enum class Use { kWritten, kReadAndWritten };

  // Results on both sides, at the same offsets.
  struct Chunk {
    PinnedMemory host;
    DeviceMemory device;
    size_t bytes = 0;
    size_t used = 0;
  };
  struct Run {  // Of bytes of one chunk.
    size_t chunk = 0;
    size_t first = 0;
    size_t bytes = 0;
  };

  template <class T>
  std::span<T> Results(std::span<T> array, Use use) {
    std::byte* const there =
        Out(reinterpret_cast<std::byte*>(array.data()), array.size_bytes(), use);
    return {reinterpret_cast<T*>(there), array.size()};
  }
  bool IsInReach(const std::byte* array, size_t bytes, Reads reads = Reads::kOnce) const {
    if (bytes == 0) return true;
    const DeviceRanges::Where where = DeviceRanges::Find(*ranges_, array, bytes);
    return where == DeviceRanges::Where::kDevice ||
           (where == DeviceRanges::Where::kHost && reads == Reads::kOnce);
  }
  const std::byte* In(const std::byte* array, size_t bytes, Reads reads = Reads::kOnce);
  std::byte* Out(std::byte* array, size_t bytes, Use use);
  // The result that holds all of `array`; none where nothing of it is one.
  const std::pair<std::byte* const, Run>* FindResult(const std::byte* array, size_t bytes) const;
  const std::byte* Upload(std::span<const std::byte> array);
  Run TakeRoom(size_t bytes);
  static void Append(std::vector<Run>& runs, const Run& run);
  std::byte* DeviceAt(const Run& run) { return chunks_[run.chunk].device.get() + run.first; }
  std::byte* HostAt(const Run& run) { return chunks_[run.chunk].host.get() + run.first; }

  CudaStream& stream_;
  std::shared_ptr<const DeviceRanges::Ranges> ranges_ =
      std::make_shared<const DeviceRanges::Ranges>();
  absl::Status room_;  // Whether there was room for all that was brought.
  size_t bytes_ = 0;
  std::vector<Chunk> chunks_;                // Results fill the last one.
  std::map<std::byte*, Run> results_;        // By the caller's address.
  std::vector<std::byte*> new_results_;      // Of the next launch.
  std::vector<Run> over_;                    // To be carried before the next launch,
  std::vector<Run> back_;                    // and after it.
  std::deque<std::vector<Extent>> extents_;  // Lists that were replaced, until CarryBack.
  std::deque<std::vector<std::byte*>> rows_;
};

}  // namespace ebbtide::gpu
