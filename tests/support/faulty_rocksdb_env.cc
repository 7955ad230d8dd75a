// SPDX-License-Identifier: Apache-2.0

#include "tests/support/faulty_rocksdb_env.h"

#include <string>
#include <utility>

#include "rocksdb/file_system.h"

namespace ebbtide::test {
namespace {

using rocksdb::FileOptions;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

IOStatus Answer(const std::atomic<DiskState>& disk) {
  switch (disk.load()) {
    case DiskState::kWell:
      return IOStatus::OK();
    case DiskState::kFull:
      return IOStatus::NoSpace("injected: no space left on device");
    case DiskState::kBroken:
      return IOStatus::IOError("injected: input/output error");
  }
  return IOStatus::OK();
}

class FaultyFile final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  FaultyFile(std::unique_ptr<FSWritableFile>&& file, const std::atomic<DiskState>& disk)
      : FSWritableFileOwnerWrapper(std::move(file)), disk_(disk) {}

  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* debug) override {
    const IOStatus answer = Answer(disk_);
    return answer.ok() ? FSWritableFileOwnerWrapper::Append(data, options, debug) : answer;
  }
  IOStatus Append(const Slice& data, const IOOptions& options,
                  const rocksdb::DataVerificationInfo& info, IODebugContext* debug) override {
    const IOStatus answer = Answer(disk_);
    return answer.ok() ? FSWritableFileOwnerWrapper::Append(data, options, info, debug) : answer;
  }

 private:
  const std::atomic<DiskState>& disk_;
};

class FaultyFileSystem final : public rocksdb::FileSystemWrapper {
 public:
  explicit FaultyFileSystem(const std::atomic<DiskState>& disk)
      : FileSystemWrapper(rocksdb::FileSystem::Default()), disk_(disk) {}

  const char* Name() const override { return "FaultyFileSystem"; }
  IOStatus NewWritableFile(const std::string& name, const FileOptions& options,
                           std::unique_ptr<FSWritableFile>* result,
                           IODebugContext* debug) override {
    if (const IOStatus answer = Answer(disk_); !answer.ok()) return answer;
    std::unique_ptr<FSWritableFile> file;
    const IOStatus status = FileSystemWrapper::NewWritableFile(name, options, &file, debug);
    if (status.ok()) *result = std::make_unique<FaultyFile>(std::move(file), disk_);
    return status;
  }

 private:
  const std::atomic<DiskState>& disk_;
};

}  // namespace

std::unique_ptr<rocksdb::Env> MakeFaultyRocksdbEnv(const std::atomic<DiskState>* disk) {
  return rocksdb::NewCompositeEnv(std::make_shared<FaultyFileSystem>(*disk));
}

}  // namespace ebbtide::test
