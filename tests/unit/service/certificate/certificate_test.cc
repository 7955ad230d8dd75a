// SPDX-License-Identifier: Apache-2.0
//
// A bound is true if no truth within what is promised is further off, and good if some truth comes
// near. Both are tried by brute force, without tolerance: truths at random, and the worst that a
// climb finds; and instances whose worst truth is known must attain it.

#include "service/attention/certificate.h"

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/service/certificate/random_row.h"
#include "tests/unit/service/certificate/sample_row.h"

namespace ebbtide::service {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNothing = -kInfinity;
const double kNotANumber = std::nan("");

using Kind = SamplePart::Kind;

// The worst error found in `draws` climbs, each from a truth drawn at random.
long double WorstError(SampleRow& row, int draws, std::mt19937_64& random) {
  long double worst = 0;
  for (int draw = 0; draw < draws; ++draw) {
    row.DrawTruth(random);
    row.WorsenTruth(15);
    worst = std::max(worst, row.Error());
  }
  return worst;
}

TEST(CertificateTest, NoTruthIsFurtherOffThanTheBound) {
  test::ForEachSeed(2, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 100; ++i) {
      SampleRow row = RandomRow(random);
      const RowBound bound = BoundRow(row.Args());
      if (bound.error < 1e-12) continue;  // The sample's own rounding shows.
      for (int draw = 0; draw < 5; ++draw) {
        row.DrawTruth(random);
        ASSERT_LE(row.Error(), bound.error);
        ASSERT_LE(row.UnreadShare(), bound.mass);
      }
      ASSERT_LE(WorstError(row, 5, random), bound.error);
      ASSERT_LE(row.UnreadShare(), bound.mass);
    }
  });
}

TEST(CertificateTest, WorstTruthFoundIsHalfOfTheBoundOnAverage) {
  std::mt19937_64 random(1);
  long double sum = 0;
  for (int i = 0; i < 100; ++i) {
    SampleRow row = RandomRow(random);
    sum += WorstError(row, 10, random) / static_cast<long double>(BoundRow(row.Args()).error);
  }

  EXPECT_GT(sum / 100, 0.5);
}

// One form and nothing else: tokens at spread e^R and -spread e^-R, balanced, are the worst there
// are.
SampleRow WorstForm(double logit_error, double spread) {
  const double up = std::exp(logit_error);
  const double share = 1 / up / (up + 1 / up);  // Of the token further away.
  return SampleRow({{.kind = Kind::kForm,
                     .logit_error = logit_error,
                     .tokens = {{.logit = std::log(share), .value = {spread * up}},
                                {.logit = std::log(1 - share), .value = {-spread / up}}}}});
}

TEST(CertificateTest, WorstFormAttainsItsBound) {
  for (const double logit_error : {0.01, 0.07, 0.5, 1.0, 3.0}) {
    SampleRow row = WorstForm(logit_error, 2);

    const RowBound bound = BoundRow(row.Args());

    std::mt19937_64 random(1);
    const long double worst = WorstError(row, 30, random);
    EXPECT_LE(worst, bound.error);
    EXPECT_GT(worst, 0.998 * bound.error) << logit_error;
    EXPECT_NEAR(bound.error, 2 * std::sinh(logit_error), 2e-3 * bound.error);
  }
}

// Tokens at +-spread, alike: nothing tells them apart but the sign, so all are off by as much.
SampleRow TogetherForm(double logit_error_joint, double spread, int tokens) {
  SamplePart form{.kind = Kind::kForm,
                  .logit_error = 2 * logit_error_joint / std::sqrt(tokens),
                  .logit_error_joint = logit_error_joint};
  for (int t = 0; t < tokens; ++t) {
    form.tokens.push_back({.logit = 0, .value = {t % 2 == 0 ? spread : -spread}});
  }
  return SampleRow({form});
}

TEST(CertificateTest, TokensThatAreOffTogetherAttainTheirBound) {
  for (const double joint : {3e-3, 1e-2, 2e-2}) {
    SampleRow row = TogetherForm(joint, 2, 16);

    const RowBound bound = BoundRow(row.Args());

    std::mt19937_64 random(1);
    const long double worst = WorstError(row, 30, random);
    EXPECT_LE(worst, bound.error);
    EXPECT_GT(worst, 0.99 * bound.error) << joint;
    EXPECT_NEAR(bound.error, 2 * joint / 4, 2e-2 * bound.error);  // 4 tokens' worth of 16.
  }
}

TEST(CertificateTest, ValuesThatAreOffTogetherAttainTheirBound) {
  SamplePart form{.kind = Kind::kForm, .value_error = 1, .value_error_joint = 1.5};
  for (int t = 0; t < 9; ++t) form.tokens.push_back({.logit = 0, .value = {3.0L, -t + 4.0L}});
  SampleRow row({form});

  const RowBound bound = BoundRow(row.Args());

  std::mt19937_64 random(1);
  const long double worst = WorstError(row, 30, random);
  EXPECT_LE(worst, bound.error);
  EXPECT_GT(worst, 0.998 * bound.error);
  EXPECT_NEAR(bound.error, 1.5 / 3, 1e-3);
}

TEST(CertificateTest, BoundOnePercentShortIsNoticed) {
  std::mt19937_64 random(2);
  for (SampleRow row : {WorstForm(0.07, 1), TogetherForm(5e-3, 1, 9)}) {
    EXPECT_GT(WorstError(row, 30, random), 0.99 * BoundRow(row.Args()).error);
  }
}

TEST(CertificateTest, UnreadPageAttainsItsBound) {
  SampleRow row({{.kind = Kind::kExact, .tokens = {{.logit = 0, .value = {1, 1}}}},
                 {.kind = Kind::kUnread,
                  .logit_error = 1,
                  .value_error = 5,
                  .tokens = {{.logit = -3, .value = {1, 1}}}}});
  std::mt19937_64 random(3);
  row.DrawTruth(random);
  row.WorsenTruth(10);

  const RowBound bound = BoundRow(row.Args());

  const double share = std::exp(-2) / (1 + std::exp(-2));
  EXPECT_NEAR(bound.error, 5 * share, 5e-3);
  EXPECT_NEAR(static_cast<double>(row.Error()), 5 * share, 1e-9);
  EXPECT_NEAR(bound.mass, share, 1e-5);
  EXPECT_LE(row.Error(), bound.error);
  EXPECT_LE(row.UnreadShare(), bound.mass);
}

TEST(CertificateTest, PageNearerThanTheBoundCountsWithItsLeastMass) {
  // The near page can only dilute what the far one adds.
  const std::vector<UnreadPage> pages = {{.mass_low = -1, .mass_high = -1, .distance = 9},
                                         {.mass_low = 1, .mass_high = 4, .distance = 0.5}};
  const RowBound bound = BoundRow({.lse = 0, .exact_mass = 1, .unread = pages});

  const double far = std::exp(-1);
  const double near = std::exp(1);
  EXPECT_NEAR(bound.error, (9 * far + 0.5 * near) / (1 + far + near), 5e-3);
}

TEST(CertificateTest, ValueErrorAloneIsTheBound) {
  const std::vector<FormPart> forms = {
      {.mass = 0.25, .distance = 7, .spread = 3, .value_error = 0.5}};

  EXPECT_NEAR(BoundRow({.exact_mass = 0.75, .forms = forms}).error, 0.125, 1e-3);
}

TEST(CertificateTest, WhatIsOpenNeverLowersTheBound) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 30; ++i) {
      SampleRow row = RandomRow(random);
      // The bound is found to within a thousandth.
      const double before = BoundRow(row.Args()).error * (1 - 2e-3);
      for (FormPart& form : row.forms()) {
        for (double* open : {&form.distance, &form.spread, &form.logit_error, &form.value_error,
                             &form.focus, &form.focal_distance, &form.focal_spread,
                             &form.logit_error_joint, &form.value_error_joint}) {
          const double kept = *open;
          *open = kept * 1.5 + 0.01;
          EXPECT_GE(BoundRow(row.Args()).error, before);
          *open = kept;
        }
      }
      for (UnreadPage& page : row.unread()) {
        page.mass_high += 0.5;
        EXPECT_GE(BoundRow(row.Args()).error, before);
        page.mass_low -= 0.5;
        EXPECT_GE(BoundRow(row.Args()).error, before);
        page.distance *= 1.1;
        EXPECT_GE(BoundRow(row.Args()).error, before);
      }
    }
  });
}

// (e^R - 1) times all distances, over the least mass: the bound one would write down first.
double PlainBound(const RowBoundArgs& args) {
  double top = 0;
  double bottom = args.exact_mass;
  for (const FormPart& form : args.forms) {
    const double reach = std::hypot(form.distance, form.spread);
    top +=
        form.mass * (std::expm1(form.logit_error) * (reach + form.value_error) + form.value_error);
    bottom += form.mass * std::exp(-form.logit_error);
  }
  for (const UnreadPage& page : args.unread) {
    top += std::exp(page.mass_high - args.lse) * page.distance;
    bottom += std::exp(page.mass_low - args.lse);
  }
  return top / bottom;
}

// With all tokens of a form taken together, which is better where it is.
double PlainJointBound(const RowBoundArgs& args) {
  double top = 0;
  double bottom = args.exact_mass;
  for (const FormPart& form : args.forms) {
    const double gain = form.logit_error_joint * std::expm1(form.logit_error) / form.logit_error;
    const double root = std::sqrt(form.focus);
    top += form.mass *
           (gain * std::hypot(form.focal_spread, root * form.focal_distance) +
            root * form.value_error_joint + std::expm1(form.logit_error) * form.value_error);
    bottom += form.mass * (1 - gain * root);
  }
  for (const UnreadPage& page : args.unread) {
    top += std::exp(page.mass_high - args.lse) * page.distance;
    bottom += std::exp(page.mass_low - args.lse);
  }
  return bottom > 0 ? top / bottom : kInfinity;
}

TEST(CertificateTest, IsNeverAboveThePlainBound) {
  test::ForEachSeed(1, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 300; ++i) {
      const SampleRow row = RandomRow(random);

      const double plain = std::min(PlainBound(row.Args()), PlainJointBound(row.Args()));
      if (plain > 1e6) continue;  // Nothing is known.
      ASSERT_LE(BoundRow(row.Args()).error,
                plain * (1 + 2e-3) + 1e-4);  // Rounding is in one alone.
    }
  });
}

TEST(CertificateTest, ExactAnswerIsOffByItsRoundingAlone) {
  const RowBound exact = BoundRow({.lse = 3, .exact_mass = 1});
  const RowBound rounded = BoundRow({.lse = 3,
                                     .exact_mass = 1,
                                     .rounding = {.logit_error = 1e-5,
                                                  .sum_error = 1e-5,
                                                  .merges = 3,
                                                  .value_norm_max = 2,
                                                  .output_norm = 1}});

  EXPECT_EQ(exact.error, 0);
  EXPECT_EQ(exact.mass, 0);
  EXPECT_GT(rounded.error, 2e-5 * 3 + 1e-5 * 2);
  EXPECT_LT(rounded.error, 5e-4);
  EXPECT_EQ(rounded.mass, 0);
}

TEST(CertificateTest, ValuesThatUnderflowAreOffByMoreThanTheirSize) {
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  Rounding rounding = {.sum_error = 1e-6, .value_norm_max = kLeast, .output_norm = kLeast};

  EXPECT_GT(BoundRow({.lse = 3, .exact_mass = 1, .rounding = rounding}).error, 1e6F * kLeast);
  rounding.value_norm_max = rounding.output_norm = 0;
  EXPECT_EQ(BoundRow({.lse = 3, .exact_mass = 1, .rounding = rounding}).error, 0);
}

TEST(CertificateTest, RoundingIsAddedToWhatFormsAndPagesLeaveOpen) {
  const Rounding rounding = {
      .logit_error = 1e-4, .sum_error = 1e-5, .value_norm_max = 2, .output_norm = 1};
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 30; ++i) {
      const SampleRow row = RandomRow(random);
      RowBoundArgs args = row.Args();
      const RowBound without = BoundRow(args);
      args.rounding = rounding;

      const RowBound with = BoundRow(args);

      EXPECT_GE(with.error, without.error * (1 - 2e-3));
      EXPECT_GT(with.error, 2e-4);
      EXPECT_GE(with.mass, without.mass);
    }
  });
}

TEST(CertificateTest, WhereNothingIsAttendedTheFarthestValueBounds) {
  const std::vector<UnreadPage> pages = {{.mass_low = -1, .mass_high = 2, .distance = 3},
                                         {.mass_low = 5, .mass_high = 6, .distance = 4}};
  const RowBound bound = BoundRow({.lse = kNothing, .unread = pages});
  const RowBound empty = BoundRow({.lse = kNothing});

  EXPECT_NEAR(bound.error, 4, 1e-6);
  EXPECT_GE(bound.error, 4);
  EXPECT_EQ(bound.mass, 1);
  EXPECT_EQ(empty.error, 0);
  EXPECT_EQ(empty.mass, 0);
}

TEST(CertificateTest, UnreadPageOfAnyMassIsNoWorseThanItsDistance) {
  for (const double high : {10.0, 800.0, 1e30, kInfinity}) {
    for (const double low : {kNothing, -5.0, 9.0}) {
      const std::vector<UnreadPage> pages = {{.mass_low = low, .mass_high = high, .distance = 2}};

      const RowBound bound = BoundRow({.lse = 0, .exact_mass = 1, .unread = pages});

      EXPECT_LE(bound.error, 2 * (1 + 1e-6));
      EXPECT_GT(bound.error, 1.99);
      EXPECT_GT(bound.mass, 0.999);
      EXPECT_LE(bound.mass, 1);
    }
  }
}

TEST(CertificateTest, PageOfNoMassAddsNothing) {
  const std::vector<UnreadPage> pages = {
      {.mass_low = kNothing, .mass_high = kNothing, .distance = 1000}};

  const RowBound bound = BoundRow({.lse = 0, .exact_mass = 1, .unread = pages});

  EXPECT_EQ(bound.error, 0);
  EXPECT_EQ(bound.mass, 0);
}

TEST(CertificateTest, WithoutAPromiseNothingIsProven) {
  const FormPart form = {
      .mass = 0.5, .distance = 1, .spread = 1, .logit_error = 0.1, .value_error = 0.1};
  for (double FormPart::*field : {&FormPart::mass, &FormPart::distance, &FormPart::spread,
                                  &FormPart::logit_error, &FormPart::value_error}) {
    for (const double useless : {kInfinity, kNotANumber}) {
      std::vector<FormPart> forms = {form, form};
      forms[1].*field = useless;

      EXPECT_EQ(BoundRow({.exact_mass = 0, .forms = forms}).error, kInfinity);
    }
  }
  const std::vector<UnreadPage> pages = {{.mass_low = 0, .mass_high = 1, .distance = kInfinity}};
  EXPECT_EQ(BoundRow({.exact_mass = 1, .unread = pages}).error, kInfinity);
  EXPECT_EQ(BoundRow({.exact_mass = 1, .rounding = {.logit_error = kInfinity}}).error, kInfinity);
  EXPECT_EQ(BoundRow({.lse = kNotANumber, .exact_mass = 1, .unread = pages}).error, kInfinity);
}

TEST(CertificateTest, FormThatProvesNothingComesFirstWhateverItsMass) {
  for (const double mass : {0.0, 1e-300, 0.5}) {
    EXPECT_EQ(FormShare({.mass = mass, .distance = 1, .value_error = kInfinity, .tokens = 16}),
              kInfinity)
        << mass;
    EXPECT_EQ(FormShare({.mass = mass, .distance = 1, .logit_error = kInfinity, .tokens = 16}),
              kInfinity)
        << mass;
  }
  EXPECT_EQ(FormShare({.mass = 0, .distance = 1, .value_error = 1, .tokens = 16}), 0);
}

TEST(CertificateTest, IsMetComparesAllHeadsTogether) {
  const std::vector<double> norms = {3, 4};  // 5 together.
  const double limit = 0.02 / 1.02 * 5;
  const auto met = [&](double first, double second) {
    const std::vector<float> errors = {static_cast<float>(first), static_cast<float>(second)};
    return IsMet(errors, norms, 0.02);
  };

  EXPECT_TRUE(met(0, 0));
  EXPECT_TRUE(met(0.999 * limit, 0));
  EXPECT_TRUE(met(0.7 * limit, 0.7 * limit));
  EXPECT_FALSE(met(1.001 * limit, 0));
  EXPECT_FALSE(met(0.72 * limit, 0.72 * limit));
}

TEST(CertificateTest, WhatIsNotProvenIsNotMet) {
  const std::vector<double> norms = {1};
  EXPECT_FALSE(IsMet(std::vector<float>{std::numeric_limits<float>::infinity()}, norms, 0.02));
  EXPECT_FALSE(IsMet(std::vector<float>{std::nanf("")}, norms, 0.02));
  EXPECT_FALSE(IsMet(std::vector<float>{1e-6F}, std::vector<double>{0}, 0.02));
  EXPECT_TRUE(IsMet(std::vector<float>{0}, std::vector<double>{0}, 0.02));
}

TEST(CertificateTest, MetMeansRelativeErrorOfTheTruth) {
  // Answer 1.02 where the truth is 1: an error of 2 % of the truth, on the edge.
  EXPECT_TRUE(IsMet(std::vector<float>{0.01999F}, std::vector<double>{1.02}, 0.02));
  EXPECT_FALSE(IsMet(std::vector<float>{0.02001F}, std::vector<double>{1.02}, 0.02));
}

}  // namespace
}  // namespace ebbtide::service
