// SPDX-License-Identifier: Apache-2.0

#include "gpu/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "base/bytes.h"
#include "gpu/cpu/attend_lanes.h"
#include "gpu/cpu/simd_targets.h"

namespace ebbtide::gpu {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Work is done before Run returns, so there is never anything to wait for.
class CpuStream final : public Stream {
 public:
  absl::Status Wait() override { return absl::OkStatus(); }
};

void ZeroCpu(const ZeroArgs& args) {
  std::ranges::fill(args.bytes, std::byte{});
}

// How each kind of batch is run.
struct Runner {
  ParallelFor& threads;

  void operator()(std::span<const AttendArgs> lanes) const { AttendLanes(lanes, threads); }
  void operator()(const FastDamage& batch) const { Each(batch.lanes, &FastDamageCpu); }
  void operator()(std::span<const AppendArgs> lanes) const { Each(lanes, &AppendCpu); }
  void operator()(std::span<const BoundArgs> lanes) const { Each(lanes, &BoundCpu); }
  void operator()(std::span<const CodeErrorArgs> lanes) const { Each(lanes, &CodeErrorsCpu); }
  void operator()(std::span<const DamageArgs> lanes) const { Each(lanes, &DamageCpu); }
  void operator()(std::span<const DecodeArgs> lanes) const { Each(lanes, &DecodeCpu); }
  void operator()(std::span<const DigestArgs> lanes) const { Each(lanes, &DigestCpu); }
  void operator()(std::span<const EncodeArgs> lanes) const { Each(lanes, &EncodeCpu); }
  void operator()(std::span<const GatherArgs> lanes) const { Each(lanes, &GatherCpu); }
  void operator()(std::span<const GeometryArgs> lanes) const { Each(lanes, &KeyDiffCpu); }
  void operator()(std::span<const MassArgs> lanes) const { Each(lanes, &MassCpu); }
  void operator()(std::span<const MergeArgs> lanes) const { Each(lanes, &MergeCpu); }
  void operator()(std::span<const PageDamageArgs> lanes) const { Each(lanes, &PageDamageCpu); }
  void operator()(std::span<const ValueDistanceArgs> lanes) const {
    Each(lanes, &ValueDistanceCpu);
  }
  void operator()(std::span<const WeightedValueArgs> lanes) const {
    Each(lanes, &WeightedValueCpu);
  }
  void operator()(std::span<const WindowArgs> lanes) const { Each(lanes, &WindowCpu); }
  void operator()(std::span<const ZeroArgs> ranges) const { Each(ranges, &ZeroCpu); }

  template <class Args>
  void Each(std::span<const Args> lanes, void (*operation)(const Args&)) const {
    threads.Run(static_cast<int>(lanes.size()),
                [&](int lane) { operation(lanes[static_cast<size_t>(lane)]); });
  }
};

}  // namespace

CpuBackend::CpuBackend(int threads)
    : name_(absl::StrCat("cpu (", std::string(ChosenSimdTarget()), ")")), threads_(threads) {}

// Mapped with room to spare, so that an aligned piece can be kept and the rest given back: the
// kernel backs it with huge pages only from a 2 MiB boundary on, which paged reads gain 3 to 17 %
// from. Mapped memory is zeroed.
absl::StatusOr<DeviceBuffer> CpuBackend::Allocate(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("device memory of 0 bytes asked for");
  const size_t size = RoundUp(bytes, kHugePageBytes);
  void* const memory = mmap(nullptr, size + kHugePageBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("simulated device memory of ", FormatBytes(bytes), ": ", std::strerror(errno),
                     "; lower the device budget or free memory (it may use ",
                     FormatBytes(AvailableMemoryBytes()), ")"));
  }
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const size_t before = RoundUp(address, kHugePageBytes) - address;
  auto* const start = static_cast<std::byte*>(memory) + before;
  if (before > 0) munmap(memory, before);
  if (before < kHugePageBytes) munmap(start + size, kHugePageBytes - before);
  madvise(start, size, MADV_HUGEPAGE);  // A wish: without it the pages are small.
  return DeviceBuffer({start, bytes},
                      [size](std::span<std::byte> kept) { munmap(kept.data(), size); });
}

absl::StatusOr<std::unique_ptr<Stream>> CpuBackend::MakeStream() {
  return std::make_unique<CpuStream>();
}

absl::Status CpuBackend::Run(Stream& /*stream*/, const Batch& batch) {
  std::visit(Runner{threads_}, batch);
  return absl::OkStatus();
}

}  // namespace ebbtide::gpu
