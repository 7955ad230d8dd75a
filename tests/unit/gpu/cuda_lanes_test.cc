// SPDX-License-Identifier: Apache-2.0
//
// What CUDA adds to the contracts: many lanes in one launch. A lane's bits are the same alone, in
// any company and in any order of blocks and threads. Each kernel's own contract is held by the
// tests that the CPU's pass too.

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "tests/cuemu/machine.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/on_cuda.h"
#include "tests/unit/gpu/sample_lane.h"
#include "tests/unit/gpu/scores_on_cuda.h"

namespace ebbtide::gpu {
namespace {

class CudaLanesTest : public testing::Test {
 public:
  ~CudaLanesTest() override { cuemu::SetSeed(0); }
};

// A lane of its own shape, and room for its answer.
struct AttendCall {
  AttendCall(Dtype dtype, int head_dim, int slots, int queries_in, std::mt19937_64& random)
      : lane({.dtype = dtype,
              .head_dim = head_dim,
              .slots = slots,
              .extent_slots = 20,
              .empty_one_in = 6,
              .poison_empty = true},
             random),
        queries(queries_in) {
    std::normal_distribution<float> normal;
    const size_t rows = 2 * static_cast<size_t>(queries);
    for (size_t i = 0; i < rows * lane.dim(); ++i) query.push_back(normal(random));
    for (int m = 0; m < queries; ++m) query_index.push_back(slots - queries + m);
    output.resize(query.size());
    lse.resize(rows);
    logits.resize(rows * lane.slots());
    part_lse.resize(lane.extents().size() * rows);
    part_output.resize(part_lse.size() * lane.dim());
  }

  AttendArgs WithParts() {
    AttendArgs args = Args();
    args.part_output = part_output;
    args.part_lse = part_lse;
    return args;
  }
  AttendArgs Args() {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = 2,
            .queries = queries,
            .scale = 0.125F,
            .extents = lane.extents(),
            .query = query,
            .query_index = query_index,
            .output = output,
            .lse = lse,
            .logits = logits};
  }

  SampleLane lane;
  int queries;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<float> output, lse, logits, part_output, part_lse;
};

TEST_F(CudaLanesTest, AttendGivesALaneTheSameBitsAloneAndInAnyCompanyAndOrder) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<std::unique_ptr<AttendCall>> calls;
  const auto add = [&](Dtype dtype, int head_dim, int slots, int queries) {
    calls.push_back(std::make_unique<AttendCall>(dtype, head_dim, slots, queries, random));
  };
  add(Dtype::kF16, 64, 1, 1);
  add(Dtype::kF16, 64, 700, 1);
  add(Dtype::kF16, 64, 1100, 7);
  add(Dtype::kF32, 80, 257, 2);
  add(Dtype::kF16, 64, 512, 0);
  add(Dtype::kF16, 33, 300, 1);
  std::vector<AttendArgs> together;
  std::vector<std::vector<float>> alone;
  for (const auto& call : calls) {
    AttendOnCuda(call->Args());
    for (const std::vector<float>* answer : {&call->output, &call->lse, &call->logits}) {
      alone.push_back(*answer);
    }
    together.push_back(call->Args());
  }

  for (const uint32_t seed : {0U, 1U, 2U}) {
    cuemu::SetSeed(seed);
    for (const auto& call : calls) call->output.assign(call->output.size(), -1.0F);
    RunOnCuda<AttendArgs>(&AttendCuda, together);

    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i]->output, alone[3 * i]) << "lane " << i << " seed " << seed;
      EXPECT_EQ(calls[i]->lse, alone[3 * i + 1]) << "lane " << i << " seed " << seed;
      EXPECT_EQ(calls[i]->logits, alone[3 * i + 2]) << "lane " << i << " seed " << seed;
    }
  }
}

// Some lanes want their extents alone and some do not; tiles are of 1 row, of 4 and of 8.
TEST_F(CudaLanesTest, AttendPartsAreTheSameBitsAloneAndInAnyCompanyAndOrder) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<std::unique_ptr<AttendCall>> calls;
  std::vector<std::vector<float>> alone;
  std::vector<AttendArgs> together;
  for (const auto& [head_dim, slots, queries] :
       {std::tuple(64, 1, 1), {64, 700, 1}, {64, 300, 2}, {64, 520, 7}, {33, 300, 1}}) {
    calls.push_back(std::make_unique<AttendCall>(Dtype::kF16, head_dim, slots, queries, random));
    AttendOnCuda(calls.back()->WithParts());
    for (std::vector<float>* answer : {&calls.back()->part_output, &calls.back()->part_lse,
                                       &calls.back()->output, &calls.back()->lse}) {
      alone.push_back(*answer);
      answer->assign(answer->size(), -1.0F);
    }
    together.push_back(calls.back()->WithParts());
  }
  AttendCall plain(Dtype::kF16, 64, 400, 3, random);
  together.insert(together.begin() + 1, plain.Args());
  AttendOnCuda(plain.Args());
  const std::vector<float> plain_alone = plain.output;

  for (const uint32_t seed : {0U, 1U, 2U}) {
    cuemu::SetSeed(seed);
    RunOnCuda<AttendArgs>(&AttendCuda, together);

    EXPECT_EQ(plain.output, plain_alone) << "seed " << seed;
    auto expected = alone.begin();
    for (const auto& call : calls) {
      for (std::vector<float>* answer :
           {&call->part_output, &call->part_lse, &call->output, &call->lse}) {
        EXPECT_EQ(*answer, *expected++) << "lane " << &call - calls.data() << " seed " << seed;
        answer->assign(answer->size(), -1.0F);
      }
    }
  }
}

TEST_F(CudaLanesTest, AttendTakesSeveralLaunchesWhereScratchIsShort) {
  std::mt19937_64 random(test::RandomSeed());
  AttendCall one(Dtype::kF16, 32, 600, 9, random);  // 18 rows: 3 tiles of 3 splits each.
  AttendCall two(Dtype::kF16, 32, 300, 1, random);
  const std::vector<AttendArgs> lanes = {one.Args(), two.Args()};
  RunOnCuda<AttendArgs>(&AttendCuda, lanes);
  const std::vector<float> output_one = one.output;
  const std::vector<float> output_two = two.output;
  const auto stream = CudaStream::Make(size_t{4} * 8 * 32 * 4);  // Bytes of four partials.
  ASSERT_TRUE(stream.ok());
  one.output.assign(one.output.size(), -1.0F);
  two.output.assign(two.output.size(), -1.0F);

  ASSERT_TRUE(AttendCuda(lanes, **stream).ok());
  ASSERT_TRUE((*stream)->Wait().ok());

  EXPECT_EQ(one.output, output_one);
  EXPECT_EQ(two.output, output_two);
}

template <class T>
std::vector<T> RandomNumbers(size_t count, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<T> numbers(count);
  for (T& number : numbers) number = static_cast<T>(normal(random));
  return numbers;
}

constexpr uint32_t kSeeds[] = {0, 1, 2};
constexpr size_t kSizes[] = {3, 0, 700, 1, 257};  // Of lanes in one launch.

TEST_F(CudaLanesTest, MergeJoinsEachLaneWithItsOwnPart) {
  std::mt19937_64 random(test::RandomSeed());
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    std::vector<std::vector<float>> output, expected, lse, expected_lse, part, part_lse;
    for (const size_t rows : kSizes) {
      output.push_back(RandomNumbers<float>(rows * 40, random));
      part.push_back(RandomNumbers<float>(rows * 40, random));
      lse.push_back(RandomNumbers<float>(rows, random));
      part_lse.push_back(RandomNumbers<float>(rows, random));
    }
    expected = output;
    expected_lse = lse;
    std::vector<MergeArgs> lanes;
    for (size_t i = 0; i < output.size(); ++i) {
      const auto rows = static_cast<int>(kSizes[i]);
      MergeReference({rows, 40, part[i], part_lse[i], expected[i], expected_lse[i]});
      lanes.push_back({rows, 40, part[i], part_lse[i], output[i], lse[i]});
    }

    RunOnCuda<MergeArgs>(&MergeCuda, lanes);

    EXPECT_EQ(output, expected);
    EXPECT_EQ(lse, expected_lse);
  }
}

TEST_F(CudaLanesTest, PageDamageIsTheSameBitsAloneAndInAnyCompanyAndOrder) {
  std::mt19937_64 random(test::RandomSeed());
  struct Pages {
    int rows, pages, head_dim;
    std::vector<float> part_output, part_lse, output, lse, damage;
  };
  std::vector<Pages> all;
  for (const auto& [rows, pages, head_dim] :
       {std::tuple(3, 20, 64), {1, 0, 64}, {40, 9, 33}, {1, 1, 256}, {2, 130, 8}}) {
    const auto r = static_cast<size_t>(rows);
    const auto parts = r * static_cast<size_t>(pages);
    const auto dim = static_cast<size_t>(head_dim);
    all.push_back({rows, pages, head_dim, RandomNumbers<float>(parts * dim, random),
                   RandomNumbers<float>(parts, random), RandomNumbers<float>(r * dim, random),
                   std::vector<float>(r, 2.5F), std::vector<float>(static_cast<size_t>(pages))});
    for (float& lse : all.back().part_lse) lse *= 2;  // Some pages hold more than half.
  }
  std::vector<PageDamageArgs> lanes;
  std::vector<std::vector<float>> alone;
  for (Pages& each : all) {
    lanes.push_back({.head_dim = each.head_dim,
                     .rows = each.rows,
                     .pages = each.pages,
                     .part_output = each.part_output,
                     .part_lse = each.part_lse,
                     .output = each.output,
                     .lse = each.lse,
                     .damage = each.damage});
    PageDamageOnCuda(lanes.back());
    alone.push_back(each.damage);
  }
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    for (Pages& each : all) each.damage.assign(each.damage.size(), -1.0F);

    RunOnCuda<PageDamageArgs>(&PageDamageCuda, lanes);

    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].damage, alone[i]) << i << " " << seed;
  }
}

TEST_F(CudaLanesTest, MassAndPoolGiveALaneTheSameBitsAloneAndInCompany) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<std::vector<float>> logits, lse, pooled, pooled_alone;
  std::vector<std::vector<double>> mass, alone;
  for (const size_t slots : kSizes) {
    logits.push_back(RandomNumbers<float>(6 * slots, random));
    lse.push_back(RandomNumbers<float>(6, random));
    mass.emplace_back(slots, 0.5);
    pooled.emplace_back(6 * slots, 0.0F);
  }
  alone = mass;
  pooled_alone = pooled;
  std::vector<MassArgs> masses;
  std::vector<PoolArgs> pools;
  for (size_t i = 0; i < mass.size(); ++i) {
    const auto slots = static_cast<int>(kSizes[i]);
    MassOnCuda({2, 3, slots, logits[i], lse[i], alone[i]});
    MaxPoolOnCuda({5, logits[i], pooled_alone[i]});
    masses.push_back({2, 3, slots, logits[i], lse[i], mass[i]});
    pools.push_back({5, logits[i], pooled[i]});
  }
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    for (std::vector<double>& each : mass) each.assign(each.size(), 0.5);
    RunOnCuda<MassArgs>(&MassCuda, masses);
    RunOnCuda<PoolArgs>(&MaxPoolCuda, pools);

    EXPECT_EQ(mass, alone);
    EXPECT_EQ(pooled, pooled_alone);
  }
}

// Windows of lanes of several shapes.
class CudaWindowsTest : public CudaLanesTest {
 protected:
  CudaWindowsTest() {
    for (const auto& [dtype, head_dim, slots, queries] : {std::tuple(Dtype::kF16, 64, 700, 9),
                                                          {Dtype::kF16, 64, 1, 1},
                                                          {Dtype::kF16, 64, 300, 0},
                                                          {Dtype::kF32, 130, 257, 5},
                                                          {Dtype::kF16, 64, 320, 40},
                                                          {Dtype::kF16, 33, 100, 2}}) {
      calls_.push_back(std::make_unique<AttendCall>(dtype, head_dim, slots, queries, random_));
      mass_.emplace_back(calls_.back()->lane.slots(), -1.0F);
    }
    for (size_t i = 0; i < calls_.size(); ++i) {
      AttendCall& call = *calls_[i];
      windows_.push_back({.dtype = call.lane.options().dtype,
                          .head_dim = call.lane.options().head_dim,
                          .group = 2,
                          .queries = call.queries,
                          .scale = 0.125F,
                          .extents = call.lane.extents(),
                          .query = call.query,
                          .query_index = call.query_index,
                          .mass = mass_[i]});
    }
  }

  std::mt19937_64 random_{test::RandomSeed()};
  std::vector<std::unique_ptr<AttendCall>> calls_;
  std::vector<std::vector<float>> mass_;
  std::vector<WindowArgs> windows_;
};

TEST_F(CudaWindowsTest, GiveALaneTheSameBitsAloneAndInAnyCompanyAndOrder) {
  for (const WindowArgs& window : windows_) WindowOnCuda(window);
  const std::vector<std::vector<float>> alone = mass_;
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    for (std::vector<float>& each : mass_) each.assign(each.size(), -1.0F);
    RunOnCuda<WindowArgs>(&WindowCuda, windows_);

    EXPECT_EQ(mass_, alone) << "seed " << seed;
  }
}

TEST_F(CudaWindowsTest, TakeSeveralLaunchesWhereScratchIsShort) {
  RunOnCuda<WindowArgs>(&WindowCuda, windows_);
  const std::vector<std::vector<float>> at_once = mass_;
  for (std::vector<float>& each : mass_) each.assign(each.size(), -1.0F);
  const auto stream = CudaStream::Make(size_t{16} << 10);  // Room for two or three of them.
  ASSERT_TRUE(stream.ok());

  ASSERT_TRUE(WindowCuda(windows_, **stream).ok());
  ASSERT_TRUE((*stream)->Wait().ok());

  EXPECT_EQ(mass_, at_once);
}

// Rows of one lane's tokens, and where they go.
struct Tokens {
  Tokens(size_t tokens, std::mt19937_64& random)
      : key(tokens * kRowBytes), value(key.size()), key_copy(key.size()), value_copy(key.size()) {
    for (std::byte& byte : key) byte = static_cast<std::byte>(random() & 0x3BU);  // Finite.
    for (std::byte& byte : value) byte = static_cast<std::byte>(random() & 0x3BU);
    for (size_t token = 0; token < tokens; ++token) {
      key_from.push_back(key.data() + token * kRowBytes);
      value_from.push_back(value.data() + token * kRowBytes);
      key_slot.push_back(key_copy.data() + (tokens - 1 - token) * kRowBytes);
      value_slot.push_back(value_copy.data() + (tokens - 1 - token) * kRowBytes);
    }
    key_norm.resize(tokens);
    value_norm.resize(tokens);
  }

  AppendArgs Append() {
    return {Dtype::kF16, kHeadDim,     static_cast<int>(key_slot.size()),
            key.data(),  value.data(), kRowBytes,
            key_slot,    value_slot,   key_norm,
            value_norm};
  }

  static constexpr int kHeadDim = 24;
  static constexpr size_t kRowBytes = size_t{2} * kHeadDim;
  std::vector<std::byte> key, value, key_copy, value_copy;
  std::vector<const std::byte*> key_from, value_from;
  std::vector<std::byte*> key_slot, value_slot;
  std::vector<float> key_norm, value_norm;
};

TEST_F(CudaLanesTest, AppendAndGatherMoveEachLanesRowsToItsOwnPlaces) {
  std::mt19937_64 random(test::RandomSeed());
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    std::vector<std::unique_ptr<Tokens>> all;
    std::vector<AppendArgs> appends;
    std::vector<GatherArgs> gathers;
    std::vector<std::vector<std::byte>> pages;
    const PageShape shape{.tokens = 9, .head_dim = Tokens::kHeadDim, .dtype = Dtype::kF16};
    pages.reserve(4);
    for (const size_t tokens : {3U, 0U, 9U, 1U}) {
      all.push_back(std::make_unique<Tokens>(tokens, random));
      appends.push_back(all.back()->Append());
      pages.emplace_back(shape.page_bytes(), std::byte{0xA5});
      gathers.push_back({shape, all.back()->key_from, all.back()->value_from, pages.back()});
    }

    RunOnCuda<AppendArgs>(&AppendCuda, appends);
    RunOnCuda<GatherArgs>(&GatherCuda, gathers);

    for (size_t i = 0; i < all.size(); ++i) {
      Tokens& tokens = *all[i];
      const std::vector<std::byte> key_copy = tokens.key_copy;
      const std::vector<std::byte> value_copy = tokens.value_copy;
      const std::vector<float> key_norm = tokens.key_norm;
      std::vector<std::byte> page(shape.page_bytes());
      AppendReference(tokens.Append());
      GatherReference({shape, tokens.key_from, tokens.value_from, page});
      EXPECT_EQ(key_copy, tokens.key_copy) << i;
      EXPECT_EQ(value_copy, tokens.value_copy) << i;
      EXPECT_EQ(key_norm, tokens.key_norm) << i;
      EXPECT_EQ(pages[i], page) << i;
    }
  }
}

TEST_F(CudaLanesTest, SelectChoosesInEachLaneAsTheReferenceWhateverTheOrder) {
  std::mt19937_64 random(test::RandomSeed());
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    std::vector<std::vector<float>> score;
    std::vector<std::vector<int32_t>> index, leaving;
    std::vector<std::vector<uint8_t>> eligible;
    std::vector<int32_t> left(std::size(kSizes), -1);
    for (const size_t tokens : kSizes) {
      score.emplace_back(tokens);
      for (float& each : score.back()) each = static_cast<float>(random() % 3);  // Ties.
      index.emplace_back(tokens);
      std::iota(index.back().begin(), index.back().end(), -5);
      std::shuffle(index.back().begin(), index.back().end(), random);
      eligible.emplace_back(tokens, uint8_t{1});
      leaving.emplace_back(tokens / 2 + 1);
    }
    std::vector<SelectCudaArgs> lanes;
    for (size_t i = 0; i < score.size(); ++i) {
      lanes.push_back({{score[i], index[i], eligible[i], leaving[i].size()}, leaving[i], &left[i]});
    }

    RunOnCuda<SelectCudaArgs>(&SelectCuda, lanes);

    for (size_t i = 0; i < lanes.size(); ++i) {
      leaving[i].resize(static_cast<size_t>(left[i]));
      EXPECT_EQ(leaving[i], SelectReference(lanes[i].select)) << i;
    }
  }
}

TEST_F(CudaLanesTest, ScoresOfALaneAreTheSameBitsAloneAndInAnyCompanyAndOrder) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<std::unique_ptr<AttendCall>> calls;
  std::vector<DamageArgs> damages;
  std::vector<GeometryArgs> geometries;
  std::vector<std::vector<float>> damage, score, damage_alone, score_alone;
  damage.reserve(5);
  score.reserve(5);
  for (const auto& [dtype, slots, queries] : {std::tuple(Dtype::kF16, 900, 1),
                                              {Dtype::kF32, 300, 3},
                                              {Dtype::kF16, 1, 1},
                                              {Dtype::kF16, 520, 5},
                                              {Dtype::kF32, 256, 1}}) {
    calls.push_back(std::make_unique<AttendCall>(dtype, 40, slots, queries, random));
    AttendCall& call = *calls.back();
    for (float& element : call.query) element *= slots > 500 ? 6.0F : 1.0F;  // Weights above 1/2.
    AttendReference(call.Args());
    damage.emplace_back(call.lane.slots(), -1.0F);
    score.emplace_back(call.lane.slots(), -1.0F);
    damages.push_back({.dtype = dtype,
                       .head_dim = 40,
                       .rows = static_cast<int>(call.lse.size()),
                       .extents = call.lane.extents(),
                       .logits = call.logits,
                       .lse = call.lse,
                       .centre = call.output,
                       .damage = damage.back()});
    geometries.push_back(
        {.dtype = dtype, .head_dim = 40, .extents = call.lane.extents(), .score = score.back()});
    DamageOnCuda(damages.back());
    KeyDiffOnCuda(geometries.back());
  }
  damage_alone = damage;
  score_alone = score;
  for (const uint32_t seed : kSeeds) {
    cuemu::SetSeed(seed);
    for (std::vector<float>& each : damage) each.assign(each.size(), -1.0F);
    for (std::vector<float>& each : score) each.assign(each.size(), -1.0F);

    RunOnCuda<DamageArgs>(&DamageCuda, damages);
    RunOnCuda<GeometryArgs>(&KeyDiffCuda, geometries);

    EXPECT_EQ(damage, damage_alone) << "seed " << seed;
    EXPECT_EQ(score, score_alone) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ebbtide::gpu
