// SPDX-License-Identifier: Apache-2.0
//
// Long arrays that grow with a sequence: by an eighth at a time, where a vector of its own would
// double, so that what is reserved stays near what is used.

#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ebbtide::service {

inline constexpr size_t kGrowthDivisor = 8;

// Makes room for `size` elements; more than were reserved come with an eighth to spare. While it
// moves, the array exists twice.
template <typename T>
void ReserveSparingly(std::vector<T>& array, size_t size) {
  if (size > array.capacity()) {
    array.reserve(std::max(size, array.size() + array.size() / kGrowthDivisor));
  }
}

}  // namespace ebbtide::service
