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
  if (page.into.size() != geometry.page_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("read of ", page.key.DebugString(), ": ",
                                                   page.into.size(), " B given, a page has ",
                                                   geometry.page_bytes, " B"));
  }
  return absl::OkStatus();
}

}  // namespace ebbtide::storage
