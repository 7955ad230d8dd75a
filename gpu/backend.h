// SPDX-License-Identifier: Apache-2.0
//
// A Backend is one device: its memory, its streams, and the operations of gpu/kernels over many
// lanes at once. It knows arrays; what they mean is decided above (service/).
//
// Implementations: cpu/, cuda/. Tested by tests/unit/gpu/backend_test.cc.

#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "gpu/device_buffer.h"
#include "gpu/kernels/append.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/damage.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/gather.h"
#include "gpu/kernels/geometry.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/merge.h"
#include "gpu/kernels/page_damage.h"
#include "gpu/kernels/window.h"

namespace ebbtide::gpu {

// The order of work: what is run on one stream happens in the order it was asked for. The only way
// to wait. Thread-compatible.
class Stream {
 public:
  virtual ~Stream() = default;

  // Returns when everything run on the stream is done and its results may be read.
  //   kUnavailable  the device failed; nothing of it may be trusted any more
  virtual absl::Status Wait() = 0;
};

// Addresses of this machine's memory that kernels read where they lie, over the bus, as long as
// this lives: nothing there is brought, so whoever names an array in it has it registered.
// Thread-safe.
class HostReach {
 public:
  virtual ~HostReach() = default;

  // Locks the pages of `memory`, which lies within the addresses and holds memory, until what is
  // returned goes; it must not be freed before. May wait for what the device is at.
  //   kInvalidArgument    nothing, or some is registered already
  //   kResourceExhausted  HostMemoryFull: the machine does not lock it, and why
  //   kUnavailable        the device failed
  virtual absl::StatusOr<std::shared_ptr<void>> Register(std::span<std::byte> memory) = 0;
};

// FastCAOTE, whose args are those of damage (damage.h).
struct FastDamage {
  std::span<const DamageArgs> lanes;
};

// Zeroes `bytes`: memory that its next owner must not read another's tokens in.
struct ZeroArgs {
  std::span<std::byte> bytes;
};

// One operation over lanes, of which none writes what another touches. A vector of args converts:
//   backend.Run(*stream, attends)
//
// Arrays that args name, extents and slots among them, may lie anywhere: in memory from Allocate,
// which the device works on where it lies, in a HostReach, which it reads there, or elsewhere in
// the caller's, which it is brought from and back to. Whoever has much of the former and little of
// the latter moves few bytes.
using Batch = std::variant<
    std::span<const AppendArgs>, std::span<const AttendArgs>, std::span<const BoundArgs>,
    std::span<const CodeErrorArgs>, std::span<const DamageArgs>, FastDamage,
    std::span<const DecodeArgs>, std::span<const DigestArgs>, std::span<const EncodeArgs>,
    std::span<const GatherArgs>, std::span<const GeometryArgs>, std::span<const MassArgs>,
    std::span<const MergeArgs>, std::span<const PageDamageArgs>, std::span<const ValueDistanceArgs>,
    std::span<const WeightedValueArgs>, std::span<const WindowArgs>, std::span<const ZeroArgs>>;

// Thread-safe; a stream belongs to one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  // "cpu (avx512)": for people and statistics.
  virtual std::string_view name() const = 0;

  // The device's memory is this machine's: a daemon without a GPU says so on every surface.
  virtual bool is_simulated() const = 0;

  // Zeroed, aligned to 2 MiB.
  //   kInvalidArgument    no bytes asked for
  //   kResourceExhausted  the device has no such room
  virtual absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) = 0;

  virtual absl::StatusOr<std::unique_ptr<Stream>> MakeStream() = 0;

  // Of host memory that kernels only read. What decorates a backend need not pass it on.
  //   kUnimplemented  the device reads none in place, or all
  virtual absl::StatusOr<std::unique_ptr<HostReach>> ReachHost(
      std::span<const std::byte> /*addresses*/) {
    return absl::UnimplementedError("this device reads host memory in no way of its own");
  }

  // Runs `batch` in stream order: it reads what those before it on the stream wrote. The args and
  // what they point to must stay until Wait, and what was written may be read by others than the
  // stream only then. Gives the same bits for any number of threads and any company in the batch. A
  // broken contract (a span of the wrong size) stops the process.
  //   kResourceExhausted  the device has no room for what is brought, or this machine none that it
  //                       can be brought from (host_memory_full.h); some lanes may have run
  //   kInternal           the device does not run this build's kernel
  //   kUnavailable        the device failed
  virtual absl::Status Run(Stream& stream, const Batch& batch) = 0;
};

}  // namespace ebbtide::gpu
