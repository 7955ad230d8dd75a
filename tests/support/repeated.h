// SPDX-License-Identifier: Apache-2.0
//
// Messages that are long and plain: the same field over and over.

#pragma once

#include <cstddef>
#include <string>

namespace ebbtide::test {

inline std::string Repeated(const std::string& bytes, size_t times) {
  std::string all;
  all.reserve(bytes.size() * times);
  for (size_t i = 0; i < times; ++i) all += bytes;
  return all;
}

}  // namespace ebbtide::test
