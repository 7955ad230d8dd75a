// SPDX-License-Identifier: Apache-2.0

#include "service/attention/check_item.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#define XXH_STATIC_LINKING_ONLY  // The streaming state lives on the stack.
#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/append.h"
#include "service/reason.h"
#include "xxhash.h"

namespace ebbtide::service {
namespace {

absl::Status Wrong(std::string_view reason, const std::string& message) {
  return Refuse(absl::StatusCode::kInvalidArgument, reason, message);
}

std::string ShapeText(std::span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape.begin(), shape.end(), ", "), "]");
}

struct Wanted {
  std::string_view name;
  int32_t tokens = 0;
  int heads = 0;
  int head_dim = 0;
};

absl::Status CheckTensor(const TensorView& tensor, const Wanted& wanted) {
  const std::array<int64_t, 3> shape = {wanted.tokens, wanted.heads, wanted.head_dim};
  if (!std::ranges::equal(tensor.shape, shape)) {
    return Wrong("SHAPE_MISMATCH",
                 absl::StrCat(std::string(wanted.name), " has shape ", ShapeText(tensor.shape),
                              "; this model needs ", ShapeText(shape)));
  }
  const auto row = static_cast<size_t>(wanted.heads) * static_cast<size_t>(wanted.head_dim);
  const size_t bytes = static_cast<size_t>(wanted.tokens) * row * gpu::DtypeBytes(tensor.dtype);
  if (tensor.bytes.size() != bytes) {
    return Wrong("SIZE_MISMATCH",
                 absl::StrCat(std::string(wanted.name), " has ", tensor.bytes.size(),
                              " bytes of data; its shape and dtype need ", bytes));
  }
  const ptrdiff_t wrong = gpu::FindTooLarge(tensor.dtype, tensor.bytes);
  if (wrong < 0) return absl::OkStatus();
  const auto element = static_cast<size_t>(wrong);
  const float value = gpu::ElementAt(tensor.dtype, tensor.bytes.data(), static_cast<int>(element));
  const std::string place = absl::StrCat(
      " at [", element / row, ", ", element % row / static_cast<size_t>(wanted.head_dim), ", ",
      element % static_cast<size_t>(wanted.head_dim), "]; nothing was appended");
  if (!std::isfinite(value)) {
    return Wrong("NOT_FINITE",
                 absl::StrCat(std::string(wanted.name), " holds NaN or infinity", place));
  }
  return Wrong("VALUE_TOO_LARGE",
               absl::StrCat(std::string(wanted.name), " holds ", value, ", beyond ",
                            gpu::kMagnitudeMax, " of either sign,", place));
}

absl::Status CheckCount(const OpenedSequence& sequence, const StepCall& call, int32_t tokens) {
  if (tokens < 1 || tokens > sequence.chunk_tokens) {
    return Wrong("TOO_MANY_TOKENS",
                 absl::StrCat("the call brings ", tokens, " tokens; this sequence takes 1 to ",
                              sequence.chunk_tokens, " per call (chunk_tokens at open)"));
  }
  if (call.phase == Phase::kPrefill && sequence.prefill.mode == PrefillMode::kBlockwise &&
      tokens > sequence.prefill.block_tokens) {
    return Wrong("TOO_MANY_TOKENS", absl::StrCat("the call brings ", tokens, " tokens; prefill ",
                                                 PrefillText(sequence.prefill), " takes at most ",
                                                 sequence.prefill.block_tokens, " per call"));
  }
  return absl::OkStatus();
}

}  // namespace

int32_t TokensOf(const StepItem& item) {
  const auto& tensor = item.q.has_value() ? item.q : item.k;
  if (!tensor.has_value() || tensor->shape.empty()) return 0;
  return static_cast<int32_t>(std::clamp<int64_t>(tensor->shape[0], 0, kSequenceTokensMax));
}

absl::Status CheckItem(const OpenedSequence& sequence, const StepCall& call, const StepItem& item) {
  const Geometry& geometry = sequence.model->geometry;
  if (call.layer >= static_cast<uint32_t>(geometry.layers)) {
    return Wrong("LAYER_OUT_OF_RANGE",
                 absl::StrCat("layer is ", call.layer, "; model \"", sequence.model->name,
                              "\" has layers 0 to ", geometry.layers - 1));
  }
  if (item.k.has_value() != item.v.has_value() || (!item.q.has_value() && !item.k.has_value())) {
    return Wrong("TENSORS_MISSING", "an item needs q, or both k and v, or all three");
  }
  const int32_t tokens = TokensOf(item);
  EBBTIDE_RETURN_IF_ERROR(CheckCount(sequence, call, tokens));
  if (!item.positions.empty() && item.positions.size() != static_cast<size_t>(tokens)) {
    return Wrong("POSITIONS_MISMATCH",
                 absl::StrCat("positions has ", item.positions.size(), " entries for ", tokens,
                              " tokens; give one each, or none"));
  }
  if (item.q.has_value()) {
    EBBTIDE_RETURN_IF_ERROR(CheckTensor(*item.q, {.name = "q",
                                                  .tokens = tokens,
                                                  .heads = geometry.query_heads,
                                                  .head_dim = geometry.head_dim}));
  }
  for (const auto& [name, tensor] : {std::pair{"k", item.k}, std::pair{"v", item.v}}) {
    if (!tensor.has_value()) continue;
    EBBTIDE_RETURN_IF_ERROR(CheckTensor(*tensor, {.name = name,
                                                  .tokens = tokens,
                                                  .heads = geometry.kv_heads,
                                                  .head_dim = geometry.head_dim}));
    if (tensor->dtype != geometry.dtype) {
      return Wrong("DTYPE_MISMATCH",
                   absl::StrCat(name, " is ", std::string(gpu::DtypeName(tensor->dtype)),
                                "; model \"", sequence.model->name, "\" keeps ",
                                std::string(gpu::DtypeName(geometry.dtype))));
    }
  }
  return absl::OkStatus();
}

CallDigest DigestOf(const StepItem& item) {
  if (!item.k.has_value()) return {};
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const auto& tensor : {item.k, item.v}) {
    const auto dtype = static_cast<uint8_t>(tensor->dtype);
    XXH3_128bits_update(&state, &dtype, 1);
    XXH3_128bits_update(&state, tensor->shape.data(), tensor->shape.size_bytes());
    XXH3_128bits_update(&state, tensor->bytes.data(), tensor->bytes.size());
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {.low = hash.low64, .high = hash.high64};
}

std::vector<std::vector<float>> QueriesByLane(const Geometry& geometry, const TensorView& q) {
  const auto queries = static_cast<size_t>(q.shape[0]);
  const auto head_dim = static_cast<size_t>(geometry.head_dim);
  const auto group = static_cast<size_t>(geometry.group());
  const auto heads = static_cast<size_t>(geometry.query_heads);
  const size_t row_bytes = head_dim * gpu::DtypeBytes(q.dtype);
  std::vector<std::vector<float>> lanes(static_cast<size_t>(geometry.kv_heads));
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    lanes[lane].resize(group * queries * head_dim);
    for (size_t g = 0; g < group; ++g) {
      for (size_t m = 0; m < queries; ++m) {
        const std::byte* row = q.bytes.data() + (m * heads + lane * group + g) * row_bytes;
        float* out = lanes[lane].data() + (g * queries + m) * head_dim;
        for (size_t d = 0; d < head_dim; ++d)
          out[d] = gpu::ElementAt(q.dtype, row, static_cast<int>(d));
      }
    }
  }
  return lanes;
}

}  // namespace ebbtide::service
