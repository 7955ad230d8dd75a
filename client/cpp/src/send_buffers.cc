// SPDX-License-Identifier: Apache-2.0

#include "client/cpp/src/send_buffers.h"

#include <utility>

namespace ebbtide::client {

std::shared_ptr<uint8_t[]> SendBuffers::Take(size_t bytes) {
  if (bytes < kStepBytes) return std::make_shared_for_overwrite<uint8_t[]>(bytes);
  Buffer buffer = TakeSpare(*spares_, bytes);
  if (buffer.memory == nullptr) {
    const size_t size = (bytes + kStepBytes - 1) / kStepBytes * kStepBytes;
    buffer = {.memory = std::make_unique_for_overwrite<uint8_t[]>(size), .bytes = size};
  }
  uint8_t* const memory = buffer.memory.release();
  return {memory, [spares = spares_, size = buffer.bytes](uint8_t* kept) {
            GiveBack(*spares, {.memory = std::unique_ptr<uint8_t[]>(kept), .bytes = size});
          }};
}

size_t SendBuffers::kept_bytes() const {
  const absl::MutexLock lock(&spares_->mu);
  return spares_->bytes;
}

// The smallest that is large enough.
SendBuffers::Buffer SendBuffers::TakeSpare(Spares& spares, size_t bytes) {
  const absl::MutexLock lock(&spares.mu);
  auto best = spares.buffers.end();
  for (auto it = spares.buffers.begin(); it != spares.buffers.end(); ++it) {
    const bool is_better = best == spares.buffers.end() || it->bytes < best->bytes;
    if (it->bytes >= bytes && is_better) best = it;
  }
  if (best == spares.buffers.end()) return {};
  Buffer found = std::move(*best);
  spares.buffers.erase(best);
  spares.bytes -= found.bytes;
  return found;
}

// The newest are kept: what is sent now is sent again.
void SendBuffers::GiveBack(Spares& spares, Buffer buffer) {
  if (buffer.bytes > kKeptBytesMax) return;
  std::vector<Buffer> dropped;  // Freed outside of the lock.
  const absl::MutexLock lock(&spares.mu);
  spares.bytes += buffer.bytes;
  spares.buffers.push_back(std::move(buffer));
  while (spares.bytes > kKeptBytesMax) {
    spares.bytes -= spares.buffers.front().bytes;
    dropped.push_back(std::move(spares.buffers.front()));
    spares.buffers.erase(spares.buffers.begin());
  }
}

}  // namespace ebbtide::client
