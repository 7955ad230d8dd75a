// SPDX-License-Identifier: Apache-2.0
//
// The promises of backend.h, for every backend: each operation reaches every lane and answers as
// its reference does, wherever its arrays lie, and a stream's batches see each other's results.

#include "gpu/backend.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/unit/gpu/backend_stand.h"
#include "tests/unit/gpu/sample_lane.h"
#include "tests/unit/gpu/sample_page.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::HasSubstr;

constexpr size_t kLanes = 5;

// A lane in the caller's memory or the device's, and what is asked of it.
struct Asked {
  Asked(int slots, int rows_in, std::mt19937_64& random)
      : lane({.head_dim = 24, .slots = slots, .empty_one_in = 7}, random),
        rows(static_cast<size_t>(rows_in)),
        extents(lane.extents()) {
    std::normal_distribution<float> normal;
    query.resize(rows * lane.dim());
    for (float& element : query) element = normal(random);
    query_index.assign(rows, slots);
    output.resize(query.size(), -1);
    lse.resize(rows, -1);
    logits.resize(rows * lane.slots(), -1);
    slot_result.resize(lane.slots(), -1);
    mass.resize(lane.slots(), 0.5);
    part_lse.resize(extents.size() * rows, -1);
    part_output.resize(part_lse.size() * lane.dim(), -1);
    AttendReference(AttendParts());
  }

  // From here on the tokens lie in `buffer`, which holds nothing else, once these appends are run.
  AppendArgs MoveTo(std::span<std::byte> buffer) {
    const size_t row_bytes = lane.dim() * DtypeBytes(lane.options().dtype);
    const std::byte* const key = extents[0].key;
    const std::byte* const value = extents[0].value;
    for (Extent& extent : extents) {
      const auto slots = static_cast<size_t>(extent.slots);
      for (size_t slot = 0; slot < slots; ++slot) {
        key_slot.push_back(buffer.data() + slot * row_bytes);
        value_slot.push_back(buffer.data() + (slots + slot) * row_bytes);
      }
      extent.key = buffer.data();
      extent.value = buffer.data() + slots * row_bytes;
      buffer = buffer.subspan(2 * slots * row_bytes);
    }
    norms.resize(2 * lane.slots());
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .tokens = static_cast<int>(lane.slots()),
            .key = key,
            .value = value,
            .stride = row_bytes,
            .key_slot = key_slot,
            .value_slot = value_slot,
            .key_norm = std::span(norms).first(lane.slots()),
            .value_norm = std::span(norms).last(lane.slots())};
  }

  AttendArgs Attend() {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = static_cast<int>(rows),
            .scale = 0.2F,
            .extents = extents,
            .query = query,
            .query_index = std::span(query_index).first(1),
            .output = output,
            .lse = lse,
            .logits = logits};
  }
  AttendArgs AttendParts() {
    AttendArgs args = Attend();
    args.part_output = part_output;
    args.part_lse = part_lse;
    return args;
  }
  DamageArgs Damage() {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .rows = static_cast<int>(rows),
            .extents = extents,
            .logits = logits,
            .lse = lse,
            .centre = output,
            .damage = slot_result};
  }

  SampleLane lane;
  size_t rows;
  std::vector<Extent> extents;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<float> output, lse, logits, part_output, part_lse, slot_result, norms;
  std::vector<double> mass;
  std::vector<std::byte*> key_slot, value_slot;
};

class BackendTest : public BackendStand {
 protected:
  // Lanes in the caller's memory and in the device's, short and long ones.
  std::vector<std::unique_ptr<Asked>> AskedLanes() {
    std::vector<std::unique_ptr<Asked>> lanes;
    for (const int slots : {90, 1, 32, 300, 65}) {
      lanes.push_back(std::make_unique<Asked>(slots, 3, random_));
      at_home_[lanes.back()->extents.data()] = &lanes.back()->lane;
    }
    for (size_t i = 0; i < lanes.size(); i += 2) {
      auto memory = backend_->Allocate(lanes[i]->lane.slots() * lanes[i]->lane.dim() * 4);
      EXPECT_OK(memory);
      Run(std::vector<AppendArgs>{lanes[i]->MoveTo(memory->bytes())});
      memory_.push_back(*std::move(memory));
    }
    return lanes;
  }

  // Device memory as bytes, which may only be read there. `from` is a multiple of 16 bytes.
  std::vector<std::byte> ReadBack(std::span<const std::byte> from) {
    std::vector<const std::byte*> rows;
    for (size_t b = 0; b < from.size(); b += 16) rows.push_back(from.data() + b);
    std::vector<std::byte> bytes(from.size());
    std::vector<GatherArgs> pages;
    for (size_t first = 0; first < rows.size(); first += 2) {  // A key and a value of four f32.
      const auto row = std::span(rows).subspan(first);
      pages.push_back({.shape = {.tokens = 1, .head_dim = 4, .dtype = Dtype::kF32},
                       .key_slot = row.first(1),
                       .value_slot = row.subspan(row.size() > 1 ? 1 : 0, 1),
                       .page = std::span(bytes).subspan(first * 16, 32)});
    }
    Run(pages);
    return bytes;
  }

  std::vector<DeviceBuffer> memory_;
};
INSTANTIATE_TEST_SUITE_P(Every, BackendTest, testing::ValuesIn(EveryBackend()),
                         testing::PrintToStringParamName());

TEST_P(BackendTest, MemoryIsZeroedAndAligned) {
  ASSERT_OK_AND_ASSIGN(const DeviceBuffer buffer, backend_->Allocate((size_t{5} << 20) + 12345));
  const std::span<std::byte> bytes = buffer.bytes();

  EXPECT_EQ(bytes.size(), (size_t{5} << 20) + 12345);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % (size_t{2} << 20), 0U);
  for (const size_t first : {size_t{0}, size_t{3} << 20, (size_t{5} << 20) + 12288}) {
    EXPECT_THAT(ReadBack(bytes.subspan(first, 32)), testing::Each(std::byte{0})) << first;
  }
}

TEST_P(BackendTest, MemoryThatNoMachineHasIsRefused) {
  EXPECT_THAT(backend_->Allocate(size_t{1} << 52).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("lower the device budget")));
  EXPECT_THAT(backend_->Allocate(0).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 bytes")));
}

TEST_P(BackendTest, EmptyBatchIsDone) {
  Run(std::span<const AttendArgs>());
  Run(std::span<const AppendArgs>());
  Run(FastDamage{});
  Run(std::vector<ZeroArgs>{{}});
}

TEST_P(BackendTest, AttendAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<AttendArgs> lanes;
  for (const auto& lane : asked) lanes.push_back(lane->Attend());
  ExpectReference<AttendArgs, float>(lanes, lanes, &AttendReference,
                                     {&AttendArgs::output, &AttendArgs::lse, &AttendArgs::logits},
                                     1e-5);
}

TEST_P(BackendTest, AttendOverEachExtentAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<AttendArgs> lanes;
  for (const auto& lane : asked) lanes.push_back(lane->AttendParts());
  ExpectReference<AttendArgs, float>(
      lanes, lanes, &AttendReference,
      {&AttendArgs::output, &AttendArgs::lse, &AttendArgs::part_output, &AttendArgs::part_lse},
      1e-5);
}

TEST_P(BackendTest, AttendGivesTheSameBitsInAnyCompany) {
  const auto asked = AskedLanes();
  std::vector<AttendArgs> lanes;
  for (const auto& lane : asked) lanes.push_back(lane->Attend());
  std::vector<std::vector<float>> alone;
  for (size_t i = 0; i < kLanes; ++i) {
    Run(std::span<const AttendArgs>(&lanes[i], 1));
    alone.push_back(asked[i]->output);
    std::ranges::fill(asked[i]->output, -1.0F);
  }

  Run(lanes);

  for (size_t i = 0; i < kLanes; ++i) EXPECT_EQ(asked[i]->output, alone[i]) << i;
}

TEST_P(BackendTest, DamageAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<DamageArgs> lanes;
  for (const auto& lane : asked) lanes.push_back(lane->Damage());
  ExpectReference<DamageArgs, float>(lanes, lanes, &DamageReference, {&DamageArgs::damage}, 1e-4);
  ExpectReference<DamageArgs, float>(FastDamage{lanes}, lanes, &FastDamageReference,
                                     {&DamageArgs::damage}, 1e-4);
}

TEST_P(BackendTest, DamageBesideARestAnswersAsTheReference) {
  const auto asked = AskedLanes();
  const std::vector<float> rest_output(3 * 24, 0.25F), rest_lse(3, 0.5F);
  std::vector<DamageArgs> lanes;
  for (const auto& lane : asked) {
    lanes.push_back(lane->Damage());
    lanes.back().rest_output = rest_output;
    lanes.back().rest_lse = rest_lse;
  }
  ExpectReference<DamageArgs, float>(lanes, lanes, &DamageReference, {&DamageArgs::damage}, 1e-4);
}

TEST_P(BackendTest, PageDamageAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<PageDamageArgs> lanes;
  for (const bool has_rest : {false, true}) {
    const std::vector<float> rest_output(3 * 24, 0.25F), rest_lse(3, 0.5F);
    lanes.clear();
    for (const auto& lane : asked) {
      lanes.push_back({.head_dim = lane->lane.options().head_dim,
                       .rows = static_cast<int>(lane->rows),
                       .pages = static_cast<int>(lane->extents.size()),
                       .part_output = lane->part_output,
                       .part_lse = lane->part_lse,
                       .output = lane->output,
                       .lse = lane->lse,
                       .damage = std::span(lane->slot_result).first(lane->extents.size())});
      if (!has_rest) continue;
      lanes.back().rest_output = rest_output;
      lanes.back().rest_lse = rest_lse;
    }
    ExpectReference<PageDamageArgs, float>(lanes, lanes, &PageDamageReference,
                                           {&PageDamageArgs::damage}, 1e-5);
  }
}

TEST_P(BackendTest, WeightedValueAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<WeightedValueArgs> lanes;
  std::vector<std::vector<float>> weights;
  for (const auto& lane : asked) {
    std::vector<float>& weight = weights.emplace_back(lane->logits);
    for (float& element : weight) element = std::exp(element) / 16;
    lanes.push_back({.dtype = lane->lane.options().dtype,
                     .head_dim = lane->lane.options().head_dim,
                     .rows = static_cast<int>(lane->rows),
                     .extents = lane->extents,
                     .weight = weight,
                     .output = lane->output});
  }
  ExpectReference<WeightedValueArgs, float>(lanes, lanes, &WeightedValueReference,
                                            {&WeightedValueArgs::output}, 1e-5);
}

TEST_P(BackendTest, KeyDiffAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<GeometryArgs> lanes;
  for (const auto& lane : asked) {
    lanes.push_back({.dtype = lane->lane.options().dtype,
                     .head_dim = lane->lane.options().head_dim,
                     .extents = lane->extents,
                     .score = lane->slot_result});
  }
  ExpectReference<GeometryArgs, float>(lanes, lanes, &KeyDiffReference, {&GeometryArgs::score},
                                       1e-5);
}

TEST_P(BackendTest, MassAddsAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<MassArgs> lanes;
  for (const auto& lane : asked) {
    lanes.push_back({.group = static_cast<int>(lane->rows),
                     .slots = static_cast<int>(lane->lane.slots()),
                     .logits = lane->logits,
                     .lse = lane->lse,
                     .mass = lane->mass});
  }
  ExpectReference<MassArgs, double>(lanes, lanes, &MassReference, {&MassArgs::mass}, 1e-6);
}

TEST_P(BackendTest, WindowAnswersAsTheReference) {
  const auto asked = AskedLanes();
  std::vector<WindowArgs> lanes;
  for (const auto& lane : asked) {
    lanes.push_back({.dtype = lane->lane.options().dtype,
                     .head_dim = lane->lane.options().head_dim,
                     .group = static_cast<int>(lane->rows),
                     .scale = 0.2F,
                     .extents = lane->extents,
                     .query = lane->query,
                     .query_index = std::span(lane->query_index).first(1),
                     .mass = lane->slot_result});
  }
  ExpectReference<WindowArgs, float>(lanes, lanes, &WindowReference, {&WindowArgs::mass}, 1e-5);
}

TEST_P(BackendTest, MergeJoinsAsTheReference) {
  const auto asked = AskedLanes();
  const std::vector<float> part_output(3 * 24, 0.25F), part_lse(3, 0.5F);
  std::vector<MergeArgs> lanes;
  for (const auto& lane : asked) {
    lanes.push_back({.rows = static_cast<int>(lane->rows),
                     .head_dim = lane->lane.options().head_dim,
                     .part_output = part_output,
                     .part_lse = part_lse,
                     .output = lane->output,
                     .lse = lane->lse});
  }
  ExpectReference<MergeArgs, float>(lanes, lanes, &MergeReference,
                                    {&MergeArgs::output, &MergeArgs::lse}, 1e-6);
}

TEST_P(BackendTest, AppendedTokensAreGatheredAgain) {
  constexpr int kTokens = 3;
  ASSERT_OK_AND_ASSIGN(const DeviceBuffer pool, backend_->Allocate(kLanes * 4096));
  std::vector<SamplePage> pages;
  std::vector<std::vector<std::byte*>> key_slots(kLanes), value_slots(kLanes);
  std::vector<std::vector<const std::byte*>> keys(kLanes), values(kLanes);
  std::vector<std::vector<float>> norms(kLanes, std::vector<float>(2 * kTokens));
  std::vector<std::vector<std::byte>> gathered;
  std::vector<AppendArgs> appends;
  std::vector<GatherArgs> gathers;
  for (size_t i = 0; i < kLanes; ++i) {
    pages.emplace_back(
        SamplePage::Options{.head_dim = 20, .page_tokens = kTokens, .tokens = kTokens}, random_);
    gathered.emplace_back(pages[0].bytes().size(), std::byte{1});
    for (size_t t = 0; t < kTokens; ++t) {  // Last token first.
      key_slots[i].push_back(pool.bytes().data() + i * 4096 + (kTokens - t) * 128);
      value_slots[i].push_back(key_slots[i].back() + 2048);
      keys[i].push_back(key_slots[i].back());
      values[i].push_back(value_slots[i].back());
    }
  }
  for (size_t i = 0; i < kLanes; ++i) {
    const PageShape& shape = pages[i].shape();
    appends.push_back({.head_dim = shape.head_dim,
                       .tokens = kTokens,
                       .key = pages[i].bytes().data(),
                       .value = pages[i].bytes().data() + shape.half_bytes(),
                       .stride = shape.row_bytes(),
                       .key_slot = key_slots[i],
                       .value_slot = value_slots[i],
                       .key_norm = std::span(norms[i]).first(kTokens),
                       .value_norm = std::span(norms[i]).last(kTokens)});
    gathers.push_back(
        {.shape = shape, .key_slot = keys[i], .value_slot = values[i], .page = gathered[i]});
  }
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, backend_->MakeStream());

  ASSERT_OK(backend_->Run(*stream, appends));
  ASSERT_OK(backend_->Run(*stream, gathers));
  ASSERT_OK(stream->Wait());

  for (size_t i = 0; i < kLanes; ++i) {
    EXPECT_THAT(gathered[i], testing::ElementsAreArray(pages[i].bytes())) << i;
    for (int t = 0; t < kTokens; ++t) {
      double squares = 0;
      for (int d = 0; d < 20; ++d) squares += std::pow(pages[i].value(t, d), 2);
      EXPECT_GE(norms[i][static_cast<size_t>(kTokens + t)], std::sqrt(squares));
      EXPECT_NEAR(norms[i][static_cast<size_t>(kTokens + t)], std::sqrt(squares), 1e-5);
    }
  }
}

TEST_P(BackendTest, ZeroLeavesNothingInsideAndEverythingBeside) {
  ASSERT_OK_AND_ASSIGN(const DeviceBuffer pool, backend_->Allocate(512));
  const std::vector<std::byte> row(256, std::byte{0x5A});
  std::vector<std::byte*> key_slot = {pool.bytes().data()};
  std::vector<std::byte*> value_slot = {pool.bytes().data() + 256};
  std::vector<float> norm(2);
  Run(std::vector<AppendArgs>{{.dtype = Dtype::kF32,
                               .head_dim = 64,
                               .tokens = 1,
                               .key = row.data(),
                               .value = row.data(),
                               .stride = 256,
                               .key_slot = key_slot,
                               .value_slot = value_slot,
                               .key_norm = std::span(norm).first(1),
                               .value_norm = std::span(norm).last(1)}});
  std::vector<std::byte> own(100, std::byte{0x5A});

  Run(std::vector<ZeroArgs>{{pool.bytes().subspan(100, 200)}, {std::span(own).first(60)}});

  const std::vector<std::byte> bytes = ReadBack(pool.bytes());
  for (size_t i = 0; i < bytes.size(); ++i) {
    ASSERT_EQ(bytes[i], i >= 100 && i < 300 ? std::byte{0} : std::byte{0x5A}) << i;
  }
  for (size_t i = 0; i < own.size(); ++i) {
    ASSERT_EQ(own[i], i < 60 ? std::byte{0} : std::byte{0x5A}) << i;
  }
}

// Attend, what it answers merged with itself, its mass: one wait at the end.
TEST_P(BackendTest, BatchesOfAStreamSeeWhatThoseBeforeThemWrote) {
  const auto asked = AskedLanes();
  std::vector<AttendArgs> attends;
  std::vector<MergeArgs> merges;
  std::vector<MassArgs> masses;
  std::vector<std::vector<float>> output(kLanes, std::vector<float>(3 * 24, 0.0F));
  std::vector<std::vector<float>> lse(kLanes, std::vector<float>(3, -INFINITY));
  std::vector<std::vector<double>> expected(kLanes);
  for (size_t i = 0; i < kLanes; ++i) {
    Asked& lane = *asked[i];
    expected[i] = lane.mass;
    MassArgs mass{.group = 3,
                  .slots = static_cast<int>(lane.lane.slots()),
                  .logits = lane.logits,
                  .lse = lane.lse,
                  .mass = expected[i]};
    MassReference(mass);
    mass.mass = lane.mass;
    masses.push_back(mass);
    attends.push_back(lane.Attend());
    merges.push_back({.rows = 3,
                      .head_dim = 24,
                      .part_output = lane.output,
                      .part_lse = lane.lse,
                      .output = output[i],
                      .lse = lse[i]});
  }
  std::vector<std::vector<float>> attended;
  for (const auto& lane : asked) {
    attended.push_back(lane->output);
    std::ranges::fill(lane->output, 9.0F);
    std::ranges::fill(lane->logits, 9.0F);
    std::ranges::fill(lane->lse, 9.0F);
  }
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, backend_->MakeStream());

  ASSERT_OK(backend_->Run(*stream, attends));
  ASSERT_OK(backend_->Run(*stream, merges));
  ASSERT_OK(backend_->Run(*stream, masses));
  ASSERT_OK(stream->Wait());

  for (size_t i = 0; i < kLanes; ++i) {
    for (size_t j = 0; j < output[i].size(); ++j) {
      ASSERT_NEAR(output[i][j], attended[i][j], 1e-5) << i << " " << j;
    }
    for (size_t s = 0; s < expected[i].size(); ++s) {
      ASSERT_NEAR(asked[i]->mass[s], expected[i][s], 1e-5) << i << " " << s;
    }
  }
}

}  // namespace
}  // namespace ebbtide::gpu
