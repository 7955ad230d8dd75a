// SPDX-License-Identifier: Apache-2.0
//
// RocksDB as the index of the slot files: key to place and header. It decides what is held: a
// record without an entry does not exist. It moves no payload.

#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "storage/block_key.h"
#include "storage/rocksdb/slot_file.h"

namespace rocksdb {
class DB;
class Env;
class Status;
}  // namespace rocksdb

namespace ebbtide::storage {

struct BlockEntry {
  SlotPlace place;
  std::vector<std::byte> header;  // The record's, without its padding (block_record.h).
};

// Thread-safe; Rebuild alone must not overlap with Put and Delete. Every error names the folder.
class BlockIndex {
 public:
  // Makes the index in a sub-folder of `folder`; its files go with it. `env` outlives it; null is
  // the machine's.
  //   kUnavailable  RocksDB cannot open it
  static absl::StatusOr<std::unique_ptr<BlockIndex>> Create(const std::filesystem::path& folder,
                                                            rocksdb::Env* env);
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  //   kUnavailable  the disk did not answer, or is full
  absl::Status Put(const BlockKey& key, const SlotPlace& place,
                   std::span<const std::byte> header_used);

  // Nothing where the key is not held.
  //   kDataLoss     the entry is damaged
  //   kUnavailable  the disk did not answer
  absl::StatusOr<std::optional<BlockEntry>> Get(const BlockKey& key) const;

  //   kUnavailable  as Put
  absl::Status Delete(const BlockKey& key);

  // After a failed Put or Delete RocksDB may refuse all further ones, for good. This copies what is
  // held into a new database and goes on with that one; look-ups go on meanwhile.
  //   kUnavailable  the fault is still there, nothing has changed
  absl::Status Rebuild() ABSL_LOCKS_EXCLUDED(mu_);

  // Bytes of disk that an entry with a header of `header_used_bytes` may take, garbage included.
  static uint64_t EntryCostBytes(uint64_t header_used_bytes);

 private:
  BlockIndex(std::filesystem::path folder, rocksdb::Env* env);

  // An empty database in a sub-folder of its own.
  absl::StatusOr<std::shared_ptr<rocksdb::DB>> OpenNext() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Copy(rocksdb::DB& source, rocksdb::DB& target) const;
  std::shared_ptr<rocksdb::DB> db() const ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Error(const char* call, const rocksdb::Status& status) const;

  // fixed after construction
  const std::filesystem::path folder_;
  rocksdb::Env* const env_;

  // guarded by mu_
  mutable absl::Mutex mu_;
  std::shared_ptr<rocksdb::DB> db_ ABSL_GUARDED_BY(mu_);  // Shared with look-ups under way.
  uint32_t next_number_ ABSL_GUARDED_BY(mu_) = 1;
};

}  // namespace ebbtide::storage
