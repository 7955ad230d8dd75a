// SPDX-License-Identifier: Apache-2.0

#include "tests/support/recorded_trace.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "gtest/gtest.h"

#include "nlohmann/json.hpp"

namespace ebbtide::test {

std::span<const uint16_t> RecordedTensor::Row(int token, int head) const {
  const auto first = static_cast<size_t>((token * heads + head) * head_dim);
  return std::span(elements).subspan(first, static_cast<size_t>(head_dim));
}

std::map<std::string, RecordedTensor> ReadRecorded(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  std::map<std::string, RecordedTensor> tensors;
  uint64_t header_bytes = 0;
  if (bytes.size() > 8) {
    std::memcpy(&header_bytes, bytes.data(), 8);
    const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__" || entry.at("shape").size() != 3) continue;
      RecordedTensor tensor{.tokens = entry.at("shape")[0],
                            .heads = entry.at("shape")[1],
                            .head_dim = entry.at("shape")[2]};
      const size_t first = entry.at("data_offsets")[0];
      const size_t end = entry.at("data_offsets")[1];
      tensor.elements.resize((end - first) / 2);
      std::memcpy(tensor.elements.data(), bytes.data() + 8 + header_bytes + first, end - first);
      tensors.emplace(name, std::move(tensor));
    }
  }
  EXPECT_FALSE(tensors.empty()) << "no tensors in " << path;
  return tensors;
}

}  // namespace ebbtide::test
