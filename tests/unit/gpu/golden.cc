// SPDX-License-Identifier: Apache-2.0

#include "tests/unit/gpu/golden.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "gtest/gtest.h"

namespace ebbtide::gpu::golden {
namespace {

constexpr std::string_view kOperations[] = {"attend",
                                            "caote",
                                            "caote_additive",
                                            "caote_on_h2o",
                                            "caote_on_snapkv",
                                            "caote_on_tova",
                                            "caote_pages",
                                            "caote_peaky",
                                            "caote_window",
                                            "fastcaote",
                                            "h2o",
                                            "keydiff",
                                            "lowbit_bounds",
                                            "lse_merge",
                                            "page_bounds",
                                            "partial_page_bounds",
                                            "residual_bound",
                                            "select",
                                            "snapkv",
                                            "tova"};

template <class T>
void Flatten(const Json& array, std::vector<T>& flat) {
  if (array.is_array()) {
    for (const Json& element : array) Flatten(element, flat);
  } else if (array.is_null()) {
    flat.push_back(-std::numeric_limits<T>::infinity());
  } else {
    flat.push_back(static_cast<T>(array.get<double>()));
  }
}

template <class T>
void ExpectCloseTo(std::span<const T> actual, const Json& expected, std::string_view what) {
  const std::vector<double> exact = Doubles(expected);
  ASSERT_EQ(actual.size(), exact.size()) << what;
  double largest = 0;
  for (const double element : exact) {
    if (std::isfinite(element)) largest = std::max(largest, std::fabs(element));
  }
  for (size_t i = 0; i < exact.size(); ++i) {
    if (std::isfinite(exact[i])) {
      ASSERT_NEAR(actual[i], exact[i], 1e-5 * largest) << what << "[" << i << "]";
    } else {
      ASSERT_EQ(static_cast<double>(actual[i]), exact[i]) << what << "[" << i << "]";
    }
  }
}

}  // namespace

std::filesystem::path Folder() {
  const char* folder = std::getenv("EBBTIDE_VECTORS");
  return folder != nullptr ? folder : EBBTIDE_VECTORS_FOLDER;
}

std::span<const std::string_view> Operations() {
  return kOperations;
}

std::vector<Case> Cases(std::string_view op) {
  const std::filesystem::path path = Folder() / (std::string(op) + ".json");
  std::ifstream file(path);
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::vector<Case> cases;
  if (json.is_object() && json.value("op", "") == op && json["cases"].is_array()) {
    for (const Json& one : json["cases"]) {
      const std::string number = std::to_string(cases.size());
      cases.push_back({std::string(op) + "[" + number + "]: " + one.value("note", ""),
                       one.at("inputs"), one.at("expect")});
    }
  }
  if (cases.empty()) ADD_FAILURE() << path << " is missing or holds no cases of " << op;
  return cases;
}

std::vector<double> Doubles(const Json& array) {
  std::vector<double> flat;
  Flatten(array, flat);
  return flat;
}

std::vector<float> Floats(const Json& array) {
  std::vector<float> flat;
  Flatten(array, flat);
  return flat;
}

std::vector<int32_t> Ints(const Json& array) {
  std::vector<int32_t> ints;
  for (const double element : Doubles(array)) ints.push_back(static_cast<int32_t>(element));
  return ints;
}

std::vector<int> Shape(const Json& array) {
  std::vector<int> shape;
  for (const Json* level = &array; level->is_array(); level = &level->front()) {
    shape.push_back(static_cast<int>(level->size()));
    if (level->empty()) break;
  }
  return shape;
}

void ExpectClose(std::span<const float> actual, const Json& expected, std::string_view what) {
  ExpectCloseTo(actual, expected, what);
}

void ExpectClose(std::span<const double> actual, const Json& expected, std::string_view what) {
  ExpectCloseTo(actual, expected, what);
}

}  // namespace ebbtide::gpu::golden
