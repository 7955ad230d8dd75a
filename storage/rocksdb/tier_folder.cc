// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/tier_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "rocksdb/db.h"
#include "rocksdb/options.h"

#include "base/log.h"
#include "base/status_macros.h"
#include "storage/block_record.h"
#include "storage/rocksdb/io_buffer.h"

namespace ebbtide::storage {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLockName = "ebbtide.lock";
constexpr std::string_view kMarker = "ebbtide rocksdb tier\n";  // The lock file's first line.
constexpr std::string_view kSegmentPrefix = "slots-";

absl::Status Unavailable(const fs::path& path, std::string_view what, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("rocksdb tier: ", path.string(), ": ",
                                             absl::string_view(what.data(), what.size()), ": ",
                                             why));
}

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

std::string SegmentName(uint64_t slot_bytes, uint32_t id) {
  return absl::StrCat(absl::string_view(kSegmentPrefix.data(), kSegmentPrefix.size()), slot_bytes,
                      "-", id);
}

bool IsSegmentName(std::string_view name) {
  if (!name.starts_with(kSegmentPrefix)) return false;
  name.remove_prefix(kSegmentPrefix.size());
  const size_t dash = name.find('-');
  return dash != std::string_view::npos && IsNumber(name.substr(0, dash)) &&
         IsNumber(name.substr(dash + 1));
}

// What lies in the folder, sorted by whether it is ours.
struct Contents {
  bool has_lock = false;
  bool has_index = false;
  std::vector<fs::path> segments;
  std::vector<std::string> foreign;
};

absl::StatusOr<Contents> List(const fs::path& folder) {
  Contents contents;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == kLockName) {
      contents.has_lock = true;
    } else if (name == "index") {
      contents.has_index = true;
    } else if (IsSegmentName(name)) {
      contents.segments.push_back(it->path());
    } else if (name != "lost+found") {  // The root of a file system of its own has one.
      contents.foreign.push_back(name);
    }
  }
  if (error) return Unavailable(folder, "cannot list", error.message());
  return contents;
}

std::string ReadText(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// May a tier live here and delete what it knows by name?
absl::Status CheckOurs(const fs::path& folder, const Contents& contents) {
  std::vector<std::string> foreign = contents.foreign;
  // Names alone prove nothing: without our lock file, an `index` may be anybody's. An empty one is
  // of a first start that was killed, or found the disk full, before it had written anything.
  const std::string lock = contents.has_lock ? ReadText(folder / kLockName) : "";
  const bool is_new = lock.empty() && !contents.has_index && contents.segments.empty();
  const bool is_ours = contents.has_lock && (is_new || std::string_view(lock).starts_with(kMarker));
  if (!is_ours) {
    if (contents.has_lock) foreign.emplace_back(kLockName);
    if (contents.has_index) foreign.emplace_back("index");
    for (const fs::path& segment : contents.segments) foreign.push_back(segment.filename());
  }
  if (foreign.empty()) return absl::OkStatus();
  const size_t named = std::min<size_t>(foreign.size(), 3);
  return absl::FailedPreconditionError(absl::StrCat(
      "rocksdb tier: ", folder.string(), " holds ", foreign.size(), " files that are not ours (",
      absl::StrJoin(foreign.begin(), foreign.begin() + static_cast<ptrdiff_t>(named), ", "),
      foreign.size() > named ? " and more" : "", "); point rocksdb.path at an empty folder"));
}

// Whoever owns the folder can put other files in the place of ours.
absl::Status CheckOwner(const fs::path& folder) {
  struct stat info = {};
  if (stat(folder.c_str(), &info) != 0) {
    return Unavailable(folder, "cannot look at", std::strerror(errno));
  }
  const uid_t self = geteuid();
  if (self == 0 || info.st_uid == 0 || info.st_uid == self) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rocksdb tier: ", folder.string(), " belongs to uid ", info.st_uid,
                   ", who could replace its files; this process runs as uid ", self,
                   ": point rocksdb.path at a folder of its own"));
}

// Of the nearest folder that is there: whoever owns it can put another in the place of ours.
absl::Status CheckParent(fs::path folder) {
  std::error_code error;
  do {
    folder = folder.parent_path();
  } while (folder.has_relative_path() && !fs::exists(folder, error));
  return CheckOwner(folder);
}

absl::StatusOr<int> Lock(const fs::path& folder) {
  const fs::path path = folder / kLockName;
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return Unavailable(path, "cannot open", std::strerror(errno));
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  const int error = errno;
  close(fd);
  if (error != EWOULDBLOCK) return Unavailable(path, "cannot lock", std::strerror(error));
  const std::string text = ReadText(path);
  const size_t pid = text.find("pid ");
  return absl::FailedPreconditionError(
      absl::StrCat("rocksdb tier: ", folder.string(), " is owned by a running process",
                   pid == std::string::npos
                       ? ""
                       : absl::StrCat(" (", text.substr(pid, text.find('\n', pid) - pid), ")"),
                   "; stop it, or point rocksdb.path elsewhere"));
}

absl::Status WriteMarker(int fd, const fs::path& folder) {
  const std::string text =
      absl::StrCat(absl::string_view(kMarker.data(), kMarker.size()), "pid ", getpid(), "\n");
  // In this order: who is killed in between, or finds the disk full, leaves the marker as it was.
  if (pwrite(fd, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) ||
      ftruncate(fd, static_cast<off_t>(text.size())) != 0) {
    return Unavailable(folder / kLockName, "cannot write", std::strerror(errno));
  }
  return absl::OkStatus();
}

// Deletes the databases of an earlier run, whole but for files that RocksDB does not know.
absl::Status WipeIndex(const fs::path& index) {
  std::error_code error;
  for (const fs::directory_entry& database : fs::directory_iterator(index, error)) {
    const rocksdb::Status status = rocksdb::DestroyDB(database.path().string(), rocksdb::Options());
    if (!status.ok()) return Unavailable(database.path(), "cannot delete", status.ToString());
    // An emptied folder goes, and one that holds something else stays: it is not ours.
    if (fs::exists(database.path(), error) && !fs::remove(database.path(), error)) {
      return absl::FailedPreconditionError(
          absl::StrCat("rocksdb tier: ", database.path().string(),
                       " holds files that are not ours; move them away"));
    }
  }
  if (!error) fs::remove(index, error);
  if (error) return Unavailable(index, "cannot delete", error.message());
  return absl::OkStatus();
}

// Deletes slot files and index of an earlier run. `contents` are known to be ours.
absl::Status Wipe(const fs::path& folder, const Contents& contents) {
  if (contents.segments.empty() && !contents.has_index) return absl::OkStatus();
  for (const fs::path& segment : contents.segments) {
    std::error_code error;
    if (!fs::remove(segment, error) && error) {
      return Unavailable(segment, "cannot delete", error.message());
    }
  }
  if (contents.has_index) EBBTIDE_RETURN_IF_ERROR(WipeIndex(folder / "index"));
  Log(LogLevel::kInfo, "rocksdb tier: deleted what an earlier run left; the tier starts empty",
      {{"folder", folder.string()}, {"slot_files", contents.segments.size()}});
  return absl::OkStatus();
}

// Can a file of this folder be written and read with O_DIRECT? Some file systems refuse at open,
// some only at the first write.
//   kUnavailable  neither yes nor no: the disk is full or broken
absl::StatusOr<bool> ProbeDirectIo(const fs::path& folder, FileCalls& calls) {
  const fs::path path = folder / SegmentName(0, 0);
  IoBuffers buffers;
  const auto buffer = buffers.Lend(kRecordAlignment);
  std::memset(buffer.bytes().data(), 0, kRecordAlignment);
  const int fd = calls.Open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT);
  const bool is_direct =
      fd >= 0 &&
      calls.Write(fd, buffer.bytes().data(), kRecordAlignment, 0) == ssize_t{kRecordAlignment} &&
      calls.Read(fd, buffer.bytes().data(), kRecordAlignment, 0) == ssize_t{kRecordAlignment};
  const int error = errno;
  if (fd >= 0) close(fd);
  calls.Unlink(path.c_str());  // A refused open may have made it all the same.
  if (!is_direct && error != EINVAL && error != EOPNOTSUPP) {
    return Unavailable(path, "cannot write", std::strerror(error));
  }
  return is_direct;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TierFolder>> TierFolder::Take(const fs::path& path,
                                                             FileCalls& calls) {
  std::error_code error;
  // A folder that is there was put there on purpose, wherever it lies.
  if (!fs::exists(path, error)) EBBTIDE_RETURN_IF_ERROR(CheckParent(path));
  if (fs::create_directories(path, error)) {
    fs::permissions(path, fs::perms::owner_all, error);  // Keys and values are for nobody else.
  }
  if (error) return Unavailable(path, "cannot make the folder", error.message());
  EBBTIDE_RETURN_IF_ERROR(CheckOwner(path));

  EBBTIDE_ASSIGN_OR_RETURN(const Contents seen, List(path));
  EBBTIDE_RETURN_IF_ERROR(CheckOurs(path, seen));  // Before our lock file is put beside others'.
  EBBTIDE_ASSIGN_OR_RETURN(const int lock_fd, Lock(path));
  std::unique_ptr<TierFolder> folder(new TierFolder(path, lock_fd));

  EBBTIDE_RETURN_IF_ERROR(folder->CheckOwned());
  EBBTIDE_RETURN_IF_ERROR(WriteMarker(lock_fd, path));
  EBBTIDE_ASSIGN_OR_RETURN(const Contents contents, List(path));
  EBBTIDE_RETURN_IF_ERROR(CheckOurs(path, contents));
  EBBTIDE_RETURN_IF_ERROR(Wipe(path, contents));
  EBBTIDE_ASSIGN_OR_RETURN(folder->is_direct_, ProbeDirectIo(path, calls));
  if (!folder->is_direct_) {
    Log(LogLevel::kWarn,
        "rocksdb tier: O_DIRECT refused; slot files go through the page cache and fdatasync",
        {{"folder", path.string()}});
  }
  return folder;
}

TierFolder::TierFolder(fs::path path, int lock_fd)
    : path_(std::move(path)), lock_path_((path_ / kLockName).string()), lock_fd_(lock_fd) {}

TierFolder::~TierFolder() {
  // The lock file stays: it marks the folder as ours, and unlinking it could let two owners in.
  close(lock_fd_);
}

fs::path TierFolder::segment_path(uint64_t slot_bytes, uint32_t id) const {
  return path_ / SegmentName(slot_bytes, id);
}

absl::Status TierFolder::CheckOwned() const {
  struct stat held = {};
  struct stat there = {};
  if (fstat(lock_fd_, &held) == 0 && stat(lock_path_.c_str(), &there) == 0 &&
      held.st_dev == there.st_dev && held.st_ino == there.st_ino) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("rocksdb tier: the folder ", path_.string(),
                   " vanished or was replaced; bring it back, or restart the daemon"));
}

}  // namespace ebbtide::storage
