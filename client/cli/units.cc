// SPDX-License-Identifier: Apache-2.0
//
// Three significant digits throughout.

#include "client/cli/units.h"

#include <array>
#include <cmath>
#include <string_view>

#include "absl/strings/str_format.h"

namespace ebbtide::cli {
namespace {

std::string ThreeDigits(double number) {
  const int decimals = number < 9.995 ? 2 : number < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f", decimals, number);
}

}  // namespace

std::string FormatBytes(uint64_t bytes) {
  constexpr std::array<std::string_view, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrFormat("%u B", bytes);
  double size = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.5 and more would print as "1024".
  for (; size >= 1023.5 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  return absl::StrFormat("%s %s", ThreeDigits(size), kUnits[unit]);
}

std::string FormatCount(uint64_t count) {
  std::string digits = absl::StrFormat("%u", count);
  for (size_t end = digits.size(); end > 3; end -= 3) digits.insert(end - 3, ",");
  return digits;
}

std::string FormatElapsed(absl::Duration length) {
  const double seconds = absl::ToDoubleSeconds(length);
  if (seconds == 0) return "0 s";
  if (seconds < 0.9995e-3) return absl::StrFormat("%s us", ThreeDigits(seconds * 1e6));
  if (seconds < 0.9995) return absl::StrFormat("%s ms", ThreeDigits(seconds * 1e3));
  if (seconds < 120) return absl::StrFormat("%s s", ThreeDigits(seconds));
  const int64_t minutes = absl::ToInt64Minutes(length);
  if (minutes < 60) {
    return absl::StrFormat("%d min %d s", minutes, absl::ToInt64Seconds(length) % 60);
  }
  const int64_t hours = minutes / 60;
  if (hours < 48) return absl::StrFormat("%d h %d min", hours, minutes % 60);
  return absl::StrFormat("%d d %d h", hours / 24, hours % 24);
}

std::string FormatNumber(double number) {
  const double size = std::fabs(number);
  if (size == 0) return "0";
  if (size < 1e-3 || size >= 1e5) return absl::StrFormat("%.1e", number);
  if (size < 1) return absl::StrFormat("%.3g", number);
  return number < 0 ? "-" + ThreeDigits(size) : ThreeDigits(size);
}

std::string FormatPercent(double share) {
  if (share != 0 && std::fabs(share) < 1e-5) return "< 0.001 %";
  return absl::StrFormat("%s %%", FormatNumber(100 * share));
}

}  // namespace ebbtide::cli
