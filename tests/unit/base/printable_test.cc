// SPDX-License-Identifier: Apache-2.0
//
// Every byte and every character, by the rules of RFC 3629 and those of terminals.

#include "base/printable.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

namespace ebbtide {
namespace {

std::string Utf8(uint32_t code) {
  const auto byte = [](uint32_t value) { return std::string(1, static_cast<char>(value)); };
  const auto tail = [&](int shift_bits, uint32_t of) {
    return byte(0x80 | (of >> shift_bits & 0x3f));
  };
  if (code < 0x80) return byte(code);
  if (code < 0x800) return byte(0xc0 | code >> 6) + tail(0, code);
  if (code < 0x10000) return byte(0xe0 | code >> 12) + tail(6, code) + tail(0, code);
  return byte(0xf0 | code >> 18) + tail(12, code) + tail(6, code) + tail(0, code);
}

std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) absl::StrAppendFormat(&escaped, "\\x%02x", static_cast<uint8_t>(c));
  return escaped;
}

TEST(PrintableTest, EveryCharacterButControlsStays) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    const std::string character = Utf8(code);
    const bool is_control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    ASSERT_EQ(Printable(character), is_control ? Escaped(character) : character) << code;
  }
}

TEST(PrintableTest, WhatIsNoUtf8IsEscapedByteForByte) {
  for (uint32_t code = 0xd800; code < 0xe000; ++code) {
    ASSERT_EQ(Printable(Utf8(code)), Escaped(Utf8(code))) << "surrogate " << code;
  }
  for (int lead = 0x80; lead < 0x100; ++lead) {
    const std::string alone(1, static_cast<char>(lead));
    ASSERT_EQ(Printable(alone), Escaped(alone));
    ASSERT_EQ(Printable(alone + "a"), Escaped(alone) + "a");
  }
  for (const std::string text : {"\xc0\xaf", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",
                                 "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xe2\x80"}) {
    EXPECT_EQ(Printable(text), Escaped(text));
  }
}

TEST(PrintableTest, WhatFollowsAByteThatIsNoneIsRead) {
  EXPECT_EQ(Printable("/run/caf\xe9/\xc3\xa9.sock"), "/run/caf\\xe9/\xc3\xa9.sock");
  EXPECT_EQ(Printable("\xe2\xc3\xa9"), "\\xe2\xc3\xa9");
  EXPECT_EQ(Printable("a\x1b[31mb\n"), "a\\x1b[31mb\\x0a");
  EXPECT_EQ(Printable(std::string("\0a", 2)), "\\x00a");
  EXPECT_EQ(Printable(""), "");
}

TEST(PrintableTest, LinesKeepTheirEnds) {
  for (const std::string text : {"", "\n", "a", "a\n", "\n\na\nb", "a\n\n"}) {
    EXPECT_EQ(PrintableLines(text), text);
  }
  EXPECT_EQ(PrintableLines("a\r\n\x1b\n"), "a\\x0d\n\\x1b\n");
}

TEST(PrintableTest, WhatIsPrintableStaysAsItIs) {
  const std::string once = Printable("a\\b\xff");
  EXPECT_EQ(once, "a\\b\\xff");
  EXPECT_EQ(Printable(once), once);
}

}  // namespace
}  // namespace ebbtide
