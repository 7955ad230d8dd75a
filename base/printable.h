// SPDX-License-Identifier: Apache-2.0
//
// What others wrote, such as paths and values of a file, as it may be shown: a terminal obeys some
// bytes, and neither JSON nor protobuf takes any that are no UTF-8.

#pragma once

#include <string>
#include <string_view>

namespace ebbtide {

// Each byte that is no part of a character to be seen is \xNN: control characters, line ends among
// them, and what is no UTF-8. Backslashes stay as they are, and so does what it gave before.
std::string Printable(std::string_view text);

// The same of each line: for text of ours that quotes others.
std::string PrintableLines(std::string_view text);

}  // namespace ebbtide
