// SPDX-License-Identifier: Apache-2.0

#include "storage/tier.h"

#include "absl/strings/str_cat.h"

namespace ebbtide::storage {

absl::Status CheckRead(const PageRead& page, const RecordGeometry& geometry) {
  if (page.page >= geometry.pages()) {
    return absl::InvalidArgumentError(absl::StrCat("read of ", page.key.DebugString(), ": page ",
                                                   page.page, ", the block has ",
                                                   geometry.pages()));
  }
  if (page.into.empty() || page.into.size() != geometry.part_bytes(page.part)) {
    return absl::InvalidArgumentError(
        absl::StrCat("read of ", page.key.DebugString(), ": ", page.into.size(),
                     " B given, this part of a page has ", geometry.part_bytes(page.part), " B"));
  }
  return absl::OkStatus();
}

}  // namespace ebbtide::storage
