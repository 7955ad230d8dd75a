// SPDX-License-Identifier: Apache-2.0

#include "service/attention/check_item.h"

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/element.h"
#include "gpu/kernels/append.h"
#include "service/reason.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kQueryHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 4;

// An array of a worker, whose elements the test may change.
struct Array {
  Array(gpu::Dtype with_dtype, std::vector<int64_t> with_shape)
      : dtype(with_dtype), shape(std::move(with_shape)) {
    size_t count = gpu::DtypeBytes(dtype);
    for (const int64_t size : shape) count *= static_cast<size_t>(size);
    bytes.resize(count);
  }

  void Set(size_t element, float value) {
    const uint16_t half = gpu::FloatToHalf(value);
    if (dtype == gpu::Dtype::kF32) {
      std::memcpy(&bytes[element * 4], &value, 4);
    } else {
      std::memcpy(&bytes[element * 2], &half, 2);
    }
  }
  TensorView View() const { return {.dtype = dtype, .shape = shape, .bytes = bytes}; }

  gpu::Dtype dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

class CheckItemTest : public testing::Test {
 protected:
  CheckItemTest()
      : sequence_(1, {.sequence = "a"},
                  std::make_shared<const Model>(Model{.name = "m",
                                                      .weights_fingerprint = "",
                                                      .geometry = {.layers = 2,
                                                                   .query_heads = kQueryHeads,
                                                                   .kv_heads = kKvHeads,
                                                                   .head_dim = kHeadDim,
                                                                   .dtype = gpu::Dtype::kF16,
                                                                   .scale = 0.5F,
                                                                   .page_tokens = 16},
                                                      .fingerprint = 1}),
                  {}) {
    sequence_.chunk_tokens = 8;
  }

  static Array Queries(int64_t tokens, gpu::Dtype dtype = gpu::Dtype::kF32) {
    return {dtype, {tokens, kQueryHeads, kHeadDim}};
  }
  static Array Keys(int64_t tokens) { return {gpu::Dtype::kF16, {tokens, kKvHeads, kHeadDim}}; }

  absl::Status Check(const StepItem& item, Phase phase = Phase::kDecode) const {
    return CheckItem(sequence_, {.layer = 1, .phase = phase}, item);
  }

  // `item` can never be right: its reason, and words that its message has.
  void ExpectRefused(const StepItem& item, const std::string& reason,
                     const std::vector<std::string>& words) const {
    const absl::Status status = Check(item);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
    for (const std::string& word : words) EXPECT_THAT(status.message(), HasSubstr(word));
  }

  OpenedSequence sequence_;
  Array q_ = Queries(3);
  Array k_ = Keys(3);
  Array v_ = Keys(3);
};

TEST_F(CheckItemTest, TokensAreTheFirstDimensionOfQueriesOrElseOfKeys) {
  const Array q = Queries(5);

  EXPECT_EQ(TokensOf({.sequence = "a", .q = q.View(), .k = k_.View()}), 5);
  EXPECT_EQ(TokensOf({.sequence = "a", .k = k_.View()}), 3);
  EXPECT_EQ(TokensOf({.sequence = "a"}), 0);
}

TEST_F(CheckItemTest, TokensOfNonsenseStayInRange) {
  const std::vector<int64_t> negative = {-1, 2, 4};
  const std::vector<int64_t> huge = {std::numeric_limits<int64_t>::max(), 2, 4};

  EXPECT_EQ(TokensOf({.sequence = "a", .k = TensorView{}}), 0);
  EXPECT_EQ(TokensOf({.sequence = "a", .k = TensorView{.shape = negative, .bytes = {}}}), 0);
  EXPECT_EQ(TokensOf({.sequence = "a", .k = TensorView{.shape = huge, .bytes = {}}}),
            kSequenceTokensMax);
}

TEST_F(CheckItemTest, WhatFitsTheModelIsTaken) {
  const std::vector<int64_t> positions = {9, 9, -1};

  EXPECT_OK(Check({.sequence = "a", .q = q_.View()}));
  EXPECT_OK(Check({.sequence = "a", .k = k_.View(), .v = v_.View()}));
  EXPECT_OK(Check(
      {.sequence = "a", .q = q_.View(), .k = k_.View(), .v = v_.View(), .positions = positions}));
  EXPECT_OK(Check(
      {.sequence = "a", .q = Queries(3, gpu::Dtype::kF16).View()}));  // Queries may have any dtype.
}

TEST_F(CheckItemTest, LayerIsOneOfTheModels) {
  const absl::Status status = CheckItem(sequence_, {.layer = 2}, {.sequence = "a", .q = q_.View()});

  EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kInvalidArgument,
                                     AllOf(HasSubstr("layer is 2"), HasSubstr("0 to 1"))));
  EXPECT_EQ(ReasonOf(status), "LAYER_OUT_OF_RANGE");
}

TEST_F(CheckItemTest, KeysAndValuesComeTogetherAndSomethingComes) {
  ExpectRefused({.sequence = "a"}, "TENSORS_MISSING", {"q", "k and v"});
  ExpectRefused({.sequence = "a", .q = q_.View(), .k = k_.View()}, "TENSORS_MISSING", {});
  ExpectRefused({.sequence = "a", .v = v_.View()}, "TENSORS_MISSING", {});
}

TEST_F(CheckItemTest, ChunkIsAtMostWhatWasSaidAtOpen) {
  EXPECT_OK(Check({.sequence = "a", .q = Queries(8).View()}));
  ExpectRefused({.sequence = "a", .q = Queries(9).View()}, "TOO_MANY_TOKENS",
                {"9 tokens", "1 to 8"});
  ExpectRefused({.sequence = "a", .q = Queries(0).View()}, "TOO_MANY_TOKENS",
                {"0 tokens", "1 to 8"});
}

TEST_F(CheckItemTest, BlockwisePrefillLimitsPrefillAlone) {
  sequence_.prefill = {.mode = PrefillMode::kBlockwise, .block_tokens = 4};
  const Array four = Queries(4);
  const Array five = Queries(5);

  EXPECT_OK(Check({.sequence = "a", .q = four.View()}, Phase::kPrefill));
  EXPECT_OK(Check({.sequence = "a", .q = five.View()}, Phase::kDecode));
  const absl::Status status = Check({.sequence = "a", .q = five.View()}, Phase::kPrefill);

  EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kInvalidArgument,
                                     AllOf(HasSubstr("5 tokens"), HasSubstr("blockwise(4)"))));
  EXPECT_EQ(ReasonOf(status), "TOO_MANY_TOKENS");
}

TEST_F(CheckItemTest, PositionsAreOnePerToken) {
  const std::vector<int64_t> two = {0, 1};

  ExpectRefused({.sequence = "a", .q = q_.View(), .positions = two}, "POSITIONS_MISMATCH",
                {"2 entries", "3 tokens"});
}

TEST_F(CheckItemTest, ShapesAreTheModels) {
  const Array too_few_heads(gpu::Dtype::kF32, {3, 3, kHeadDim});
  const Array too_flat(gpu::Dtype::kF32, {3, kQueryHeads * kHeadDim});
  const Array too_wide(gpu::Dtype::kF16, {3, kKvHeads, kHeadDim + 1});
  const Array other_length = Keys(2);

  ExpectRefused({.sequence = "a", .q = too_few_heads.View()}, "SHAPE_MISMATCH",
                {"q has shape [3, 3, 4]", "[3, 4, 4]"});
  ExpectRefused({.sequence = "a", .q = too_flat.View()}, "SHAPE_MISMATCH", {"q has shape [3, 16]"});
  ExpectRefused({.sequence = "a", .k = too_wide.View(), .v = v_.View()}, "SHAPE_MISMATCH",
                {"k has shape [3, 2, 5]", "[3, 2, 4]"});
  ExpectRefused({.sequence = "a", .k = k_.View(), .v = other_length.View()}, "SHAPE_MISMATCH",
                {"v has shape [2, 2, 4]"});
  ExpectRefused(
      {.sequence = "a", .q = q_.View(), .k = other_length.View(), .v = other_length.View()},
      "SHAPE_MISMATCH", {"k has shape [2, 2, 4]", "[3, 2, 4]"});
}

TEST_F(CheckItemTest, BytesAreWhatShapeAndDtypeNeed) {
  TensorView short_view = k_.View();
  short_view.bytes = short_view.bytes.first(short_view.bytes.size() - 1);
  q_.bytes.push_back(std::byte{0});

  ExpectRefused({.sequence = "a", .k = short_view, .v = v_.View()}, "SIZE_MISMATCH",
                {"k has 47 bytes", "need 48"});
  ExpectRefused({.sequence = "a", .q = q_.View()}, "SIZE_MISMATCH",
                {"q has 193 bytes", "need 192"});
}

TEST_F(CheckItemTest, KeysAndValuesHaveTheModelsDtype) {
  const Array f32(gpu::Dtype::kF32, {3, kKvHeads, kHeadDim});

  ExpectRefused({.sequence = "a", .k = f32.View(), .v = v_.View()}, "DTYPE_MISMATCH",
                {"k is f32", "keeps f16"});
  ExpectRefused({.sequence = "a", .k = k_.View(), .v = f32.View()}, "DTYPE_MISMATCH", {"v is f32"});
}

TEST_F(CheckItemTest, ElementThatIsNotFiniteIsNamedByItsIndices) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    Array q = q_;
    q.Set((1 * kQueryHeads + 2) * kHeadDim + 3, bad);
    ExpectRefused({.sequence = "a", .q = q.View()}, "NOT_FINITE", {"q holds", "[1, 2, 3]"});

    Array k = k_;
    k.Set(0, bad);
    ExpectRefused({.sequence = "a", .k = k.View(), .v = v_.View()}, "NOT_FINITE",
                  {"k holds", "[0, 0, 0]"});

    Array v = v_;
    v.Set(3 * kKvHeads * kHeadDim - 1, bad);
    ExpectRefused({.sequence = "a", .k = k_.View(), .v = v.View()}, "NOT_FINITE",
                  {"v holds", "[2, 1, 3]"});
  }
}

TEST_F(CheckItemTest, ElementBeyondTheLimitIsNamedByItsIndicesAndValue) {
  q_.Set(1, -std::numeric_limits<float>::max());
  ExpectRefused({.sequence = "a", .q = q_.View()}, "VALUE_TOO_LARGE",
                {"q holds -3.4", "beyond 2.8", "[0, 0, 1]"});
}

TEST_F(CheckItemTest, LargestElementsAreTaken) {
  q_.Set(0, gpu::kMagnitudeMax);
  k_.Set(0, 65504.0F);

  EXPECT_OK(Check({.sequence = "a", .q = q_.View(), .k = k_.View(), .v = v_.View()}));
}

TEST_F(CheckItemTest, DigestIsOfKeysAndValuesAlone) {
  k_.Set(0, 1.0F);
  const std::vector<int64_t> positions = {4, 5, 6};
  const CallDigest digest = DigestOf({.sequence = "a", .k = k_.View(), .v = v_.View()});

  EXPECT_EQ(DigestOf({.sequence = "a",
                      .first_index = 9,
                      .q = q_.View(),
                      .k = k_.View(),
                      .v = v_.View(),
                      .positions = positions}),
            digest);
  EXPECT_NE(digest, CallDigest{});
  EXPECT_EQ(DigestOf({.sequence = "a", .q = q_.View()}), CallDigest{});
}

TEST_F(CheckItemTest, DigestTellsEveryBitDtypeShapeAndRoleApart) {
  const CallDigest zeros = DigestOf({.sequence = "a", .k = k_.View(), .v = v_.View()});
  std::vector<CallDigest> digests = {zeros};
  for (const size_t element : {size_t{0}, k_.bytes.size() / 2 - 1}) {
    for (const bool in_keys : {true, false}) {
      Array changed = Keys(3);
      changed.Set(element, 1.0F);
      digests.push_back(in_keys ? DigestOf({.sequence = "a", .k = changed.View(), .v = v_.View()})
                                : DigestOf({.sequence = "a", .k = k_.View(), .v = changed.View()}));
    }
  }
  const std::vector<int64_t> other_shape = {3, kHeadDim, kKvHeads};
  TensorView reshaped = k_.View();
  reshaped.shape = other_shape;
  digests.push_back(DigestOf({.sequence = "a", .k = reshaped, .v = v_.View()}));
  TensorView retyped = k_.View();
  retyped.dtype = gpu::Dtype::kF32;
  digests.push_back(DigestOf({.sequence = "a", .k = retyped, .v = v_.View()}));

  for (size_t a = 0; a < digests.size(); ++a) {
    for (size_t b = 0; b < a; ++b) EXPECT_NE(digests[a], digests[b]) << a << " and " << b;
  }
}

TEST_F(CheckItemTest, QueriesComeByLaneThenByHeadOfTheGroup) {
  for (const gpu::Dtype dtype : {gpu::Dtype::kF32, gpu::Dtype::kF16}) {
    Array q = Queries(2, dtype);
    for (int m = 0; m < 2; ++m) {
      for (int head = 0; head < kQueryHeads; ++head) {
        for (int d = 0; d < kHeadDim; ++d) {
          q.Set(static_cast<size_t>((m * kQueryHeads + head) * kHeadDim + d),
                static_cast<float>(100 * m + 10 * head + d));
        }
      }
    }

    const auto lanes = QueriesByLane(sequence_.model->geometry, q.View());

    ASSERT_EQ(lanes.size(), 2U);
    EXPECT_THAT(lanes[0], ElementsAre(0, 1, 2, 3, 100, 101, 102, 103,        // Head 0.
                                      10, 11, 12, 13, 110, 111, 112, 113));  // Head 1.
    EXPECT_THAT(lanes[1], ElementsAre(20, 21, 22, 23, 120, 121, 122, 123,    // Head 2.
                                      30, 31, 32, 33, 130, 131, 132, 133));  // Head 3.
  }
}

}  // namespace
}  // namespace ebbtide::service
