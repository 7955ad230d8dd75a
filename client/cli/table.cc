// SPDX-License-Identifier: Apache-2.0
//
// Tables: measured, then padded.

#include "client/cli/table.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ebbtide::cli {
namespace {

constexpr std::string_view kGap = "  ";

void AppendCell(const std::string& cell, Align align, size_t width, std::string& line) {
  const std::string padding(width - DisplayWidth(cell), ' ');
  line += align == Align::kRight ? padding + cell : cell + padding;
}

}  // namespace

size_t DisplayWidth(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;  // Not a continuation byte.
  }));
}

std::string WithoutArguments(std::string_view text) {
  std::string names;
  int depth = 0;
  for (const char c : text) {
    if (c == '(') ++depth;
    if (depth == 0) names += c;
    if (c == ')') --depth;
  }
  return names;
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::vector<size_t> Table::ColumnWidths() const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(DisplayWidth(column.heading));
  for (const auto& cells : rows_) {
    for (size_t i = 0; i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], DisplayWidth(cells[i]));
    }
  }
  return widths;
}

size_t Table::Width() const {
  const std::vector<size_t> widths = ColumnWidths();
  const size_t gaps = widths.empty() ? 0 : (widths.size() - 1) * kGap.size();
  return std::accumulate(widths.begin(), widths.end(), gaps);
}

std::string Table::Render() const {
  std::vector<std::vector<std::string>> lines(1);
  for (const Column& column : columns_) lines.front().push_back(column.heading);
  lines.insert(lines.end(), rows_.begin(), rows_.end());
  const std::vector<size_t> widths = ColumnWidths();
  std::string text;
  for (const auto& cells : lines) {
    std::string line;
    for (size_t i = 0; i < widths.size(); ++i) {
      if (i > 0) line += kGap;
      AppendCell(cells[i], columns_[i].align, widths[i], line);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace ebbtide::cli
