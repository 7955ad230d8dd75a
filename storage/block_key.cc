// SPDX-License-Identifier: Apache-2.0

#include "storage/block_key.h"

#include "absl/strings/str_cat.h"

namespace ebbtide::storage {

std::string BlockKey::DebugString() const {
  return absl::StrCat("sequence ", sequence, ", block ", block, ", generation ", generation);
}

}  // namespace ebbtide::storage
