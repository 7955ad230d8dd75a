// SPDX-License-Identifier: Apache-2.0

#include "tests/support/faulty_file_calls.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <new>

namespace ebbtide::test {
namespace {

constexpr size_t kPartBytes = 8192;  // O_DIRECT goes on at multiples of 4096.

storage::FileCalls& Kernel() {
  return storage::SystemFileCalls();
}

// Fails with `error` where there is one.
bool Fails(int error) {
  if (error != 0) errno = error;
  return error != 0;
}

}  // namespace

int FaultyFileCalls::Open(const char* path, int flags) {
  if (on_open) on_open();
  if (open_throws) throw std::bad_alloc();
  if (Fails(open_error)) return -1;
  if (refuse_direct && (flags & O_DIRECT) != 0) {
    errno = EINVAL;
    return -1;
  }
  return Kernel().Open(path, flags);
}

int FaultyFileCalls::Allocate(int fd, off_t bytes) {
  if (Fails(allocate_error)) return -1;
  if (bytes > room_bytes) {
    errno = ENOSPC;
    return -1;
  }
  return Kernel().Allocate(fd, bytes);
}

ssize_t FaultyFileCalls::Read(int fd, void* into, size_t bytes, off_t offset) {
  ++reads;
  if (Fails(read_error)) return -1;
  return Kernel().Read(fd, into, short_transfers ? std::min(bytes, kPartBytes) : bytes, offset);
}

ssize_t FaultyFileCalls::Write(int fd, const void* from, size_t bytes, off_t offset) {
  if (write_throws) throw std::bad_alloc();
  const int error = write_error;
  if (error == 0) {
    return Kernel().Write(fd, from, short_transfers ? std::min(bytes, kPartBytes) : bytes, offset);
  }
  Kernel().Write(fd, from, bytes / 2 / 4096 * 4096, offset);
  errno = error;
  return -1;
}

int FaultyFileCalls::Sync(int fd) {
  ++syncs;
  return Fails(sync_error) ? -1 : Kernel().Sync(fd);
}

int FaultyFileCalls::Unlink(const char* path) {
  if (on_unlink) on_unlink();
  return Fails(unlink_error) ? -1 : Kernel().Unlink(path);
}

}  // namespace ebbtide::test
