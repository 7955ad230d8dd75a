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
#include <span>
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
  explicit Errors(size_t rows) : logit(rows), logit_joint(rows), logit_deviation(rows) {}

  std::vector<float> logit;
  std::vector<float> logit_joint;
  std::vector<float> logit_deviation;
  float key = -1;
  float value = -1;
  float value_joint = -1;
  float value_deviation = -1;
};

CodeErrorArgs ErrorArgs(const CodedPage& page, const Coded& coded, CodeForm form,
                        const std::vector<float>& query, Errors& errors) {
  return {.shape = page.shape(),
          .form = form,
          .scale = kScale,
          .rows = static_cast<int>(errors.logit.size()),
          .query = query,
          .digest = page.digest(),
          .coarse = coded.coarse,
          .logit_error = errors.logit,
          .logit_error_joint = errors.logit_joint,
          .logit_deviation = errors.logit_deviation,
          .key_error = &errors.key,
          .value_error = &errors.value,
          .value_error_joint = &errors.value_joint,
          .value_deviation = &errors.value_deviation};
}

class CodesTest : public testing::TestWithParam<ImplementationCase> {
 protected:
  Coded Encode(const CodedPage& page) {
    Coded coded{std::vector<std::byte>(CoarseBytes(page.shape()), std::byte{0xA5}),
                std::vector<std::byte>(FineBytes(page.shape()), std::byte{0xA5})};
    implementation_.Choose(EncodeReference, EncodeCpu,
                           EncodeOnCuda)(page.Encoding(coded.coarse, coded.fine));
    return coded;
  }

  std::vector<float> Decode(const CodedPage& page, const Coded& coded, CodeForm form) {
    std::vector<float> decoded(static_cast<size_t>(page.rows() * page.shape().head_dim),
                               std::nanf(""));
    implementation_.Choose(DecodeReference, DecodeCpu,
                           DecodeOnCuda)(DecodeArgs{.shape = page.shape(),
                                                    .form = form,
                                                    .digest = page.digest(),
                                                    .coarse = coded.coarse,
                                                    .fine = coded.FineOf(form),
                                                    .page = decoded});
    return decoded;
  }

  Errors ErrorsOf(const CodedPage& page, const Coded& coded, CodeForm form,
                  const std::vector<float>& query) {
    Errors errors(query.size() / static_cast<size_t>(page.shape().head_dim));
    implementation_.Choose(CodeErrorsReference, CodeErrorsCpu,
                           CodeErrorsOnCuda)(ErrorArgs(page, coded, form, query, errors));
    return errors;
  }

  Implementation implementation_{GetParam().name};
};

long double Difference(const CodedPage& page, const std::vector<float>& decoded, int row, int d) {
  const float element = decoded[static_cast<size_t>(row * page.shape().head_dim + d)];
  return static_cast<long double>(page.At(row, d)) - static_cast<long double>(element);
}

// A row of ones, rows that make errors add up (of the first keys, signs and all), and random ones.
std::vector<float> Queries(const CodedPage& page, const std::vector<float>& decoded,
                           std::mt19937_64& random) {
  std::vector<float> query;
  std::normal_distribution<float> normal;
  query.assign(static_cast<size_t>(page.shape().head_dim), 1.0F);
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

// scale * query . (key - decoded key) of each token.
std::vector<long double> LogitDifferences(const CodedPage& page, const std::vector<float>& decoded,
                                          std::span<const float> query) {
  std::vector<long double> off(static_cast<size_t>(page.shape().tokens));
  for (int token = 0; token < page.shape().tokens; ++token) {
    for (int d = 0; d < page.shape().head_dim; ++d) {
      off[static_cast<size_t>(token)] +=
          kScale * query[static_cast<size_t>(d)] * Difference(page, decoded, token, d);
    }
  }
  return off;
}

long double Length(const std::vector<long double>& x) {
  long double sum = 0;
  for (const long double element : x) sum += element * element;
  return std::sqrt(sum);
}

// |sum_j c_j (v_j - decoded v_j)| / |c|, the worst of weights that are alike, of one token each,
// and of those that steps towards the worst lead to.
long double WorstValueSum(const CodedPage& page, const std::vector<float>& decoded) {
  const int tokens = page.shape().tokens;
  std::vector<long double> weights(static_cast<size_t>(tokens), 1);
  long double worst = 0;
  for (int step = 0; step < 4; ++step) {
    std::vector<long double> sum(static_cast<size_t>(page.shape().head_dim));
    const auto off = [&](int token, size_t d) {
      return Difference(page, decoded, tokens + token, static_cast<int>(d));
    };
    for (size_t d = 0; d < sum.size(); ++d) {
      for (int t = 0; t < tokens; ++t) sum[d] += weights[static_cast<size_t>(t)] * off(t, d);
    }
    if (Length(weights) > 0) worst = std::max(worst, Length(sum) / Length(weights));
    for (int t = 0; t < tokens; ++t) {
      weights[static_cast<size_t>(t)] = 0;
      for (size_t d = 0; d < sum.size(); ++d) weights[static_cast<size_t>(t)] += sum[d] * off(t, d);
    }
  }
  return worst;
}

// Names of the promises that do not hold.
std::vector<std::string> BrokenPromises(const CodedPage& page, const std::vector<float>& decoded,
                                        const Errors& errors, const std::vector<float>& query) {
  std::vector<std::string> broken;
  const auto head_dim = static_cast<size_t>(page.shape().head_dim);
  for (int token = 0; token < page.shape().tokens; ++token) {
    if (!(Norm(page, decoded, token) <= errors.key)) broken.emplace_back("key_error");
    const int value = page.shape().tokens + token;
    if (!(Norm(page, decoded, value) <= errors.value)) broken.emplace_back("value_error");
  }
  for (size_t row = 0; row < errors.logit.size(); ++row) {
    const std::vector<long double> off =
        LogitDifferences(page, decoded, std::span(query).subspan(row * head_dim, head_dim));
    for (const long double z : off) {
      if (!(std::fabs(z) <= errors.logit[row])) broken.emplace_back("logit_error");
    }
    if (!(Length(off) <= errors.logit_joint[row])) broken.emplace_back("logit_error_joint");
  }
  // What long double rounds off in the sums over tokens.
  if (!(WorstValueSum(page, decoded) * (1 - 1e-17L) <= errors.value_joint)) {
    broken.emplace_back("value_error_joint");
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

// Joint norms from a Gram matrix are up to 5.6 % above that of rows that are all alike.
TEST_P(CodesTest, PromiseALittleShortIsNoticed) {
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
    errors.logit[3] *= 0.99F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query), testing::Contains("logit_error"));
    errors = whole;
    errors.key *= 0.99F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query), testing::Contains("key_error"));
    errors = whole;
    errors.value *= 0.99F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query), testing::Contains("value_error"));
    errors = whole;
    errors.logit_joint[0] *= 0.94F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query),
                testing::Contains("logit_error_joint"));
    errors = whole;
    errors.value_joint *= 0.94F;
    EXPECT_THAT(BrokenPromises(page, decoded, errors, query),
                testing::Contains("value_error_joint"));
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
      Errors expected(7);
      CodeErrorsReference(ErrorArgs(page, coded, form, query, expected));

      const Errors errors = ErrorsOf(page, coded, form, query);

      constexpr double kSubnormal = 256 * 0x1p-147;
      for (size_t row = 0; row < query.size() / static_cast<size_t>(page.shape().head_dim); ++row) {
        ASSERT_LE(errors.logit[row], expected.logit[row] * (1 + 1e-5) + kSubnormal);
        ASSERT_LE(errors.logit_joint[row], expected.logit_joint[row] * (1 + 1e-5) + kSubnormal);
        ASSERT_NEAR(errors.logit_deviation[row], expected.logit_deviation[row],
                    1e-5 * expected.logit_deviation[row] + kSubnormal);
      }
      ASSERT_LE(errors.key, expected.key * (1 + 1e-5) + kSubnormal);
      ASSERT_LE(errors.value, expected.value * (1 + 1e-5) + kSubnormal);
      ASSERT_EQ(errors.value_joint, expected.value_joint);
      ASSERT_NEAR(errors.value_deviation, expected.value_deviation,
                  1e-5 * expected.value_deviation + kSubnormal);
    }
  }
}

// A query along one channel leaves nothing to average over.
TEST_P(CodesTest, ErrorsAreThoseOfStepsAndLittleMore) {
  std::mt19937_64 random(3);
  const CodedPage page({.dtype = GetParam().dtype}, random);
  const Coded coded = Encode(page);
  std::vector<float> query(64);
  query[5] = -1;
  const double width = ElementAt(Dtype::kF16, page.digest().data(), 64 + 5) -
                       ElementAt(Dtype::kF16, page.digest().data(), 5);
  for (const CodeForm form : kForms) {
    const double step = width * (form == CodeForm::k4Bit ? 17 : 1) / 480;

    const Errors errors = ErrorsOf(page, coded, form, query);

    EXPECT_GE(errors.logit[0], kScale * step);
    EXPECT_LE(errors.logit[0], kScale * step * (form == CodeForm::k4Bit ? 1.0001 : 1.001));
  }
}

// Over 64 channels, what each channel may be off by does not add up; nor does it over 32 tokens.
TEST_P(CodesTest, NormsTightenWhatChannelsAllow) {
  std::mt19937_64 random(14);
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

    EXPECT_LT(errors.logit[0], 0.75 * kScale * steps);
    EXPECT_LT(errors.logit_joint[0], 2.2 * errors.logit[0]);
    // Fine values are not worth more than the length of the vector of their tokens' errors.
    EXPECT_LT(errors.value_joint, (form == CodeForm::k4Bit ? 2.5 : 5.7) * errors.value);
  }
}

TEST_P(CodesTest, DeviationsAreThoseOfTheDifferences) {
  std::mt19937_64 random(15);
  const CodedPage page({.dtype = GetParam().dtype, .tokens = 64}, random);
  const Coded coded = Encode(page);
  for (const CodeForm form : kForms) {
    const std::vector<float> decoded = Decode(page, coded, form);
    long double logits = 0;
    long double model = 0;
    const std::vector<float> query = Queries(page, decoded, random);
    const Errors errors = ErrorsOf(page, coded, form, query);
    for (const size_t row : {size_t{5}, size_t{6}}) {  // Rows that know nothing of the page.
      const auto off = LogitDifferences(page, decoded, std::span(query).subspan(row * 64, 64));
      logits += Length(off) * Length(off) / 64;
      model += errors.logit_deviation[row] * errors.logit_deviation[row];
    }
    long double values = 0;
    for (int token = 0; token < 64; ++token) {
      const long double off = Norm(page, decoded, 64 + token);
      values += off * off / 64;
    }

    EXPECT_NEAR(static_cast<double>(logits / model), 1, 0.35);
    EXPECT_NEAR(static_cast<double>(std::sqrt(values) / errors.value_deviation), 1, 0.05);
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
  const std::vector<int> box = {0x00, 0xC8, 0x00, 0x38, 0x00, 0x40,
                                0x00, 0x48, 0x00, 0x38, 0x00, 0x43};
  const std::vector<int> coarse = {0x00, 0xF0, 0xF0, 0x06, 0x08, 0x00, 0xF0, 0xF0, 0x01, 0x03};
  const std::vector<int> fine = {0x88, 0x88, 0x88, 0x8F, 0x00, 0x88, 0x88, 0x88, 0x87, 0x00};
  const auto numbers = [](std::span<const std::byte> bytes) {
    std::vector<int> ints;
    for (const std::byte byte : bytes) ints.push_back(std::to_integer<int>(byte));
    return ints;
  };
  const std::span<const std::byte> part = coded.coarse;
  EXPECT_EQ(numbers(part.first(12)), box);
  EXPECT_EQ(numbers(part.subspan(12 + 32)), coarse);
  EXPECT_EQ(numbers(coded.fine), fine);
  const auto near = [](const std::vector<double>& elements) {
    std::vector<testing::Matcher<float>> matchers;
    for (const double x : elements)
      matchers.push_back(testing::FloatNear(static_cast<float>(x), 1e-5F));
    return matchers;
  };
  // Token 2 alone is off: keys by 7 / 240 and 1 / 30 of their widths, values by 1 / 15 and 1 / 20;
  // in 8 bits by nothing. One row of three makes joint norms 1.0099 and 1.0724 of it, by their
  // formulas.
  float norms[8];
  std::memcpy(norms, part.data() + 12, sizeof(norms));
  const double key = std::hypot(7.0 / 240, 1.0 / 30);
  const double value = std::hypot(1.0 / 15, 1.0 / 20);
  EXPECT_THAT(std::vector<double>(norms, norms + 4),
              testing::ElementsAre(
                  testing::DoubleNear(key, 1e-4), testing::DoubleNear(1.0099 * key, 1e-4),
                  testing::DoubleNear(value, 1e-4), testing::DoubleNear(1.0724 * value, 2e-4)));
  EXPECT_THAT(std::vector<double>(norms + 4, norms + 8), testing::Each(testing::Lt(1e-5)));
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
    for (int d = 0; d < 64; ++d) page.Set(row, d, d % 2 == 0 ? 65280 : -0x1p-24 * d);
  }
  page.StoreKeyBox();
  const Coded coded = Encode(page);
  for (const CodeForm form : kForms) {
    const std::vector<float> decoded = Decode(page, coded, form);

    const Errors errors = ErrorsOf(page, coded, form, std::vector<float>(64, 3.0F));

    EXPECT_EQ(errors.key, 0);
    EXPECT_EQ(errors.value, 0);
    EXPECT_EQ(errors.logit[0], 0);
    EXPECT_EQ(errors.logit_joint[0], 0);
    EXPECT_EQ(errors.value_joint, 0);
    for (int row = 0; row < page.rows(); ++row) EXPECT_EQ(Norm(page, decoded, row), 0);
  }
}

// Of pages whose elements may leave the range of halves.
using WideCodesTest = CodesTest;

TEST_P(WideCodesTest, PageOutsideTheRangeOfHalvesIsOfNoUseButHarmless) {
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
      EXPECT_THAT(errors.logit_joint, testing::Each(kInfinity));
      EXPECT_EQ(errors.value_joint, kInfinity);
      EXPECT_EQ(errors.key, kInfinity);
      EXPECT_EQ(errors.value, kInfinity);
      const std::vector<float> decoded = Decode(page, coded, form);
      EXPECT_THAT(decoded, testing::Each(testing::AllOf(testing::Ge(-65504), testing::Le(65504))));
      EXPECT_EQ(decoded[11], 0);
      EXPECT_NE(decoded[12], 0);
    }
  }
}

TEST_P(WideCodesTest, ValuesOutsideTheRangeLeaveKeysOfUse) {
  std::mt19937_64 random(7);
  CodedPage page({.dtype = GetParam().dtype}, random);
  page.Set(page.shape().tokens, 0, 1e9);
  const Coded coded = Encode(page);

  const Errors errors = ErrorsOf(page, coded, CodeForm::k8Bit, std::vector<float>(64, 1.0F));

  EXPECT_LT(errors.logit[0], 1);
  EXPECT_LT(errors.logit_joint[0], 1);
  EXPECT_LT(errors.key, 1);
  EXPECT_EQ(errors.value, kInfinity);
  EXPECT_EQ(errors.value_joint, kInfinity);
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
  const size_t head_bytes = CoarseHeadBytes(page.shape());
  for (size_t i = head_bytes; i < coded.coarse.size(); ++i)
    coded.coarse[i] = static_cast<std::byte>(random());
  for (std::byte& byte : coded.fine) byte = static_cast<std::byte>(random() % 256);
  std::fill_n(coded.fine.begin(), 16, std::byte{0});
  std::fill_n(&coded.coarse[head_bytes], 16, std::byte{0});  // Code 0: below the box.

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

  EXPECT_NEAR(four.logit[0] / eight.logit[0], 16, 1.5);
  EXPECT_NEAR(four.logit_joint[0] / eight.logit_joint[0], 14, 2);  // The finer one is less near.
  EXPECT_NEAR(four.value / eight.value, 16, 1.5);
  EXPECT_NEAR(four.value_joint / eight.value_joint, 7, 1);
}

TEST_P(CodesTest, PartsNeedNoAlignment) {
  std::mt19937_64 random(10);
  const CodedPage page({.dtype = GetParam().dtype, .head_dim = 77}, random);
  const Coded aligned = Encode(page);
  Coded shifted{std::vector<std::byte>(aligned.coarse.size() + 1),
                std::vector<std::byte>(aligned.fine.size() + 1)};
  const std::span<std::byte> coarse = std::span(shifted.coarse).subspan(1);
  const std::span<std::byte> fine = std::span(shifted.fine).subspan(1);

  implementation_.Choose(EncodeReference, EncodeCpu, EncodeOnCuda)(page.Encoding(coarse, fine));

  EXPECT_TRUE(std::equal(coarse.begin(), coarse.end(), aligned.coarse.begin()));
  EXPECT_TRUE(std::equal(fine.begin(), fine.end(), aligned.fine.begin()));
  std::vector<float> decoded(static_cast<size_t>(page.rows() * 77));
  implementation_.Choose(DecodeReference, DecodeCpu,
                         DecodeOnCuda)(DecodeArgs{.shape = page.shape(),
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

  EXPECT_DEATH(implementation_.Choose(DecodeReference, DecodeCpu, DecodeOnCuda)(args),
               "fine is FineBytes");
  args.form = CodeForm::k4Bit;
  args.coarse = args.coarse.first(100);
  EXPECT_DEATH(implementation_.Choose(DecodeReference, DecodeCpu, DecodeOnCuda)(args),
               "coarse is CoarseBytes");
}

std::vector<ImplementationCase> OfDtypesWiderThanHalves() {
  std::vector<ImplementationCase> cases = EveryImplementationAndCuda();
  std::erase_if(cases, [](const ImplementationCase& each) { return each.dtype == Dtype::kF16; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Every, CodesTest, testing::ValuesIn(EveryImplementationAndCuda()),
                         ImplementationCaseName);
INSTANTIATE_TEST_SUITE_P(Every, WideCodesTest, testing::ValuesIn(OfDtypesWiderThanHalves()),
                         ImplementationCaseName);

}  // namespace
}  // namespace ebbtide::gpu
