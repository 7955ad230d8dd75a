// SPDX-License-Identifier: Apache-2.0
//
// What is promised of codes are inequalities over the page that was encoded, checked in long double
// without tolerance on pages at the edges of number formats and steps, for every implementation;
// and that all implementations make the same bits.

#include "gpu/kernels/codes.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/coded_page.h"
#include "tests/unit/gpu/implementation.h"

namespace ebbtide::gpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr CodeForm kForms[] = {CodeForm::k4Bit, CodeForm::k8Bit};
constexpr float kScale = 0.125F;

struct Errors {
  std::vector<float> logit;
  float key = -1;
  float value = -1;
};

class CodesTest : public testing::TestWithParam<ImplementationCase> {
 protected:
  Coded Encode(const CodedPage& page) {
    Coded coded{std::vector<std::byte>(CoarseBytes(page.shape()), std::byte{0xA5}),
                std::vector<std::byte>(FineBytes(page.shape()), std::byte{0xA5})};
    implementation_.Choose(EncodeReference, EncodeCpu)(page.Encoding(coded.coarse, coded.fine));
    return coded;
  }

  std::vector<float> Decode(const CodedPage& page, const Coded& coded, CodeForm form) {
    std::vector<float> decoded(static_cast<size_t>(page.rows() * page.shape().head_dim),
                               std::nanf(""));
    implementation_.Choose(DecodeReference, DecodeCpu)(DecodeArgs{.shape = page.shape(),
                                                                  .form = form,
                                                                  .digest = page.digest(),
                                                                  .coarse = coded.coarse,
                                                                  .fine = coded.FineOf(form),
                                                                  .page = decoded});
    return decoded;
  }

  Errors ErrorsOf(const CodedPage& page, const Coded& coded, CodeForm form,
                  const std::vector<float>& query) {
    Errors errors{
        .logit = std::vector<float>(query.size() / static_cast<size_t>(page.shape().head_dim))};
    implementation_.Choose(CodeErrorsReference, CodeErrorsCpu)(
        CodeErrorArgs{.shape = page.shape(),
                      .form = form,
                      .scale = kScale,
                      .rows = static_cast<int>(errors.logit.size()),
                      .query = query,
                      .digest = page.digest(),
                      .coarse = coded.coarse,
                      .logit_error = errors.logit,
                      .key_error = &errors.key,
                      .value_error = &errors.value});
    return errors;
  }

  Implementation implementation_{GetParam().name};
};

long double Difference(const CodedPage& page, const std::vector<float>& decoded, int row, int d) {
  const float element = decoded[static_cast<size_t>(row * page.shape().head_dim + d)];
  return static_cast<long double>(page.At(row, d)) - static_cast<long double>(element);
}

// Rows that make errors add up (of the first keys, signs and all), and random ones.
std::vector<float> Queries(const CodedPage& page, const std::vector<float>& decoded,
                           std::mt19937_64& random) {
  std::vector<float> query;
  std::normal_distribution<float> normal;
  for (int row = 0; row < 6; ++row) {
    for (int d = 0; d < page.shape().head_dim; ++d) {
      const bool is_up = Difference(page, decoded, row % page.shape().tokens, d) > 0;
      query.push_back(row < 4 ? (is_up ? 1.0F : -1.0F) * (1.0F + static_cast<float>(row * d))
                              : normal(random));
    }
  }
  return query;
}

long double Norm(const CodedPage& page, const std::vector<float>& decoded, int row) {
  long double sum = 0;
  for (int d = 0; d < page.shape().head_dim; ++d) {
    const long double off = Difference(page, decoded, row, d);
    sum += off * off;
  }
  return std::sqrt(sum);
}

// Names of the promises that do not hold.
std::vector<std::string> BrokenPromises(const CodedPage& page, const std::vector<float>& decoded,
                                        const Errors& errors, const std::vector<float>& query) {
  std::vector<std::string> broken;
  const int head_dim = page.shape().head_dim;
  for (int token = 0; token < page.shape().tokens; ++token) {
    if (!(Norm(page, decoded, token) <= errors.key)) broken.emplace_back("key_error");
    const int value = page.shape().tokens + token;
    if (!(Norm(page, decoded, value) <= errors.value)) broken.emplace_back("value_error");
    for (size_t row = 0; row < errors.logit.size(); ++row) {
      long double off = 0;
      for (int d = 0; d < head_dim; ++d) {
        off += query[row * static_cast<size_t>(head_dim) + static_cast<size_t>(d)] *
               Difference(page, decoded, token, d);
      }
      if (!(std::fabs(kScale * off) <= errors.logit[row])) broken.emplace_back("logit_error");
    }
  }
  return broken;
}

TEST_P(CodesTest, DecodedIsNeverFurtherOffThanPromised) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const CodedPage& page : EveryCodedPage(GetParam().dtype, random)) {
      const Coded coded = Encode(page);
      for (const CodeForm form : kForms) {
        const std::vector<float> decoded = Decode(page, coded, form);
        const std::vector<float> query = Queries(page, decoded, random);

        const Errors errors = ErrorsOf(page, coded, form, query);

        ASSERT_THAT(BrokenPromises(page, decoded, errors, query), testing::IsEmpty());
      }
    }
  });
}

TEST_P(CodesTest, PromiseOnePercentShortIsNoticed) {
  std::mt19937_64 random(1);
  CodedPage page({.dtype = GetParam().dtype, .tokens = 4}, random);
  // Both ends, and twice where either form is furthest off: halfway between fine steps, rounded up,
  // and then from the middle of coarse ones up again.
  for (int row = 0; row < page.rows(); ++row) {
    for (int d = 0; d < 64; ++d)
      page.Set(row, d, row % 4 == 0 ? 0 : row % 4 == 1 ? 30 : 0.125 * 7.5);
  }
  page.StoreKeyBox();
  const Coded coded = Encode(page);
  for (const CodeForm form : kForms) {
    const std::vector<float> decoded = Decode(page, coded, form);
    const std::vector<float> query = Queries(page, decoded, random);
    const Errors whole = ErrorsOf(page, coded, form, query);

    Errors errors = whole;
    errors.logit[2] *= 0.99F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query), testing::Contains("logit_error"));
    errors = whole;
    errors.key *= 0.99F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query), testing::Contains("key_error"));
    errors = whole;
    errors.value *= 0.99F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query), testing::Contains("value_error"));
  }
}

TEST_P(CodesTest, EveryImplementationMakesTheReferencesBits) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const CodedPage& page : EveryCodedPage(GetParam().dtype, random)) {
      Coded reference = Encode(page);
      EncodeReference(page.Encoding(reference.coarse, reference.fine));

      const Coded coded = Encode(page);

      ASSERT_EQ(coded.coarse, reference.coarse);
      ASSERT_EQ(coded.fine, reference.fine);
      for (const CodeForm form : kForms) {
        std::vector<float> expected(static_cast<size_t>(page.rows() * page.shape().head_dim));
        DecodeReference({.shape = page.shape(),
                         .form = form,
                         .digest = page.digest(),
                         .coarse = coded.coarse,
                         .fine = coded.FineOf(form),
                         .page = expected});
        const std::vector<float> decoded = Decode(page, coded, form);
        ASSERT_EQ(std::memcmp(decoded.data(), expected.data(), 4 * expected.size()), 0);
      }
    }
  });
}

TEST_P(CodesTest, ErrorsAreAtMostAHundredThousandthAboveTheReference) {
  std::mt19937_64 random(2);
  for (const CodedPage& page : EveryCodedPage(GetParam().dtype, random)) {
    const Coded coded = Encode(page);
    for (const CodeForm form : kForms) {
      const std::vector<float> query = Queries(page, Decode(page, coded, form), random);
      Errors expected{.logit = std::vector<float>(6)};
      CodeErrorsReference({.shape = page.shape(),
                           .form = form,
                           .scale = kScale,
                           .rows = 6,
                           .query = query,
                           .digest = page.digest(),
                           .coarse = coded.coarse,
                           .logit_error = expected.logit,
                           .key_error = &expected.key,
                           .value_error = &expected.value});

      const Errors errors = ErrorsOf(page, coded, form, query);

      constexpr double kSubnormal = 256 * 0x1p-147;
      for (size_t row = 0; row < query.size() / static_cast<size_t>(page.shape().head_dim); ++row) {
        ASSERT_LE(errors.logit[row], expected.logit[row] * (1 + 1e-5) + kSubnormal);
      }
      ASSERT_LE(errors.key, expected.key * (1 + 1e-5) + kSubnormal);
      ASSERT_LE(errors.value, expected.value * (1 + 1e-5) + kSubnormal);
    }
  }
}

TEST_P(CodesTest, ErrorsAreThoseOfStepsAndLittleMore) {
  std::mt19937_64 random(3);
  const CodedPage page({.dtype = GetParam().dtype}, random);
  const Coded coded = Encode(page);
  for (const CodeForm form : kForms) {
    double steps = 0;
    for (int d = 0; d < 64; ++d) {
      const double width = ElementAt(Dtype::kF16, page.digest().data(), 64 + d) -
                           ElementAt(Dtype::kF16, page.digest().data(), d);
      steps += width * (form == CodeForm::k4Bit ? 17 : 1) / 480;
    }

    const Errors errors = ErrorsOf(page, coded, form, std::vector<float>(64, -1.0F));

    EXPECT_GE(errors.logit[0], kScale * steps);
    EXPECT_LE(errors.logit[0], kScale * steps * (form == CodeForm::k4Bit ? 1.0001 : 1.001));
  }
}

TEST_P(CodesTest, BytesOfASmallPageAreThoseOfTheFormat) {
  std::mt19937_64 random(4);
  CodedPage page({.dtype = GetParam().dtype, .head_dim = 3, .tokens = 3}, random);
  // Keys: channel 0 from 0 to 240 in fine steps of 1, channel 1 constant, channel 2 in the middle.
  const double rows[6][3] = {{0, 7, -1},   {240, 7, 1},   {103, 7, 0},
                             {-8, 0.5, 2}, {8, 0.5, 3.5}, {-7, 0.5, 2.25}};
  for (int row = 0; row < 6; ++row) {
    for (int d = 0; d < 3; ++d) page.Set(row, d, rows[row][d]);
  }
  page.StoreKeyBox();

  const Coded coded = Encode(page);

  // Codes, which are steps and 8, of keys: 8 8 8, 248 8 248, 111 8 128. Of values: 8 8 8, 248 8
  // 248, 23 8 48. Values' box: -8 0.5 2, 8 0.5 3.5.
  const std::vector<int> coarse = {0x00, 0xC8, 0x00, 0x38, 0x00, 0x40, 0x00, 0x48,
                                   0x00, 0x38, 0x00, 0x43, 0x00, 0xF0, 0xF0, 0x06,
                                   0x08, 0x00, 0xF0, 0xF0, 0x01, 0x03};
  const std::vector<int> fine = {0x88, 0x88, 0x88, 0x8F, 0x00, 0x88, 0x88, 0x88, 0x87, 0x00};
  const auto numbers = [](const std::vector<std::byte>& bytes) {
    std::vector<int> ints;
    for (const std::byte byte : bytes) ints.push_back(std::to_integer<int>(byte));
    return ints;
  };
  EXPECT_EQ(numbers(coded.coarse), coarse);
  EXPECT_EQ(numbers(coded.fine), fine);
  const auto near = [](const std::vector<double>& elements) {
    std::vector<testing::Matcher<float>> matchers;
    for (const double x : elements)
      matchers.push_back(testing::FloatNear(static_cast<float>(x), 1e-5F));
    return matchers;
  };
  EXPECT_THAT(Decode(page, coded, CodeForm::k4Bit),
              testing::ElementsAreArray(near({0, 7, -1, 240, 7, 1, 96, 7, 1.0 / 15, -8, 0.5, 2, 8,
                                              0.5, 3.5, -8 + 16.0 / 15, 0.5, 2.3})));
  EXPECT_THAT(Decode(page, coded, CodeForm::k8Bit),
              testing::ElementsAreArray(
                  near({0, 7, -1, 240, 7, 1, 103, 7, 0, -8, 0.5, 2, 8, 0.5, 3.5, -7, 0.5, 2.25})));
}

TEST_P(CodesTest, LowerEndOfABoxIsExact) {
  std::mt19937_64 random(12);
  for (const CodedPage& page : EveryCodedPage(GetParam().dtype, random)) {
    const Coded coded = Encode(page);
    for (const CodeForm form : kForms) {
      const std::vector<float> decoded = Decode(page, coded, form);
      for (int d = 0; d < page.shape().head_dim; ++d) {
        const double low = ElementAt(Dtype::kF16, page.digest().data(), d);
        for (int token = 0; token < page.shape().tokens; ++token) {
          if (page.At(token, d) != low) continue;
          ASSERT_EQ(Difference(page, decoded, token, d), 0);
        }
      }
    }
  }
}

TEST_P(CodesTest, ChannelThatDoesNotVaryIsExact) {
  std::mt19937_64 random(5);
  CodedPage page({.dtype = GetParam().dtype}, random);
  for (int row = 0; row < page.rows(); ++row) {
    for (int d = 0; d < 64; ++d) page.Set(row, d, d % 2 == 0 ? 65504 : -0x1p-24 * d);
  }
  page.StoreKeyBox();
  const Coded coded = Encode(page);
  for (const CodeForm form : kForms) {
    const std::vector<float> decoded = Decode(page, coded, form);

    const Errors errors = ErrorsOf(page, coded, form, std::vector<float>(64, 3.0F));

    EXPECT_EQ(errors.key, 0);
    EXPECT_EQ(errors.value, 0);
    EXPECT_LE(errors.logit[0], 64 * 0x1p-148);
    for (int row = 0; row < page.rows(); ++row) EXPECT_EQ(Norm(page, decoded, row), 0);
  }
}

TEST_P(CodesTest, PageOutsideTheRangeOfHalvesIsOfNoUseButHarmless) {
  if (GetParam().dtype == Dtype::kF16) GTEST_SKIP() << "an f16 page has no such elements";
  std::mt19937_64 random(6);
  for (const double beyond : {65505.0, 1e30, -65505.0, -1e30}) {
    CodedPage page({.dtype = GetParam().dtype}, random);
    page.Set(3, 11, beyond);
    page.Set(page.shape().tokens + 5, 60, beyond);
    page.StoreKeyBox();
    const Coded coded = Encode(page);
    for (const CodeForm form : kForms) {
      const Errors errors = ErrorsOf(page, coded, form, std::vector<float>(128, 0.0F));

      EXPECT_THAT(errors.logit, testing::Each(kInfinity));
      EXPECT_EQ(errors.key, kInfinity);
      EXPECT_EQ(errors.value, kInfinity);
      const std::vector<float> decoded = Decode(page, coded, form);
      EXPECT_THAT(decoded, testing::Each(testing::AllOf(testing::Ge(-65504), testing::Le(65504))));
      EXPECT_EQ(decoded[11], 0);
      EXPECT_NE(decoded[12], 0);
    }
  }
}

TEST_P(CodesTest, ValuesOutsideTheRangeLeaveKeysOfUse) {
  if (GetParam().dtype == Dtype::kF16) GTEST_SKIP() << "an f16 page has no such elements";
  std::mt19937_64 random(7);
  CodedPage page({.dtype = GetParam().dtype}, random);
  page.Set(page.shape().tokens, 0, 1e9);
  const Coded coded = Encode(page);

  const Errors errors = ErrorsOf(page, coded, CodeForm::k8Bit, std::vector<float>(64, 1.0F));

  EXPECT_LT(errors.logit[0], 1);
  EXPECT_LT(errors.key, 1);
  EXPECT_EQ(errors.value, kInfinity);
}

TEST_P(CodesTest, EitherZeroIsStoredAsPlusZero) {
  std::mt19937_64 random(8);
  const CodedPage page({.dtype = GetParam().dtype, .kind = CodedPageKind::kZeros}, random);

  const Coded coded = Encode(page);

  EXPECT_THAT(coded.coarse, testing::Each(std::byte{0}));
}

// What no encoder makes still decodes to numbers inside the box.
TEST_P(CodesTest, AnyNibblesDecodeInsideTheBox) {
  std::mt19937_64 random(13);
  const CodedPage page({.dtype = GetParam().dtype}, random);
  Coded coded = Encode(page);
  const size_t box_bytes = 4 * 64;
  for (size_t i = box_bytes; i < coded.coarse.size(); ++i)
    coded.coarse[i] = static_cast<std::byte>(random());
  for (std::byte& byte : coded.fine) byte = static_cast<std::byte>(random() % 256);
  std::fill_n(coded.fine.begin(), 16, std::byte{0});
  std::fill_n(coded.coarse.begin() + box_bytes, 16, std::byte{0});  // Code 0: below the box.

  for (const CodeForm form : kForms) {
    const std::vector<float> decoded = Decode(page, coded, form);
    for (int token = 0; token < page.shape().tokens; ++token) {
      for (int d = 0; d < 64; ++d) {
        const float low = ElementAt(Dtype::kF16, page.digest().data(), d);
        const float width = ElementAt(Dtype::kF16, page.digest().data(), 64 + d) - low;
        const float element = decoded[static_cast<size_t>(token * 64 + d)];
        EXPECT_GE(element, low);
        EXPECT_LE(element, low + width * (form == CodeForm::k4Bit ? 1.0001F : 247.01F / 240));
      }
    }
  }
}

TEST_P(CodesTest, SecondPlaneRefinesTheFirst) {
  std::mt19937_64 random(9);
  const CodedPage page({.dtype = GetParam().dtype}, random);
  const Coded coded = Encode(page);
  const std::vector<float> query(64, 1.0F);
  const Errors four = ErrorsOf(page, coded, CodeForm::k4Bit, query);
  const Errors eight = ErrorsOf(page, coded, CodeForm::k8Bit, query);

  EXPECT_NEAR(four.logit[0] / eight.logit[0], 17, 0.1);
  EXPECT_NEAR(four.value / eight.value, 17, 0.1);
}

TEST_P(CodesTest, PartsNeedNoAlignment) {
  std::mt19937_64 random(10);
  const CodedPage page({.dtype = GetParam().dtype, .head_dim = 77}, random);
  const Coded aligned = Encode(page);
  Coded shifted{std::vector<std::byte>(aligned.coarse.size() + 1),
                std::vector<std::byte>(aligned.fine.size() + 1)};
  const std::span<std::byte> coarse = std::span(shifted.coarse).subspan(1);
  const std::span<std::byte> fine = std::span(shifted.fine).subspan(1);

  implementation_.Choose(EncodeReference, EncodeCpu)(page.Encoding(coarse, fine));

  EXPECT_TRUE(std::equal(coarse.begin(), coarse.end(), aligned.coarse.begin()));
  EXPECT_TRUE(std::equal(fine.begin(), fine.end(), aligned.fine.begin()));
  std::vector<float> decoded(static_cast<size_t>(page.rows() * 77));
  implementation_.Choose(DecodeReference, DecodeCpu)(DecodeArgs{.shape = page.shape(),
                                                                .form = CodeForm::k8Bit,
                                                                .digest = page.digest(),
                                                                .coarse = coarse,
                                                                .fine = fine,
                                                                .page = decoded});
  EXPECT_EQ(decoded, Decode(page, aligned, CodeForm::k8Bit));
}

TEST_P(CodesTest, SpanOfTheWrongSizeStopsTheProcess) {
  std::mt19937_64 random(11);
  const CodedPage page({.dtype = GetParam().dtype}, random);
  Coded coded = Encode(page);
  std::vector<float> decoded(static_cast<size_t>(page.rows() * 64));
  DecodeArgs args = {.shape = page.shape(),
                     .form = CodeForm::k8Bit,
                     .digest = page.digest(),
                     .coarse = coded.coarse,
                     .fine = {},
                     .page = decoded};

  EXPECT_DEATH(implementation_.Choose(DecodeReference, DecodeCpu)(args), "fine is FineBytes");
  args.form = CodeForm::k4Bit;
  args.coarse = args.coarse.first(100);
  EXPECT_DEATH(implementation_.Choose(DecodeReference, DecodeCpu)(args), "coarse is CoarseBytes");
}

INSTANTIATE_TEST_SUITE_P(Every, CodesTest, testing::ValuesIn(EveryImplementation()),
                         ImplementationCaseName);

}  // namespace
}  // namespace ebbtide::gpu
