// SPDX-License-Identifier: Apache-2.0
//
// A page for tests of codes, with the boxes and spans that coding needs around it. Every element is
// exactly what its dtype can hold, so wider arithmetic sees what was encoded. The digest holds a
// box alone.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "gpu/element.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"
#include "gpu/shape.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {

enum class CodedPageKind {
  kNormal,
  kConstantChannels,  // Three channels in four do not vary.
  kOneStep,           // Far from zero; lowest and highest one step of f16 apart.
  kFormatLimit,       // -65504 to 65504.
  kSubnormal,         // Multiples of 2^-24; in f32 far below too.
  kMixedScales,       // Magnitudes from subnormal to a thousand.
  kZeros,             // Both of them.
  kStepEdges,         // The edges of cells and their neighbours.
  kLast = kStepEdges,
};

class CodedPage {
 public:
  struct Options {
    Dtype dtype = Dtype::kF16;
    int head_dim = 64;
    int tokens = 32;
    CodedPageKind kind = CodedPageKind::kNormal;
  };

  CodedPage(const Options& options, std::mt19937_64& random)
      : shape_{options.tokens, options.head_dim, options.dtype},
        page_(shape_.page_bytes()),
        digest_(DigestBytes(options.head_dim)) {
    for (int row = 0; row < 2 * shape_.tokens; ++row) {
      for (int d = 0; d < shape_.head_dim; ++d) Set(row, d, Element(options.kind, row, d, random));
    }
    StoreKeyBox();
  }

  const PageShape& shape() const { return shape_; }
  int rows() const { return 2 * shape_.tokens; }  // Keys, then values.
  std::span<const std::byte> digest() const { return digest_; }

  double At(int row, int d) const {
    return ElementAt(shape_.dtype, page_.data() + static_cast<size_t>(row) * shape_.row_bytes(), d);
  }

  // StoreKeyBox must follow where it is a key.
  void Set(int row, int d, double x) {
    WriteElement(shape_.dtype, page_.data() + static_cast<size_t>(row) * shape_.row_bytes(),
                 static_cast<size_t>(d), x);
  }

  void StoreKeyBox() {
    for (int d = 0; d < shape_.head_dim; ++d) {
      double low = At(0, d);
      double high = low;
      for (int token = 1; token < shape_.tokens; ++token) {
        low = std::min(low, At(token, d));
        high = std::max(high, At(token, d));
      }
      const uint16_t box[2] = {HalfDown(low), HalfUp(high)};
      std::memcpy(&digest_[2 * static_cast<size_t>(d)], &box[0], 2);
      std::memcpy(&digest_[2 * static_cast<size_t>(shape_.head_dim + d)], &box[1], 2);
    }
  }

  EncodeArgs Encoding(std::span<std::byte> coarse, std::span<std::byte> fine) const {
    return {.shape = shape_, .page = page_, .digest = digest_, .coarse = coarse, .fine = fine};
  }

 private:
  double Element(CodedPageKind kind, int row, int d, std::mt19937_64& random) {
    const bool is_f32 = shape_.dtype == Dtype::kF32;
    const double limit = shape_.dtype == Dtype::kBF16 ? 65280 : 65504;  // Of f16, as it can be.
    const double x = std::normal_distribution<double>()(random);
    switch (kind) {
      case CodedPageKind::kNormal:
        return x;
      case CodedPageKind::kConstantChannels:
        return d % 4 == 0 ? x : 0.37 * d;
      case CodedPageKind::kOneStep:
        return d % 3 == 0 ? 3.0 + (row % 2) * 0x1p-9
                          : 1000 + (x > 0 ? 0.5 : 0) + (is_f32 ? x * 0.01 : 0);
      case CodedPageKind::kFormatLimit:
        return row % 7 == 0 ? std::copysign(limit, x) : std::clamp(x * 30000, -limit, limit);
      case CodedPageKind::kSubnormal:
        return x * 0x1p-23 * (is_f32 && d % 3 == 0 ? 0x1p-120 : 1.0);
      case CodedPageKind::kMixedScales:
        return std::ldexp(x, static_cast<int>(random() % 33) - 24);
      case CodedPageKind::kZeros:
        return random() % 2 == 0 ? 0.0 : -0.0;
      case CodedPageKind::kStepEdges:
        return StepEdge(row % shape_.tokens, d, random);
    }
    return 0;
  }

  // Box [low, low + 240 steps], a place halfway between steps, and the nearest numbers beside it.
  double StepEdge(int token, int d, std::mt19937_64& random) {
    const double step = std::ldexp(1 + (d % 5) * 0.125, d % 7 - 8);
    const double low = (d % 3 - 1) * 100 * step;
    if (token < 2) return low + token * 240 * step;
    const auto edge = static_cast<float>(low + (static_cast<double>(random() % 240) + 0.5) * step);
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const float beside = std::nextafter(edge, random() % 2 == 0 ? kInfinity : -kInfinity);
    return random() % 2 == 0 ? edge : beside;
  }

  PageShape shape_;
  std::vector<std::byte> page_;
  std::vector<std::byte> digest_;
};

// Every kind, each with a few sizes: rows shorter than a vector, and no whole number of them.
inline std::vector<CodedPage> EveryCodedPage(Dtype dtype, std::mt19937_64& random) {
  constexpr std::pair<int, int> kSizes[] = {{1, 1},   {7, 2},    {64, 32},
                                            {77, 32}, {128, 64}, {256, 2}};
  std::vector<CodedPage> pages;
  for (int kind = 0; kind <= static_cast<int>(CodedPageKind::kLast); ++kind) {
    for (const auto& [head_dim, tokens] : kSizes) {
      pages.emplace_back(CodedPage::Options{.dtype = dtype,
                                            .head_dim = head_dim,
                                            .tokens = tokens,
                                            .kind = static_cast<CodedPageKind>(kind)},
                         random);
    }
  }
  return pages;
}

// A page's codes and all that is made of them.
struct Coded {
  std::vector<std::byte> coarse;
  std::vector<std::byte> fine;

  std::span<const std::byte> FineOf(CodeForm form) const {
    return form == CodeForm::k8Bit ? std::span<const std::byte>(fine)
                                   : std::span<const std::byte>();
  }
};

}  // namespace ebbtide::gpu
