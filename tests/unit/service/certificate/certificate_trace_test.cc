// SPDX-License-Identifier: Apache-2.0
//
// Certificates on what a real model asked of its cache: answers made of exact pages, pages in codes
// and pages that are not read, by the kernels that make them in service. No row may be further off
// than its bound; how far the bounds are from the truth is printed.

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/element.h"
#include "service/attention/certificate.h"
#include "tests/unit/service/certificate/recorded_lane.h"

namespace ebbtide::service {
namespace {

constexpr int kGroup = 3;  // Query heads that share a lane.
constexpr float kScale = 0.125F;

// The rungs of pages by their rank in mass, the heaviest first.
using Ladder = std::function<PageRung(size_t rank, size_t pages)>;

std::vector<PageRung> RungsOf(const std::vector<double>& masses, const Ladder& ladder) {
  std::vector<size_t> order(masses.size() - 1);  // The page before the query stays exact.
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, [&](size_t a, size_t b) { return masses[a] > masses[b]; });
  std::vector<PageRung> rungs(order.size());
  for (size_t rank = 0; rank < order.size(); ++rank)
    rungs[order[rank]] = ladder(rank, order.size());
  return rungs;
}

class CertificateTraceTest : public testing::Test {
 protected:
  // The answers of every query head of three layers at a few indices.
  std::vector<RecordedAnswer> Answers(const Ladder& ladder) {
    static const auto recorded = ReadRecorded(std::filesystem::path(EBBTIDE_SOURCE_DIR) /
                                              "tests/data/traces/smollm2-kjv-1024x3.safetensors");
    std::vector<RecordedAnswer> answers;
    for (const std::string layer : {"layer0", "layer15", "layer29"}) {
      const RecordedTensor& queries = recorded.at(layer + ".q");
      for (int head = 0; head < queries.heads / kGroup; ++head) {
        const RecordedLane lane(recorded.at(layer + ".k"), recorded.at(layer + ".v"), head);
        for (int row = head * kGroup; row < (head + 1) * kGroup; ++row) {
          for (const int token : {300, 607, 864, 1023}) {
            std::vector<float> query;
            for (const uint16_t half : queries.Row(token, row))
              query.push_back(gpu::HalfToFloat(half));
            const auto rungs = RungsOf(lane.PageMasses(query, kScale, token), ladder);
            answers.push_back(lane.Answer(query, kScale, token, rungs));
          }
        }
      }
    }
    return answers;
  }
};

double Median(std::vector<double> numbers) {
  std::ranges::sort(numbers);
  return numbers[numbers.size() / 2];
}

// Checks every answer, and prints the middle of errors and bounds, both relative to full attention.
double ExpectTrue(const char* name, const std::vector<RecordedAnswer>& answers) {
  std::vector<double> error;
  std::vector<double> bound;
  std::vector<double> ratio;
  for (const RecordedAnswer& answer : answers) {
    EXPECT_LE(answer.error, answer.bound.error) << name;
    EXPECT_LE(answer.unread, answer.bound.mass) << name;
    error.push_back(answer.error / answer.full_norm);
    bound.push_back(answer.bound.error / answer.full_norm);
    ratio.push_back(answer.bound.error / answer.error);
    const std::vector<float> errors = {answer.bound.error};
    if (IsMet(errors, std::vector<double>{answer.answer_norm}, 0.02)) {
      EXPECT_LE(answer.error, 0.02 * answer.full_norm) << name;
    }
  }
  std::printf("%-28s rows %zu  error %.2g  bound %.2g  bound/error %.3g  (medians)\n", name,
              answers.size(), Median(error), Median(bound), Median(ratio));
  return Median(bound);
}

TEST_F(CertificateTraceTest, AllExact) {
  const double bound =
      ExpectTrue("all exact", Answers([](size_t, size_t) { return PageRung::kExact; }));

  EXPECT_LT(bound, 1e-3);
}

TEST_F(CertificateTraceTest, AllInEightBits) {
  const double bound =
      ExpectTrue("all in 8 bits", Answers([](size_t, size_t) { return PageRung::kFine; }));

  EXPECT_LT(bound, 0.15);
}

TEST_F(CertificateTraceTest, AllInFourBits) {
  const double bound =
      ExpectTrue("all in 4 bits", Answers([](size_t, size_t) { return PageRung::kCoarse; }));

  EXPECT_LT(bound, 3);
}

TEST_F(CertificateTraceTest, HeaviestExactRestInEightBits) {
  const double bound =
      ExpectTrue("an eighth exact, rest 8 bits", Answers([](size_t rank, size_t pages) {
                   return rank < pages / 8 ? PageRung::kExact : PageRung::kFine;
                 }));

  EXPECT_LT(bound, 0.1);
}

TEST_F(CertificateTraceTest, EveryRungAtOnce) {
  ExpectTrue("every rung at once", Answers([](size_t rank, size_t pages) {
               if (rank < pages / 4) return PageRung::kExact;
               if (rank < pages / 2) return PageRung::kFine;
               return rank < pages * 3 / 4 ? PageRung::kCoarse : PageRung::kUnread;
             }));
}

TEST_F(CertificateTraceTest, AllUnread) {
  ExpectTrue("all unread", Answers([](size_t, size_t) { return PageRung::kUnread; }));
}

}  // namespace
}  // namespace ebbtide::service
