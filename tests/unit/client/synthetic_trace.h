// SPDX-License-Identifier: Apache-2.0
//
// Small traces out of a seed, as the bytes of a safetensors file, and ways to damage them.

#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ebbtide::cli {

struct SyntheticSpec {
  uint32_t tokens = 40;
  uint32_t prompt_length = 24;
  uint32_t query_heads = 4;
  uint32_t kv_heads = 2;
  uint32_t head_dim = 8;
  std::vector<uint32_t> layers = {3, 7};
  std::string dtype = "F16";  // Of k and v; queries are F32.
  uint64_t seed = 1;
};

// The header, and the data that it describes; change either before Bytes.
struct SyntheticFile {
  nlohmann::ordered_json header;
  std::vector<std::byte> data;

  std::vector<std::byte> Bytes() const;
};

SyntheticFile MakeSyntheticFile(const SyntheticSpec& spec);

// Bytes of a safetensors file with this header text, valid or not.
std::vector<std::byte> FileBytes(const std::string& header, const std::vector<std::byte>& data);

}  // namespace ebbtide::cli
