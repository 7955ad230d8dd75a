// SPDX-License-Identifier: Apache-2.0

#include "bench/micro/storage/values_in_rocksdb.h"

#include "rocksdb/db.h"
#include "rocksdb/options.h"
#include "rocksdb/table.h"

#include "base/status_macros.h"

namespace ebbtide::bench {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

rocksdb::WriteOptions WithoutLog() {
  rocksdb::WriteOptions options;
  options.disableWAL = true;
  return options;
}

}  // namespace

ValuesInRocksdb::ValuesInRocksdb(const std::filesystem::path& folder) {
  rocksdb::BlockBasedTableOptions table;
  table.checksum = rocksdb::kXXH3;
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.write_buffer_size = 64 * kMiB;
  options.max_write_buffer_number = 3;
  options.max_background_jobs = 2;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  rocksdb::DB* db = nullptr;
  EBBTIDE_CHECK(rocksdb::DB::Open(options, folder.string(), &db).ok(), "RocksDB opens");
  db_.reset(db);
}

ValuesInRocksdb::~ValuesInRocksdb() = default;

void ValuesInRocksdb::Put(const storage::BlockKey& key, std::span<const std::byte> record) {
  const rocksdb::Slice value(reinterpret_cast<const char*>(record.data()), record.size());
  EBBTIDE_CHECK(db_->Put(WithoutLog(), key.DebugString(), value).ok(), "RocksDB takes a put");
}

void ValuesInRocksdb::Delete(const storage::BlockKey& key) {
  EBBTIDE_CHECK(db_->Delete(WithoutLog(), key.DebugString()).ok(), "RocksDB takes a delete");
}

void ValuesInRocksdb::Flush() {
  EBBTIDE_CHECK(db_->Flush(rocksdb::FlushOptions()).ok(), "RocksDB flushes");
}

}  // namespace ebbtide::bench
