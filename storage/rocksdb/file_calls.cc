// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/file_calls.h"

#include <fcntl.h>
#include <unistd.h>

namespace ebbtide::storage {
namespace {

class KernelFileCalls final : public FileCalls {
 public:
  int Open(const char* path, int flags) override { return open(path, flags | O_CLOEXEC, 0600); }
  int Allocate(int fd, off_t bytes) override { return fallocate(fd, 0, 0, bytes); }
  ssize_t Read(int fd, void* into, size_t bytes, off_t offset) override {
    return pread(fd, into, bytes, offset);
  }
  ssize_t Write(int fd, const void* from, size_t bytes, off_t offset) override {
    return pwrite(fd, from, bytes, offset);
  }
  int Sync(int fd) override { return fdatasync(fd); }
  int Unlink(const char* path) override { return unlink(path); }
};

}  // namespace

FileCalls& SystemFileCalls() {
  static KernelFileCalls calls;
  return calls;
}

}  // namespace ebbtide::storage
