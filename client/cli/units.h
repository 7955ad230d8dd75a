// SPDX-License-Identifier: Apache-2.0
//
// Numbers as people read them in a table: three digits and a unit. The daemon's messages have a
// FormatBytes of their own (base/bytes.h), whose texts parse back.

#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace ebbtide::cli {

std::string FormatBytes(uint64_t bytes);           // "0 B", "1.50 KiB", "12.0 GiB"
std::string FormatCount(uint64_t count);           // "12,345"
std::string FormatElapsed(absl::Duration length);  // "45.0 us", "1.20 ms", "3.00 s", "2 h 5 min"
std::string FormatNumber(double number);           // "0.0213", "3.1e-07", "12.4", "0"
std::string FormatPercent(double share);           // 0.125: "12.5 %"

}  // namespace ebbtide::cli
