// SPDX-License-Identifier: Apache-2.0
//
// Calls of so many queries that recall cannot keep what it needs of all of them: they are answered
// in tiles. Such an answer has the bits that each tile has as a call of its own, and is as near to
// the whole call's, made at once, as both certify: what is read for one query serves the others of
// its tile, and slots that no query of a tile may see are passed over before sums are cut. And it
// is one answer: one reason, one lesson.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/status_macros.h"
#include "gpu/element.h"
#include "tests/support/engine_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::EngineSetup;
using test::EngineStand;
using test::FaultyBackend;
using test::FaultyTier;
using test::Tokens;
using test::Worker;

constexpr uint64_t kUnlimited = uint64_t{1} << 40;

// A sequence that is fed whole pages, then asked for `count` tokens in one decode call.
struct Shape {
  Geometry geometry;
  std::string policy;
  std::string recall;
  uint32_t budget = 0;
  int32_t fed = 0;
  int32_t count = 0;
  int32_t tile = 0;    // Queries of one.
  double flipped = 0;  // Chance of each record to be damaged.
  uint64_t seed = 0;

  // What recall keeps of `queries` of them: attention.cc counts so.
  uint64_t RecallBytes(int32_t queries) const {
    const auto pages =
        static_cast<uint64_t>((fed + count + geometry.page_tokens - 1) / geometry.page_tokens);
    const uint64_t outputs = recall == "off" ? 0 : static_cast<uint64_t>(geometry.head_dim) * 8;
    return static_cast<uint64_t>(queries) * static_cast<uint64_t>(geometry.query_heads) * pages *
           (outputs + 80);
  }
};

template <typename T, size_t kCount>
T OneOf(std::mt19937_64& random, const T (&choices)[kCount]) {
  return choices[random() % kCount];
}

Shape DrawShape(uint64_t seed, const std::string& mode) {
  std::mt19937_64 random(seed);
  const int kv_heads = OneOf(random, {1, 2, 3});
  Shape shape{
      .geometry = {.layers = 1,
                   .query_heads = kv_heads * OneOf(random, {1, 2, 4}),
                   .kv_heads = kv_heads,
                   .head_dim = OneOf(random, {16, 32, 64}),
                   .dtype = OneOf(random, {gpu::Dtype::kF32, gpu::Dtype::kF16, gpu::Dtype::kBF16}),
                   .scale = OneOf(random, {0.05F, 0.125F, 0.25F}),
                   .page_tokens = OneOf(random, {16, 32})},
      .policy = OneOf<std::string>(random, {"streaming", "h2o", "snapkv+caote", "keydiff"}),
      .recall = mode,
      .budget = 64 + static_cast<uint32_t>(random() % 64),
      .fed = 32 * (5 + static_cast<int32_t>(random() % 6)),
      .count = 2 + static_cast<int32_t>(random() % 11),
      .flipped = OneOf(random, {0.0, 0.0, 0.3}),
      .seed = seed};
  if (mode != "off") shape.recall = mode + OneOf<std::string>(random, {"(0.02)", "(0.1)", "(0.4)"});
  shape.tile = 1 + static_cast<int32_t>(random() % static_cast<uint64_t>(shape.count - 1));
  return shape;
}

// Feeds a sequence, and makes room in its working set: the call finds no victims, neither do those
// after it that bring no tokens. Draft tokens are appended, others leave for them, and they are cut
// off again.
absl::Status Feed(const Shape& shape, EngineStand& stand, Worker& worker) {
  EBBTIDE_RETURN_IF_ERROR(worker.Open().status());
  for (int32_t at = 0; at < shape.fed; at += 32) {
    EBBTIDE_RETURN_IF_ERROR(
        worker.Step({.first = at, .count = 32, .phase = Phase::kPrefill}).status);
    stand.Settle();
  }
  const Worker::Call draft = {
      .first = shape.fed, .count = shape.count, .phase = Phase::kPrefill, .sends_queries = false};
  EBBTIDE_RETURN_IF_ERROR(worker.Step(draft).status);
  EBBTIDE_RETURN_IF_ERROR(
      worker.Step({.first = shape.fed, .phase = Phase::kPrefill, .appends = false}).status);
  return stand.engine().Truncate("a", static_cast<uint64_t>(shape.fed)).status();
}

// Queries `first` to `first + count` of the call's, all of whose tokens are appended in one call
// before or with them, from an engine of their own.
StepAnswer AnswerOf(const Shape& shape, int32_t first, int32_t count, uint64_t recall_bytes) {
  const Tokens tokens{.geometry = shape.geometry, .seed = shape.seed};
  EngineStand stand({.recall_bytes = recall_bytes, .wrap_host = [&](storage::Tier& tier) {
                       auto faulty = std::make_unique<FaultyTier>(tier, shape.seed);
                       faulty->Set({.flipped = shape.flipped});
                       return faulty;
                     }});
  Worker worker(stand.engine(), tokens, "a");
  worker.open = {.policy = shape.policy,
                 .prefill = "blockwise(32)",
                 .recall = shape.recall,
                 .budget_tokens = shape.budget,
                 .chunk_tokens = 32};
  StepAnswer none;
  none.status = Feed(shape, stand, worker);
  if (!none.status.ok()) return none;
  if (count == shape.count) return worker.Step({.first = shape.fed, .count = count});
  none.status =
      worker.Step({.first = shape.fed, .count = shape.count, .sends_queries = false}).status;
  if (!none.status.ok()) return none;
  return worker.Step({.first = shape.fed + first, .count = count, .appends = false});
}

// As one answer: rows one after the other, work added up, the first reason.
void Join(StepAnswer& whole, const StepAnswer& part) {
  const auto join = [](auto& all, const auto& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  join(whole.output, part.output);
  join(whole.lse, part.lse);
  join(whole.certificate.mass_bound, part.certificate.mass_bound);
  join(whole.certificate.error_bound, part.certificate.error_bound);
  join(whole.certificate.met, part.certificate.met);
  if (whole.certificate.not_met_reason.empty())
    whole.certificate.not_met_reason = part.certificate.not_met_reason;
  whole.absent_pages = std::max(whole.absent_pages, part.absent_pages);
  for (const TouchedRung& touched : part.touched) {
    const auto same = std::ranges::find_if(whole.touched, [&](const TouchedRung& rung) {
      return rung.rung == touched.rung && rung.tier == touched.tier;
    });
    if (same == whole.touched.end()) {
      whole.touched.push_back(touched);
    } else {
      same->pages += touched.pages;
      same->bytes += touched.bytes;
    }
  }
  for (const LostPage& lost : part.lost) {
    if (std::ranges::find(whole.lost, lost) == whole.lost.end()) whole.lost.push_back(lost);
  }
}

StepAnswer JoinedTiles(const Shape& shape) {
  StepAnswer joined;
  for (int32_t first = 0; first < shape.count; first += shape.tile) {
    const StepAnswer part =
        AnswerOf(shape, first, std::min(shape.tile, shape.count - first), kUnlimited);
    EXPECT_OK(part.status);
    Join(joined, part);
  }
  return joined;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void ExpectSame(const StepAnswer& tiled, const StepAnswer& other) {
  EXPECT_TRUE(SameBits(tiled.output, other.output));
  EXPECT_TRUE(SameBits(tiled.lse, other.lse));
  EXPECT_TRUE(SameBits(tiled.certificate.mass_bound, other.certificate.mass_bound));
  EXPECT_TRUE(SameBits(tiled.certificate.error_bound, other.certificate.error_bound));
  EXPECT_EQ(tiled.certificate.met, other.certificate.met);
  EXPECT_EQ(tiled.certificate.not_met_reason, other.certificate.not_met_reason);
  EXPECT_EQ(tiled.absent_pages, other.absent_pages);
  EXPECT_EQ(tiled.lost, other.lost);
  ASSERT_EQ(tiled.touched.size(), other.touched.size());
  for (size_t i = 0; i < tiled.touched.size(); ++i) {
    EXPECT_EQ(tiled.touched[i].rung, other.touched[i].rung);
    EXPECT_EQ(tiled.touched[i].tier, other.touched[i].tier);
    EXPECT_EQ(tiled.touched[i].pages, other.touched[i].pages);
    EXPECT_EQ(tiled.touched[i].bytes, other.touched[i].bytes);
  }
}

// In l2 norm, of f32 elements from `first` on.
double Apart(const std::vector<std::byte>& a, const std::vector<std::byte>& b, size_t first,
             size_t count) {
  double square = 0;
  for (size_t i = first; i < first + count; ++i) {
    const double off = double{gpu::ElementAt(gpu::Dtype::kF32, a.data(), static_cast<int>(i))} -
                       gpu::ElementAt(gpu::Dtype::kF32, b.data(), static_cast<int>(i));
    square += off * off;
  }
  return std::sqrt(square);
}

class TiledAnswersTest : public testing::TestWithParam<const char*> {};

TEST_P(TiledAnswersTest, AreTheAnswersOfTheirTiles) {
  test::ForEachSeed(24, [&](uint64_t seed) {
    const Shape shape = DrawShape(seed, GetParam());
    const StepAnswer tiled = AnswerOf(shape, 0, shape.count, shape.RecallBytes(shape.tile));
    ASSERT_OK(tiled.status);
    ExpectSame(tiled, JoinedTiles(shape));
  });
}

TEST_P(TiledAnswersTest, AreTheWholeAnswerWhereOneTileIsEnough) {
  test::ForEachSeed(8, [&](uint64_t seed) {
    const Shape shape = DrawShape(seed, GetParam());
    const StepAnswer limited = AnswerOf(shape, 0, shape.count, shape.RecallBytes(shape.count));
    ASSERT_OK(limited.status);
    ExpectSame(limited, AnswerOf(shape, 0, shape.count, kUnlimited));
  });
}

TEST_P(TiledAnswersTest, AreAsNearToTheWholeAnswerAsBothCertify) {
  test::ForEachSeed(16, [&](uint64_t seed) {
    const Shape shape = DrawShape(seed, GetParam());
    const StepAnswer tiled = AnswerOf(shape, 0, shape.count, shape.RecallBytes(shape.tile));
    const StepAnswer whole = AnswerOf(shape, 0, shape.count, kUnlimited);
    ASSERT_OK(tiled.status);
    ASSERT_OK(whole.status);
    const auto rows = static_cast<size_t>(shape.count * shape.geometry.query_heads);
    const auto head_dim = static_cast<size_t>(shape.geometry.head_dim);
    ASSERT_EQ(tiled.lse.size(), rows);
    for (size_t row = 0; row < rows; ++row) {
      const double apart = Apart(tiled.output, whole.output, row * head_dim, head_dim);
      ASSERT_LE(apart, static_cast<double>(tiled.certificate.error_bound[row]) +
                           static_cast<double>(whole.certificate.error_bound[row]));
      if (shape.recall != "off") continue;
      ASSERT_LE(apart, 1e-5);  // Only the rounding of sums differs.
      ASSERT_NEAR(tiled.lse[row], whole.lse[row], 1e-5);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(EveryRecall, TiledAnswersTest,
                         testing::Values("bounded", "estimated", "off"),
                         [](const auto& test) { return std::string(test.param); });

Shape DearShape(int layers = 1) {
  Geometry geometry = test::SmallGeometry();
  geometry.layers = layers;
  return {.geometry = geometry,
          .policy = "streaming",
          .recall = "bounded(0.0000001)",  // No form is near enough.
          .budget = 64,
          .fed = 192,
          .count = 8,
          .tile = 2,
          .seed = 5};
}

TEST(TiledAnswersTest, NameEachDamagedPageOnce) {
  Shape shape = DearShape();
  shape.flipped = 0.5;

  const StepAnswer tiled = AnswerOf(shape, 0, shape.count, shape.RecallBytes(shape.tile));

  EXPECT_FALSE(tiled.lost.empty());
  EXPECT_EQ(tiled.certificate.not_met_reason, "CORRUPT_PAGE");
  ExpectSame(tiled, JoinedTiles(shape));
}

// The first tile reads everything and is not met for its arithmetic; before the second reads, time
// runs out.
TEST(TiledAnswersTest, GiveTheReasonOfTheFirstTokenThatIsNotMet) {
  const Shape shape = DearShape();
  const Tokens tokens{.geometry = shape.geometry, .seed = shape.seed};
  test::FakeClock clock;
  FaultyBackend* device = nullptr;
  EngineStand stand({.clock = &clock,
                     .recall_bytes = shape.RecallBytes(shape.tile),
                     .wrap_backend = [&](gpu::Backend& backend) {
                       auto faulty = std::make_unique<FaultyBackend>(backend);
                       device = faulty.get();
                       return faulty;
                     }});
  Worker worker(stand.engine(), tokens, "a", clock);
  worker.open = {.policy = shape.policy, .recall = shape.recall, .budget_tokens = shape.budget};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.StepAllLayers({.count = shape.fed, .phase = Phase::kPrefill}).status);
  device->Fail([&](const gpu::Batch& batch) {
    const auto* attends = std::get_if<std::span<const gpu::AttendArgs>>(&batch);
    const bool is_second_tile =
        attends != nullptr && attends->front().query_index.front() == shape.fed + shape.tile;
    if (is_second_tile) clock.Advance(absl::Hours(1));
    return false;
  });

  const StepAnswer answer = worker.Step({.first = shape.fed, .count = shape.count});

  ASSERT_OK(answer.status);
  EXPECT_EQ(answer.certificate.met, std::vector<uint8_t>(8, 0));
  EXPECT_EQ(answer.certificate.not_met_reason, "ARITHMETIC");
  const Stats stats = stand.engine().GetStats();
  EXPECT_THAT(stats.answers_not_met, testing::ElementsAre(testing::Pair("ARITHMETIC", 8)));
}

bool ReadsForms(const StepAnswer& answer) {
  return std::ranges::any_of(answer.touched,
                             [](const TouchedRung& touched) { return touched.rung == "coarse"; });
}

// A climb that was dearer than exact bytes: so many answers after it read those at once, however
// many tiles they come in.
TEST(TiledAnswersTest, TeachRecallOnce) {
  const Shape shape = DearShape(2);
  const Tokens tokens{.geometry = shape.geometry, .seed = shape.seed};
  for (const uint64_t recall_bytes : {shape.RecallBytes(shape.tile), kUnlimited}) {
    EngineStand stand({.recall_bytes = recall_bytes});
    Worker worker(stand.engine(), tokens, "a");
    worker.open = {.policy = shape.policy, .recall = shape.recall, .budget_tokens = shape.budget};
    ASSERT_OK(worker.Open().status());
    ASSERT_OK(worker.StepAllLayers({.count = shape.fed, .phase = Phase::kPrefill}).status);
    std::vector<bool> climbed;
    std::vector<bool> again_climbed;
    for (int32_t first = shape.fed; first < shape.fed + 18 * 4; first += 4) {
      const StepAnswer answer = worker.Step({.first = first, .count = 4});
      ASSERT_OK(answer.status);
      climbed.push_back(ReadsForms(answer));
      // The same call again teaches nothing.
      const StepAnswer again = worker.Step({.first = first, .count = 4});
      ASSERT_TRUE(again.replayed);
      again_climbed.push_back(ReadsForms(again));
      ASSERT_OK(worker.Step({.layer = 1, .first = first, .count = 4}).status);
    }
    std::vector<bool> expected(18, false);
    expected.front() = expected.back() = true;
    EXPECT_EQ(climbed, expected) << recall_bytes;
    std::vector<bool> expected_again(18, false);
    expected_again[16] = true;  // The next answer would.
    EXPECT_EQ(again_climbed, expected_again) << recall_bytes;
  }
}

}  // namespace
}  // namespace ebbtide::service
