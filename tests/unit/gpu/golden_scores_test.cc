// SPDX-License-Identifier: Apache-2.0
//
// Golden vectors of scores, digests and bounds, on the reference, every SIMD target and CUDA.
// Scores must be equal element by element (1e-5 of each, and 1e-6 of the additive score); bounds
// must hold for the exact value, without tolerance: ours may be wider or tighter than the golden
// ones.

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/damage.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/geometry.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/page_damage.h"
#include "gpu/kernels/window.h"
#include "gpu/outward.h"
#include "tests/unit/gpu/each_target.h"
#include "tests/unit/gpu/golden.h"
#include "tests/unit/gpu/scores_on_cuda.h"

namespace ebbtide::gpu {
namespace {

using golden::Case;
using golden::Cases;
using golden::Doubles;
using golden::ExpectClose;
using golden::Floats;
using golden::Ints;
using golden::Json;
using golden::Shape;

// Rows of f32 as a lane in extents of 20 slots; they serve as keys and as values.
struct Lane {
  explicit Lane(const Json& rows_in) : Lane(Floats(rows_in), Shape(rows_in)[1]) {}

  Lane(std::vector<float> rows_in, int dim) : rows(std::move(rows_in)), head_dim(dim) {
    index.resize(rows.size() / static_cast<size_t>(dim));
    std::iota(index.begin(), index.end(), 0);
    for (size_t first = 0; first < slots(); first += 20) {
      const auto* row = reinterpret_cast<const std::byte*>(&rows[first * static_cast<size_t>(dim)]);
      extents.push_back({.key = row,
                         .value = row,
                         .index = &index[first],
                         .slots = static_cast<int>(std::min<size_t>(20, slots() - first))});
    }
  }

  size_t slots() const { return index.size(); }
  size_t dim() const { return static_cast<size_t>(head_dim); }

  std::vector<float> rows;
  int head_dim;
  std::vector<int32_t> index;
  std::vector<Extent> extents;
};

class GoldenScoreTest : public OnReferenceAndTarget {
 protected:
  // Weighted sums of a lane's values; `weight` is [rows, slots].
  std::vector<float> Outputs(const Lane& lane, std::span<const float> weight) const {
    const size_t rows = weight.size() / lane.slots();
    std::vector<float> output(rows * lane.dim());
    Choose(&WeightedValueReference, &WeightedValueCpu,
           &WeightedValueOnCuda)({.dtype = Dtype::kF32,
                                  .head_dim = lane.head_dim,
                                  .rows = static_cast<int>(rows),
                                  .extents = lane.extents,
                                  .weight = weight,
                                  .output = output});
    return output;
  }

  // The damage of rows of weights that add up to 1: their logarithms are logits of lse 0.
  std::vector<float> DamageOfWeights(const Lane& lane, std::vector<float> weight,
                                     std::span<const float> centre, bool is_fast) const {
    for (float& w : weight) w = std::log(w);
    const std::vector<float> lse(weight.size() / lane.slots(), 0.0F);
    std::vector<float> damage(lane.slots());
    const auto exact = Choose(&DamageReference, &DamageCpu, &DamageOnCuda);
    (is_fast ? Choose(&FastDamageReference, &FastDamageCpu, &FastDamageOnCuda)
             : exact)({.dtype = Dtype::kF32,
                       .head_dim = lane.head_dim,
                       .rows = static_cast<int>(lse.size()),
                       .extents = lane.extents,
                       .logits = weight,
                       .lse = lse,
                       .centre = centre,
                       .damage = damage});
    return damage;
  }

  std::vector<float> Caote(const Lane& lane, const std::vector<float>& weight) const {
    return DamageOfWeights(lane, weight, Outputs(lane, weight), /*is_fast=*/false);
  }

  // The plain mean of the values in place of the output.
  std::vector<float> FastCaote(const Lane& lane, const std::vector<float>& weight) const {
    const std::vector<float> uniform(lane.slots(), 1.0F / static_cast<float>(lane.slots()));
    return DamageOfWeights(lane, weight, Outputs(lane, uniform), /*is_fast=*/true);
  }

  std::vector<float> Mass(int group, std::vector<float> rows, size_t slots) const {
    for (float& weight : rows) weight = std::log(weight);
    const std::vector<float> lse(rows.size() / slots, 0.0F);
    std::vector<double> mass(slots, 0.0);
    Choose(&MassReference, &MassCpu, &MassOnCuda)({.group = group,
                                                   .queries = static_cast<int>(lse.size()) / group,
                                                   .slots = static_cast<int>(slots),
                                                   .logits = rows,
                                                   .lse = lse,
                                                   .mass = mass});
    return {mass.begin(), mass.end()};
  }
};
INSTANTIATE_TEST_SUITE_P(Every, GoldenScoreTest, ReferenceTargetsAndCuda(), TargetName);

// |s - s*| <= 1e-5 |s*| + 1e-6 `additive`, where that is a |o - v| = s* (1 - a) <= s*.
void ExpectScores(std::span<const float> score, std::span<const double> exact) {
  ASSERT_EQ(score.size(), exact.size());
  for (size_t s = 0; s < score.size(); ++s) {
    ASSERT_NEAR(score[s], exact[s], 1.1e-5 * std::fabs(exact[s])) << "[" << s << "]";
  }
}

std::vector<float> RowOf(std::span<const float> rows, size_t r, size_t slots) {
  const auto row = rows.subspan(r * slots, slots);
  return {row.begin(), row.end()};
}

std::vector<float> Normalised(std::span<const float> score) {
  const double total = std::accumulate(score.begin(), score.end(), 0.0);
  std::vector<float> weight;
  for (const float s : score) weight.push_back(static_cast<float>(s / total));
  return weight;
}

TEST_P(GoldenScoreTest, KeyDiff) {
  for (const Case& golden : Cases("keydiff")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("K"));
    std::vector<float> score(lane.slots());

    Choose(&KeyDiffReference, &KeyDiffCpu, &KeyDiffOnCuda)(
        {.dtype = Dtype::kF32, .head_dim = lane.head_dim, .extents = lane.extents, .score = score});

    ExpectClose(score, golden.expect.at("score"), "score");
  }
}

TEST_P(GoldenScoreTest, Caote) {
  for (const Case& golden : Cases("caote")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));
    const std::vector<float> rows = Floats(golden.inputs.at("A"));
    std::vector<float> score;
    for (size_t r = 0; r < rows.size() / lane.slots(); ++r) {
      const std::vector<float> damage = Caote(lane, RowOf(rows, r, lane.slots()));
      score.insert(score.end(), damage.begin(), damage.end());
    }

    ExpectScores(score, Doubles(golden.expect.at("score")));
  }
}

// a |o - v| is (1 - a) times the damage: identity 1 of docs/policies.md.
TEST_P(GoldenScoreTest, CaoteAdditive) {
  for (const Case& golden : Cases("caote_additive")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));
    const std::vector<float> rows = Floats(golden.inputs.at("A"));
    const std::vector<double> exact_rows = Doubles(golden.inputs.at("A"));
    std::vector<float> score;
    for (size_t r = 0; r < rows.size() / lane.slots(); ++r) {
      const std::vector<float> damage = Caote(lane, RowOf(rows, r, lane.slots()));
      for (size_t s = 0; s < damage.size(); ++s) {
        score.push_back(static_cast<float>((1 - exact_rows[score.size()]) * damage[s]));
      }
    }

    ExpectScores(score, Doubles(golden.expect.at("score")));
  }
}

TEST_P(GoldenScoreTest, CaoteWindow) {
  for (const Case& golden : Cases("caote_window")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));

    ExpectScores(Caote(lane, Floats(golden.inputs.at("A"))), Doubles(golden.expect.at("score")));
  }
}

TEST_P(GoldenScoreTest, CaotePeaky) {
  for (const Case& golden : Cases("caote_peaky")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));
    const std::vector<float> logits = Floats(golden.inputs.at("z"));
    double total = 0;
    const float peak = *std::max_element(logits.begin(), logits.end());
    for (const float z : logits) total += std::exp(static_cast<double>(z) - peak);
    const auto lse = static_cast<float>(peak + std::log(total));
    std::vector<float> weight;
    for (const float z : logits) {
      weight.push_back(static_cast<float>(std::exp(static_cast<double>(z) - peak) / total));
    }
    std::vector<float> damage(lane.slots());

    Choose(&DamageReference, &DamageCpu, &DamageOnCuda)({.dtype = Dtype::kF32,
                                                         .head_dim = lane.head_dim,
                                                         .rows = 1,
                                                         .extents = lane.extents,
                                                         .logits = logits,
                                                         .lse = {&lse, 1},
                                                         .centre = Outputs(lane, weight),
                                                         .damage = damage});

    const std::vector<double> exact = Doubles(golden.expect.at("score"));
    for (size_t s = 0; s < damage.size(); ++s) {
      // The others' weights fall to 1e-38: f32 lse and damages below 1e-30 are what is left.
      const double lse_rounding = std::fabs(lse) * 0x1p-24;
      EXPECT_NEAR(damage[s], exact[s], (1.1e-5 + lse_rounding) * exact[s] + 1e-30) << s;
    }
  }
}

TEST_P(GoldenScoreTest, CaoteOnH2o) {
  for (const Case& golden : Cases("caote_on_h2o")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));
    const int group = Shape(golden.inputs.at("A"))[0];
    const std::vector<float> weight =
        Normalised(Mass(group, Floats(golden.inputs.at("A")), lane.slots()));

    ExpectScores(Caote(lane, weight), Doubles(golden.expect.at("caote")));
    ExpectScores(FastCaote(lane, weight), Doubles(golden.expect.at("fastcaote")));
  }
}

TEST_P(GoldenScoreTest, CaoteOnTova) {
  for (const Case& golden : Cases("caote_on_tova")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));
    std::vector<float> last_rows;
    for (const Json& head : golden.inputs.at("A")) {
      const std::vector<float> row = Floats(head.back());
      last_rows.insert(last_rows.end(), row.begin(), row.end());
    }
    const int group = Shape(golden.inputs.at("A"))[0];
    const std::vector<float> weight = Normalised(Mass(group, last_rows, lane.slots()));

    ExpectScores(Caote(lane, weight), Doubles(golden.expect.at("caote")));
    ExpectScores(FastCaote(lane, weight), Doubles(golden.expect.at("fastcaote")));
  }
}

// The last tokens of the lane ask; what those before them draw is pooled and normalised.
TEST_P(GoldenScoreTest, CaoteOnSnapKv) {
  for (const Case& golden : Cases("caote_on_snapkv")) {
    SCOPED_TRACE(golden.name);
    const Lane keys(golden.inputs.at("K"));
    const std::vector<int> shape = Shape(golden.inputs.at("Q"));
    const auto window = static_cast<size_t>(shape[1]);
    const size_t prefix = keys.slots() - window;
    const std::vector<float> query = Floats(golden.inputs.at("Q"));
    const std::vector<int32_t> last(keys.index.end() - static_cast<ptrdiff_t>(window),
                                    keys.index.end());
    std::vector<float> mass(keys.slots());
    Choose(&WindowReference, &WindowCpu,
           &WindowOnCuda)({.dtype = Dtype::kF32,
                           .head_dim = keys.head_dim,
                           .group = shape[0],
                           .queries = shape[1],
                           .scale = 1 / std::sqrt(static_cast<float>(keys.head_dim)),
                           .extents = keys.extents,
                           .query = query,
                           .query_index = last,
                           .mass = mass});
    const std::vector<float> drawn(mass.begin(), mass.begin() + static_cast<ptrdiff_t>(prefix));
    std::vector<float> pooled(prefix);
    const bool is_average = golden.inputs.at("pool") == "avg";
    (is_average ? &AveragePool : &MaxPool)(
        {.kernel = golden.inputs.at("kernel").get<int>(), .mass = drawn, .pooled = pooled});

    std::vector<float> values = Floats(golden.inputs.at("V"));
    values.resize(prefix * keys.dim());
    const Lane lane(values, keys.head_dim);
    const std::vector<float> weight = Normalised(pooled);

    ExpectScores(Caote(lane, weight), Doubles(golden.expect.at("caote")));
    ExpectScores(FastCaote(lane, weight), Doubles(golden.expect.at("fastcaote")));
  }
}

TEST_P(GoldenScoreTest, FastCaote) {
  for (const Case& golden : Cases("fastcaote")) {
    SCOPED_TRACE(golden.name);
    const Lane lane(golden.inputs.at("V"));
    const std::vector<float> rows = Floats(golden.inputs.at("A"));
    std::vector<float> score;
    for (size_t r = 0; r < rows.size() / lane.slots(); ++r) {
      const std::vector<float> damage = FastCaote(lane, RowOf(rows, r, lane.slots()));
      score.insert(score.end(), damage.begin(), damage.end());
    }

    ExpectScores(score, Doubles(golden.expect.at("score")));
  }
}

// Attention over each page alone, in the pass that attends to all, and the error of losing each.
TEST_P(GoldenScoreTest, CaotePages) {
  for (const Case& golden : Cases("caote_pages")) {
    SCOPED_TRACE(golden.name);
    Lane values(golden.inputs.at("V"));
    const std::vector<float> logits = Floats(golden.inputs.at("z"));
    // Keys whose first channel is the logit, asked for by a query of that channel alone.
    std::vector<float> keys(values.rows.size(), 0.0F);
    for (size_t s = 0; s < logits.size(); ++s) keys[s * values.dim()] = logits[s];
    std::vector<float> query(values.dim(), 0.0F);
    query[0] = 1;
    const auto page = golden.inputs.at("page").get<size_t>();
    const auto last = static_cast<int32_t>(values.slots());
    std::vector<Extent> pages;
    for (size_t first = 0; first < values.slots(); first += page) {
      const size_t at = first * values.dim();
      pages.push_back({.key = reinterpret_cast<const std::byte*>(&keys[at]),
                       .value = reinterpret_cast<const std::byte*>(&values.rows[at]),
                       .index = &values.index[first],
                       .slots = static_cast<int>(std::min(page, values.slots() - first))});
    }
    std::vector<float> output(values.dim()), lse(1), damage(pages.size());
    std::vector<float> part_output(pages.size() * values.dim()), part_lse(pages.size());

    Choose(&AttendReference, &AttendCpu, &AttendOnCuda)({.dtype = Dtype::kF32,
                                                         .head_dim = values.head_dim,
                                                         .scale = 1,
                                                         .extents = pages,
                                                         .query = query,
                                                         .query_index = {&last, 1},
                                                         .output = output,
                                                         .lse = lse,
                                                         .logits = {},
                                                         .part_output = part_output,
                                                         .part_lse = part_lse});
    Choose(&PageDamageReference, &PageDamageCpu,
           &PageDamageOnCuda)({.head_dim = values.head_dim,
                               .pages = static_cast<int>(pages.size()),
                               .part_output = part_output,
                               .part_lse = part_lse,
                               .output = output,
                               .lse = lse,
                               .damage = damage});
    std::vector<float> mass;
    for (const float each : part_lse) mass.push_back(std::exp(each - lse[0]));

    ExpectClose(damage, golden.expect.at("score"), "score");
    ExpectClose(mass, golden.expect.at("mass"), "mass");
  }
}

// Digests of runs of `page` tokens of a lane, and their bounds for one query that is scaled
// already.
struct Pages {
  Pages(const Json& keys, const Json& values, size_t page_tokens)
      : key(Floats(keys)), value(Floats(values)), dim(Shape(keys)[1]) {
    const auto row = static_cast<size_t>(dim);
    for (size_t first = 0; first < key.size() / row; first += page_tokens) {
      const size_t count = std::min(page_tokens, key.size() / row - first);
      const PageShape shape{
          .tokens = static_cast<int>(page_tokens), .head_dim = dim, .dtype = Dtype::kF32};
      std::vector<float> page(2 * page_tokens * row);
      std::copy_n(&key[first * row], count * row, page.begin());
      std::copy_n(&value[first * row], count * row,
                  page.begin() + static_cast<ptrdiff_t>(page_tokens * row));
      tokens.push_back(static_cast<int32_t>(count));
      shapes.push_back(shape);
      bytes.push_back(std::move(page));
      digests.emplace_back(DigestBytes(dim));
    }
    for (const auto& digest : digests) pointers.push_back(digest.data());
  }

  std::vector<float> key, value;
  int dim;
  std::vector<int32_t> tokens;
  std::vector<PageShape> shapes;
  std::vector<std::vector<float>> bytes;
  std::vector<std::vector<std::byte>> digests;
  std::vector<const std::byte*> pointers;
};

class GoldenBoundTest : public GoldenScoreTest {
 protected:
  void DrawDigests(Pages& pages) const {
    for (size_t p = 0; p < pages.tokens.size(); ++p) {
      Choose(&DigestReference, &DigestCpu,
             &DigestOnCuda)({.shape = pages.shapes[p],
                             .tokens = pages.tokens[p],
                             .page = std::as_bytes(std::span(pages.bytes[p])),
                             .digest = pages.digests[p]});
    }
  }

  struct Bounds {
    std::vector<float> low, high, estimate;
  };

  Bounds Bound(const Pages& pages, std::span<const float> query, std::span<const int32_t> absent,
               std::span<const float> resident_sum) const {
    const size_t count = absent.size();
    Bounds bounds{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count)};
    Choose(&BoundReference, &BoundCpu, &BoundOnCuda)({.head_dim = pages.dim,
                                                      .rows = 1,
                                                      .pages = static_cast<int>(count),
                                                      .scale = 1,
                                                      .query = query,
                                                      .digest = pages.pointers,
                                                      .absent = absent,
                                                      .resident_logit_sum = resident_sum,
                                                      .mass_low = bounds.low,
                                                      .mass_high = bounds.high,
                                                      .mass_estimate = bounds.estimate});
    return bounds;
  }
};
INSTANTIATE_TEST_SUITE_P(Every, GoldenBoundTest, ReferenceTargetsAndCuda(), TargetName);

// How much wider ours are than the golden bounds, which know the keys' box and mean in f64.
class Width {
 public:
  void Add(double low, double high, double golden_low, double golden_high) {
    const double wider = std::max(golden_low - low, high - golden_high);
    most_ = std::max(most_, wider);
    sum_ += wider;
    ++count_;
  }
  ~Width() {
    std::cout << "wider than golden by " << sum_ / count_ << " nats on average, " << most_
              << " at most\n";
  }

 private:
  double most_ = 0;
  double sum_ = 0;
  int count_ = 0;
};

TEST_P(GoldenBoundTest, PageBounds) {
  Width width;
  for (const Case& golden : Cases("page_bounds")) {
    SCOPED_TRACE(golden.name);
    Pages pages(golden.inputs.at("K"), golden.inputs.at("V"),
                golden.inputs.at("page").get<size_t>());
    DrawDigests(pages);

    const Bounds bounds = Bound(pages, Floats(golden.inputs.at("q")), pages.tokens, {});

    const std::vector<double> exact = Doubles(golden.expect.at("true_lse"));
    const std::vector<double> lower = Doubles(golden.expect.at("lower"));
    const std::vector<double> upper = Doubles(golden.expect.at("upper"));
    ASSERT_EQ(exact.size(), bounds.low.size());
    for (size_t p = 0; p < exact.size(); ++p) {
      EXPECT_LE(bounds.low[p], exact[p]) << p;
      EXPECT_GE(bounds.high[p], exact[p]) << p;
      width.Add(bounds.low[p], bounds.high[p], lower[p], upper[p]);
    }
  }
}

TEST_P(GoldenBoundTest, PartialPageBounds) {
  Width width;
  for (const Case& golden : Cases("partial_page_bounds")) {
    SCOPED_TRACE(golden.name);
    const Json& keys = golden.inputs.at("K");
    Pages pages(keys, keys, static_cast<size_t>(Shape(keys)[0]));
    DrawDigests(pages);
    const std::vector<float> query = Floats(golden.inputs.at("q"));
    const std::vector<int32_t> resident = Ints(golden.inputs.at("resident"));
    double sum = 0;
    for (const int32_t token : resident) {
      for (size_t d = 0; d < query.size(); ++d) {
        sum += static_cast<double>(query[d]) *
               pages.key[static_cast<size_t>(token) * query.size() + d];
      }
    }
    const auto resident_sum = static_cast<float>(sum);
    const int32_t absent = pages.tokens[0] - static_cast<int32_t>(resident.size());

    const Bounds bounds = Bound(pages, query, {&absent, 1}, {&resident_sum, 1});

    // Stated to 1e-14 or so: where one token is absent the bracket has no width but for rounding.
    const double exact = golden.expect.at("true_lse").get<double>();
    EXPECT_LE(bounds.low[0], exact);
    EXPECT_GE(bounds.high[0], exact);
    width.Add(bounds.low[0], bounds.high[0], golden.expect.at("lower").get<double>(),
              golden.expect.at("upper").get<double>());
  }
}

// The first tokens are resident, the pages after them absent: the error of leaving those out is at
// most what their masses and value distances allow (policies, section 5).
TEST_P(GoldenBoundTest, ResidualBound) {
  double looser = 0;
  for (const Case& golden : Cases("residual_bound")) {
    SCOPED_TRACE(golden.name);
    const auto page = golden.inputs.at("page").get<size_t>();
    const auto resident = golden.inputs.at("resident_tokens").get<size_t>();
    ASSERT_EQ(resident % page, 0U);
    Pages pages(golden.inputs.at("K"), golden.inputs.at("V"), page);
    DrawDigests(pages);
    const std::vector<float> query = Floats(golden.inputs.at("q"));
    const auto row = static_cast<size_t>(pages.dim);

    std::vector<int32_t> index(resident);
    std::iota(index.begin(), index.end(), 0);
    const Extent extent{.key = reinterpret_cast<const std::byte*>(pages.key.data()),
                        .value = reinterpret_cast<const std::byte*>(pages.value.data()),
                        .index = index.data(),
                        .slots = static_cast<int>(resident)};
    const auto last = static_cast<int32_t>(resident);
    std::vector<float> output(row), lse(1);
    Choose(&AttendReference, &AttendCpu, &AttendOnCuda)({.dtype = Dtype::kF32,
                                                         .head_dim = pages.dim,
                                                         .scale = 1,
                                                         .extents = {&extent, 1},
                                                         .query = query,
                                                         .query_index = {&last, 1},
                                                         .output = output,
                                                         .lse = lse,
                                                         .logits = {}});
    const Bounds bounds = Bound(pages, query, pages.tokens, {});
    std::vector<float> distance(pages.tokens.size());
    Choose(&ValueDistanceReference, &ValueDistanceCpu,
           &ValueDistanceOnCuda)({.head_dim = pages.dim,
                                  .rows = 1,
                                  .pages = static_cast<int>(pages.tokens.size()),
                                  .output = output,
                                  .digest = pages.pointers,
                                  .distance = distance});

    const double known = std::exp(static_cast<double>(lse[0]));
    double low = known;
    double high = 0;
    double reach = 0;
    double farthest = 0;
    for (size_t p = resident / page; p < distance.size(); ++p) {
      low += std::exp(static_cast<double>(bounds.low[p]));
      high += std::exp(static_cast<double>(bounds.high[p]));
      reach += std::exp(static_cast<double>(bounds.high[p])) * distance[p];
      farthest = std::max<double>(farthest, distance[p]);
    }
    const double bound = std::min(high / (known + high) * farthest, reach / low);

    EXPECT_GE(bound, golden.expect.at("true_error").get<double>());
    looser = std::max(looser, bound / golden.expect.at("bound").get<double>() - 1);
  }
  std::cout << "looser than golden by " << looser * 100 << " % at most\n";
}

}  // namespace
}  // namespace ebbtide::gpu
