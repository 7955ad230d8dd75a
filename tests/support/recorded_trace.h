// SPDX-License-Identifier: Apache-2.0
//
// What a recorded model asked of its cache (tests/data/README.md), for tests that hold the service
// to it. Trusts the file; what reads traces of users is client/cli/trace.h.

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace ebbtide::test {

// One tensor of a trace: [tokens, heads, head_dim] f16.
struct RecordedTensor {
  int tokens = 0;
  int heads = 0;
  int head_dim = 0;
  std::vector<uint16_t> elements = {};

  std::span<const uint16_t> Row(int token, int head) const;
};

// All tensors of three axes in a safetensors file, by name. Fails the test where there is none.
std::map<std::string, RecordedTensor> ReadRecorded(const std::filesystem::path& path);

}  // namespace ebbtide::test
