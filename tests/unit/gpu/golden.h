// SPDX-License-Identifier: Apache-2.0
//
// Golden vectors (tests/data/vectors/README.md): reads a file's cases, and compares arrays with
// what they expect. A file that is missing or does not parse fails the test.

#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"

namespace ebbtide::gpu::golden {

using Json = nlohmann::json;

// One case of a file; `name` says which in failures.
struct Case {
  std::string name;  // "attend[2]: causal by position"
  Json inputs;
  Json expect;
};

// EBBTIDE_VECTORS, or tests/data/vectors of this tree.
std::filesystem::path Folder();

// The operations whose vectors are run here, sorted.
std::span<const std::string_view> Operations();

// All cases of `op`.json; never empty, unless it has failed the test.
std::vector<Case> Cases(std::string_view op);

// All numbers of nested lists in order; null is minus infinity.
std::vector<double> Doubles(const Json& array);
std::vector<float> Floats(const Json& array);
std::vector<int32_t> Ints(const Json& array);

// Lengths of nested lists, outermost first: [2, 8, 40]; empty for a number.
std::vector<int> Shape(const Json& array);

// Every element within 1e-5 of the largest finite magnitude expected.
void ExpectClose(std::span<const float> actual, const Json& expected, std::string_view what);
void ExpectClose(std::span<const double> actual, const Json& expected, std::string_view what);

}  // namespace ebbtide::gpu::golden
