// SPDX-License-Identifier: Apache-2.0

#include "tests/simulation/sequence_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/attention/certificate.h"
#include "service/reason.h"
#include "tests/support/comes_true.h"

namespace ebbtide::test {

using service::PageAnswer;
using service::Phase;
using service::RecallMode;
using service::StepAnswer;

Tokens TokensOf(uint64_t seed) {
  Tokens tokens{.geometry = SmallGeometry(), .seed = seed};
  tokens.geometry.dtype = gpu::kDtypes[seed % gpu::kDtypes.size()];
  tokens.output_dtype = gpu::kDtypes[seed / gpu::kDtypes.size() % gpu::kDtypes.size()];
  return tokens;
}

SequenceOracle::SequenceOracle(service::Engine& engine, std::string name, uint64_t seed,
                               const service::OpenArgs& args)
    : engine_(engine),
      name_(std::move(name)),
      tokens_(TokensOf(seed)),
      worker_(engine, tokens_, name_) {
  worker_.open = args;
  recall_ = service::ParseRecall(args.recall).value();
  prefill_ = service::ParsePrefill(args.prefill).value();
}

bool SequenceOracle::Open() {
  const auto answer = worker_.Open();
  if (!answer.ok()) {
    EXPECT_THAT(service::ReasonOf(answer.status()),
                testing::AnyOf("DEVICE_FULL", "LOWER_TIERS_FULL"))
        << answer.status();
    return false;
  }
  is_open_ = true;
  return true;
}

bool SequenceOracle::Step(int32_t count, Phase phase, absl::Duration patience) {
  if (step_count_ == 0) step_count_ = count;
  for (; next_layer_ < tokens_.geometry.layers; ++next_layer_) {
    const Worker::Call call = {.layer = next_layer_,
                               .first = length_,
                               .count = step_count_,
                               .phase = phase,
                               .patience = patience};
    StepAnswer answer = worker_.Step(call);
    // Somebody else reads this layer's pages just now: an honest worker asks again.
    EXPECT_TRUE(ComesTrue([&] {
      if (service::ReasonOf(answer.status) != "CALL_IN_FLIGHT") return true;
      answer = worker_.Step(call);
      return false;
    }));
    if (!answer.status.ok()) {
      EXPECT_EQ(answer.status.code(), absl::StatusCode::kResourceExhausted) << answer.status;
      if (next_layer_ == 0) step_count_ = 0;  // Refused as a whole: nothing changed.
      return false;
    }
    for (int32_t m = 0; m < step_count_; m += std::max(1, step_count_ - 1)) {
      CheckAnswer(answer, {phase, next_layer_, length_ + m, static_cast<size_t>(m)});
    }
  }
  length_ += step_count_;
  step_count_ = 0;
  next_layer_ = 0;
  return true;
}

void SequenceOracle::AskAgain() {
  if (length_ == 0 || step_count_ != 0) return;
  const StepAnswer answer = worker_.Step({.layer = 0, .first = length_ - 1, .appends = false});
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  CheckAnswer(answer, {Phase::kDecode, 0, length_ - 1, 0});
}

service::RecallSpec SequenceOracle::RecallIn(Phase phase) const {
  if (phase == Phase::kDecode) return recall_;
  return {.mode = prefill_.mode == service::PrefillMode::kExact ? RecallMode::kExact
                                                                : RecallMode::kOff};
}

void SequenceOracle::CheckAnswer(const StepAnswer& answer, const AnsweredToken& token) {
  const std::vector<double> truth = FullAttention(tokens_, token.layer, token.index);
  const std::vector<double> output = OutputOf(answer, tokens_, token.row);
  const auto heads = static_cast<size_t>(tokens_.geometry.query_heads);
  const auto head_dim = static_cast<size_t>(tokens_.geometry.head_dim);
  double off = 0;
  double all = 0;
  for (size_t head = 0; head < heads; ++head) {
    double square = 0;
    for (size_t i = head * head_dim; i < (head + 1) * head_dim; ++i) {
      square += (output[i] - truth[i]) * (output[i] - truth[i]);
      all += truth[i] * truth[i];
    }
    off += square;
    const float bound = answer.certificate.error_bound[token.row * heads + head];
    // Without tolerance; a NaN fails too.
    ASSERT_TRUE(std::sqrt(square) <= bound)
        << name_ << " layer " << token.layer << " index " << token.index << " head " << head
        << " in " << gpu::DtypeName(tokens_.output_dtype) << ": error " << std::sqrt(square)
        << ", bound " << bound;
  }
  ++counts_.answers;
  const bool is_met = answer.certificate.met[token.row] != 0;
  counts_.not_met += is_met ? 0 : 1;
  const service::RecallSpec recall = RecallIn(token.phase);
  if (is_met && recall.tau > 0) {
    ASSERT_LE(std::sqrt(off), recall.tau * std::sqrt(all)) << name_ << " index " << token.index;
  }
  CheckMet(answer, token, output);
}

void SequenceOracle::CheckMet(const StepAnswer& answer, const AnsweredToken& token,
                              const std::vector<double>& output) {
  const service::RecallSpec recall = RecallIn(token.phase);
  const bool is_met = answer.certificate.met[token.row] != 0;
  const std::string why(answer.certificate.not_met_reason);
  SCOPED_TRACE(testing::Message() << name_ << " layer " << token.layer << " index " << token.index
                                  << " not met for \"" << why << "\"");
  ASSERT_TRUE(is_met || !why.empty());
  if (recall.mode == RecallMode::kOff) {
    ASSERT_EQ(is_met, answer.absent_pages == 0);
  } else if (recall.mode == RecallMode::kExact) {
    // Only for want of a page.
    ASSERT_THAT(why, testing::Not(testing::AnyOf("RECALL_OFF", "ESTIMATED", "ARITHMETIC")));
  } else {
    // By norms of the output before it was rounded to what was sent: at most so much longer or
    // shorter.
    const double rounding = tokens_.output_dtype == gpu::Dtype::kF32   ? 0
                            : tokens_.output_dtype == gpu::Dtype::kF16 ? 0x1p-10
                                                                       : 0x1p-7;
    const auto heads = static_cast<size_t>(tokens_.geometry.query_heads);
    const auto bounds = std::span(answer.certificate.error_bound).subspan(token.row * heads, heads);
    double bound_squares = 0;
    double output_squares = 0;
    for (const float bound : bounds) bound_squares += static_cast<double>(bound) * bound;
    for (const double element : output) output_squares += element * element;
    // ‖o_full‖ is at least ‖o‖ less the bound, so this target keeps ‖o − o_full‖ ≤ τ·‖o_full‖.
    const double limit = recall.tau / (1 + recall.tau) * std::sqrt(output_squares);
    const double bound = std::sqrt(bound_squares);
    ASSERT_TRUE(is_met || bound > limit * (1 - rounding) * (1 - 1e-9));
    ASSERT_TRUE(!is_met || bound <= limit * (1 + rounding) * (1 + 1e-9));
  }
}

void SequenceOracle::Truncate(int32_t length) {
  const auto answer = engine_.Truncate(name_, static_cast<uint64_t>(length));
  const int32_t sealed = length_ / tokens_.geometry.page_tokens * tokens_.geometry.page_tokens;
  if (length > length_ + step_count_) {
    ASSERT_EQ(answer.status().code(), absl::StatusCode::kInvalidArgument);
    return;
  }
  if (length < sealed) {
    ASSERT_EQ(answer.status().code(), absl::StatusCode::kFailedPrecondition);
    return;
  }
  ASSERT_TRUE(answer.ok()) << answer.status();
  if (length == length_ + step_count_) return;  // Its present length: a no-op.
  length_ = std::min(length_, length);
  step_count_ = 0;
  next_layer_ = 0;
}

void SequenceOracle::Close() {
  absl::Status closed = engine_.CloseSequence(name_);
  EXPECT_TRUE(ComesTrue([&] {
    if (service::ReasonOf(closed) != "CALL_IN_FLIGHT") return true;
    closed = engine_.CloseSequence(name_);
    return false;
  }));
  ASSERT_TRUE(closed.ok()) << closed;
  ASSERT_TRUE(engine_.CloseSequence(name_).ok());  // Again: a no-op.
  is_open_ = false;
}

void SequenceOracle::CheckBytes(int layer, int kv_head) {
  const auto pages = engine_.ReadPages({.sequence = name_,
                                        .layer = static_cast<uint32_t>(layer),
                                        .kv_head = static_cast<uint32_t>(kv_head)});
  if (!pages.ok()) {  // A tier that does not answer just now.
    ASSERT_EQ(pages.status().code(), absl::StatusCode::kUnavailable) << pages.status();
    return;
  }
  const size_t row = tokens_.geometry.page_shape().row_bytes();
  const auto heads = static_cast<size_t>(tokens_.geometry.kv_heads);
  uint64_t tokens_seen = 0;
  for (const service::PageBytes& page : *pages) {
    tokens_seen += page.tokens;
    if (page.state != PageAnswer::kOk) {
      ++counts_.lost_pages;
      ASSERT_TRUE(page.k.empty() && page.v.empty());
      continue;
    }
    ++counts_.checked_pages;
    const auto first = static_cast<int32_t>(page.first_index);
    const std::vector<std::byte> keys =
        tokens_.Keys(layer, first, static_cast<int32_t>(page.tokens));
    const std::vector<std::byte> values =
        tokens_.Values(layer, first, static_cast<int32_t>(page.tokens));
    for (size_t t = 0; t < page.tokens; ++t) {
      const size_t at = (t * heads + static_cast<size_t>(kv_head)) * row;
      ASSERT_EQ(std::memcmp(page.k.data() + t * row, keys.data() + at, row), 0)
          << name_ << " token " << first + static_cast<int32_t>(t);
      ASSERT_EQ(std::memcmp(page.v.data() + t * row, values.data() + at, row), 0)
          << name_ << " token " << first + static_cast<int32_t>(t);
      ASSERT_EQ(page.positions[t], first + static_cast<int32_t>(t));
    }
  }
  ASSERT_EQ(tokens_seen, static_cast<uint64_t>(length_ + (layer < next_layer_ ? step_count_ : 0)));
}

std::string SequenceOracle::Residents() {
  std::string all;
  for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
    for (int head = 0; head < tokens_.geometry.kv_heads; ++head) {
      const auto description = engine_.Describe({.sequence = name_,
                                                 .with_tokens = true,
                                                 .layer = static_cast<uint32_t>(layer),
                                                 .kv_head = static_cast<uint32_t>(head)});
      EXPECT_TRUE(description.ok()) << description.status();
      if (!description.ok()) return all;
      for (const auto& token : description->tokens) all += token.resident ? '1' : '0';
      all += '|';
    }
  }
  return all;
}

}  // namespace ebbtide::test
