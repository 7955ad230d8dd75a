// SPDX-License-Identifier: Apache-2.0
//
// The promises of backend.h for operations on pages, digests and codes: what every backend answers
// is what its reference does.

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/backend.h"
#include "gpu/kernels/digest.h"
#include "tests/unit/gpu/backend_stand.h"
#include "tests/unit/gpu/sample_page.h"

namespace ebbtide::gpu {
namespace {

constexpr size_t kLanes = 5;

// Pages with their digests and codes, by the references, and what is asked of them.
struct CodedLane {
  explicit CodedLane(std::mt19937_64& random)
      : page({.head_dim = 48}, random),
        digest(DigestBytes(48)),
        coarse(CoarseBytes(page.shape())),
        fine(FineBytes(page.shape())),
        decoded(2 * 32 * 48),
        query(2 * 48) {
    std::normal_distribution<float> normal;
    for (float& element : query) element = normal(random);
    DigestReference(page.Args(digest));
    EncodeReference(Encode());
  }

  EncodeArgs Encode() {
    return {.shape = page.shape(),
            .page = page.bytes(),
            .digest = digest,
            .coarse = coarse,
            .fine = fine};
  }
  DecodeArgs Decode(CodeForm form) {
    return {.shape = page.shape(),
            .form = form,
            .digest = digest,
            .coarse = coarse,
            .fine = fine,
            .page = decoded};
  }

  SamplePage page;
  std::vector<std::byte> digest, coarse, fine;
  std::vector<float> decoded, query;
  std::vector<float> first = std::vector<float>(2), second = std::vector<float>(2),
                     third = std::vector<float>(2);
  float key_error = 0, value_error = 0;
};

class BackendOnPagesTest : public BackendStand {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < kLanes; ++i) coded_.push_back(std::make_unique<CodedLane>(random_));
  }

  std::vector<std::unique_ptr<CodedLane>> coded_;
};
INSTANTIATE_TEST_SUITE_P(Every, BackendOnPagesTest, testing::ValuesIn(EveryBackend()),
                         testing::PrintToStringParamName());

TEST_P(BackendOnPagesTest, EncodeMakesTheBitsOfTheReference) {
  std::vector<EncodeArgs> lanes;
  for (const auto& lane : coded_) {
    lanes.push_back(lane->Encode());
    std::ranges::fill(lane->coarse, std::byte{0xA5});
    std::ranges::fill(lane->fine, std::byte{0xA5});
  }
  ExpectReference<EncodeArgs, std::byte>(lanes, lanes, &EncodeReference,
                                         {&EncodeArgs::coarse, &EncodeArgs::fine}, 0);
}

TEST_P(BackendOnPagesTest, DecodeMakesTheBitsOfTheReference) {
  for (const CodeForm form : {CodeForm::k4Bit, CodeForm::k8Bit}) {
    std::vector<DecodeArgs> lanes;
    for (const auto& lane : coded_) lanes.push_back(lane->Decode(form));
    ExpectReference<DecodeArgs, float>(lanes, lanes, &DecodeReference, {&DecodeArgs::page}, 0);
  }
}

TEST_P(BackendOnPagesTest, CodeErrorsAnswerAsTheReference) {
  std::vector<CodeErrorArgs> lanes;
  for (const auto& lane : coded_) {
    lanes.push_back({.shape = lane->page.shape(),
                     .form = CodeForm::k8Bit,
                     .scale = 0.2F,
                     .rows = 2,
                     .query = lane->query,
                     .digest = lane->digest,
                     .coarse = lane->coarse,
                     .logit_error = lane->first,
                     .logit_error_joint = lane->second,
                     .logit_deviation = lane->third,
                     .key_error = &lane->key_error,
                     .value_error = &lane->value_error});
  }
  ExpectReference<CodeErrorArgs, float>(
      lanes, lanes, &CodeErrorsReference,
      {&CodeErrorArgs::logit_error, &CodeErrorArgs::logit_error_joint,
       &CodeErrorArgs::logit_deviation},
      1e-5);
  for (const auto& lane : coded_) {
    EXPECT_GT(lane->key_error, 0);
    EXPECT_GT(lane->value_error, 0);
  }
}

TEST_P(BackendOnPagesTest, DigestIsWithinWhatItsContractAllows) {
  std::vector<std::vector<std::byte>> digests;
  std::vector<DigestArgs> lanes;
  for (const auto& lane : coded_) digests.emplace_back(lane->digest.size());
  for (size_t i = 0; i < kLanes; ++i) lanes.push_back(coded_[i]->page.Args(digests[i]));

  Run(lanes);

  for (size_t i = 0; i < kLanes; ++i) {
    const DigestView expected(coded_[i]->digest.data(), 48);
    const DigestView digest(digests[i].data(), 48);
    EXPECT_EQ(0, std::memcmp(digest.key_low, expected.key_low, 2 * 48 * 2)) << i;  // The box.
    EXPECT_NEAR(digest.tail.value_radius, expected.tail.value_radius, 1e-3) << i;
    EXPECT_GE(digest.tail.value_norm_max, expected.tail.value_norm_max) << i;
    EXPECT_EQ(digest.tail.tokens, 32) << i;
  }
}

TEST_P(BackendOnPagesTest, BoundsAnswerAsTheReference) {
  std::vector<const std::byte*> digests;
  for (const auto& lane : coded_) digests.push_back(lane->digest.data());
  const std::vector<int32_t> absent(kLanes, 32);
  std::vector<std::vector<float>> low(kLanes, std::vector<float>(2 * kLanes)), high = low,
                                                                               estimate = low;
  std::vector<BoundArgs> lanes;
  std::vector<ValueDistanceArgs> distances;
  for (size_t i = 0; i < kLanes; ++i) {
    lanes.push_back({.head_dim = 48,
                     .rows = 2,
                     .pages = kLanes,
                     .scale = 0.2F,
                     .query = coded_[i]->query,
                     .digest = digests,
                     .absent = absent,
                     .mass_low = low[i],
                     .mass_high = high[i],
                     .mass_estimate = estimate[i]});
    distances.push_back({.head_dim = 48,
                         .rows = 2,
                         .pages = kLanes,
                         .output = coded_[i]->query,
                         .digest = digests,
                         .distance = low[i]});
  }
  ExpectReference<BoundArgs, float>(
      lanes, lanes, &BoundReference,
      {&BoundArgs::mass_low, &BoundArgs::mass_high, &BoundArgs::mass_estimate}, 1e-4);
  ExpectReference<ValueDistanceArgs, float>(distances, distances, &ValueDistanceReference,
                                            {&ValueDistanceArgs::distance}, 1e-5);
}

}  // namespace
}  // namespace ebbtide::gpu
