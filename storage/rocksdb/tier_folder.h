// SPDX-License-Identifier: Apache-2.0
//
// The folder a RocksDB tier lives in: one owner at a time, empty at the start, and never a file
// deleted that is not ours. It knows names and locks; slot files and the index know what is inside.

#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "storage/rocksdb/file_calls.h"

namespace ebbtide::storage {

// Thread-safe.
class TierFolder {
 public:
  // Makes the folder where it is missing, locks it, and deletes what an earlier run left.
  //   kFailedPrecondition  another process owns it (named by its pid), it holds files of others, it
  //                        is another user's, or it is missing and the folder around it is
  //   kUnavailable         it cannot be made, read or emptied
  static absl::StatusOr<std::unique_ptr<TierFolder>> Take(const std::filesystem::path& path,
                                                          FileCalls& calls);
  ~TierFolder();
  TierFolder(const TierFolder&) = delete;
  TierFolder& operator=(const TierFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path index_path() const { return path_ / "index"; }
  std::filesystem::path segment_path(uint64_t slot_bytes, uint32_t id) const;
  bool is_direct() const { return is_direct_; }  // O_DIRECT works here.

  // Is the folder still there, and ours? Two system calls.
  //   kUnavailable  it was deleted, moved, unmounted or replaced
  absl::Status CheckOwned() const;

 private:
  TierFolder(std::filesystem::path path, int lock_fd);

  // fixed once taken
  const std::filesystem::path path_;
  const std::string lock_path_;
  const int lock_fd_;
  bool is_direct_ = false;
};

}  // namespace ebbtide::storage
