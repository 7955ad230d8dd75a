// SPDX-License-Identifier: Apache-2.0
//
// What a folder takes of the disk, as `du` counts it.

#pragma once

#include <cstdint>
#include <filesystem>

namespace ebbtide::test {

// Blocks of files and folders below `folder` and its own; files may come and go meanwhile.
uint64_t DiskUseBytes(const std::filesystem::path& folder);

}  // namespace ebbtide::test
