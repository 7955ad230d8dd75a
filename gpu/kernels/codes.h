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

// Two parts, kept and read apart; element i = token * head_dim + channel, the even one in the low
// nibble. `coarse` stands alone; `fine` needs it.
//   coarse  [value_low f16 x d][value_high f16 x d][key nibbles][value nibbles]
//   fine    [key nibbles][value nibbles]
// The keys' box is the digest's key_low and key_high.
constexpr size_t NibbleBytes(const PageShape& shape) {
  return (static_cast<size_t>(shape.tokens) * static_cast<size_t>(shape.head_dim) + 1) / 2;
}
constexpr size_t CoarseBytes(const PageShape& shape) {
  return 4 * static_cast<size_t>(shape.head_dim) + 2 * NibbleBytes(shape);
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

//   Math      code = floor(256 (x - low) / (high - low)), at most 255; its upper four bits are the
//             coarse plane. Code 0 where a channel's box has no width, or is infinite because an
//             f32 page leaves the range of f16.
//   Numerics  in f32, each step rounded: x - low, times 256 / (high - low); the values' box is
//             rounded outward to f16
//   Repeats   bit for bit on every target, as the reference: codes are part of the record at rest
//   Cost      reads each element once from memory; values a second time from the first-level cache
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

//   Math      low + (code + 1/2) (high - low) / 2^b: the middle of its cell; b the form's bits,
//   code
//             their upper b. 0 where a channel's box is infinite.
//   Numerics  in f32, each step rounded: code * cell + (low + cell / 2)
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
  std::span<float> logit_error;  // [rows] out: R >= |scale * q . (k - decoded k)|
  float* key_error = nullptr;    // out where wanted: >= |k - decoded k|, l2
  float* value_error = nullptr;  // out where wanted: rho >= |v - decoded v|, l2
};

//   Math      R = |scale| sum_i |q_i| e_i; l2 errors sqrt(sum_i e_i^2)
//             e_i = (high_i - low_i) 17 / 480 in 4 bits, 1 / 480 in 8, and what rounding adds
//             (CodeElementError)
//             inf where a channel's box is infinite: such a form is of no use
//   Numerics  the reference adds up in f64 and rounds up once; CPU is at most 1e-5 above
//   Repeats   bit for bit, for one build and SIMD target
//   Cost      reads two boxes and each query once; 2 * rows * head_dim flops
//   Source    docs/architecture.md, bounds
void CodeErrorsReference(const CodeErrorArgs& args);
void CodeErrorsCpu(const CodeErrorArgs& args);

// >= |x - decoded x| of a channel with the finite box [low, high].
double CodeElementError(CodeForm form, double low, double high);

// Stop the process where a span disagrees with the shape.
void CheckEncode(const EncodeArgs& args);
void CheckDecode(const DecodeArgs& args);
void CheckCodeErrors(const CodeErrorArgs& args);

}  // namespace ebbtide::gpu
