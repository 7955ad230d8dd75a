// SPDX-License-Identifier: Apache-2.0
//
// A lane for tests: keys and values in extents of a few slots each, some slots empty, every element
// exactly what its dtype can hold.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "gpu/element.h"
#include "gpu/extent.h"
#include "gpu/outward.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

inline void WriteElement(Dtype dtype, std::byte* array, size_t i, double value) {
  if (dtype != Dtype::kF16) {
    StoreElement(dtype, array, static_cast<int>(i), static_cast<float>(value));
    return;
  }
  const uint16_t f16 = HalfNearest(value);
  std::memcpy(array + i * sizeof(f16), &f16, sizeof(f16));
}

class SampleLane {
 public:
  // Extents of at most `extent_slots` slots; about one slot in `empty_one_in` holds nothing (0:
  // none), or NaN if `poison_empty`.
  struct Options {
    Dtype dtype = Dtype::kF16;
    int head_dim = 64;
    int slots = 100;
    int extent_slots = 32;
    int empty_one_in = 0;
    bool poison_empty = false;
  };

  SampleLane(const Options& options, std::mt19937_64& random)
      : options_(options),
        key_(elements() * DtypeBytes(options.dtype)),
        value_(key_.size()),
        index_(static_cast<size_t>(options.slots)) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < elements(); ++i) {
      WriteElement(options.dtype, key_.data(), i, normal(random));
      WriteElement(options.dtype, value_.data(), i, normal(random));
    }
    for (size_t s = 0; s < index_.size(); ++s) {
      const bool is_empty =
          options.empty_one_in > 0 && random() % static_cast<uint64_t>(options.empty_one_in) == 0;
      index_[s] = is_empty ? kNoToken : static_cast<int32_t>(s);
      if (is_empty && options.poison_empty) Poison(s);
    }
    CutExtents();
  }

  SampleLane(const SampleLane&) = delete;
  SampleLane& operator=(const SampleLane&) = delete;

  const Options& options() const { return options_; }
  size_t slots() const { return index_.size(); }
  size_t dim() const { return static_cast<size_t>(options_.head_dim); }
  const std::vector<Extent>& extents() const { return extents_; }
  bool is_empty(size_t s) const { return index_[s] == kNoToken; }

  double key(size_t s, size_t d) const {
    return ElementAt(options_.dtype, key_.data(), static_cast<int>(s * dim() + d));
  }
  double value(size_t s, size_t d) const {
    return ElementAt(options_.dtype, value_.data(), static_cast<int>(s * dim() + d));
  }
  void set_key(size_t s, size_t d, double x) {
    WriteElement(options_.dtype, key_.data(), s * dim() + d, x);
  }
  void set_value(size_t s, size_t d, double x) {
    WriteElement(options_.dtype, value_.data(), s * dim() + d, x);
  }

 private:
  size_t elements() const { return static_cast<size_t>(options_.slots) * dim(); }

  // NaN in both dtypes: who lets an empty slot into a sum shows it.
  void Poison(size_t s) {
    const size_t row_bytes = dim() * DtypeBytes(options_.dtype);
    std::memset(key_.data() + s * row_bytes, 0xFF, row_bytes);
    std::memset(value_.data() + s * row_bytes, 0xFF, row_bytes);
  }

  void CutExtents() {
    const size_t row_bytes = dim() * DtypeBytes(options_.dtype);
    for (int first = 0; first < options_.slots; first += options_.extent_slots) {
      const auto s = static_cast<size_t>(first);
      extents_.push_back({.key = key_.data() + s * row_bytes,
                          .value = value_.data() + s * row_bytes,
                          .index = index_.data() + s,
                          .slots = std::min(options_.extent_slots, options_.slots - first)});
    }
  }

  Options options_;
  std::vector<std::byte> key_;
  std::vector<std::byte> value_;
  std::vector<int32_t> index_;
  std::vector<Extent> extents_;
};

}  // namespace ebbtide::gpu
