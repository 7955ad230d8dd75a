// SPDX-License-Identifier: Apache-2.0
//
// A page in fewer bits: keys and values quantised inside the page's own channel boxes, so that a
// page can be attended, with a proven bound on what that changes, for a quarter of its bytes. Four
// bits per element (the first plane) are a form of their own; the second plane refines them to
// eight. Tested by tests/unit/gpu/codes_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/kernels/matrix_norms.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

enum class CodeForm : uint8_t { k4Bit = 4, k8Bit = 8 };

// Steps between the ends of a channel's box.
constexpr int CodeSteps(CodeForm form) {
  return form == CodeForm::k4Bit ? 15 : 240;
}

// Half a step, and half a fine one for what the coarse nibble was rounded from, over the box.
constexpr double CodeStepError(CodeForm form) {
  return form == CodeForm::k4Bit ? 17.0 / 480 : 1.0 / 480;
}

// How far off one half of a page is in one form, rounded up: each token, and all tokens together
// (the largest singular value of their differences). Keys in units of their channels' widths,
// values as they are; inf where a channel's box is infinite.
struct CodeNorm {
  float each = 0;
  float joint = 0;
};
struct CodeNorms {
  CodeNorm key;
  CodeNorm value;
};
static_assert(sizeof(CodeNorms) == 16);

// Two parts, kept and read apart; element i = token * head_dim + channel, the even one in the low
// nibble. `coarse` stands alone; `fine` needs it.
//   coarse  [value_low f16 x d][value_high f16 x d][CodeNorms of 4 bits][CodeNorms of 8 bits]
//           [key nibbles][value nibbles]
//   fine    [key nibbles][value nibbles]
// The keys' box is the digest's key_low and key_high. No part needs alignment.
constexpr size_t NibbleBytes(const PageShape& shape) {
  return (static_cast<size_t>(shape.tokens) * static_cast<size_t>(shape.head_dim) + 1) / 2;
}
constexpr size_t CodeBoxBytes(const PageShape& shape) {
  return 4 * static_cast<size_t>(shape.head_dim);
}
constexpr size_t CoarseHeadBytes(const PageShape& shape) {
  return CodeBoxBytes(shape) + 2 * sizeof(CodeNorms);
}
constexpr size_t CoarseBytes(const PageShape& shape) {
  return CoarseHeadBytes(shape) + 2 * NibbleBytes(shape);
}
constexpr size_t FineBytes(const PageShape& shape) {
  return 2 * NibbleBytes(shape);
}

struct EncodeArgs {
  PageShape shape;
  std::span<const std::byte> page;    // A full page: [K tokens x d][V tokens x d]
  std::span<const std::byte> digest;  // Of this page (digest.h).
  std::span<std::byte> coarse;        // CoarseBytes out
  std::span<std::byte> fine;          // FineBytes out
};

//   Math      u = round(240 (x - low) / (high - low)), 0 .. 240; the code u + 8 has the coarse
//             nibble above the fine one. Code 8 where a channel's box has no width, or is infinite
//             because an f32 page leaves the range of f16. Norms: matrix_norms.h
//   Numerics  in f32, each step rounded: x - low, times 240 / (high - low), and 8.5, rounded down;
//             the values' box is rounded outward to f16
//   Repeats   bit for bit on every target, as the reference: codes are part of the record at rest
//   Cost      reads each element once from memory, then from the first-level cache; most of the
//             time goes to four MatrixNorms (bench/micro/gpu/codes_bench.cc)
//   Source    docs/decisions/0002-digest-ladder.md
void EncodeReference(const EncodeArgs& args);
void EncodeCpu(const EncodeArgs& args);

struct DecodeArgs {
  PageShape shape;
  CodeForm form = CodeForm::k4Bit;
  std::span<const std::byte> digest;
  std::span<const std::byte> coarse;
  std::span<const std::byte> fine;  // Empty for k4Bit.
  std::span<float> page;            // [K tokens x d][V tokens x d] out, f32
};

//   Math      low + c (high - low) / 15 of the coarse nibble c, low + u (high - low) / 240 of both:
//             the ends of the box are among them. 0 where a channel's box is infinite.
//   Numerics  in f32, each step rounded: (high - low) / steps, times c or u, and low
//   Repeats   bit for bit on every target, as the reference
//   Cost      writes 4 bytes per element; reads the form's bytes once
void DecodeReference(const DecodeArgs& args);
void DecodeCpu(const DecodeArgs& args);

// What a form may be off by, for every token of the page, rounded up: compares exact arithmetic on
// what was encoded with exact arithmetic on what DecodeCpu writes. Rounding inside attend is apart.
struct CodeErrorArgs {
  PageShape shape;
  CodeForm form = CodeForm::k4Bit;
  float scale = 0;
  int rows = 0;
  std::span<const float> query;  // [rows, head_dim]
  std::span<const std::byte> digest;
  std::span<const std::byte> coarse;
  // Out: [rows] R >= |scale * q . (k - decoded k)| of each token
  std::span<float> logit_error;
  // Out where wanted, all in l2 norm:
  std::span<float> logit_error_joint =
      {};                                 // [rows] >= that of the vector of all tokens' differences
  std::span<float> logit_deviation = {};  // [rows] by experience, no promise
  float* key_error = nullptr;             // >= |k - decoded k|
  float* value_error = nullptr;           // rho >= |v - decoded v|
  float* value_error_joint = nullptr;     // >= |sum_j c_j (v_j - decoded v_j)| where |c| = 1
  float* value_deviation = nullptr;       // of a token, by experience, no promise
};

//   Math      with e_i = W_i 17 / 480 in 4 bits, W_i / 480 in 8, and what rounding adds
//             (CodeElementError), W = high - low, x.y of CodeNorms:
//             R = |scale| min(sum_i |q_i| e_i, |q W| key.each), joint |scale| |q W| key.joint
//             key_error |e|; value_error min(|e|, value.each), joint value.joint
//             deviations |scale| |q W| and |W| of values, times a step's 1 / sqrt(12)
//             inf where a channel's box is infinite: such a form is of no use
//   Numerics  the reference and CUDA add up in f64 and round up once; CPU is at most 1e-5 above
//   Repeats   bit for bit, for one build and SIMD target or device
//   Cost      reads two boxes and each query once; 6 * rows * head_dim flops
//   Source    docs/architecture.md, bounds
void CodeErrorsReference(const CodeErrorArgs& args);
void CodeErrorsCpu(const CodeErrorArgs& args);

// >= |x - decoded x| of a channel with the finite box [low, high].
double CodeElementError(CodeForm form, double low, double high);

// How near joint norms come, by what that is worth in bytes read (docs/benchmarks.md, low-bit
// forms).
constexpr JointNorm JointNormOf(CodeForm form, bool are_keys) {
  if (form == CodeForm::k4Bit) return are_keys ? JointNorm::kSquare : JointNorm::kGram;
  return are_keys ? JointNorm::kGram : JointNorm::kLengths;
}

// What implementations share. Differences of one half are multiplied by `factor` before their norms
// are found, so that keys are in units of widths and values near 1.
struct ResidualUnits {
  // `width` of each channel, 0 of infinite ones.
  ResidualUnits(std::span<const float> width, bool all_finite, bool are_keys);
  CodeNorm NormOf(const MatrixNorms& scaled) const;

  alignas(64) float factor[kHeadDimMax] = {};
  double unit = 1;
  bool is_finite = true;
  bool has_width = false;
};
void StoreCodeNorms(const CodeNorms (&norms)[2], const EncodeArgs& args);
// The length of a box's widths, each times its weight where there are some, rounded up. Infinite
// channels count as 0.
double WidthNorm(const std::byte* box, int head_dim, const float* weight);
// What norms say of errors that were found channel by channel, `width_norm` being that of the keys'
// box weighed by the row's query, or of the values' box.
void TightenLogits(const CodeErrorArgs& args, size_t row, double width_norm);
void TightenValues(const CodeErrorArgs& args, double width_norm);

// Stop the process where a span disagrees with the shape.
void CheckEncode(const EncodeArgs& args);
void CheckDecode(const DecodeArgs& args);
void CheckCodeErrors(const CodeErrorArgs& args);

}  // namespace ebbtide::gpu
