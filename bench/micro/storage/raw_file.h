// SPDX-License-Identifier: Apache-2.0
//
// The limit that the disk tier is held against: one preallocated file, O_DIRECT, no index, no
// checksum.

#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace ebbtide::bench {

// Stops the process where the disk refuses: there is nothing to measure then.
class RawFile {
 public:
  RawFile(const std::filesystem::path& path, uint64_t bytes);
  ~RawFile();  // Deletes it.
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;

  // Memory, length and offset are multiples of 4096.
  void Write(uint64_t offset, std::span<const std::byte> bytes);
  void Read(uint64_t offset, std::span<std::byte> into) const;

  uint64_t bytes() const { return bytes_; }

 private:
  const std::filesystem::path path_;
  const uint64_t bytes_;
  int fd_ = -1;
};

}  // namespace ebbtide::bench
