// SPDX-License-Identifier: Apache-2.0

#include "base/bytes.h"

#include <array>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"

namespace ebbtide {
namespace {

struct Unit {
  std::string_view name;
  uint64_t bytes;
};

constexpr std::array kUnits = {
    Unit{"", 1},
    Unit{"B", 1},
    Unit{"KiB", uint64_t{1} << 10},
    Unit{"MiB", uint64_t{1} << 20},
    Unit{"GiB", uint64_t{1} << 30},
    Unit{"TiB", uint64_t{1} << 40},
    Unit{"kB", 1'000},
    Unit{"MB", 1'000'000},
    Unit{"GB", 1'000'000'000},
    Unit{"TB", 1'000'000'000'000},
};

absl::Status NotASize(std::string_view text, std::string_view reason) {
  return absl::InvalidArgumentError(
      absl::StrFormat("'%s' is not a size: %s; write a number and a unit, as in 512MiB or 1.5GiB "
                      "(B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)",
                      std::string(text), std::string(reason)));
}

// Takes the leading digits off `text`.
std::string_view TakeDigits(std::string_view& text) {
  size_t length = 0;
  while (length < text.size() && absl::ascii_isdigit(static_cast<unsigned char>(text[length]))) {
    ++length;
  }
  const std::string_view digits = text.substr(0, length);
  text.remove_prefix(length);
  return digits;
}

// value * 10 + digit, digit by digit; false where that passes 64 bits.
bool ReadDigits(std::string_view digits, uint64_t& value) {
  for (const char digit : digits) {
    if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
        __builtin_add_overflow(value, static_cast<uint64_t>(digit - '0'), &value)) {
      return false;
    }
  }
  return true;
}

const Unit* FindUnit(std::string_view name) {
  for (const Unit& unit : kUnits) {
    if (unit.name == name) {
      return &unit;
    }
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  std::string_view rest = text;
  const std::string_view whole_digits = TakeDigits(rest);
  if (whole_digits.empty()) {
    return NotASize(text, "it does not begin with a digit");
  }
  std::string_view thousandths;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    thousandths = TakeDigits(rest);
    if (thousandths.empty() || thousandths.size() > 3) {
      return NotASize(text, "it needs one to three digits after the point");
    }
  }
  if (rest.size() > 1 && rest.front() == ' ') {
    rest.remove_prefix(1);
  }
  const Unit* unit = FindUnit(rest);
  if (unit == nullptr) {
    return NotASize(text, absl::StrFormat("'%s' is no unit", std::string(rest)));
  }

  uint64_t bytes = 0;
  if (!ReadDigits(whole_digits, bytes) || __builtin_mul_overflow(bytes, unit->bytes, &bytes)) {
    return NotASize(text, "it is above 16 EiB");
  }
  uint64_t fraction = 0;
  ReadDigits(thousandths, fraction);  // Three digits always fit, times 2^40 too.
  for (size_t digits = thousandths.size(); digits < 3; ++digits) {
    fraction *= 10;
  }
  if (__builtin_add_overflow(bytes, fraction * unit->bytes / 1000, &bytes)) {
    return NotASize(text, "it is above 16 EiB");
  }
  return bytes;
}

std::string FormatBytes(uint64_t bytes) {
  constexpr std::array<std::string_view, 3> kNames = {"MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / (1 << 20);
  if (value < 1) {
    return absl::StrFormat("%d B", bytes);
  }
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  std::string number = absl::StrFormat("%.2f", value);
  while (number.back() == '0') {
    number.pop_back();
  }
  if (number.back() == '.') {
    number.pop_back();
  }
  return number + " " + std::string(kNames[unit]);
}

}  // namespace ebbtide
