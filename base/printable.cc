// SPDX-License-Identifier: Apache-2.0

#include "base/printable.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_format.h"

namespace ebbtide {
namespace {

// Bytes of the character that `text` begins with (RFC 3629); 0 where there is none to be seen.
size_t FirstCharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return lead >= ' ' && lead != 0x7f ? 1 : 0;
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return 0;
  uint32_t code = lead & (0xffU >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fU);
  }
  // Longer forms than needed are none, nor are U+0080 to U+009F to be seen: a terminal's commands.
  constexpr uint32_t kLeast[] = {0, 0, 0xa0, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code <= 0xdfff;
  return code < kLeast[bytes] || code > 0x10ffff || is_surrogate ? 0 : bytes;
}

}  // namespace

std::string Printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t bytes = FirstCharacterBytes(text);
    if (bytes == 0) {
      absl::StrAppendFormat(&shown, "\\x%02x", static_cast<uint8_t>(text.front()));
    } else {
      shown += text.substr(0, bytes);
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return shown;
}

std::string PrintableLines(std::string_view text) {
  std::string shown;
  for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
    shown += Printable(text.substr(0, end)) + '\n';
    text.remove_prefix(end + 1);
  }
  return shown + Printable(text);
}

}  // namespace ebbtide
