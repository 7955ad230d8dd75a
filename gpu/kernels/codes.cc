// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of codes shares: its contract's checks and its error bound.

#include "gpu/kernels/codes.h"

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "gpu/kernels/digest.h"

namespace ebbtide::gpu {
namespace {

void CheckShape(const PageShape& shape) {
  EBBTIDE_CHECK(shape.head_dim >= 1 && shape.head_dim <= kHeadDimMax,
                "codes: head_dim is 1 to 256");
  EBBTIDE_CHECK(shape.tokens >= 1 && shape.tokens <= kPageTokensMax,
                "codes: a page has 1 to 64 tokens");
}

void CheckParts(const PageShape& shape, std::span<const std::byte> digest,
                std::span<const std::byte> coarse) {
  CheckShape(shape);
  EBBTIDE_CHECK(digest.size() == DigestBytes(shape.head_dim),
                "codes: digest is DigestBytes(head_dim) long");
  EBBTIDE_CHECK(coarse.size() == CoarseBytes(shape), "codes: coarse is CoarseBytes(shape) long");
}

}  // namespace

void CheckEncode(const EncodeArgs& args) {
  CheckParts(args.shape, args.digest, args.coarse);
  EBBTIDE_CHECK(args.page.size() == args.shape.page_bytes(), "codes: page is one page long");
  EBBTIDE_CHECK(args.fine.size() == FineBytes(args.shape), "codes: fine is FineBytes(shape) long");
}

void CheckDecode(const DecodeArgs& args) {
  CheckParts(args.shape, args.digest, args.coarse);
  EBBTIDE_CHECK(args.form == CodeForm::k4Bit || args.fine.size() == FineBytes(args.shape),
                "codes: fine is FineBytes(shape) long");
  EBBTIDE_CHECK(args.page.size() == 2 * static_cast<size_t>(args.shape.tokens) *
                                        static_cast<size_t>(args.shape.head_dim),
                "codes: page is [2, tokens, head_dim]");
}

void CheckCodeErrors(const CodeErrorArgs& args) {
  CheckParts(args.shape, args.digest, args.coarse);
  EBBTIDE_CHECK(args.rows >= 0, "codes: rows is not negative");
  const auto rows = static_cast<size_t>(args.rows);
  EBBTIDE_CHECK(args.query.size() == rows * static_cast<size_t>(args.shape.head_dim),
                "codes: query is [rows, head_dim]");
  EBBTIDE_CHECK(args.logit_error.size() == rows, "codes: logit_error is [rows]");
}

// With u = 2^-24, W = high - low > 0, M = max(|low|, |high|), p = 240 (x - low) / W:
//
// Encoding finds p with four roundings (x - low, W, 240 / W, their product) and p + 8.5 with one
// more, so it is off by at most 240 * 4.1 u + 249 u < 1240 u, and 2^-150 where the product is
// subnormal. So |p - (code - 8)| <= 1/2 + 1240 u + 2^-150, and for the coarse nibble c, with code -
// 16 c in 0 .. 15, |p - 16 c| <= 8 + 1/2 + 1240 u + 2^-150.
//
// Decoding puts rounded W for W, rounds the step, its multiple (each at most W u) and the sum (at
// most M u), each but for a factor 1 + 10 u; a step is not subnormal, for W >= 2^-24 where it is
// not 0.
//
// Together W (1240 / 240 + 3) u + M u, but for that factor. Without width every step is exact.
double CodeElementError(CodeForm form, double low, double high) {
  constexpr double kUnit = 0x1p-24;
  const double width = high - low;  // Exact: f16 are multiples of 2^-24 below 2^17.
  if (width == 0) return 0;
  const double largest = std::max(std::fabs(low), std::fabs(high));
  return width * CodeStepError(form) + kUnit * (8.5 * width + 1.01 * largest);
}

}  // namespace ebbtide::gpu
