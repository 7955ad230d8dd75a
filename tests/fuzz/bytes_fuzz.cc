// SPDX-License-Identifier: Apache-2.0
//
// Any text is a size or is refused, and what is accepted survives being written out again.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/bytes.h"
#include "base/status_macros.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto bytes = ebbtide::ParseBytes(text);
  if (!bytes.ok()) {
    return 0;
  }
  const auto again = ebbtide::ParseBytes(ebbtide::FormatBytes(*bytes));
  // Rounded up at the very top, a size may pass 16 EiB; anywhere else it parses.
  EBBTIDE_CHECK(again.ok() || *bytes > (uint64_t{1} << 63), "a formatted size must parse");
  return 0;
}
