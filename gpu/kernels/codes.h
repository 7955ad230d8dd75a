// SPDX-License-Identifier: Apache-2.0
//
// A page in fewer bits: keys and values quantised inside the page's own channel boxes, so that a page
// can be attended, with a proven bound on what that changes, for a quarter of its bytes. Four bits per
// element (the first plane) are a form of their own; the second plane refines them to eight.
// Tested by tests/unit/gpu/codes_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

enum class CodeForm : uint8_t { k4Bit = 4, k8Bit = 8 };

// Two parts, kept and read apart; element i = token * head_dim + channel, the even one in the low
// nibble. `coarse` stands alone; `fine` needs it.
//   coarse  [value_low f16 x d][value_high f16 x d][key nibbles][value nibbles]
//   fine    [key nibbles][value nibbles]
// The keys' box is the digest's key_low and key_high.
size_t CoarseBytes(const PageShape& shape);
size_t FineBytes(const PageShape& shape);

struct EncodeArgs {
  PageShape shape;
  std::span<const std::byte> page;    // A full page: [K tokens x d][V tokens x d]
  std::span<const std::byte> digest;  // Of this page (digest.h).
  std::span<std::byte> coarse;        // CoarseBytes out
  std::span<std::byte> fine;          // FineBytes out
};

//   Math      code = floor((x - low) / (high - low) * 2^b) clamped to 2^b - 1, b = 8; its upper four
//             bits are the coarse plane. A form's element is the middle of its cell of 2^b cells.
//   Numerics  |element - x| <= (high - low) / 2^(b+1) plus what CodeErrors adds for rounding
//   Repeats   bit for bit on every target: codes are part of the record
//   Cost      reads each element once
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

//   Cost      writes 4 bytes per element; reads the form's bytes once
void DecodeReference(const DecodeArgs& args);
void DecodeCpu(const DecodeArgs& args);

// What a form may be off by, for every token of the page, rounded up.
struct CodeErrorArgs {
  PageShape shape;
  CodeForm form = CodeForm::k4Bit;
  float scale = 0;
  int rows = 0;
  std::span<const float> query;              // [rows, head_dim]
  std::span<const std::byte> digest;
  std::span<const std::byte> coarse;
  std::span<float> logit_error;  // [rows] out: R >= |scale * q . (k - decoded k)|
  float* value_error = nullptr;  // out: rho >= |v - decoded v|, l2
};

//   Math      R = scale * sum_i |q_i| (high_i - low_i) / 2^(b+1); rho = sqrt(sum_i cell_i^2) / 2, each
//             widened by the rounding of decoding in f32
//   Source    docs/architecture.md, bounds
void CodeErrorsReference(const CodeErrorArgs& args);
void CodeErrorsCpu(const CodeErrorArgs& args);

}  // namespace ebbtide::gpu
