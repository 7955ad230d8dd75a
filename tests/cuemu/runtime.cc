// SPDX-License-Identifier: Apache-2.0

#include "tests/cuemu/runtime.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "tests/cuemu/device.h"

using cuemu::Answer;

namespace {

using Work = std::function<void()>;

// What a stream was given while it was captured.
struct Graph {
  std::vector<Work> works;
};

// Work in the order of issue; what has run is gone.
struct Stream {
  std::deque<Work> queue;
  uint64_t issued = 0;
  uint64_t done = 0;
  std::unique_ptr<Graph> capture;  // Takes work in the queue's place.
};

// Where in a stream an event stands.
struct Event {
  Stream* stream = nullptr;
  uint64_t after = 0;
};

struct Allocated {
  size_t bytes = 0;
  bool is_hidden = false;  // By cuemu::MapHidden.
};

struct Device {
  std::recursive_mutex mutex;  // Work that waits for an event runs another stream's.
  std::set<Stream*> streams;
  std::map<void*, Allocated> allocated;         // By cudaMalloc.
  std::map<void*, size_t> pinned;               // By cudaHostAlloc.
  std::atomic<cudaError_t> last = cudaSuccess;  // Answered without the lock, which others hold.
  std::atomic<bool> is_broken = false;
  bool is_capture_spoiled = false;  // By a call that a graph can't hold.
};

Device& TheDevice() {
  static Device* const device = new Device;
  return *device;
}

void RunUntil(Stream& stream, uint64_t count) {
  if (stream.done >= count) return;
  const cuemu::Working working;
  while (stream.done < count) {
    const Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    ++stream.done;
    work();
  }
}

void RunAll() {
  for (Stream* const stream : TheDevice().streams) RunUntil(*stream, stream->issued);
}

// Whether some stream is captured, which waits and allocations spoil (CUDA C++ Programming Guide,
// "Prohibited and Unhandled Operations" of stream capture).
bool SpoilsCapture() {
  for (const Stream* const stream : TheDevice().streams) {
    if (stream->capture != nullptr) TheDevice().is_capture_spoiled = true;
  }
  return TheDevice().is_capture_spoiled;
}

Stream* Real(cudaStream_t stream) {
  return reinterpret_cast<Stream*>(stream);
}
Event* Real(cudaEvent_t event) {
  return reinterpret_cast<Event*>(event);
}

// Memory that holds 0xFF; null where there is none.
void* Plain(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) return nullptr;
  std::memset(memory, 0xFF, bytes);
  return memory;
}

cudaError_t Allocate(void** memory, size_t bytes, void* (*from)(size_t)) {
  const std::lock_guard lock(TheDevice().mutex);
  if (SpoilsCapture()) return Answer(cudaErrorStreamCaptureUnsupported);
  *memory = from(bytes);
  return Answer(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

// What `map` holds at `memory`, which it holds no longer.
template <class Value>
Value Take(std::map<void*, Value>& map, void* memory) {
  const auto taken = map.extract(memory);
  return taken.empty() ? Value() : taken.mapped();
}

// Freeing waits for the whole device, as CUDA does.
void AwaitDevice() {
  (void)SpoilsCapture();
  RunAll();
}

}  // namespace

namespace cuemu {

cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard lock(TheDevice().mutex);
  if (stream == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  if (Real(stream)->capture != nullptr) {
    Real(stream)->capture->works.push_back(std::move(work));
  } else if (!TheDevice().is_broken) {
    Real(stream)->queue.push_back(std::move(work));
    ++Real(stream)->issued;
  }
  return Answer(cudaSuccess);
}

void BreakDevice() {
  const std::lock_guard lock(TheDevice().mutex);
  TheDevice().is_broken = true;
}
void HealDevice() {
  const std::lock_guard lock(TheDevice().mutex);
  TheDevice().is_broken = false;
  TheDevice().last = cudaSuccess;
}
cudaError_t Answer(cudaError_t error) {
  if (error == cudaSuccess && TheDevice().is_broken) error = cudaErrorLaunchFailure;
  if (error != cudaSuccess) TheDevice().last = error;
  return error;
}

}  // namespace cuemu

// The runtime's own functions, as cuda_runtime_api.h declares them.
// NOLINTBEGIN(readability-identifier-naming): CUDA's own names.
extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  const std::lock_guard lock(TheDevice().mutex);
  if (TheDevice().is_broken) return Answer(cudaErrorLaunchFailure);
  if (!cuemu::TakeDeviceBytes(bytes)) return Answer(cudaErrorMemoryAllocation);
  const bool is_hidden = cuemu::HidesMemory();
  const cudaError_t error = Allocate(memory, bytes, is_hidden ? &cuemu::MapHidden : &Plain);
  if (error == cudaSuccess) {
    TheDevice().allocated[*memory] = {bytes, is_hidden};
  } else {
    cuemu::GiveDeviceBytes(bytes);
  }
  return error;
}
cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(TheDevice().mutex);
  const Allocated allocated = Take(TheDevice().allocated, memory);
  cuemu::GiveDeviceBytes(allocated.bytes);
  AwaitDevice();
  if (allocated.is_hidden) {
    cuemu::UnmapHidden(memory, allocated.bytes);
  } else {
    std::free(memory);
  }
  return Answer(cudaSuccess);
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned /*flags*/) {
  const std::lock_guard lock(TheDevice().mutex);
  if (!cuemu::TakeLockedBytes(bytes)) return Answer(cudaErrorMemoryAllocation);
  const cudaError_t error = Allocate(memory, bytes, &Plain);
  if (error == cudaSuccess) {
    TheDevice().pinned[*memory] = bytes;
  } else {
    cuemu::GiveLockedBytes(bytes);
  }
  return error;
}
cudaError_t cudaFreeHost(void* memory) {
  const std::lock_guard lock(TheDevice().mutex);
  AwaitDevice();
  cuemu::GiveLockedBytes(Take(TheDevice().pinned, memory));
  std::free(memory);
  return Answer(cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return cuemu::Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return cuemu::Enqueue(stream, [=] { std::memset(memory, value, bytes); });
}

cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(TheDevice().mutex);
  if (SpoilsCapture()) return Answer(cudaErrorStreamCaptureUnsupported);
  RunAll();
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  const std::lock_guard lock(TheDevice().mutex);
  auto* const made = new Stream;
  TheDevice().streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(TheDevice().mutex);
  RunUntil(*Real(stream), Real(stream)->issued);
  TheDevice().streams.erase(Real(stream));
  delete Real(stream);
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard lock(TheDevice().mutex);
  if (Real(stream)->capture != nullptr && SpoilsCapture())
    return Answer(cudaErrorStreamCaptureUnsupported);
  RunUntil(*Real(stream), Real(stream)->issued);
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  const Event seen = *Real(event);
  return cuemu::Enqueue(stream, [seen] {
    if (seen.stream != nullptr) RunUntil(*seen.stream, seen.after);
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  const std::lock_guard lock(TheDevice().mutex);
  TheDevice().is_capture_spoiled = false;
  Real(stream)->capture = std::make_unique<Graph>();
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(TheDevice().mutex);
  std::unique_ptr<Graph> captured = std::move(Real(stream)->capture);
  *graph = nullptr;
  if (std::exchange(TheDevice().is_capture_spoiled, false))
    return Answer(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(captured.release());
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  *ready = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const Work& work : reinterpret_cast<Graph*>(graph)->works) {
    if (const cudaError_t error = cuemu::Enqueue(stream, work); error != cudaSuccess) return error;
  }
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return Answer(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return Answer(cudaSuccess);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete Real(event);
  return Answer(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(TheDevice().mutex);
  *Real(event) = {Real(stream), Real(stream)->issued};
  return Answer(cudaSuccess);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(TheDevice().mutex);
  const Event& seen = *Real(event);
  if (seen.stream != nullptr && seen.stream->done < seen.after) return cudaErrorNotReady;
  return Answer(cudaSuccess);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(TheDevice().mutex);
  const Event& seen = *Real(event);
  if (seen.stream != nullptr) RunUntil(*seen.stream, seen.after);
  return Answer(cudaSuccess);
}

cudaError_t cudaGetLastError() {
  const std::lock_guard lock(TheDevice().mutex);
  return TheDevice().last.exchange(cudaSuccess);
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorHostMemoryNotRegistered:
      return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
    default:
      return "cudaErrorUnknown";
  }
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming): back to the rules.
