// SPDX-License-Identifier: Apache-2.0
//
// The system calls that slot files make, so that a test can refuse any of them
// (tests/support/faulty_file_calls.h). Each answers as its system call does: -1 and errno.

#pragma once

#include <sys/types.h>

#include <cstddef>

namespace ebbtide::storage {

// Thread-safe.
class FileCalls {
 public:
  virtual ~FileCalls() = default;

  virtual int Open(const char* path, int flags) = 0;  // open, mode 0600
  virtual int Allocate(int fd, off_t bytes) = 0;      // fallocate of [0, bytes)
  virtual ssize_t Read(int fd, void* into, size_t bytes, off_t offset) = 0;         // pread
  virtual ssize_t Write(int fd, const void* from, size_t bytes, off_t offset) = 0;  // pwrite
  virtual int Sync(int fd) = 0;                                                     // fdatasync
  virtual int Unlink(const char* path) = 0;                                         // unlink
};

// The kernel's.
FileCalls& SystemFileCalls();

}  // namespace ebbtide::storage
