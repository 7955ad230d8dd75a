// SPDX-License-Identifier: Apache-2.0

#include "tests/simulation/sequence_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/policy/policy.h"
#include "service/reason.h"

namespace ebbtide::test {

using service::PageAnswer;
using service::Phase;
using service::StepAnswer;

service::Geometry GeometryOf(uint64_t seed) {
  service::Geometry geometry = SmallGeometry();
  geometry.dtype = gpu::kDtypes[seed % gpu::kDtypes.size()];
  return geometry;
}

SequenceOracle::SequenceOracle(service::Engine& engine, std::string name, uint64_t seed,
                               const service::OpenArgs& args)
    : engine_(engine),
      name_(std::move(name)),
      tokens_{.geometry = GeometryOf(seed), .seed = seed},
      worker_(engine, tokens_, name_) {
  worker_.open = args;
  const auto recall = service::ParseRecall(args.recall);
  if (recall.ok() && recall->mode == service::RecallMode::kBounded) tau_ = recall->tau;
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
    while (service::ReasonOf(answer.status) == "CALL_IN_FLIGHT") answer = worker_.Step(call);
    if (!answer.status.ok()) {
      EXPECT_EQ(answer.status.code(), absl::StatusCode::kResourceExhausted) << answer.status;
      if (next_layer_ == 0) step_count_ = 0;  // Refused as a whole: nothing changed.
      return false;
    }
    for (int32_t m = 1; m <= step_count_; m += std::max(1, step_count_ - 1)) {
      CheckAnswer(answer, next_layer_, length_ + m - 1, m);
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
  CheckAnswer(answer, 0, length_ - 1, 1);
}

// Token `count` of the answer, whose index is `index`, beside full attention.
void SequenceOracle::CheckAnswer(const StepAnswer& answer, int layer, int32_t index,
                                 int32_t count) {
  const std::vector<double> truth = FullAttention(tokens_, layer, index);
  const auto heads = static_cast<size_t>(tokens_.geometry.query_heads);
  const auto head_dim = static_cast<size_t>(tokens_.geometry.head_dim);
  const auto token = static_cast<size_t>(count - 1);
  double off = 0;
  double all = 0;
  for (size_t head = 0; head < heads; ++head) {
    double square = 0;
    for (size_t d = 0; d < head_dim; ++d) {
      float x = 0;
      std::memcpy(&x, answer.output.data() + ((token * heads + head) * head_dim + d) * 4, 4);
      square += (x - truth[head * head_dim + d]) * (x - truth[head * head_dim + d]);
      all += truth[head * head_dim + d] * truth[head * head_dim + d];
    }
    off += square;
    // Without tolerance; a NaN fails too.
    ASSERT_TRUE(std::sqrt(square) <= answer.certificate.error_bound[token * heads + head])
        << name_ << " layer " << layer << " index " << index << " head " << head << ": error "
        << std::sqrt(square) << ", bound " << answer.certificate.error_bound[token * heads + head];
  }
  ++counts_.answers;
  const bool is_met = answer.certificate.met[token] != 0;
  counts_.not_met += is_met ? 0 : 1;
  if (is_met && tau_ > 0) {
    ASSERT_LE(std::sqrt(off), tau_ * std::sqrt(all)) << name_ << " index " << index;
  }
  ASSERT_EQ(is_met, answer.certificate.met[token] != 0);
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
  while (service::ReasonOf(closed) == "CALL_IN_FLIGHT") closed = engine_.CloseSequence(name_);
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
