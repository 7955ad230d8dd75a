// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/rocksdb_options.h"

#include <array>
#include <cstdarg>
#include <cstdio>
#include <memory>

#include "rocksdb/cache.h"
#include "rocksdb/filter_policy.h"
#include "rocksdb/table.h"

#include "base/log.h"

namespace ebbtide::storage {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// RocksDB's own LOG file would grow beside the budget. Its errors go to our log; its warnings
// repeat what calls return.
class ForwardingLogger final : public rocksdb::Logger {
 public:
  ForwardingLogger() : rocksdb::Logger(rocksdb::InfoLogLevel::ERROR_LEVEL) {}

  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    std::array<char, 1024> text;
    std::vsnprintf(text.data(), text.size(), format, arguments);
    Log(LogLevel::kError, "rocksdb", {{"message", text.data()}});
  }
};

rocksdb::BlockBasedTableOptions TableOptions() {
  rocksdb::BlockBasedTableOptions table;
  table.checksum = rocksdb::kXXH3;  // Debian builds CRC32C without the CPU's instruction.
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));  // Misses read no block.
  table.block_cache = rocksdb::NewLRUCache(16 * kMiB);  // 8000 entries of a 4 MiB block each.
  table.cache_index_and_filter_blocks = true;           // So that the cache bounds them too.
  table.pin_l0_filter_and_index_blocks_in_cache = true;
  table.format_version = 5;
  return table;
}

}  // namespace

rocksdb::Options IndexOptions(rocksdb::Env* env) {
  rocksdb::Options options;
  options.env = env;
  options.create_if_missing = true;
  options.error_if_exists = true;  // The folder was wiped: anything there is not ours.
  options.info_log = std::make_shared<ForwardingLogger>();

  // Small memtables: 2 MiB are a thousand blocks of 4 MiB, seconds of writing at full rate, and the
  // logs that go with them stay small.
  options.write_buffer_size = 2 * kMiB;
  options.max_write_buffer_number = 2;
  options.max_total_wal_size = 4 * kMiB;

  // Little garbage rather than little work: the index is a thousandth of what is written.
  options.level0_file_num_compaction_trigger = 2;
  options.level0_slowdown_writes_trigger = 4;
  options.level0_stop_writes_trigger = 6;  // Bounds the garbage of level 0 at 12 MiB.
  options.target_file_size_base = 2 * kMiB;
  options.max_bytes_for_level_base = 8 * kMiB;
  options.max_compaction_bytes = 8 * kMiB;  // Bounds what lies twice during a compaction.
  options.max_background_jobs = 2;

  options.compression = rocksdb::kNoCompression;  // Checksums do not shrink.
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(TableOptions()));
  options.max_open_files = -1;  // A few dozen; kept open, they can be read if the folder goes.

  options.max_manifest_file_size = 1 * kMiB;        // Default 1 GiB, beside the budget.
  options.manifest_preallocation_size = kMiB / 16;  // Default 4 MiB, taken at once.
  options.keep_log_file_num = 1;
  options.stats_dump_period_sec = 0;  // No background work of an idle daemon.
  options.stats_persist_period_sec = 0;
  return options;
}

rocksdb::WriteOptions IndexWriteOptions() {
  // The log is on but not synced: the tier starts empty, so nothing is promised across a crash yet.
  return rocksdb::WriteOptions();
}

rocksdb::ReadOptions IndexReadOptions() {
  return rocksdb::ReadOptions();  // Verifies block checksums: an entry names bytes to trust.
}

}  // namespace ebbtide::storage
