// SPDX-License-Identifier: Apache-2.0
//
// Pages that try a digest: kind ones, and ones at the edges of the number formats. Every element is
// exactly what its dtype can hold, so f64 sees what was stored.

#pragma once

#include <cstddef>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu/element.h"
#include "gpu/kernels/digest.h"
#include "gpu/shape.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {

enum class PageKind {
  kNormal,
  kConstantChannels,  // Three channels in four do not vary.
  kOutlierChannel,    // One channel a hundred times the others.
  kIdentical,         // Every key the same.
  kOffset,            // A large common part, a spread of one or two steps of the format.
  kFormatLimit,       // +-65504, and far beyond it in f32.
  kSubnormal,         // Multiples of 2^-24; in f32 far below.
  kMixedScales,       // Magnitudes from subnormal to the limit.
  kZero,
  kLast = kZero,
};

class SamplePage {
 public:
  struct Options {
    Dtype dtype = Dtype::kF16;
    int head_dim = 64;
    int page_tokens = 32;
    int tokens = 32;
    PageKind kind = PageKind::kNormal;
  };

  SamplePage(const Options& options, std::mt19937_64& random)
      : shape_{options.page_tokens, options.head_dim, options.dtype},
        tokens_(options.tokens),
        page_(shape_.page_bytes(),
              std::byte{0x7E}) {  // NaN where no token is: it must not be read.
    Fill(options.kind, 0, random);
    Fill(options.kind, shape_.half_bytes(), random);
  }

  const PageShape& shape() const { return shape_; }
  int tokens() const { return tokens_; }
  std::span<const std::byte> bytes() const { return page_; }
  double key(int j, int d) const { return ElementAt(shape_.dtype, Row(0, j), d); }
  double value(int j, int d) const {
    return ElementAt(shape_.dtype, Row(shape_.half_bytes(), j), d);
  }
  void set_key(int j, int d, double x) { Set(0, j, d, x); }
  void set_value(int j, int d, double x) { Set(shape_.half_bytes(), j, d, x); }

  DigestArgs Args(std::span<std::byte> digest) const {
    return {.shape = shape_, .tokens = tokens_, .page = page_, .digest = digest};
  }

 private:
  const std::byte* Row(size_t offset, int j) const {
    return page_.data() + offset + static_cast<size_t>(j) * shape_.row_bytes();
  }

  void Set(size_t offset, int j, int d, double x) {
    WriteElement(shape_.dtype, page_.data() + offset + static_cast<size_t>(j) * shape_.row_bytes(),
                 static_cast<size_t>(d), x);
  }

  void Fill(PageKind kind, size_t offset, std::mt19937_64& random) {
    for (int d = 0; d < shape_.head_dim; ++d) {
      const double common = normal_(random);
      for (int j = 0; j < tokens_; ++j) Set(offset, j, d, Element(kind, d, common, random));
    }
  }

  double Element(PageKind kind, int d, double common, std::mt19937_64& random) {
    const bool is_f32 = shape_.dtype == Dtype::kF32;
    const double limit = shape_.dtype == Dtype::kBF16 ? 65280 : 65504;  // Of f16, as it can be.
    const double x = normal_(random);
    switch (kind) {
      case PageKind::kNormal:
        return x;
      case PageKind::kConstantChannels:
        return d % 4 == 0 ? x : common;
      case PageKind::kOutlierChannel:
        return d == 1 ? 100 * (1 + 0.1 * x) : x;
      case PageKind::kIdentical:
        return common;
      case PageKind::kOffset:
        return 1000 * (common > 0 ? 1 : -1) + (is_f32 ? 1e-4 : 0.5) * x;
      case PageKind::kFormatLimit:
        return (x > 0 ? limit : -limit) * (is_f32 && d % 3 == 0 ? 1e15 : 1.0);
      case PageKind::kSubnormal:
        return x * 0x1p-23 * (is_f32 && d % 3 == 0 ? 0x1p-120 : 1.0);
      case PageKind::kMixedScales:
        return std::ldexp(x, static_cast<int>(random() % 36) - 22);
      case PageKind::kZero:
        return 0;
    }
    return 0;
  }

  std::normal_distribution<double> normal_;
  PageShape shape_;
  int tokens_;
  std::vector<std::byte> page_;
};

// Every kind, each with a few sizes: one token, some, a full page; odd and even head_dim.
inline std::vector<SamplePage> EveryPage(Dtype dtype, std::mt19937_64& random) {
  std::vector<SamplePage> pages;
  for (int kind = 0; kind <= static_cast<int>(PageKind::kLast); ++kind) {
    for (const int head_dim : {8, 77, 128}) {
      for (const int tokens : {1, 2, 19, 32}) {
        pages.emplace_back(SamplePage::Options{.dtype = dtype,
                                               .head_dim = head_dim,
                                               .tokens = tokens,
                                               .kind = static_cast<PageKind>(kind)},
                           random);
      }
    }
  }
  return pages;
}

}  // namespace ebbtide::gpu
