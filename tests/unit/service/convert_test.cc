// SPDX-License-Identifier: Apache-2.0
//
// Messages to calls and answers to messages: what is refused before anybody looks at a model, that
// tensors are looked at and not copied, and that every field of an answer arrives.

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "service/rpc/convert_answer.h"
#include "service/rpc/convert_request.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::IsOk;
using test::StatusIs;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// kInvalidArgument with this reason, and a message that holds `part`.
MATCHER_P2(IsInvalid, reason, part, "") {
  const absl::Status& status = test::StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == absl::StatusCode::kInvalidArgument && ReasonOf(status) == reason &&
         testing::Matches(HasSubstr(part))(std::string(status.message()));
}

v1::Tensor Tensor(std::vector<int64_t> shape, v1::Dtype dtype = v1::DTYPE_F16) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  int64_t bytes = dtype == v1::DTYPE_F16 ? 2 : 4;
  for (const int64_t size : shape) {
    bytes *= size;
  }
  tensor.set_data(std::string(static_cast<size_t>(bytes), 'x'));
  return tensor;
}

v1::AppendItem AppendItemOf(const std::string& sequence) {
  v1::AppendItem item;
  item.set_sequence(sequence);
  item.set_first_index(7);
  *item.mutable_k() = Tensor({2, 3, 8});
  *item.mutable_v() = Tensor({2, 3, 8});
  return item;
}

v1::AppendRequest AppendOf(const std::vector<v1::AppendItem>& items) {
  v1::AppendRequest request;
  request.set_layer(4);
  request.set_phase(v1::PHASE_PREFILL);
  request.set_prompt_end(true);
  request.mutable_items()->Add(items.begin(), items.end());
  return request;
}

v1::AttendRequest AttendOf() {
  v1::AttendRequest request;
  request.set_phase(v1::PHASE_DECODE);
  v1::AttendItem& item = *request.add_items();
  item.set_sequence("a");
  *item.mutable_q() = Tensor({2, 6, 8}, v1::DTYPE_F32);
  return request;
}

// The refusal of a call's only item.
absl::Status ItemRefusal(const v1::AppendItem& item) {
  const v1::AppendRequest request = AppendOf({item});
  const absl::StatusOr<StepRequest> step = ReadAppend(request);
  return step.ok() ? step->refusals.at(0) : step.status();
}

absl::Status ItemRefusal(const v1::AttendRequest& request) {
  const absl::StatusOr<StepRequest> step = ReadAttend(request);
  return step.ok() ? step->refusals.at(0) : step.status();
}

TEST(ReadAppendTest, TensorsAreLookedAtWhereTheMessageHoldsThem) {
  const v1::AppendRequest request = AppendOf({AppendItemOf("a")});

  const absl::StatusOr<StepRequest> step = ReadAppend(request);

  ASSERT_THAT(step, IsOk());
  EXPECT_EQ(step->call.layer, 4);
  EXPECT_EQ(step->call.phase, Phase::kPrefill);
  ASSERT_EQ(step->items.size(), 1);
  const StepItem& item = step->items[0];
  EXPECT_EQ(item.sequence, "a");
  EXPECT_EQ(item.first_index, 7);
  EXPECT_FALSE(item.q.has_value());
  EXPECT_EQ(static_cast<const void*>(item.k->bytes.data()), request.items(0).k().data().data());
  EXPECT_EQ(item.k->bytes.size(), 96);
  EXPECT_THAT(item.v->shape, ElementsAre(2, 3, 8));
  EXPECT_EQ(item.v->dtype, gpu::Dtype::kF16);
}

TEST(ReadAppendTest, PositionsAreOptional) {
  v1::AppendItem item = AppendItemOf("a");
  const v1::AppendRequest without = AppendOf({item});
  item.add_positions(-1);
  item.add_positions(5);
  const v1::AppendRequest with = AppendOf({item});

  EXPECT_THAT(ReadAppend(without)->items[0].positions, IsEmpty());
  EXPECT_THAT(ReadAppend(with)->items[0].positions, ElementsAre(-1, 5));
}

TEST(ReadAppendTest, RefusedItemLeavesTheOthersInOrder) {
  v1::AppendItem bad = AppendItemOf("b");
  bad.mutable_k()->mutable_data()->pop_back();
  const v1::AppendRequest request = AppendOf({AppendItemOf("a"), bad, AppendItemOf("c")});

  const absl::StatusOr<StepRequest> step = ReadAppend(request);

  ASSERT_THAT(step, IsOk());
  EXPECT_THAT(step->refusals, ElementsAre(IsOk(), IsInvalid("SIZE_MISMATCH", "95"), IsOk()));
  ASSERT_EQ(step->items.size(), 2);
  EXPECT_EQ(step->items[0].sequence, "a");
  EXPECT_EQ(step->items[1].sequence, "c");
}

TEST(ReadAppendTest, SequenceNamedTwiceIsRefusedInBothItems) {
  const v1::AppendRequest request =
      AppendOf({AppendItemOf("a"), AppendItemOf("b"), AppendItemOf("a")});

  const absl::StatusOr<StepRequest> step = ReadAppend(request);

  ASSERT_THAT(step, IsOk());
  EXPECT_THAT(step->refusals, ElementsAre(IsInvalid("SEQUENCE_REPEATED", "\"a\" has 2 items"),
                                          IsOk(), IsInvalid("SEQUENCE_REPEATED", "\"a\"")));
}

TEST(ReadAppendTest, BatchHasOneItemToTheLimit) {
  EXPECT_THAT(ReadAppend(AppendOf({})), IsInvalid("BATCH_SIZE", "0 items; send 1 to 4096"));
  EXPECT_THAT(ReadAppend(AppendOf(std::vector<v1::AppendItem>(4096))), IsOk());
  EXPECT_THAT(ReadAppend(AppendOf(std::vector<v1::AppendItem>(4097))),
              IsInvalid("BATCH_SIZE", "4097 items"));
}

TEST(ReadAppendTest, PhaseMustBeSaidAndKnown) {
  v1::AppendRequest request = AppendOf({AppendItemOf("a")});

  request.set_phase(v1::PHASE_UNSPECIFIED);
  EXPECT_THAT(ReadAppend(request), IsInvalid("PHASE_UNKNOWN", "phase is 0"));
  request.set_phase(static_cast<v1::Phase>(9));
  EXPECT_THAT(ReadAppend(request), IsInvalid("PHASE_UNKNOWN", "phase is 9"));
  request.set_phase(v1::PHASE_DECODE);
  EXPECT_THAT(ReadAppend(request), IsInvalid("PHASE_UNKNOWN", "prompt_end"));
}

TEST(ReadAppendTest, KeysAndValuesAreBothNeeded) {
  v1::AppendItem no_v = AppendItemOf("a");
  no_v.clear_v();
  v1::AppendItem neither = no_v;
  neither.clear_k();

  EXPECT_THAT(ItemRefusal(no_v), IsInvalid("TENSORS_MISSING", "v is missing"));
  EXPECT_THAT(ItemRefusal(neither), IsInvalid("TENSORS_MISSING", "Append needs both"));
}

TEST(ReadAppendTest, DataMustFillItsShapeToTheByte) {
  v1::AppendItem item = AppendItemOf("a");
  item.mutable_v()->mutable_data()->push_back('x');

  EXPECT_THAT(ItemRefusal(item),
              IsInvalid("SIZE_MISMATCH",
                        "v has 97 bytes of data; its shape [2, 3, 8] of f16 needs "
                        "96"));
}

TEST(ReadAppendTest, ShapeIsThreePositiveNumbers) {
  const std::vector<std::vector<int64_t>> bad = {{},
                                                 {2, 24},
                                                 {2, 3, 8, 1},
                                                 {0, 3, 8},
                                                 {-2, -3, 8},
                                                 {int64_t{1} << 62, 4, 8},
                                                 {std::numeric_limits<int64_t>::min(), 3, 8}};
  for (const std::vector<int64_t>& shape : bad) {
    v1::AppendItem item = AppendItemOf("a");
    item.mutable_k()->clear_shape();
    item.mutable_k()->mutable_shape()->Add(shape.begin(), shape.end());

    EXPECT_THAT(ItemRefusal(item), IsInvalid("SHAPE_MISMATCH", "k has shape ["))
        << testing::PrintToString(shape);
  }
}

TEST(ReadAppendTest, DtypeMustBeKnown) {
  for (const int dtype : {0, 4, -1, 1000}) {
    v1::AppendItem item = AppendItemOf("a");
    item.mutable_k()->set_dtype(static_cast<v1::Dtype>(dtype));

    EXPECT_THAT(ItemRefusal(item), IsInvalid("DTYPE_UNKNOWN", "dtype of k is "));
  }
}

TEST(ReadAttendTest, OutputComesInTheDtypeOfTheQueriesUnlessAsked) {
  v1::AttendRequest request = AttendOf();

  EXPECT_EQ(ReadAttend(request)->items[0].output_dtype, gpu::Dtype::kF32);
  request.mutable_items(0)->set_output_dtype(v1::DTYPE_F16);
  EXPECT_EQ(ReadAttend(request)->items[0].output_dtype, gpu::Dtype::kF16);
  request.mutable_items(0)->set_output_dtype(v1::DTYPE_BF16);
  EXPECT_EQ(ReadAttend(request)->items[0].output_dtype, gpu::Dtype::kBF16);
  request.mutable_items(0)->set_output_dtype(static_cast<v1::Dtype>(7));
  EXPECT_THAT(ItemRefusal(request), IsInvalid("DTYPE_UNKNOWN", "output_dtype is 7"));
}

TEST(ReadAttendTest, QueriesAreNeededAndKeysComeWithValues) {
  v1::AttendRequest request = AttendOf();
  request.mutable_items(0)->set_require_met(true);
  EXPECT_TRUE(ReadAttend(request)->items[0].require_met);
  EXPECT_FALSE(ReadAttend(request)->items[0].k.has_value());

  *request.mutable_items(0)->mutable_v() = Tensor({2, 3, 8});
  EXPECT_THAT(ItemRefusal(request), IsInvalid("TENSORS_MISSING", "k is missing"));
  request = AttendOf();
  request.mutable_items(0)->clear_q();
  EXPECT_THAT(ItemRefusal(request), IsInvalid("TENSORS_MISSING", "q is missing"));
}

TEST(ReadAttendTest, AnswerIsForeseenToTheByteOfItsTensors) {
  const v1::AttendRequest request = AttendOf();  // 2 tokens, 6 heads, 8 channels
  v1::AttendRequest narrow = request;
  narrow.mutable_items(0)->set_output_dtype(v1::DTYPE_F16);

  const uint64_t tensors = 2 * 6 * 8 * 4 + 3 * 2 * 6 * 4 + 2;
  EXPECT_GE(ReadAttend(request)->answer_bytes, tensors);
  EXPECT_LE(ReadAttend(request)->answer_bytes, tensors + 4096);
  EXPECT_EQ(ReadAttend(request)->answer_bytes - ReadAttend(narrow)->answer_bytes, 2 * 6 * 8 * 2);
}

TEST(ReadAttendTest, AnswerThatNamesAllThePagesItMayIsForeseen) {
  const v1::AttendRequest request = AttendOf();
  const absl::StatusOr<StepRequest> read = ReadAttend(request);
  StepAnswer answer;
  answer.length = kSequenceTokensMax;
  answer.committed = kSequenceTokensMax;
  answer.output.resize(2 * 6 * 8 * 4);
  answer.lse.resize(2 * 6, 1);
  answer.certificate = {.mass_bound = std::vector<float>(2 * 6, 1),
                        .error_bound = std::vector<float>(2 * 6, 1),
                        .met = {1, 0},
                        .not_met_reason = "TIER_UNAVAILABLE"};
  answer.lost.resize(kLostPagesNamed, {.kv_head = 1023,
                                       .first_index = kSequenceTokensMax - 64,
                                       .tokens = 64,
                                       .tier = TierName::kRocksdb,
                                       .is_corrupt = true});
  for (const std::string_view rung : {"coarse", "fine", "exact"}) {
    for (const TierName tier : {TierName::kDevice, TierName::kHost, TierName::kRocksdb}) {
      answer.touched.push_back(
          {.rung = rung, .tier = tier, .pages = uint64_t{1} << 30, .bytes = uint64_t{1} << 40});
    }
  }
  v1::AttendResponse response;
  WriteAttend(answer, read->items[0], *response.add_results());

  EXPECT_LE(response.ByteSizeLong(), read->answer_bytes);
}

TEST(CheckNameTest, NamesArePrintableAndShort) {
  EXPECT_THAT(CheckName("sequence", "chat-17/turn 2"), IsOk());
  EXPECT_THAT(CheckName("sequence", std::string(256, 'a')), IsOk());
  EXPECT_THAT(CheckName("sequence", std::string(257, 'a')),
              IsInvalid("NAME_INVALID", "sequence has 257 bytes; it needs 1 to 256"));
  EXPECT_THAT(CheckName("sequence", ""), IsInvalid("NAME_INVALID", "0 bytes"));
  EXPECT_THAT(CheckName("sequence", std::string_view("a\0b", 3)),
              IsInvalid("NAME_INVALID", "\"a\\x00"));
  EXPECT_THAT(CheckName("sequence", "a\x1b[2J"), IsInvalid("NAME_INVALID", "\\x1b"));
  EXPECT_THAT(CheckName("sequence", "\xc3\xa9"), IsInvalid("NAME_INVALID", "\\xc3\\xa9"));
}

v1::OpenSequenceRequest OpenOf(uint32_t budget_tokens) {
  v1::OpenSequenceRequest request;
  request.set_sequence("a");
  request.set_model("m");
  request.mutable_budget()->set_tokens(budget_tokens);
  return request;
}

TEST(ReadOpenTest, EveryFieldArrives) {
  v1::OpenSequenceRequest request = OpenOf(64);
  request.set_policy("h2o");
  request.set_prefill("exact");
  request.set_recall("off");
  request.set_queries(v1::QUERIES_NONE);
  request.set_idle_timeout_ms(1500);
  request.set_chunk_tokens(9);

  const absl::StatusOr<OpenArgs> args = ReadOpen(request);

  ASSERT_THAT(args, IsOk());
  EXPECT_EQ(*args, (OpenArgs{.sequence = "a",
                             .model = "m",
                             .policy = "h2o",
                             .prefill = "exact",
                             .recall = "off",
                             .budget_tokens = 64,
                             .sends_queries = false,
                             .chunk_tokens = 9,
                             .idle_timeout = absl::Milliseconds(1500)}));
}

TEST(ReadOpenTest, QueriesAreSentUnlessSaidOtherwise) {
  EXPECT_TRUE(ReadOpen(OpenOf(64))->sends_queries);
}

TEST(ReadOpenTest, PercentIsRoundedUp) {
  const auto tokens = [](double percent, uint32_t of) {
    v1::OpenSequenceRequest request = OpenOf(0);
    request.mutable_budget()->mutable_percent()->set_percent(percent);
    request.mutable_budget()->mutable_percent()->set_of_tokens(of);
    return ReadOpen(request).value().budget_tokens;
  };

  EXPECT_EQ(tokens(20, 4096), 820);   // 819.2
  EXPECT_EQ(tokens(25, 4096), 1024);  // whole
  EXPECT_EQ(tokens(1.1, 1000), 11);   // whole, but 1.1 * 1000 / 100 is 11.000000000000002
  EXPECT_EQ(tokens(0.001, 1), 1);
  EXPECT_EQ(tokens(100, 4294967295), 4294967295);
}

TEST(ReadOpenTest, BudgetMustBeGivenAndMakeSense) {
  v1::OpenSequenceRequest request = OpenOf(0);
  EXPECT_THAT(ReadOpen(request), IsInvalid("BUDGET_INVALID", "budget is missing"));
  request.clear_budget();
  EXPECT_THAT(ReadOpen(request), IsInvalid("BUDGET_INVALID", "budget is missing"));
  const double bad[] = {0, -5, 100.5, std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity()};
  for (const double percent : bad) {
    request.mutable_budget()->mutable_percent()->set_percent(percent);
    request.mutable_budget()->mutable_percent()->set_of_tokens(100);
    EXPECT_THAT(ReadOpen(request), IsInvalid("BUDGET_INVALID", "must be over 0")) << percent;
  }
  request.mutable_budget()->mutable_percent()->set_percent(100.0000001);
  EXPECT_THAT(ReadOpen(request), IsInvalid("BUDGET_INVALID", "is 100.0000001 % of 100 tokens"));
  request.mutable_budget()->mutable_percent()->set_percent(20);
  request.mutable_budget()->mutable_percent()->set_of_tokens(0);
  EXPECT_THAT(ReadOpen(request), IsInvalid("BUDGET_INVALID", "of_tokens at least 1"));
}

TEST(ReadOpenTest, UnknownWordsAndLimitsAreRefused) {
  v1::OpenSequenceRequest request = OpenOf(64);
  request.set_queries(static_cast<v1::Queries>(3));
  EXPECT_THAT(ReadOpen(request), IsInvalid("QUERIES_UNKNOWN", "queries is 3"));
  request = OpenOf(64);
  request.set_idle_timeout_ms(std::numeric_limits<uint64_t>::max());
  EXPECT_THAT(ReadOpen(request), IsInvalid("TIMEOUT_TOO_LONG", "18446744073709551615"));
  request = OpenOf(64);
  request.set_policy("h2o\n");
  EXPECT_THAT(ReadOpen(request), IsInvalid("POLICY_INVALID", "policy \"h2o\\n\""));
  request.set_policy(std::string(257, '('));
  EXPECT_THAT(ReadOpen(request), IsInvalid("POLICY_INVALID", "policy has 257 bytes"));
  request = OpenOf(64);
  request.set_prefill(std::string(257, '('));
  EXPECT_THAT(ReadOpen(request), IsInvalid("PREFILL_INVALID", "prefill has 257 bytes"));
  request = OpenOf(64);
  request.set_recall(std::string(257, '('));
  EXPECT_THAT(ReadOpen(request), IsInvalid("RECALL_INVALID", "recall has 257 bytes"));
  request = OpenOf(64);
  request.set_model("");
  EXPECT_THAT(ReadOpen(request), IsInvalid("NAME_INVALID", "model has 0 bytes"));
}

TEST(ReadGeometryTest, DefaultsAreFilledIn) {
  v1::Geometry message;
  message.set_layers(2);
  message.set_query_heads(8);
  message.set_kv_heads(4);
  message.set_head_dim(64);
  message.set_dtype(v1::DTYPE_F16);

  const absl::StatusOr<Geometry> geometry = ReadGeometry(message);

  ASSERT_THAT(geometry, IsOk());
  EXPECT_EQ(geometry->scale, 0.125F);
  EXPECT_EQ(geometry->page_tokens, 32);
  EXPECT_THAT(geometry->Validate(), IsOk());
}

TEST(ReadGeometryTest, NumbersThatDoNotFitAnIntStayOutOfRange) {
  v1::Geometry message;
  message.set_dtype(v1::DTYPE_F32);
  message.set_layers(4294967295);
  message.set_head_dim(4294967295);

  const absl::StatusOr<Geometry> geometry = ReadGeometry(message);

  ASSERT_THAT(geometry, IsOk());
  EXPECT_GT(geometry->layers, kLayersMax);
  EXPECT_THAT(geometry->Validate(), StatusIs(absl::StatusCode::kInvalidArgument));
  message.clear_dtype();
  EXPECT_THAT(ReadGeometry(message), IsInvalid("DTYPE_UNKNOWN", "geometry.dtype is 0"));
}

TEST(ReadListTest, TokenContinuesWhereThePageEnded) {
  v1::ListSequencesRequest request;
  EXPECT_EQ(ReadList(request)->limit, 100);
  request.set_page_size(1000);
  request.set_page_token(PageToken("chat-17"));
  EXPECT_EQ(ReadList(request)->after, "chat-17");
  EXPECT_EQ(ReadList(request)->limit, 1000);

  request.set_page_size(1001);
  EXPECT_THAT(ReadList(request), IsInvalid("PAGE_SIZE_TOO_LARGE", "1001; at most 1000"));
  for (const char* token : {"chat-17", "%%%", "Y2hhdA"}) {
    request.set_page_size(1);
    request.set_page_token(token);
    EXPECT_THAT(ReadList(request), IsInvalid("PAGE_TOKEN_UNKNOWN", "not one of this server's"));
  }
}

TEST(WriteAttendTest, EveryFieldArrives) {
  const v1::AttendRequest request = AttendOf();
  const StepItem item = ReadAttend(request)->items[0];
  StepAnswer answer;
  answer.length = 12;
  answer.committed = 11;
  answer.replayed = true;
  answer.absent_pages = 3;
  answer.output.assign(2 * 6 * 8 * 4, std::byte{'o'});
  answer.lse = {1, 2};
  answer.certificate.mass_bound = {0.25};
  answer.certificate.error_bound = {0.5};
  answer.certificate.met = {1, 0};
  answer.certificate.not_met_reason = "DEADLINE";
  answer.touched = {{.rung = "exact", .tier = TierName::kRocksdb, .pages = 5, .bytes = 640}};
  answer.lost = {{.kv_head = 1,
                  .first_index = 32,
                  .tokens = 16,
                  .tier = TierName::kRocksdb,
                  .is_corrupt = true},
                 {.kv_head = 2, .first_index = 64, .tokens = 16, .tier = TierName::kHost}};

  v1::AttendResult result;
  WriteAttend(answer, item, result);

  EXPECT_EQ(result.status().code(), 0);
  EXPECT_EQ(result.output().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(result.output().shape(), ElementsAre(2, 6, 8));
  EXPECT_EQ(result.output().data(), std::string(384, 'o'));
  EXPECT_THAT(result.lse(), ElementsAre(1, 2));
  EXPECT_THAT(result.certificate().mass_bound(), ElementsAre(0.25));
  EXPECT_THAT(result.certificate().error_bound(), ElementsAre(0.5));
  EXPECT_THAT(result.certificate().met(), ElementsAre(true, false));
  EXPECT_EQ(result.certificate().not_met_reason(), "DEADLINE");
  EXPECT_EQ(result.recall().absent_pages(), 3);
  ASSERT_EQ(result.recall().touched_size(), 1);
  EXPECT_EQ(result.recall().touched(0).rung(), "exact");
  EXPECT_EQ(result.recall().touched(0).tier(), v1::TIER_ROCKSDB);
  EXPECT_EQ(result.recall().touched(0).pages(), 5);
  EXPECT_EQ(result.recall().touched(0).bytes(), 640);
  ASSERT_EQ(result.recall().lost_size(), 2);
  EXPECT_EQ(result.recall().lost(0).kv_head(), 1);
  EXPECT_EQ(result.recall().lost(0).first_index(), 32);
  EXPECT_EQ(result.recall().lost(0).tokens(), 16);
  EXPECT_EQ(result.recall().lost(0).tier(), v1::TIER_ROCKSDB);
  EXPECT_EQ(result.recall().lost(0).state(), v1::PAGE_STATE_CORRUPT);
  EXPECT_EQ(result.recall().lost(1).state(), v1::PAGE_STATE_MISSING);
  EXPECT_EQ(result.length(), 12);
  EXPECT_EQ(result.committed(), 11);
  EXPECT_TRUE(result.replayed());
}

TEST(WriteAttendTest, RefusedItemHasStatusAndLengthsAlone) {
  const v1::AttendRequest request = AttendOf();
  const StepItem item = ReadAttend(request)->items[0];
  StepAnswer answer;
  answer.status = Refuse(absl::StatusCode::kAborted, "INDEX_GAP", "7 is past 5");
  answer.length = 5;

  v1::AttendResult result;
  WriteAttend(answer, item, result);

  EXPECT_EQ(result.status().code(), 10);
  EXPECT_EQ(result.status().reason(), "INDEX_GAP");
  EXPECT_EQ(result.status().message(), "7 is past 5");
  EXPECT_EQ(result.length(), 5);
  EXPECT_FALSE(result.has_output());
}

TEST(WritePageTest, EveryStateHasItsWord) {
  const std::pair<PageAnswer, v1::PageState> words[] = {
      {PageAnswer::kOk, v1::PAGE_STATE_OK},
      {PageAnswer::kMissing, v1::PAGE_STATE_MISSING},
      {PageAnswer::kCorrupt, v1::PAGE_STATE_CORRUPT}};
  for (const auto& [state, word] : words) {
    v1::Page page;
    WritePage({.first_index = 32,
               .tokens = 2,
               .tier = TierName::kHost,
               .state = state,
               .k = {std::byte{'k'}},
               .v = {std::byte{'v'}},
               .positions = {32, 40}},
              page);

    EXPECT_EQ(page.state(), word);
    EXPECT_EQ(page.first_index(), 32);
    EXPECT_EQ(page.tokens(), 2);
    EXPECT_EQ(page.tier(), v1::TIER_HOST);
    EXPECT_EQ(page.k(), "k");
    EXPECT_EQ(page.v(), "v");
    EXPECT_THAT(page.positions(), ElementsAre(32, 40));
  }
}

// Every field of an answer's message is set from a value that is not its default.
TEST(WriteStatsTest, NoFieldIsForgotten) {
  Stats stats{.tiers = {{.tier = TierName::kHost,
                         .budget_bytes = 1,
                         .used_bytes = 2,
                         .blocks = 3,
                         .tokens = 4,
                         .corrupt_pages = 5,
                         .metadata_bytes = 6,
                         .degraded = true,
                         .degraded_why = "disk full",
                         .place = "memory"}},
              .sequences = 1,
              .tokens_appended = 2,
              .tokens_demoted = 3,
              .tokens_forgotten = {{"CLOSED", 4}},
              .answers = 5,
              .answers_with_target = 6,
              .answers_not_met = {{"DEADLINE", 7}},
              .pages_recalled = 8,
              .bytes_recalled = 9,
              .blocks_sealed = 10,
              .blocks_moved_down = 11,
              .refused = {{"DEVICE_FULL", 12}},
              .pages_lost = {{"MISSING_PAGE", 13}},
              .carries_failed = {{"DEVICE_LOST", 14}}};

  v1::GetStatsResponse message;
  WriteStats(stats, message);

  std::vector<const google::protobuf::FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  EXPECT_EQ(static_cast<int>(fields.size()), v1::GetStatsResponse::descriptor()->field_count());
  message.tiers(0).GetReflection()->ListFields(message.tiers(0), &fields);
  EXPECT_EQ(static_cast<int>(fields.size()), v1::TierStats::descriptor()->field_count());
  EXPECT_EQ(message.refused().at("DEVICE_FULL"), 12);
  EXPECT_EQ(message.blocks_moved_down(), 11);
  EXPECT_EQ(message.carries_failed().at("DEVICE_LOST"), 14);
}

TEST(WriteDescriptionTest, NoFieldIsForgotten) {
  const SequenceDescription description{
      .summary = {.sequence = "a",
                  .model = "m",
                  .policy = "h2o",
                  .recall = "off",
                  .prefill = "exact",
                  .committed = 1,
                  .budget_tokens = 2,
                  .device_bytes = 3,
                  .idle = absl::Milliseconds(4),
                  .tokens = {.device = 5, .host = 6, .rocksdb = 7, .open = 8}},
      .layer_lengths = {9, 10},
      .lanes = {{.layer = 1, .kv_head = 2, .length = 3, .resident = 4, .absent = 5, .demoted = 6}},
      .tokens = {{.index = 1,
                  .position = 2,
                  .resident = true,
                  .tier = TierName::kDevice,
                  .score = 0.5,
                  .why = "sink"}}};

  v1::DescribeSequenceResponse message;
  WriteDescription(description, message);

  const auto has_all = [](const google::protobuf::Message& part) {
    std::vector<const google::protobuf::FieldDescriptor*> fields;
    part.GetReflection()->ListFields(part, &fields);
    return static_cast<int>(fields.size()) == part.GetDescriptor()->field_count();
  };
  EXPECT_TRUE(has_all(message)) << message.DebugString();
  EXPECT_TRUE(has_all(message.summary())) << message.DebugString();
  EXPECT_TRUE(has_all(message.summary().tokens())) << message.DebugString();
  EXPECT_TRUE(has_all(message.lanes(0))) << message.DebugString();
  EXPECT_TRUE(has_all(message.tokens(0))) << message.DebugString();
}

}  // namespace
}  // namespace ebbtide::service
