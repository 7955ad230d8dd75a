// SPDX-License-Identifier: Apache-2.0
//
// The sizes that models come in, each of which every CUDA kernel is run at and held against the
// reference: chance, which draws the sizes of other tests, may leave any out. Without CUDA's
// headers there is nothing to run.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "gpu/shape.h"
#include "tests/unit/gpu/on_cuda.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {

// And 77, whose rows are no whole number of 16 bytes and are read in their own way.
inline constexpr int kHeadDims[] = {64, 80, 96, 128, 256, 77};

// Sanitizers take 13 times as long, and look for what few sizes show: the least group, the largest,
// and some between.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kGroupStep = 5;
#else
inline constexpr int kGroupStep = 1;
#endif
static_assert((kGroupMax - 1) % kGroupStep == 0);

class KernelGrid : public testing::TestWithParam<Dtype> {
 protected:
  void SetUp() override {
    if (!WhyNoCuda().empty()) GTEST_SKIP() << "not run: " << WhyNoCuda();
  }

  // Calls run(head_dim) for each, and stops at the first that fails.
  template <class Run>
  void ForEachHeadDim(Run run) {
    for (const int head_dim : kHeadDims) {
      SCOPED_TRACE(testing::Message() << "head_dim " << head_dim);
      run(head_dim);
      if (HasFailure()) return;
    }
  }

  // The same with run(head_dim, group): so many query heads share a lane.
  template <class Run>
  void ForEachGroup(Run run) {
    ForEachHeadDim([&](int head_dim) {
      for (int group = 1; group <= kGroupMax && !HasFailure(); group += kGroupStep) {
        SCOPED_TRACE(testing::Message() << "group " << group);
        run(head_dim, group);
      }
    });
  }

  std::mt19937_64 random_{1};  // The sizes are what varies.
};

inline std::string GridDtypeName(const testing::TestParamInfo<Dtype>& test) {
  return std::string(DtypeName(test.param));
}

// Every element within relative |expected| + absolute; infinite ones are equal, and what is no
// number is none in both.
template <class T>
void ExpectNear(const std::vector<T>& got, const std::vector<T>& expected, double relative,
                double absolute) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    const auto exact = static_cast<double>(expected[i]);
    const auto number = static_cast<double>(got[i]);
    if (std::isnan(number) && std::isnan(exact)) continue;
    // A share of infinity would allow anything.
    const double allowed = std::isfinite(exact) ? relative * std::fabs(exact) + absolute : 0;
    ASSERT_LE(std::fabs(number - exact), allowed) << "[" << i << "] " << number << " of " << exact;
  }
}

// A lane, queries of a group that shares it, and what attention over it gives by the reference.
// Some slots are empty; its first tokens are there twice, kPairs slots apart, and every query sees
// both. One of the others draws most of what one row has to give.
class GridLane {
 public:
  static constexpr int kPairs = 20;
  static constexpr int kSlots = 44;
  static constexpr int kQueriesMax = kSlots - 2 * kPairs;

  struct Answer {
    std::vector<float> output, lse, logits;
  };

  GridLane(const SampleLane::Options& size, int group, int queries, std::mt19937_64& random)
      : lane_(size, random), group_(group), queries_(queries) {
    for (size_t s = 0; s < kPairs; ++s) {
      for (size_t d = 0; d < lane_.dim() && is_pair(s); ++d) {
        lane_.set_key(s + kPairs, d, lane_.key(s, d));
        lane_.set_value(s + kPairs, d, lane_.value(s, d));
      }
    }
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows() * lane_.dim(); ++i) query_.push_back(normal(random));
    for (int m = 0; m < queries; ++m) query_index_.push_back(kSlots - queries + m);
    AskFor(kSlots - 1);
    answer_ = NoAnswer();
    AttendReference(Args(answer_));
  }

  static SampleLane::Options Size(Dtype dtype, int head_dim) {
    return {.dtype = dtype,
            .head_dim = head_dim,
            .slots = kSlots,
            .extent_slots = kPairs,
            .empty_one_in = 9,
            .poison_empty = true};
  }

  const SampleLane& lane() const { return lane_; }
  int group() const { return group_; }
  int queries() const { return queries_; }
  size_t rows() const { return static_cast<size_t>(group_ * queries_); }
  const Answer& answer() const { return answer_; }
  bool is_pair(size_t s) const {
    return s < kPairs && !lane_.is_empty(s) && !lane_.is_empty(s + kPairs);
  }

  Answer NoAnswer() const {
    return {std::vector<float>(query_.size(), -1.0F), std::vector<float>(rows(), -1.0F),
            std::vector<float>(rows() * kSlots, -1.0F)};
  }

  AttendArgs Args(Answer& answer) const {
    return {.dtype = lane_.options().dtype,
            .head_dim = lane_.options().head_dim,
            .group = group_,
            .queries = queries_,
            .scale = 1 / std::sqrt(static_cast<float>(lane_.dim())),
            .extents = lane_.extents(),
            .query = query_,
            .query_index = query_index_,
            .output = answer.output,
            .lse = answer.lse,
            .logits = answer.logits};
  }

 private:
  // The newest query of the first head asks for slot `s` with a logit of 6, unless it is empty.
  void AskFor(size_t s) {
    double squares = 0;
    for (size_t d = 0; d < lane_.dim(); ++d) squares += lane_.key(s, d) * lane_.key(s, d);
    const double share = 6 * std::sqrt(static_cast<double>(lane_.dim())) / squares;
    float* const row = &query_[static_cast<size_t>(queries_ - 1) * lane_.dim()];
    for (size_t d = 0; d < lane_.dim() && !lane_.is_empty(s); ++d) {
      row[d] = static_cast<float>(share * lane_.key(s, d));
    }
  }

  SampleLane lane_;
  int group_;
  int queries_;
  std::vector<float> query_;
  std::vector<int32_t> query_index_;
  Answer answer_;
};

}  // namespace ebbtide::gpu
