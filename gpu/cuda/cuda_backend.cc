// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

#include "base/status_macros.h"
#include "gpu/cuda/bring.h"
#include "gpu/cuda/carried_arrays.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/device_pool.h"
#include "gpu/cuda/host_memory.h"
#include "gpu/cuda/kernels.h"
#include "gpu/make_cuda_backend.h"

namespace ebbtide::gpu {

// Launches, and what they carry.
struct CarryingStream {
  explicit CarryingStream(std::unique_ptr<CudaStream> made)
      : launches(std::move(made)), arrays(*launches) {}

  absl::Status Wait() {
    EBBTIDE_RETURN_IF_ERROR(launches->Wait());
    arrays.Deliver();
    return absl::OkStatus();
  }

  size_t device_bytes() const { return launches->device_bytes() + arrays.device_bytes(); }

  std::unique_ptr<CudaStream> launches;
  CarriedArrays arrays;
};

// Streams that nobody uses just now. What they have pinned takes milliseconds to pin, so callers
// that make a stream for each of their calls are given those of others. Thread-safe.
class IdleStreams {
 public:
  explicit IdleStreams(size_t device_bytes_max) : device_bytes_max_(device_bytes_max) {}

  std::unique_ptr<CarryingStream> Take() {
    const absl::MutexLock lock(&mu_);
    if (streams_.empty()) return nullptr;
    std::unique_ptr<CarryingStream> taken = std::move(streams_.back());
    streams_.pop_back();
    device_bytes_ -= taken->device_bytes();
    return taken;
  }
  void Give(std::unique_ptr<CarryingStream> stream) {
    const size_t bytes = stream->device_bytes();
    const absl::MutexLock lock(&mu_);
    if (device_bytes_ + bytes > device_bytes_max_) return;  // Down it goes, after the lock.
    streams_.push_back(std::move(stream));
    device_bytes_ += bytes;
  }

 private:
  const size_t device_bytes_max_;

  absl::Mutex mu_;
  size_t device_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::unique_ptr<CarryingStream>> streams_ ABSL_GUARDED_BY(mu_);
};

namespace {

class LentStream final : public Stream {
 public:
  LentStream(std::unique_ptr<CarryingStream> stream, std::shared_ptr<IdleStreams> idle)
      : stream_(std::move(stream)), idle_(std::move(idle)) {}
  // Results that nobody waited for are nobody's, but their copies may be under way.
  ~LentStream() override {
    stream_->arrays.Forget();
    if (stream_->Wait().ok()) idle_->Give(std::move(stream_));
  }

  absl::Status Wait() override { return stream_->Wait(); }
  CarryingStream& stream() { return *stream_; }

 private:
  std::unique_ptr<CarryingStream> stream_;
  std::shared_ptr<IdleStreams> idle_;
};

class RegisteredReach final : public HostReach {
 public:
  RegisteredReach(std::shared_ptr<DeviceRanges> ranges, std::span<const std::byte> addresses)
      : ranges_(std::move(ranges)), addresses_(addresses) {
    ranges_->Add(addresses_, DeviceRanges::Where::kHost);
  }
  ~RegisteredReach() override { ranges_->Remove(addresses_); }

  absl::StatusOr<std::shared_ptr<void>> Register(std::span<std::byte> memory) override {
    EBBTIDE_CHECK(Holds(memory), "what is registered lies within these addresses");
    EBBTIDE_ASSIGN_OR_RETURN(DeviceBuffer locked, RegisterHostMemory(memory));
    return std::make_shared<DeviceBuffer>(std::move(locked));
  }

 private:
  bool Holds(std::span<const std::byte> memory) const {
    return std::less_equal<>()(addresses_.data(), memory.data()) &&
           std::less_equal<>()(memory.data() + memory.size(),
                               addresses_.data() + addresses_.size());
  }

  const std::shared_ptr<DeviceRanges> ranges_;
  const std::span<const std::byte> addresses_;
};

absl::Status ZeroCuda(std::span<const ZeroArgs> ranges, CudaStream& stream) {
  for (const ZeroArgs& args : ranges) {
    if (args.bytes.empty()) continue;
    EBBTIDE_RETURN_IF_ERROR(CudaStatus(
        "zero", cudaMemsetAsync(args.bytes.data(), 0, args.bytes.size(), stream.handle())));
  }
  return absl::OkStatus();
}

// How each kind of batch is run.
struct Runner {
  CarryingStream& stream;
  size_t carried_bytes_max;

  absl::Status operator()(std::span<const AppendArgs> lanes) const {
    return Each(lanes, &AppendCuda);
  }
  absl::Status operator()(std::span<const AttendArgs> lanes) const {
    return Each(lanes, &AttendCuda);
  }
  absl::Status operator()(std::span<const BoundArgs> lanes) const {
    return Each(lanes, &BoundCuda);
  }
  absl::Status operator()(std::span<const CodeErrorArgs> lanes) const {
    return Each(lanes, &CodeErrorsCuda);
  }
  absl::Status operator()(std::span<const DecodeArgs> lanes) const {
    return Each(lanes, &DecodeCuda);
  }
  absl::Status operator()(std::span<const DigestArgs> lanes) const {
    return Each(lanes, &DigestCuda);
  }
  absl::Status operator()(std::span<const EncodeArgs> lanes) const {
    return Each(lanes, &EncodeCuda);
  }
  absl::Status operator()(std::span<const GatherArgs> lanes) const {
    return Each(lanes, &GatherCuda);
  }
  absl::Status operator()(std::span<const MassArgs> lanes) const { return Each(lanes, &MassCuda); }
  absl::Status operator()(std::span<const MergeArgs> lanes) const {
    return Each(lanes, &MergeCuda);
  }
  absl::Status operator()(std::span<const PageDamageArgs> lanes) const {
    return Each(lanes, &PageDamageCuda);
  }
  absl::Status operator()(std::span<const ValueDistanceArgs> lanes) const {
    return Each(lanes, &ValueDistanceCuda);
  }
  absl::Status operator()(std::span<const WindowArgs> lanes) const {
    return Each(lanes, &WindowCuda);
  }
  absl::Status operator()(std::span<const ZeroArgs> lanes) const { return Each(lanes, &ZeroCuda); }
  absl::Status operator()(std::span<const DamageArgs> lanes) const {
    return Each(lanes, &DamageCuda);
  }
  absl::Status operator()(const FastDamage& batch) const {
    return Each(batch.lanes, &FastDamageCuda);
  }
  absl::Status operator()(std::span<const GeometryArgs> lanes) const {
    return Each(lanes, &KeyDiffCuda);
  }
  absl::Status operator()(std::span<const WeightedValueArgs> lanes) const {
    return Each(lanes, &WeightedValueCuda);
  }

  // One launch for all lanes, or several where they carry much: so what is pinned has a bound.
  template <class Args>
  absl::Status Each(std::span<const Args> lanes,
                    absl::Status (*operation)(std::span<const Args>, CudaStream&)) const {
    std::vector<Args> brought;
    brought.reserve(lanes.size());
    for (const Args& args : lanes) {
      if (stream.arrays.bytes() >= carried_bytes_max) {
        EBBTIDE_RETURN_IF_ERROR(Launch<Args>(brought, operation));
        EBBTIDE_RETURN_IF_ERROR(stream.Wait());
        brought.clear();
      }
      Bring(brought.emplace_back(args), stream.arrays);
    }
    return Launch<Args>(brought, operation);
  }

  template <class Args>
  absl::Status Launch(std::span<const Args> lanes,
                      absl::Status (*operation)(std::span<const Args>, CudaStream&)) const {
    absl::Status status = stream.arrays.CarryOver();
    if (status.ok()) status = operation(lanes, *stream.launches);
    if (status.ok()) status = stream.arrays.CarryBack();
    if (!status.ok()) stream.arrays.Abandon();
    return status;
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend() {
  return CudaBackend::Make();
}

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Make(const CudaBackendOptions& options) {
  EBBTIDE_ASSIGN_OR_RETURN(CudaDevice device, FindCudaDevice());
  // No make_unique: the constructor is private.
  return std::unique_ptr<CudaBackend>(new CudaBackend(std::move(device), options));
}

CudaBackend::CudaBackend(CudaDevice device, const CudaBackendOptions& options)
    : device_(std::move(device)),
      name_(absl::StrCat("cuda (", device_.name, ", sm_", device_.capability, ")")),
      options_(options),
      idle_streams_(std::make_shared<IdleStreams>(options.idle_bytes_max)) {}

DeviceBuffer CudaBackend::InReach(DeviceBuffer buffer) {
  const std::span<std::byte> bytes = buffer.bytes();
  ranges_->Add(bytes, DeviceRanges::Where::kDevice);
  auto kept = std::make_shared<DeviceBuffer>(std::move(buffer));
  return DeviceBuffer(bytes, [ranges = ranges_, kept](std::span<std::byte> gone) mutable {
    ranges->Remove(gone);
    kept.reset();
  });
}

absl::StatusOr<DeviceBuffer> CudaBackend::Allocate(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("device memory of 0 bytes asked for");
  EBBTIDE_ASSIGN_OR_RETURN(DeviceBuffer buffer, AllocateDevicePool(device_, {.bytes = bytes}));
  return InReach(std::move(buffer));
}

absl::StatusOr<std::unique_ptr<Stream>> CudaBackend::MakeStream() {
  std::unique_ptr<CarryingStream> stream = idle_streams_->Take();
  if (stream == nullptr) {
    EBBTIDE_ASSIGN_OR_RETURN(std::unique_ptr<CudaStream> launches, CudaStream::Make());
    stream = std::make_unique<CarryingStream>(std::move(launches));
  }
  return std::make_unique<LentStream>(std::move(stream), idle_streams_);
}

absl::StatusOr<std::unique_ptr<HostReach>> CudaBackend::ReachHost(
    std::span<const std::byte> addresses) {
  if (!device_.reads_host_addresses) {
    return absl::UnimplementedError(
        absl::StrCat(device_.name, " has other addresses for host memory than this process"));
  }
  return std::make_unique<RegisteredReach>(ranges_, addresses);
}

absl::Status CudaBackend::Run(Stream& stream, const Batch& batch) {
  CarryingStream& carrying = static_cast<LentStream&>(stream).stream();
  carrying.arrays.SetReach(ranges_->Now());
  return std::visit(Runner{carrying, options_.carried_bytes_max}, batch);
}

}  // namespace ebbtide::gpu
