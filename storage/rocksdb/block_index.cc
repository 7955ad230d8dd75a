// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/block_index.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "rocksdb/db.h"
#include "rocksdb/env.h"
#include "rocksdb/iterator.h"
#include "rocksdb/status.h"

#include "base/log.h"
#include "base/status_macros.h"
#include "storage/rocksdb/rocksdb_options.h"

namespace ebbtide::storage {
namespace {

// Entries of one sequence lie together in block order, so numbers are big-endian.
using KeyBytes = std::array<char, 16>;

template <typename T>
void StoreBigEndian(T value, char* into) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    into[i] = static_cast<char>(value >> (8 * (sizeof(T) - 1 - i)));
  }
}

KeyBytes Encode(const BlockKey& key) {
  KeyBytes bytes;
  StoreBigEndian(key.sequence, &bytes[0]);
  StoreBigEndian(key.block, &bytes[8]);
  StoreBigEndian(key.generation, &bytes[12]);
  return bytes;
}

rocksdb::Slice SliceOf(const KeyBytes& bytes) {
  return {bytes.data(), bytes.size()};
}

// A value is a place, little-endian like the header that follows it.
static_assert(sizeof(SlotPlace) == 8);

// How a database ends: nothing in it outlives the process.
struct CloseAndDelete {
  rocksdb::Env* env;
  void operator()(rocksdb::DB* db) const {
    const std::string path = db->GetName();
    delete db;
    const rocksdb::Status status = rocksdb::DestroyDB(path, IndexOptions(env));
    if (status.ok()) return;
    Log(LogLevel::kWarn, "rocksdb tier: an index could not be deleted; the next start will",
        {{"folder", path}, {"error", status.ToString()}});
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockIndex>> BlockIndex::Create(const std::filesystem::path& folder,
                                                               rocksdb::Env* env) {
  std::unique_ptr<BlockIndex> index(
      new BlockIndex(folder, env != nullptr ? env : rocksdb::Env::Default()));
  EBBTIDE_ASSIGN_OR_RETURN(std::shared_ptr<rocksdb::DB> db, index->OpenNext());
  absl::MutexLock lock(&index->mu_);
  index->db_ = std::move(db);
  return index;
}

BlockIndex::BlockIndex(std::filesystem::path folder, rocksdb::Env* env)
    : folder_(std::move(folder)), env_(env) {}

BlockIndex::~BlockIndex() {
  absl::MutexLock lock(&mu_);
  db_.reset();
  std::error_code error;
  std::filesystem::remove(folder_, error);  // Empty by now; where it is not, the next start wipes.
}

absl::StatusOr<std::shared_ptr<rocksdb::DB>> BlockIndex::OpenNext() {
  std::filesystem::path path;
  {
    absl::MutexLock lock(&mu_);
    path = folder_ / std::to_string(next_number_++);
  }
  std::error_code error;
  std::filesystem::create_directories(path, error);  // Where it fails, RocksDB says so below.
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(IndexOptions(env_), path.string(), &db);
  if (status.ok()) return std::shared_ptr<rocksdb::DB>(db, CloseAndDelete{.env = env_});
  std::filesystem::remove_all(path, error);  // Made above, and empty of anybody else's files.
  return Error("open", status);
}

std::shared_ptr<rocksdb::DB> BlockIndex::db() const {
  absl::MutexLock lock(&mu_);
  return db_;
}

absl::Status BlockIndex::Rebuild() {
  EBBTIDE_ASSIGN_OR_RETURN(std::shared_ptr<rocksdb::DB> rebuilt, OpenNext());
  EBBTIDE_RETURN_IF_ERROR(Copy(*db(), *rebuilt));
  absl::MutexLock lock(&mu_);
  db_.swap(rebuilt);
  return absl::OkStatus();  // The old one goes after the lock, with the last look-up in it.
}

absl::Status BlockIndex::Copy(rocksdb::DB& source, rocksdb::DB& target) const {
  const std::unique_ptr<rocksdb::Iterator> it(source.NewIterator(IndexReadOptions()));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const rocksdb::Status status = target.Put(IndexWriteOptions(), it->key(), it->value());
    if (!status.ok()) return Error("rebuild", status);
  }
  return it->status().ok() ? absl::OkStatus() : Error("rebuild", it->status());
}

absl::Status BlockIndex::Put(const BlockKey& key, const SlotPlace& place,
                             std::span<const std::byte> header_used) {
  std::array<char, sizeof(SlotPlace)> place_bytes;
  std::memcpy(place_bytes.data(), &place, sizeof(place));
  const std::array<rocksdb::Slice, 2> value = {
      rocksdb::Slice(place_bytes.data(), place_bytes.size()),
      rocksdb::Slice(reinterpret_cast<const char*>(header_used.data()), header_used.size())};
  const KeyBytes key_bytes = Encode(key);
  const rocksdb::Slice key_slice = SliceOf(key_bytes);
  rocksdb::WriteBatch batch;
  rocksdb::Status status = batch.Put(rocksdb::SliceParts(&key_slice, 1),
                                     rocksdb::SliceParts(value.data(), value.size()));
  if (status.ok()) status = db()->Write(IndexWriteOptions(), &batch);
  return status.ok() ? absl::OkStatus() : Error("put", status);
}

absl::StatusOr<std::optional<BlockEntry>> BlockIndex::Get(const BlockKey& key) const {
  const KeyBytes key_bytes = Encode(key);
  const std::shared_ptr<rocksdb::DB> db = this->db();
  rocksdb::PinnableSlice value;  // Goes before the database it may point into.
  const rocksdb::Status status =
      db->Get(IndexReadOptions(), db->DefaultColumnFamily(), SliceOf(key_bytes), &value);
  if (status.IsNotFound()) return std::nullopt;
  if (status.IsCorruption())
    return absl::DataLossError(Error("get", status).message());  // Its block's, not the disk's.
  if (!status.ok()) return Error("get", status);
  if (value.size() < sizeof(SlotPlace)) {
    return absl::DataLossError(absl::StrCat("rocksdb tier: ", folder_.string(),
                                            ": the index entry of ", key.DebugString(), " has ",
                                            value.size(), " B"));
  }
  BlockEntry entry;
  std::memcpy(&entry.place, value.data(), sizeof(SlotPlace));
  const auto* header = reinterpret_cast<const std::byte*>(value.data()) + sizeof(SlotPlace);
  entry.header.assign(header, header + value.size() - sizeof(SlotPlace));
  return entry;
}

absl::Status BlockIndex::Delete(const BlockKey& key) {
  const KeyBytes key_bytes = Encode(key);
  const rocksdb::Status status = db()->Delete(IndexWriteOptions(), SliceOf(key_bytes));
  return status.ok() ? absl::OkStatus() : Error("delete", status);
}

uint64_t BlockIndex::EntryCostBytes(uint64_t header_used_bytes) {
  constexpr uint64_t kFramingBytes = 64;  // Sequence number, lengths, filter, index and block ends.
  return kIndexBytesPerEntryByte *
         (sizeof(KeyBytes) + sizeof(SlotPlace) + kFramingBytes + header_used_bytes);
}

absl::Status BlockIndex::Error(const char* call, const rocksdb::Status& status) const {
  return absl::UnavailableError(
      absl::StrCat("rocksdb tier: ", folder_.string(), ": index ", call, ": ", status.ToString()));
}

}  // namespace ebbtide::storage
