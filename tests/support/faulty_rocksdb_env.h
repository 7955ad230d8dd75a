// SPDX-License-Identifier: Apache-2.0
//
// RocksDB's environment with a disk that can be full or broken: appends and new files fail while
// told to, reads go on.

#pragma once

#include <atomic>
#include <memory>

#include "rocksdb/env.h"

namespace ebbtide::test {

enum class DiskState { kWell, kFull, kBroken };

// The environment writes while `*disk` is kWell; `disk` outlives it.
std::unique_ptr<rocksdb::Env> MakeFaultyRocksdbEnv(const std::atomic<DiskState>* disk);

}  // namespace ebbtide::test
