// SPDX-License-Identifier: Apache-2.0
//
// Sizes with units, as people write them, and rounding to alignments.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ebbtide {

// "512MiB", "1.5 GiB", "64kB", "4096", "4096 B". Units: B, KiB, MiB, GiB, TiB (powers of 1024), kB,
// MB, GB, TB (powers of 1000); none means bytes. At most three digits after the point; a fraction
// of a byte is cut off.
//   kInvalidArgument  not a size; the message quotes the text and says what would be
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);

// For people: "196608 B" below 1 MiB, else two digits after the point at most: "4 MiB", "1.46 GiB".
std::string FormatBytes(uint64_t bytes);

// The least multiple of `multiple` (> 0) that is >= value. The sum must fit.
constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ebbtide
