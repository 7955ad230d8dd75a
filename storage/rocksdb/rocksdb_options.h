// SPDX-License-Identifier: Apache-2.0
//
// Every option set on RocksDB, each with its reason in the source. RocksDB holds the index alone:
// some kilobytes for each block, written once, erased once.

#pragma once

#include <cstdint>

#include "rocksdb/env.h"
#include "rocksdb/options.h"

namespace ebbtide::storage {

// What the index's files may take beyond its live entries: write-ahead logs, memtables on their way
// down, garbage, and a compaction's output beside its input. RocksdbTierTest.DiskUseIsWithinUsage
// holds du against it.
inline constexpr uint64_t kIndexHeadroomBytes = uint64_t{32} << 20;

// Space on disk for one byte of live entries: leveled compaction keeps a tenth of garbage, and an
// entry lies twice while it is compacted.
inline constexpr uint64_t kIndexBytesPerEntryByte = 2;

// `env` outlives the database.
rocksdb::Options IndexOptions(rocksdb::Env* env);

rocksdb::WriteOptions IndexWriteOptions();
rocksdb::ReadOptions IndexReadOptions();

}  // namespace ebbtide::storage
