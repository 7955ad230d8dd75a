// SPDX-License-Identifier: Apache-2.0
//
// Rows and columns for people: as wide as needed, numbers to the right, nothing else.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ebbtide::cli {

enum class Align : uint8_t { kLeft, kRight };

struct Column {
  std::string heading;
  Align align = Align::kLeft;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns);

  // Missing cells are empty; cells beyond the last column are dropped.
  void AddRow(std::vector<std::string> cells);

  // Heading, rows, each ended by a newline, no trailing blanks.
  std::string Render() const;
  size_t Width() const;  // Of the longest line, trailing blanks and all.

 private:
  std::vector<size_t> ColumnWidths() const;

  const std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// "snapkv(sinks=4,window=16)+caote" to "snapkv+caote", where a column has to be narrow.
std::string WithoutArguments(std::string_view text);

// Characters a terminal shows for UTF-8 `text`; combining and wide ones are not used here.
size_t DisplayWidth(std::string_view text);

}  // namespace ebbtide::cli
