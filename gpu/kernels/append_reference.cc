// SPDX-License-Identifier: Apache-2.0
//
// Append, row by row: copy, and the l2 norm in float64, rounded up.

#include <cstring>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/append.h"
#include "gpu/kernels/norm.h"

namespace ebbtide::gpu {
namespace {

float RowNorm(Dtype dtype, int head_dim, const std::byte* row) {
  double sum = 0;
  for (int d = 0; d < head_dim; ++d) {
    const double element = ElementAt(dtype, row, d);
    sum += element * element;
  }
  return NormFromSquares(sum);
}

}  // namespace

void CheckAppend(const AppendArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax, "append: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.tokens >= 0, "append: tokens is not negative");
  const size_t tokens = static_cast<size_t>(args.tokens);
  EBBTIDE_CHECK(tokens == 0 || (args.key != nullptr && args.value != nullptr),
                "append: tokens without keys and values");
  EBBTIDE_CHECK(args.key_slot.size() == tokens && args.value_slot.size() == tokens,
                "append: key_slot and value_slot are [tokens]");
  EBBTIDE_CHECK(args.key_norm.size() == tokens && args.value_norm.size() == tokens,
                "append: key_norm and value_norm are [tokens]");
}

void AppendReference(const AppendArgs& args) {
  CheckAppend(args);
  const size_t row_bytes = RowBytes(args.dtype, args.head_dim);
  for (size_t token = 0; token < static_cast<size_t>(args.tokens); ++token) {
    const std::byte* key = args.key + token * args.stride;
    const std::byte* value = args.value + token * args.stride;
    std::memcpy(args.key_slot[token], key, row_bytes);
    std::memcpy(args.value_slot[token], value, row_bytes);
    args.key_norm[token] = RowNorm(args.dtype, args.head_dim, key);
    args.value_norm[token] = RowNorm(args.dtype, args.head_dim, value);
  }
}

}  // namespace ebbtide::gpu
