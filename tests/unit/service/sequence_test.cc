// SPDX-License-Identifier: Apache-2.0

#include "service/model/sequence.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/death_test.h"

namespace ebbtide::service {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int kLayers = 2;
constexpr int kKvHeads = 2;
constexpr int32_t kPage = 16;

Sequence MakeSequence() {
  const Geometry geometry{.layers = kLayers,
                          .query_heads = 4,
                          .kv_heads = kKvHeads,
                          .head_dim = 16,
                          .scale = 0.25F,
                          .page_tokens = kPage};
  Sequence sequence(
      7, {.sequence = "a"},
      std::make_shared<const Model>(
          Model{.name = "m", .weights_fingerprint = "", .geometry = geometry, .fingerprint = 1}));
  for (int lane = 0; lane < kLayers * kKvHeads; ++lane) sequence.lanes.emplace_back(kPage, 96, 0);
  return sequence;
}

// One layer's call, as the cache makes it: room, slots, then the layer is longer.
std::vector<int32_t> AppendToLayer(Sequence& sequence, int layer, int32_t tokens,
                                   std::span<const int64_t> positions = {}) {
  const int32_t end = sequence.layers[static_cast<size_t>(layer)].length + tokens;
  std::vector<int32_t> slots;
  for (int head = 0; head < kKvHeads; ++head) sequence.lane(layer, head).Append(tokens, &slots);
  sequence.Lengthen(end, positions);
  return sequence.Extend(layer, tokens);
}

void Append(Sequence& sequence, int32_t tokens) {
  for (int layer = 0; layer < kLayers; ++layer) AppendToLayer(sequence, layer, tokens);
}

void Seal(Sequence& sequence, size_t block, TierName tier) {
  sequence.blocks[block] = {.stage = BlockStage::kSealed, .tier = tier};
}

TEST(SequenceTest, QueriesOfTruncatedTokensAreObservedWhenTheyComeAgain) {
  Sequence sequence = MakeSequence();
  Append(sequence, 20);
  for (Layer& layer : sequence.layers) layer.observed_end = 20;

  sequence.Truncate(17);

  for (const Layer& layer : sequence.layers) EXPECT_EQ(layer.observed_end, 17);
}

TEST(SequenceTest, StartsEmpty) {
  const Sequence sequence = MakeSequence();

  EXPECT_EQ(sequence.committed, 0);
  EXPECT_EQ(sequence.sealable_end(), 0);
  EXPECT_THAT(sequence.blocks, IsEmpty());
  EXPECT_FALSE(sequence.any_in_flight());
  sequence.CheckInvariants();
}

TEST(SequenceTest, LaneIsFoundByLayerAndHead) {
  Sequence sequence = MakeSequence();
  std::vector<int32_t> slots;

  sequence.lane(1, 0).Append(3, &slots);

  EXPECT_EQ(sequence.lanes[2].length(), 3);
  EXPECT_EQ(std::as_const(sequence).lane(1, 0).length(), 3);
}

TEST(SequenceTest, KeyNamesTheSequenceAndTheBlock) {
  EXPECT_EQ(MakeSequence().key(5), (storage::BlockKey{.sequence = 7, .block = 5}));
}

TEST(SequenceTest, BegunBlocksCount) {
  const Sequence sequence = MakeSequence();

  EXPECT_EQ(sequence.blocks_of(0), 0);
  EXPECT_EQ(sequence.blocks_of(1), 1);
  EXPECT_EQ(sequence.blocks_of(kPage), 1);
  EXPECT_EQ(sequence.blocks_of(kPage + 1), 2);
}

TEST(SequenceTest, TokensWithoutPositionsHaveTheirIndices) {
  Sequence sequence = MakeSequence();

  sequence.Lengthen(2, {});
  sequence.Lengthen(4, {});

  EXPECT_THAT(sequence.positions, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(sequence.longest, 4);
  EXPECT_EQ(sequence.blocks.size(), 1U);
}

TEST(SequenceTest, FirstLayersPositionsAreKept) {
  Sequence sequence = MakeSequence();
  const std::vector<int64_t> first = {100, -3};
  const std::vector<int64_t> other = {1, 2};

  AppendToLayer(sequence, 0, 2, first);
  AppendToLayer(sequence, 1, 2, other);

  EXPECT_THAT(sequence.positions, ElementsAre(100, -3));
}

TEST(SequenceTest, CommittedLengthIsTheLeastOverLayers) {
  Sequence sequence = MakeSequence();

  AppendToLayer(sequence, 0, 5);
  EXPECT_EQ(sequence.committed, 0);
  EXPECT_EQ(sequence.longest, 5);
  AppendToLayer(sequence, 1, 5);

  EXPECT_EQ(sequence.committed, 5);
  sequence.CheckInvariants();
}

TEST(SequenceTest, BlockIsCompleteWhenTheLastLayerFillsIt) {
  Sequence sequence = MakeSequence();

  EXPECT_THAT(AppendToLayer(sequence, 0, 40), IsEmpty());
  EXPECT_EQ(sequence.blocks[0].stage, BlockStage::kOpen);
  EXPECT_THAT(AppendToLayer(sequence, 1, 40), ElementsAre(0, 1));

  EXPECT_EQ(sequence.blocks[0].stage, BlockStage::kSealing);
  EXPECT_EQ(sequence.blocks[1].stage, BlockStage::kSealing);
  EXPECT_EQ(sequence.blocks[2].stage, BlockStage::kOpen);
  EXPECT_EQ(sequence.sealable_end(), 2 * kPage);
  sequence.CheckInvariants();
}

TEST(SequenceTest, BlockIsCompleteOnce) {
  Sequence sequence = MakeSequence();
  Append(sequence, kPage);

  AppendToLayer(sequence, 0, 1);

  EXPECT_THAT(AppendToLayer(sequence, 1, 1), IsEmpty());
}

TEST(SequenceTest, OnlyASealedBlockIsConfirmed) {
  Sequence sequence = MakeSequence();
  Append(sequence, kPage);

  EXPECT_FALSE(sequence.is_confirmed(0));
  Seal(sequence, 0, TierName::kHost);

  EXPECT_TRUE(sequence.is_confirmed(0));
}

TEST(SequenceTest, OneLayerInFlightIsEnough) {
  Sequence sequence = MakeSequence();

  sequence.layers[1].in_flight = true;

  EXPECT_TRUE(sequence.any_in_flight());
}

TEST(SequenceTest, TruncateForgetsTokensBlocksAndTheLastCall) {
  Sequence sequence = MakeSequence();
  Append(sequence, 20);
  AppendToLayer(sequence, 0, 15);  // Only the first layer has tokens 20 to 34.
  sequence.layers[0].last = {.first_index = 20, .tokens = 15, .digest = {1, 2}};

  sequence.Truncate(18);

  EXPECT_EQ(sequence.committed, 18);
  EXPECT_EQ(sequence.longest, 18);
  EXPECT_EQ(sequence.layers[0].length, 18);
  EXPECT_EQ(sequence.layers[1].length, 18);
  EXPECT_EQ(sequence.layers[0].last.tokens, 0);
  EXPECT_EQ(sequence.positions.size(), 18U);
  EXPECT_EQ(sequence.blocks.size(), 2U);
  for (const Lane& lane : sequence.lanes) EXPECT_EQ(lane.length(), 18);
  sequence.CheckInvariants();
}

// Its retry is one still.
TEST(SequenceTest, TruncateKeepsTheLastCallOfALayerWhoseTokensStay) {
  Sequence sequence = MakeSequence();
  Append(sequence, 20);
  AppendToLayer(sequence, 0, 15);
  sequence.layers[0].last = {.first_index = 20, .tokens = 15, .digest = {1, 2}};
  sequence.layers[1].last = {.first_index = 8, .tokens = 12, .digest = {3, 4}};

  sequence.Truncate(20);

  EXPECT_EQ(sequence.layers[0].last.tokens, 0);
  EXPECT_EQ(sequence.layers[1].last.tokens, 12);
}

TEST(SequenceTest, TruncateToTheCommittedLengthDropsAStepThatIsHalfDone) {
  Sequence sequence = MakeSequence();
  Append(sequence, 20);
  AppendToLayer(sequence, 0, 15);

  sequence.Truncate(20);

  EXPECT_EQ(sequence.longest, 20);
  EXPECT_EQ(sequence.layers[0].length, 20);
  sequence.CheckInvariants();
}

TEST(SequenceTest, TokensAreCountedByLaneInEachTier) {
  Sequence sequence = MakeSequence();
  Append(sequence, 3 * kPage + 5);
  Seal(sequence, 0, TierName::kRocksdb);
  Seal(sequence, 1, TierName::kHost);
  for (int32_t index = 0; index < 4; ++index) sequence.lanes[3].Demote(index);

  const TokensByTier tokens = sequence.Tokens();

  constexpr uint64_t kLanes = kLayers * kKvHeads;
  EXPECT_EQ(tokens.device, kLanes * (3 * kPage + 5) - 4);
  EXPECT_EQ(tokens.rocksdb, kLanes * kPage);
  EXPECT_EQ(tokens.host, kLanes * kPage);
  EXPECT_EQ(tokens.open, kLanes * (kPage + 5));  // No copy below: the block being sealed is in it.
}

TEST(SequenceTest, TokensOfAHalfDoneStepAreOpen) {
  Sequence sequence = MakeSequence();
  Append(sequence, 4);

  AppendToLayer(sequence, 0, 3);

  EXPECT_EQ(sequence.Tokens().open, 2U * (4 + 3) + 2U * 4);
}

using SequenceDeathTest = test::ThreadsafeDeathTest;

TEST_F(SequenceDeathTest, TruncateIntoACompleteBlockStopsTheProcess) {
  Sequence sequence = MakeSequence();
  Append(sequence, kPage + 1);

  EXPECT_DEATH(sequence.Truncate(kPage - 1), "complete blocks are not truncated");
}

TEST_F(SequenceDeathTest, EachContradictionIsFound) {
  struct Lie {
    std::string message;
    void (*tell)(Sequence&);
  };
  for (const Lie& lie : {
           Lie{"layers differ by one step", [](Sequence& s) { s.layers[0].length = 21; }},
           Lie{"committed length is the least", [](Sequence& s) { s.committed = 19; }},
           Lie{"every token has a block", [](Sequence& s) { s.blocks.pop_back(); }},
           Lie{"complete blocks are sealing or sealed",
               [](Sequence& s) { s.blocks[0].stage = BlockStage::kOpen; }},
           Lie{"complete blocks are sealing or sealed",
               [](Sequence& s) { s.blocks[1].stage = BlockStage::kSealed; }},
           Lie{"as long as its layer",
               [](Sequence& s) {
                 std::vector<int32_t> slots;
                 s.lanes[0].Append(1, &slots);
               }},
           Lie{"open block is resident", [](Sequence& s) { s.lanes[0].Demote(17); }},
           Lie{"a slot or a confirmed copy",
               [](Sequence& s) {
                 std::vector<int32_t> slots;
                 s.lanes[0].Demote(3);
                 s.lanes[0].Append(1, &slots);
                 s.lanes[0].Truncate(20);
               }},
       }) {
    Sequence sequence = MakeSequence();
    Append(sequence, 20);
    sequence.CheckInvariants();
    lie.tell(sequence);

    EXPECT_DEATH(sequence.CheckInvariants(), lie.message);
  }
}

}  // namespace
}  // namespace ebbtide::service
