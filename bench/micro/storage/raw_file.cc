// SPDX-License-Identifier: Apache-2.0

#include "bench/micro/storage/raw_file.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/status_macros.h"

namespace ebbtide::bench {

RawFile::RawFile(const std::filesystem::path& path, uint64_t bytes) : path_(path), bytes_(bytes) {
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
  EBBTIDE_CHECK(fd_ >= 0, "the benchmark's folder takes O_DIRECT");
  EBBTIDE_CHECK(fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) == 0, "the disk has room");
}

RawFile::~RawFile() {
  close(fd_);
  unlink(path_.c_str());
}

void RawFile::Write(uint64_t offset, std::span<const std::byte> bytes) {
  const ssize_t done = pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
  EBBTIDE_CHECK(done == static_cast<ssize_t>(bytes.size()), "the disk takes all of a write");
}

void RawFile::Read(uint64_t offset, std::span<std::byte> into) const {
  const ssize_t done = pread(fd_, into.data(), into.size(), static_cast<off_t>(offset));
  EBBTIDE_CHECK(done == static_cast<ssize_t>(into.size()), "the disk gives all of a read");
}

}  // namespace ebbtide::bench
