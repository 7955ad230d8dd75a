// SPDX-License-Identifier: Apache-2.0
//
// The blocked truth against the formula written out in long double.

#include "client/cli/truth.h"

#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/client/synthetic_trace.h"

namespace ebbtide::cli {
namespace {

struct PlainRow {
  std::vector<long double> output;
  long double lse = 0;
};

// softmax over 0 … token, one query head, nothing clever.
PlainRow PlainAttention(const Trace& trace, const TraceLayer& layer, size_t token, size_t head) {
  const std::vector<float> q = layer.q.ToFloats();
  const std::vector<float> k = layer.k.ToFloats();
  const std::vector<float> v = layer.v.ToFloats();
  const size_t dim = trace.head_dim;
  const size_t kv_head = head / trace.group();
  PlainRow row{.output = std::vector<long double>(dim)};
  long double sum = 0;
  for (size_t j = 0; j <= token; ++j) {
    long double logit = 0;
    for (size_t d = 0; d < dim; ++d) {
      logit += static_cast<long double>(q[(token * trace.query_heads + head) * dim + d]) *
               k[(j * trace.kv_heads + kv_head) * dim + d];
    }
    const long double weight = std::exp(trace.scale * logit);
    sum += weight;
    for (size_t d = 0; d < dim; ++d) {
      row.output[d] += weight * v[(j * trace.kv_heads + kv_head) * dim + d];
    }
  }
  for (long double& o : row.output) o /= sum;
  row.lse = std::log(sum);
  return row;
}

class TruthTest : public testing::TestWithParam<SyntheticSpec> {
 protected:
  SyntheticSpec Spec() const {
    SyntheticSpec spec = GetParam();
    spec.seed = seed_;
    return spec;
  }

  const uint64_t seed_ = test::RandomSeed();
};

TEST_P(TruthTest, EqualsThePlainLoops) {
  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(MakeSyntheticFile(Spec()).Bytes(), {}));
  ParallelFor parallel(2);

  ASSERT_OK_AND_ASSIGN(const LayerTruth truth,
                       ComputeTruth(trace, trace.layers[0], parallel, [](uint64_t) {}));

  for (size_t token = 0; token < trace.tokens; ++token) {
    for (uint32_t head = 0; head < trace.query_heads; ++head) {
      const PlainRow plain = PlainAttention(trace, trace.layers[0], token, head);
      EXPECT_NEAR(truth.lse[token * trace.query_heads + head], static_cast<double>(plain.lse),
                  1e-12);
      for (size_t d = 0; d < trace.head_dim; ++d) {
        ASSERT_NEAR(truth.Output(token, head)[d], static_cast<double>(plain.output[d]), 1e-13)
            << "token " << token << ", head " << head << ", channel " << d;
      }
    }
  }
}

// Around the tile of 16 tokens and the block of 128 keys; odd head_dim; one head; many per kv head.
INSTANTIATE_TEST_SUITE_P(
    Shapes, TruthTest,
    testing::Values(
        SyntheticSpec{.tokens = 1, .prompt_length = 1, .layers = {0}},
        SyntheticSpec{.tokens = 17, .prompt_length = 5, .layers = {0}},
        SyntheticSpec{.tokens = 131, .prompt_length = 5, .layers = {0}},
        SyntheticSpec{
            .tokens = 129, .prompt_length = 5, .head_dim = 7, .layers = {0}, .dtype = "F32"},
        SyntheticSpec{
            .tokens = 33, .prompt_length = 5, .query_heads = 6, .kv_heads = 1, .layers = {0}}),
    [](const auto& test) {
      return std::to_string(test.param.tokens) + "Tokens" + std::to_string(test.param.head_dim) +
             "Channels" + std::to_string(test.param.query_heads) + "Heads";
    });

TEST(TruthProgressTest, EveryTokenOfEveryKvHeadIsReportedOnce) {
  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(MakeSyntheticFile({}).Bytes(), {}));
  ParallelFor parallel(2);
  uint64_t last = 0;

  EXPECT_OK(ComputeTruth(trace, trace.layers[0], parallel, [&](uint64_t done) {
    EXPECT_GT(done, last);
    last = done;
  }));

  EXPECT_EQ(last, trace.tokens * trace.kv_heads);
}

TEST(TruthStopTest, NothingIsBegunAfterAStop) {
  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(MakeSyntheticFile({}).Bytes(), {}));
  ParallelFor parallel(1);
  int reports = 0;

  EXPECT_THAT(ComputeTruth(
                  trace, trace.layers[0], parallel, [&](uint64_t) { ++reports; },
                  [&] { return reports > 0; }),
              test::StatusIs(absl::StatusCode::kCancelled));

  EXPECT_EQ(reports, 1);  // Of three tiles for each of two kv heads.
}

TEST(TruthStopTest, ATileIsLeftInItsMiddle) {
  ASSERT_OK_AND_ASSIGN(
      const Trace trace,
      ParseTrace(MakeSyntheticFile({.tokens = 300, .prompt_length = 1}).Bytes(), {}));
  ParallelFor parallel(1);
  constexpr size_t kTile = 18;  // The last one of the first kv head: it reads 3 blocks of keys.
  int asked = 0;
  std::vector<int> asked_before;  // Each report.
  ASSERT_OK(ComputeTruth(
      trace, trace.layers[0], parallel, [&](uint64_t) { asked_before.push_back(asked); },
      [&] {
        ++asked;
        return false;
      }));
  ASSERT_EQ(asked_before[kTile] - asked_before[kTile - 1], 1 + 3 + 1);

  const int in_its_middle = asked_before[kTile - 1] + 1 + 2;
  size_t reports = 0;
  asked = 0;
  EXPECT_THAT(ComputeTruth(
                  trace, trace.layers[0], parallel, [&](uint64_t) { ++reports; },
                  [&] { return ++asked >= in_its_middle; }),
              test::StatusIs(absl::StatusCode::kCancelled));

  EXPECT_EQ(reports, kTile);
  EXPECT_EQ(asked, in_its_middle + 2);  // By who began the tile, and by who began the tiles.
}

TEST(TruthSlackTest, GrantsAnyOrderOfAnF32Sum) {
  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(MakeSyntheticFile({}).Bytes(), {}));
  ParallelFor parallel(1);
  const std::vector<float> q = trace.layers[0].q.ToFloats();
  const std::vector<float> k = trace.layers[0].k.ToFloats();

  ASSERT_OK_AND_ASSIGN(const LayerTruth truth,
                       ComputeTruth(trace, trace.layers[0], parallel, [](uint64_t) {}));

  for (size_t token = 0; token < trace.tokens; ++token) {
    for (size_t j = 0; j <= token; ++j) {
      float forward = 0, backward = 0;
      double exact = 0;
      for (size_t d = 0; d < 8; ++d) {
        forward += q[token * 32 + d] * k[j * 16 + d];
        backward += q[token * 32 + 7 - d] * k[j * 16 + 7 - d];
        exact += double{q[token * 32 + d]} * double{k[j * 16 + d]};
      }
      EXPECT_LE(trace.scale * std::fabs(forward - exact), truth.logit_slack[token * 4]);
      EXPECT_LE(trace.scale * std::fabs(backward - exact), truth.logit_slack[token * 4]);
    }
  }
}

}  // namespace
}  // namespace ebbtide::cli
