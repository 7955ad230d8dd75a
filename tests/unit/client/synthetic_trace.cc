// SPDX-License-Identifier: Apache-2.0
//
// Normal numbers, rounded to f16 by truncation; keys of one direction so that softmax has a shape.

#include "tests/unit/client/synthetic_trace.h"

#include <bit>
#include <cstring>
#include <random>

namespace ebbtide::cli {
namespace {

// f32 to f16 towards zero; |value| lies between 2^-14 and 65504, or becomes 0.
uint16_t ToHalf(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t exponent = (bits >> 23) & 0xFFU;  // Bias 127; a half's is 15.
  if (exponent <= 112) return sign;
  return static_cast<uint16_t>(sign | ((exponent - 112) << 10) | ((bits >> 13) & 0x3FFU));
}

template <typename T>
void Append(T value, std::vector<std::byte>& data) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  data.insert(data.end(), bytes, bytes + sizeof(value));
}

void AddTensor(SyntheticFile& file, const std::string& name, const SyntheticSpec& spec,
               uint32_t heads, std::mt19937_64& random) {
  const bool is_query = name.back() == 'q';
  const std::string dtype = is_query ? "F32" : spec.dtype;
  const size_t begin = file.data.size();
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < uint64_t{spec.tokens} * heads * spec.head_dim; ++i) {
    const float value = normal(random) * (is_query ? 2.0F : 1.0F);
    if (dtype == "F32") {
      Append(value, file.data);
    } else {
      Append(ToHalf(value), file.data);
    }
  }
  file.header[name] = {{"dtype", dtype},
                       {"shape", {spec.tokens, heads, spec.head_dim}},
                       {"data_offsets", {begin, file.data.size()}}};
}

}  // namespace

std::vector<std::byte> FileBytes(const std::string& header, const std::vector<std::byte>& data) {
  std::vector<std::byte> bytes;
  Append(uint64_t{header.size()}, bytes);
  for (const char c : header) bytes.push_back(static_cast<std::byte>(c));
  bytes.insert(bytes.end(), data.begin(), data.end());
  return bytes;
}

std::vector<std::byte> SyntheticFile::Bytes() const {
  return FileBytes(header.dump(), data);
}

SyntheticFile MakeSyntheticFile(const SyntheticSpec& spec) {
  SyntheticFile file;
  file.header["__metadata__"] = {{"format", "ebbtide.trace.v1"},
                                 {"model", "synthetic"},
                                 {"text", "none"},
                                 {"layers", nlohmann::json(spec.layers).dump()},
                                 {"query_heads", std::to_string(spec.query_heads)},
                                 {"kv_heads", std::to_string(spec.kv_heads)},
                                 {"head_dim", std::to_string(spec.head_dim)},
                                 {"scale", "0.35"},
                                 {"prompt_length", std::to_string(spec.prompt_length)}};
  std::mt19937_64 random(spec.seed);
  for (const uint32_t layer : spec.layers) {
    const std::string prefix = "layer" + std::to_string(layer);
    AddTensor(file, prefix + ".q", spec, spec.query_heads, random);
    AddTensor(file, prefix + ".k", spec, spec.kv_heads, random);
    AddTensor(file, prefix + ".v", spec, spec.kv_heads, random);
  }
  return file;
}

}  // namespace ebbtide::cli
