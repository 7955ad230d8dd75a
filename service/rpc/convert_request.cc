// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/convert_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

#include "base/status_macros.h"
#include "service/reason.h"

namespace ebbtide::service {
namespace {

constexpr uint64_t kIdleTimeoutMsMax = uint64_t{30} * 24 * 3600 * 1000;
constexpr std::string_view kPageTokenMark = "after:";

absl::Status Invalid(std::string_view reason, const std::string& message) {
  return Refuse(absl::StatusCode::kInvalidArgument, reason, message);
}

bool IsPrintable(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

absl::StatusOr<gpu::Dtype> ReadDtype(std::string_view what, v1::Dtype dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return gpu::Dtype::kF32;
    case v1::DTYPE_F16:
      return gpu::Dtype::kF16;
    case v1::DTYPE_BF16:
      return gpu::Dtype::kBF16;
    default:
      return Invalid("DTYPE_UNKNOWN",
                     absl::StrFormat("%s is %d; known are DTYPE_F32 (1), DTYPE_F16 (2) and "
                                     "DTYPE_BF16 (3)",
                                     what, static_cast<int>(dtype)));
  }
}

// A number of a model that Geometry::Validate will judge, which it can't where it does not fit.
int Clamped(uint32_t value) {
  return static_cast<int>(std::min<uint32_t>(value, std::numeric_limits<int>::max()));
}

// As many digits as tell it from every other number.
std::string ExactText(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

// ⌈percent · of / 100⌉; a product that is whole but for its rounding counts as whole.
double TokensOfPercent(double percent, uint32_t of_tokens) {
  const double exact = percent * of_tokens / 100;
  const double nearest = std::round(exact);
  return std::abs(exact - nearest) <= 1e-9 * nearest ? nearest : std::ceil(exact);
}

absl::StatusOr<uint32_t> ReadBudget(const v1::Budget& budget) {
  if (budget.kind_case() == v1::Budget::kTokens && budget.tokens() > 0) {
    return budget.tokens();
  }
  if (budget.kind_case() == v1::Budget::kPercent) {
    const double percent = budget.percent().percent();
    if (!(percent > 0 && percent <= 100) || budget.percent().of_tokens() == 0) {
      return Invalid("BUDGET_INVALID",
                     absl::StrFormat("budget is %s %% of %d tokens; percent must be over 0 and at "
                                     "most 100, of_tokens at least 1",
                                     ExactText(percent), budget.percent().of_tokens()));
    }
    return static_cast<uint32_t>(TokensOfPercent(percent, budget.percent().of_tokens()));
  }
  return Invalid("BUDGET_INVALID",
                 "budget is missing: give tokens, or percent with the of_tokens it is drawn from");
}

std::string ShapeText(const v1::Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < std::min(tensor.shape_size(), 4); ++i) {
    text += absl::StrFormat("%s%d", i > 0 ? ", " : "", tensor.shape(i));
  }
  return text + (tensor.shape_size() > 4 ? ", …]" : "]");
}

absl::StatusOr<TensorView> ReadTensor(std::string_view what, const v1::Tensor& tensor) {
  EBBTIDE_ASSIGN_OR_RETURN(const gpu::Dtype dtype,
                           ReadDtype(absl::StrFormat("dtype of %s", what), tensor.dtype()));
  uint64_t bytes = gpu::DtypeBytes(dtype);
  bool fits = tensor.shape_size() == 3;
  for (const int64_t size : tensor.shape()) {
    fits = fits && size >= 1 && !__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes);
  }
  if (!fits) {
    return Invalid("SHAPE_MISMATCH",
                   absl::StrFormat("%s has shape %s; it must be [tokens, heads, head_dim], each at "
                                   "least 1",
                                   what, ShapeText(tensor)));
  }
  if (tensor.data().size() != bytes) {
    return Invalid(
        "SIZE_MISMATCH",
        absl::StrFormat("%s has %d bytes of data; its shape %s of %s needs %d", what,
                        tensor.data().size(), ShapeText(tensor), gpu::DtypeName(dtype), bytes));
  }
  return TensorView{.dtype = dtype,
                    .shape = {tensor.shape().data(), static_cast<size_t>(tensor.shape_size())},
                    .bytes = std::as_bytes(std::span(tensor.data().data(), tensor.data().size()))};
}

// What AppendItem and AttendItem have in common.
template <typename Item>
absl::StatusOr<StepItem> ReadKeysAndValues(const Item& message) {
  EBBTIDE_RETURN_IF_ERROR(CheckName("sequence", message.sequence()));
  StepItem item{.sequence = message.sequence(), .first_index = message.first_index()};
  if (message.has_k() != message.has_v()) {
    return Invalid("TENSORS_MISSING",
                   absl::StrFormat("%s is missing; send both k and v, or neither",
                                   message.has_k() ? "v" : "k"));
  }
  if (message.has_k()) {
    EBBTIDE_ASSIGN_OR_RETURN(item.k, ReadTensor("k", message.k()));
    EBBTIDE_ASSIGN_OR_RETURN(item.v, ReadTensor("v", message.v()));
  }
  item.positions = {message.positions().data(), static_cast<size_t>(message.positions_size())};
  return item;
}

absl::StatusOr<StepItem> ReadItem(const v1::AppendItem& message) {
  EBBTIDE_ASSIGN_OR_RETURN(StepItem item, ReadKeysAndValues(message));
  if (!item.k.has_value()) {
    return Invalid("TENSORS_MISSING", "k and v are missing; Append needs both");
  }
  return item;
}

absl::StatusOr<StepItem> ReadItem(const v1::AttendItem& message) {
  EBBTIDE_ASSIGN_OR_RETURN(StepItem item, ReadKeysAndValues(message));
  if (!message.has_q()) {
    return Invalid("TENSORS_MISSING", "q is missing; Attend needs it");
  }
  EBBTIDE_ASSIGN_OR_RETURN(item.q, ReadTensor("q", message.q()));
  item.output_dtype = item.q->dtype;
  if (message.output_dtype() != v1::DTYPE_UNSPECIFIED) {
    EBBTIDE_ASSIGN_OR_RETURN(item.output_dtype, ReadDtype("output_dtype", message.output_dtype()));
  }
  item.require_met = message.require_met();
  return item;
}

// Status, lengths and, where there are queries, output, lse, both bounds, met and pages lost.
uint64_t AnswerBytes(const StepItem& item) {
  constexpr uint64_t kFixedBytes = 512;
  constexpr uint64_t kLostPageBytes = 24;
  if (!item.q.has_value()) {
    return kFixedBytes;
  }
  const uint64_t outputs = item.q->bytes.size() / gpu::DtypeBytes(item.q->dtype);
  const auto tokens = static_cast<uint64_t>(item.q->shape[0]);
  const uint64_t rows = tokens * static_cast<uint64_t>(item.q->shape[1]);
  return kFixedBytes + kLostPagesNamed * kLostPageBytes +
         outputs * gpu::DtypeBytes(item.output_dtype) + rows * 3 * sizeof(float) + tokens;
}

template <typename Request>
absl::StatusOr<StepCall> ReadCall(const Request& message) {
  StepCall call{.layer = message.layer()};
  if (message.phase() != v1::PHASE_PREFILL && message.phase() != v1::PHASE_DECODE) {
    return Invalid("PHASE_UNKNOWN",
                   absl::StrFormat("phase is %d; say PHASE_PREFILL (1) or PHASE_DECODE (2)",
                                   static_cast<int>(message.phase())));
  }
  call.phase = message.phase() == v1::PHASE_PREFILL ? Phase::kPrefill : Phase::kDecode;
  if (message.prompt_end() && call.phase == Phase::kDecode) {
    return Invalid("PHASE_UNKNOWN",
                   "prompt_end marks the last call of PHASE_PREFILL; this call is "
                   "PHASE_DECODE");
  }
  if (message.items_size() < 1 || message.items_size() > kItemsMax) {
    return Invalid("BATCH_SIZE", absl::StrFormat("the call has %d items; send 1 to %d",
                                                 message.items_size(), kItemsMax));
  }
  return call;
}

template <typename Request>
absl::StatusOr<StepRequest> ReadStep(const Request& message) {
  StepRequest request;
  EBBTIDE_ASSIGN_OR_RETURN(request.call, ReadCall(message));
  // Which of two items of one sequence goes first is anybody's guess, so neither does.
  absl::flat_hash_map<std::string_view, int> times;
  for (const auto& item : message.items()) {
    ++times[item.sequence()];
  }
  for (const auto& message_item : message.items()) {
    absl::StatusOr<StepItem> item = ReadItem(message_item);
    if (item.ok() && times[message_item.sequence()] > 1) {
      item = Invalid("SEQUENCE_REPEATED",
                     absl::StrFormat("sequence \"%s\" has %d items in this call; send one",
                                     message_item.sequence(), times[message_item.sequence()]));
    }
    request.refusals.push_back(item.status());
    if (item.ok()) {
      request.answer_bytes += AnswerBytes(*item);
      request.items.push_back(*std::move(item));
    }
  }
  return request;
}

}  // namespace

absl::Status CheckName(std::string_view what, std::string_view name, std::string_view reason) {
  if (name.empty() || name.size() > kNameBytesMax) {
    return Invalid(reason, absl::StrFormat("%s has %d bytes; it needs 1 to %d", what, name.size(),
                                           kNameBytesMax));
  }
  if (!IsPrintable(name)) {
    return Invalid(reason,
                   absl::StrFormat("%s \"%s\" holds a character that is not printable ASCII", what,
                                   absl::CHexEscape(absl::string_view(name.data(), name.size()))));
  }
  return absl::OkStatus();
}

absl::Status CheckText(std::string_view what, std::string_view text, std::string_view reason) {
  return text.empty() ? absl::OkStatus() : CheckName(what, text, reason);
}

absl::StatusOr<Geometry> ReadGeometry(const v1::Geometry& message) {
  Geometry geometry{.layers = Clamped(message.layers()),
                    .query_heads = Clamped(message.query_heads()),
                    .kv_heads = Clamped(message.kv_heads()),
                    .head_dim = Clamped(message.head_dim()),
                    .scale = message.scale()};
  EBBTIDE_ASSIGN_OR_RETURN(geometry.dtype, ReadDtype("geometry.dtype", message.dtype()));
  if (message.page_tokens() != 0) {
    geometry.page_tokens = Clamped(message.page_tokens());
  }
  if (geometry.scale == 0 && geometry.head_dim > 0) {
    geometry.scale = 1 / std::sqrt(static_cast<float>(geometry.head_dim));
  }
  return geometry;
}

absl::StatusOr<OpenArgs> ReadOpen(const v1::OpenSequenceRequest& message) {
  EBBTIDE_RETURN_IF_ERROR(CheckName("sequence", message.sequence()));
  EBBTIDE_RETURN_IF_ERROR(CheckName("model", message.model()));
  EBBTIDE_RETURN_IF_ERROR(CheckText("policy", message.policy(), "POLICY_INVALID"));
  EBBTIDE_RETURN_IF_ERROR(CheckText("prefill", message.prefill(), "PREFILL_INVALID"));
  EBBTIDE_RETURN_IF_ERROR(CheckText("recall", message.recall(), "RECALL_INVALID"));
  if (!v1::Queries_IsValid(message.queries())) {
    return Invalid("QUERIES_UNKNOWN",
                   absl::StrFormat("queries is %d; known are QUERIES_EVERY_STEP (1) and "
                                   "QUERIES_NONE (2)",
                                   static_cast<int>(message.queries())));
  }
  if (message.idle_timeout_ms() > kIdleTimeoutMsMax) {
    return Invalid("TIMEOUT_TOO_LONG",
                   absl::StrFormat("idle_timeout_ms is %d; at most %d (30 days), or 0 for the "
                                   "server's default",
                                   message.idle_timeout_ms(), kIdleTimeoutMsMax));
  }
  OpenArgs args;
  EBBTIDE_ASSIGN_OR_RETURN(args.budget_tokens, ReadBudget(message.budget()));
  args.sequence = message.sequence();
  args.model = message.model();
  args.policy = message.policy();
  args.prefill = message.prefill();
  args.recall = message.recall();
  args.sends_queries = message.queries() != v1::QUERIES_NONE;
  args.chunk_tokens = message.chunk_tokens();
  args.idle_timeout = absl::Milliseconds(static_cast<int64_t>(message.idle_timeout_ms()));
  return args;
}

absl::StatusOr<StepRequest> ReadAppend(const v1::AppendRequest& message) {
  return ReadStep(message);
}

absl::StatusOr<StepRequest> ReadAttend(const v1::AttendRequest& message) {
  return ReadStep(message);
}

absl::StatusOr<DescribeArgs> ReadDescribe(const v1::DescribeSequenceRequest& message) {
  EBBTIDE_RETURN_IF_ERROR(CheckName("sequence", message.sequence()));
  return DescribeArgs{.sequence = message.sequence(),
                      .with_lanes = message.with_lanes(),
                      .with_tokens = message.with_tokens(),
                      .layer = message.layer(),
                      .kv_head = message.kv_head()};
}

absl::StatusOr<ListArgs> ReadList(const v1::ListSequencesRequest& message) {
  if (message.page_size() > kListPageSizeMax) {
    return Invalid("PAGE_SIZE_TOO_LARGE", absl::StrFormat("page_size is %d; at most %d",
                                                          message.page_size(), kListPageSizeMax));
  }
  ListArgs args{.after = "", .limit = message.page_size() == 0 ? 100 : message.page_size()};
  if (message.page_token().empty()) {
    return args;
  }
  std::string token;
  if (!absl::WebSafeBase64Unescape(message.page_token(), &token) ||
      !std::string_view(token).starts_with(kPageTokenMark)) {
    return Invalid("PAGE_TOKEN_UNKNOWN",
                   "page_token is not one of this server's; take it from next_page_token of the "
                   "page before");
  }
  args.after = token.substr(kPageTokenMark.size());
  return args;
}

std::string PageToken(std::string_view after) {
  return absl::WebSafeBase64Escape(absl::StrFormat("%s%s", kPageTokenMark, after));
}

}  // namespace ebbtide::service
