// SPDX-License-Identifier: Apache-2.0
//
// A folder for a program and the processes that it starts, gone with the program however that ends:
// a guard, a process of its own, waits for the end and removes what is still there. Contract:
// tests/unit/client/own_folder_test.cc.

#pragma once

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace ebbtide::cli {

class OwnFolder {
 public:
  // A new folder PREFIX-… among temporary files. It forks: no other thread may be
  // at work.
  //   kUnavailable  names what could not be made
  static absl::StatusOr<OwnFolder> Make(const std::string& prefix);
  OwnFolder(OwnFolder&& other) noexcept;
  OwnFolder& operator=(OwnFolder&&) = delete;
  ~OwnFolder();  // Removes it, and lets the guard go.

  const std::string& path() const { return path_; }

 private:
  OwnFolder(std::string path, pid_t guard) : path_(std::move(path)), guard_(guard) {}

  std::string path_;
  pid_t guard_ = -1;
};

}  // namespace ebbtide::cli
