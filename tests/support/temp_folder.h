// SPDX-License-Identifier: Apache-2.0
//
// A folder of a test's own, gone with it.

#pragma once

#include <filesystem>

namespace ebbtide::test {

class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace ebbtide::test
