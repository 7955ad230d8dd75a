// SPDX-License-Identifier: Apache-2.0

#include "tests/support/temp_folder.h"

#include <cstdlib>
#include <string>
#include <system_error>

#include "base/status_macros.h"

namespace ebbtide::test {

TempFolder::TempFolder() {
  // Short, since unix sockets inside allow a path of 107 characters.
  std::string name = (std::filesystem::temp_directory_path() / "ebb-XXXXXX").string();
  EBBTIDE_CHECK(mkdtemp(name.data()) != nullptr, "no temporary folder could be made");
  path_ = name;
}

TempFolder::~TempFolder() {
  std::error_code ignored;  // A test that passed has nothing to say about what is left.
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace ebbtide::test
