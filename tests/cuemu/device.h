// SPDX-License-Identifier: Apache-2.0
//
// The device that the fake runtime finds, and what it may lack: a driver, a capability, memory. Its
// virtual memory is this process's, and faults where a GPU would: where it was not mapped, or
// access was not asked for. Tested by tests/unit/gpu/cuda_device_test.cc and device_pool_test.cc.

#pragma once

#include <cstddef>
#include <string>

namespace cuemu {

struct DeviceTraits {
  int driver_version = 13000;  // 0: no driver.
  int devices = 1;
  std::string name = "Emulated H200";
  int major = 9;
  int minor = 0;
  size_t memory_bytes = size_t{1} << 32;
  bool has_virtual_memory = true;
  bool exports_files = true;
  bool reads_host_addresses = true;
  bool hides_memory = false;                // Its memory faults but where work of a stream uses it.
  size_t lockable_bytes = size_t{1} << 40;  // Of host memory: registered or pinned.
  bool registers_memory = true;             // Of the host. Where not, it can be pinned still.
};

// The one there is from now on; DeviceTraits() at first.
void SetDevice(const DeviceTraits& traits);

// Device memory that is taken now: allocations, chunks; and host memory that is registered.
size_t DeviceBytesTaken();
size_t HostBytesRegistered();
// Whether one registered piece holds all of them.
bool IsRegistered(const void* memory, size_t bytes);
// Ranges of addresses reserved now.
int RangesReserved();

// For the runtime: takes device memory from what there is, or answers that it is full.
bool TakeDeviceBytes(size_t bytes);
void GiveDeviceBytes(size_t bytes);
// And host memory that stays locked.
bool TakeLockedBytes(size_t bytes);
void GiveLockedBytes(size_t bytes);

// For the runtime: memory that hides like the rest, holding 0xFF, its end before a page that nobody
// may touch; null where there is none. Must be given back with the same size.
void* MapHidden(size_t bytes);
void UnmapHidden(void* memory, size_t bytes);
bool HidesMemory();

// For the runtime: while it lives, work of a stream runs, which sees what is hidden. One at a time.
class Working {
 public:
  Working();
  ~Working();
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;
};

}  // namespace cuemu
