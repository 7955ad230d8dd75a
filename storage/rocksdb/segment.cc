// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/segment.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "base/log.h"
#include "base/status_macros.h"

namespace ebbtide::storage {
namespace {

absl::Status FileError(const std::string& path, const char* call, int error) {
  return absl::UnavailableError(
      absl::StrCat("rocksdb tier: ", path, ": ", call, ": ", std::strerror(error)));
}

bool IsAligned(const std::byte* memory) {
  return reinterpret_cast<uintptr_t>(memory) % kRecordAlignment == 0;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Segment>> Segment::Create(const TierFolder& folder,
                                                         const SegmentShape& shape,
                                                         FileCalls& calls, IoBuffers& buffers) {
  const std::string path = folder.segment_path(shape.slot.bytes, shape.id).string();
  const int flags = O_RDWR | O_CREAT | O_EXCL | (folder.is_direct() ? O_DIRECT : 0);
  const int fd = calls.Open(path.c_str(), flags);
  if (fd < 0) return FileError(path, "cannot make a slot file", errno);
  return std::shared_ptr<Segment>(new Segment(folder, path, fd, shape, calls, buffers));
}

Segment::Segment(const TierFolder& folder, std::string path, int fd, const SegmentShape& shape,
                 FileCalls& calls, IoBuffers& buffers)
    : folder_(folder),
      path_(std::move(path)),
      fd_(fd),
      shape_(shape),
      is_direct_(folder.is_direct()),
      calls_(calls),
      buffers_(buffers) {}

Segment::~Segment() {
  if (const absl::Status status = Delete(); !status.ok() && folder_.CheckOwned().ok()) {
    Log(LogLevel::kWarn, "a slot file stays on the disk until the next start",
        {{"why", std::string(status.message())}});
  }
  close(fd_);
}

absl::Status Segment::TakeRoom() {
  // Unwritten but taken: a later write can no longer find the disk full. File systems without
  // fallocate (NFS, some FUSE) take space as it is written; a refusal comes then.
  if (calls_.Allocate(fd_, static_cast<off_t>(shape_.bytes())) == 0 || errno == EOPNOTSUPP)
    return absl::OkStatus();
  return FileError(path_, absl::StrCat("no room for ", shape_.bytes(), " B").c_str(), errno);
}

absl::Status Segment::Delete() {
  if (is_deleted_) return absl::OkStatus();
  // The file itself says whether it is gone: a name that is not found may be one in a folder that
  // is away, and comes back with it.
  struct stat file = {};
  if (fstat(fd_, &file) != 0 || file.st_nlink > 0) {
    // In a folder that is another's by now, a file of this name is another's too.
    EBBTIDE_RETURN_IF_ERROR(folder_.CheckOwned());
    if (calls_.Unlink(path_.c_str()) != 0 && errno != ENOENT)
      return FileError(path_, "cannot delete", errno);
  }
  is_deleted_ = true;
  return absl::OkStatus();
}

absl::Status Segment::Write(uint32_t slot, std::span<const std::byte> record) {
  EBBTIDE_CHECK(slot < shape_.slots && record.size() == shape_.slot.bytes,
                "a record fills one slot of its segment");
  const uint64_t offset = slot * shape_.slot.bytes;
  if (!is_direct_) {
    EBBTIDE_RETURN_IF_ERROR(WriteAligned(offset, record));
    if (calls_.Sync(fd_) != 0) return Error("cannot sync", offset);
    // Written and safe: the page cache need not hold it too. Best effort.
    posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(record.size()),
                  POSIX_FADV_DONTNEED);
    return absl::OkStatus();
  }
  if (IsAligned(record.data())) return WriteAligned(offset, record);
  const IoBuffers::Buffer buffer = buffers_.Lend(IoBuffers::kKeptBytes);
  for (uint64_t done = 0; done < record.size();) {
    const uint64_t bytes = std::min<uint64_t>(buffer.bytes().size(), record.size() - done);
    std::memcpy(buffer.bytes().data(), record.data() + done, bytes);
    EBBTIDE_RETURN_IF_ERROR(WriteAligned(offset + done, buffer.bytes().first(bytes)));
    done += bytes;
  }
  return absl::OkStatus();
}

absl::Status Segment::WriteAligned(uint64_t offset, std::span<const std::byte> bytes) {
  uint64_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = calls_.Write(fd_, bytes.data() + done, bytes.size() - done,
                                         static_cast<off_t>(offset + done));
    if (written > 0) {
      done += static_cast<uint64_t>(written);
    } else if (written == 0 || errno != EINTR) {
      if (written == 0) errno = EIO;
      return Error("cannot write", offset + done);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Segment::Read(uint32_t slot, uint64_t offset,
                                       std::span<std::byte> into) const {
  const uint64_t begin = slot * shape_.slot.bytes + offset;
  uint64_t done = 0;
  while (done < into.size()) {
    const ssize_t read =
        calls_.Read(fd_, into.data() + done, into.size() - done, static_cast<off_t>(begin + done));
    if (read > 0) {
      done += static_cast<uint64_t>(read);
    } else if (read == 0) {
      break;
    } else if (errno != EINTR) {
      return Error("cannot read", begin + done);
    }
  }
  return done;
}

absl::Status Segment::Error(const char* call, uint64_t offset) const {
  const int error = errno;
  return FileError(path_, absl::StrCat(call, " at ", offset).c_str(), error);
}

}  // namespace ebbtide::storage
