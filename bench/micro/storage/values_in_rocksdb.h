// SPDX-License-Identifier: Apache-2.0
//
// The alternative to slot files: records as values of RocksDB, set up as well as we know how. Kept
// so that the comparison can be run again (docs/decisions/0003-slot-files.md).

#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

#include "storage/block_key.h"

namespace rocksdb {
class DB;
}  // namespace rocksdb

namespace ebbtide::bench {

// Plain tables, direct I/O, no log, no compression: the best of the forms measured. Stops the
// process where RocksDB refuses.
class ValuesInRocksdb {
 public:
  explicit ValuesInRocksdb(const std::filesystem::path& folder);
  ~ValuesInRocksdb();

  void Put(const storage::BlockKey& key, std::span<const std::byte> record);
  void Delete(const storage::BlockKey& key);
  void Flush();  // What is in memory goes to disk.

 private:
  std::unique_ptr<rocksdb::DB> db_;
};

}  // namespace ebbtide::bench
