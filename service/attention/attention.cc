// SPDX-License-Identifier: Apache-2.0

#include "service/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"
#include "gpu/device.h"
#include "gpu/element.h"
#include "gpu/kernels/append.h"
#include "service/attention/check_item.h"
#include "service/attention/recall.h"
#include "service/reason.h"

namespace ebbtide::service {
namespace {

// Logits kept for scores at once: 16 MiB in f32.
constexpr int64_t kSpillMax = 4 << 20;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Of token `m`, per query head.
std::vector<double> OutputNorms(std::span<const LaneAnswer> lanes, int m) {
  std::vector<double> norms;
  for (const LaneAnswer& lane : lanes) {
    for (int row = m; row < lane.rows(); row += lane.queries()) {
      double squares = 0;
      for (const float x : lane.output(row)) squares += static_cast<double>(x) * x;
      norms.push_back(std::sqrt(squares));
    }
  }
  return norms;
}

// A call that waits for blocks to find their place below waits so long for a degraded tier: it
// is probed each second.
constexpr absl::Duration kDegradedPatience = absl::Seconds(3);

// An answer that is ready at its deadline comes too late: some of the time is for the way back.
absl::Duration ReadUntil(absl::Duration deadline, absl::Duration now) {
  return deadline - std::min((deadline - now) / 8, absl::Milliseconds(100));
}

// A call's queries may be answered in several tiles, which look at the same pages.
void NoteWork(std::span<const LaneAnswer> lanes, const RecallResult& result, StepAnswer& answer) {
  uint64_t absent = 0;
  for (const LaneAnswer& lane : lanes) absent += lane.pages().size();
  answer.absent_pages = std::max(answer.absent_pages, absent);
  for (const TouchedRung& touched : result.touched) {
    const auto same = std::ranges::find_if(answer.touched, [&](const TouchedRung& noted) {
      return noted.rung == touched.rung && noted.tier == touched.tier;
    });
    if (same == answer.touched.end()) {
      answer.touched.push_back(touched);
      continue;
    }
    same->pages += touched.pages;
    same->bytes += touched.bytes;
  }
  for (const LostPage& lost : result.lost) {
    const bool is_named = std::ranges::find(answer.lost, lost) != answer.lost.end();
    if (!is_named && answer.lost.size() < kLostPagesNamed) answer.lost.push_back(lost);
  }
}

}  // namespace

struct Attention::Work {
  const StepCall& call;
  const StepItem& item;
  const Geometry& geometry;
  int32_t tokens = 0;  // Of the item.
  Ticket ticket;
  gpu::Device device;
  RecallSpec recall;
  bool reads_exactly = false;  // At once, for recall's history.
  uint64_t spent = 0;          // What reads cost, and would have cost exactly at once.
  uint64_t exact = 0;
  absl::Duration read_until;                // Recall begins no read later.
  std::vector<std::vector<int32_t>> slots;  // [kv_heads] of the new tokens
  std::vector<std::vector<float>> queries;  // [kv_heads][group, tokens, head_dim]
  std::vector<int32_t> query_index;         // [tokens]
  std::vector<ScoreNotes> notes;            // [kv_heads] what the queries teach,
  RecallHistory history;                    // and what their answer does,
  int32_t observed_end = 0;                 // once it is made: queries before are observed then.
  StepAnswer answer;

  OpenedSequence& sequence() const { return *ticket.sequence; }
  LaneMemory& memory(int head) const {
    return sequence().memory[static_cast<size_t>(ticket.layer * geometry.kv_heads + head)];
  }
  const Lane& lane(int head) const { return sequence().facts.lane(ticket.layer, head); }
  bool has_target() const {
    return recall.mode == RecallMode::kBounded || recall.mode == RecallMode::kEstimated;
  }
  // Are some of the queries new? Those of a call that comes again were observed, unless a device
  // that failed kept them from it.
  bool observes() const { return ticket.observed_end < ticket.first_index + tokens; }
  RecallHistory& recall_history() const {
    return sequence().recall_history[static_cast<size_t>(ticket.layer)];
  }
};

// A layer held by a call, which gives it back however the call ends. What was placed and not
// committed is withdrawn, so an exception leaves the sequence as it was, but for tokens that made
// room for it: they stay absent.
class Attention::Hold {
 public:
  Hold(Attention& attention, const Ticket& ticket) : attention_(attention), ticket_(ticket) {}
  ~Hold() {
    if (is_placed_) {
      attention_.mover_.ReleaseHost(attention_.cache_.Withdraw(ticket_));
    } else if (!is_done_) {
      attention_.cache_.Abandon(ticket_);
    }
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void NotePlaced() { is_placed_ = true; }
  void NoteDone() {
    is_placed_ = false;
    is_done_ = true;
  }

 private:
  Attention& attention_;
  const Ticket& ticket_;
  bool is_placed_ = false;
  bool is_done_ = false;
};

StepAnswer Attention::Step(const StepCall& call, const StepItem& item) {
  StepAnswer refused;
  const auto refuse = [&](absl::Status status) {
    refused.status = WithDeviceReason(status);
    cache_.Count([&](Stats& stats) { ++stats.refused[ReasonOf(refused.status)]; });
    return refused;
  };
  const absl::StatusOr<SequenceRef> found = cache_.Find(item.sequence);
  if (!found.ok()) return refuse(found.status());
  if (absl::Status status = CheckItem(**found, call, item); !status.ok())
    return refuse(std::move(status));

  absl::StatusOr<gpu::Device> device = gpu::Device::Open(backend_);
  if (!device.ok()) return refuse(device.status());

  const CallDigest digest = DigestOf(item);
  const int32_t tokens = TokensOf(item);
  Lengths lengths;
  absl::StatusOr<Ticket> ticket = cache_.Begin(*found,
                                               {.layer = call.layer,
                                                .first_index = item.first_index,
                                                .queries = item.q.has_value() ? tokens : 0,
                                                .tokens = item.k.has_value() ? tokens : 0,
                                                .digest = digest},
                                               &lengths);
  refused.length = lengths.length;
  refused.committed = lengths.committed;
  if (!ticket.ok()) return refuse(ticket.status());

  Work work{.call = call,
            .item = item,
            .geometry = ticket->sequence->model->geometry,
            .tokens = tokens,
            .ticket = *std::move(ticket),
            .device = *std::move(device),
            .recall = {},
            .read_until = ReadUntil(call.deadline, clock_.SinceStart()),
            .slots = {},
            .queries = {},
            .query_index = {},
            .notes = {},
            .history = {},
            .answer = {}};
  Hold hold(*this, work.ticket);
  if (absl::Status status = TakeSlots(work); !status.ok()) return refuse(std::move(status));
  if (work.ticket.tokens > 0) hold.NotePlaced();
  if (absl::Status status = AppendTokens(work); !status.ok()) return refuse(std::move(status));
  if (item.q.has_value()) work.answer.status = Answer(work);
  if (absl::Status& status = work.answer.status; !status.ok()) {
    status = WithDeviceReason(status);
    cache_.Count([&](Stats& stats) { ++stats.refused[ReasonOf(status)]; });
  }
  TakeNotes(work);  // From here on nothing fails.
  const bool has_complete = cache_.Finish(work.ticket, digest, work.observed_end, &lengths);
  hold.NoteDone();
  if (has_complete) mover_.Kick();
  work.answer.length = lengths.length;
  work.answer.committed = lengths.committed;
  work.answer.replayed = work.ticket.replayed;
  return std::move(work.answer);
}

// The fixed point: who leaves is decided by the latest scores, then the new tokens take slots.
absl::Status Attention::TakeSlots(Work& work) {
  if (work.ticket.replayed) return absl::OkStatus();
  std::vector<std::vector<int32_t>> victims(static_cast<size_t>(work.geometry.kv_heads));
  if (work.ticket.length > work.sequence().budget_tokens) {
    EBBTIDE_ASSIGN_OR_RETURN(victims, FindVictims(work));
  }
  return PlaceBeforeDeadline(work, victims);
}

absl::StatusOr<std::vector<std::vector<int32_t>>> Attention::FindVictims(Work& work) {
  std::vector<WorkingFrames> frames;
  std::vector<LaneToScore> lanes;
  for (int head = 0; head < work.geometry.kv_heads; ++head) {
    frames.push_back(FindWorkingFrames(work.memory(head), work.lane(head).slot_index()));
    lanes.push_back({.set = {.scale = work.geometry.scale,
                             .group = work.geometry.group(),
                             .extents = frames.back().extents,
                             .slot_index = frames.back().slot_index},
                     .memory = work.memory(head)});
  }
  return ChooseVictims(work.sequence().policy, lanes,
                       {.budget = work.sequence().budget_tokens,
                        .length = work.ticket.length,
                        .candidate_end = work.ticket.candidate_end},
                       {.device = work.device, .parallel = parallel_});
}

absl::Status Attention::PlaceBeforeDeadline(Work& work,
                                            std::span<const std::vector<int32_t>> victims) {
  absl::Duration below_was_well = clock_.SinceStart();
  for (;;) {
    // Slots come free as seals are confirmed; between tries the carriers are reminded of them.
    const absl::Duration until =
        std::min(work.call.deadline, clock_.SinceStart() + absl::Milliseconds(50));
    const absl::Status status = cache_.AwaitSlots(work.ticket, victims, until);
    if (status.ok()) break;
    const absl::Duration now = clock_.SinceStart();
    const std::string why = tiers_.rocksdb == nullptr ? "" : tiers_.rocksdb->why_no_writes();
    if (why.empty()) below_was_well = now;
    if (now - below_was_well >= kDegradedPatience) {
      return Refuse(
          absl::StatusCode::kUnavailable, "TIER_UNAVAILABLE",
          absl::StrCat(std::string(status.message()), "; the tier below is degraded: ", why));
    }
    if (now >= work.call.deadline) return status;
    mover_.Kick();
  }
  // With the slots sure, one reservation: host memory first, since it may have to be made free.
  const Cache::Need need = cache_.NeedOf(work.ticket);
  EBBTIDE_ASSIGN_OR_RETURN(auto charge, mover_.ChargeHost(need.metadata_bytes, work.call.deadline));
  EBBTIDE_ASSIGN_OR_RETURN(const Cache::Need taken, cache_.Place(work.ticket,
                                                                 {.victims = victims,
                                                                  .positions = work.item.positions,
                                                                  .charged_bytes = charge.bytes()},
                                                                 &work.slots));
  charge.Keep(taken.metadata_bytes);
  return absl::OkStatus();
}

absl::Status Attention::AppendTokens(Work& work) {
  if (work.ticket.tokens == 0) return absl::OkStatus();
  const auto heads = static_cast<size_t>(work.geometry.kv_heads);
  const size_t row_bytes = work.geometry.page_shape().row_bytes();
  struct NewTokens {
    std::vector<std::byte*> keys;
    std::vector<std::byte*> values;
    std::vector<float> key_norm;
    std::vector<float> value_norm;
  };
  std::vector<NewTokens> tokens(heads);
  std::vector<gpu::AppendArgs> appends;
  for (size_t head = 0; head < heads; ++head) {
    const LaneMemory& memory = work.memory(static_cast<int>(head));
    for (const int32_t slot : work.slots[head]) {
      tokens[head].keys.push_back(memory.key_slot(slot));
      tokens[head].values.push_back(memory.value_slot(slot));
    }
    tokens[head].key_norm.resize(tokens[head].keys.size());
    tokens[head].value_norm.resize(tokens[head].keys.size());
    appends.push_back({.dtype = work.geometry.dtype,
                       .head_dim = work.geometry.head_dim,
                       .tokens = work.ticket.tokens,
                       .key = work.item.k->bytes.data() + head * row_bytes,
                       .value = work.item.v->bytes.data() + head * row_bytes,
                       .stride = heads * row_bytes,
                       .key_slot = tokens[head].keys,
                       .value_slot = tokens[head].values,
                       .key_norm = tokens[head].key_norm,
                       .value_norm = tokens[head].value_norm});
  }
  EBBTIDE_RETURN_IF_ERROR(work.device.Run(appends));
  std::vector<LaneToDigest> lanes;
  for (size_t head = 0; head < heads; ++head) {
    const auto h = static_cast<int>(head);
    work.memory(h).NoteTokens(tokens[head].key_norm, tokens[head].value_norm,
                              work.sequence().policy.scorer->wants_logits());
    lanes.push_back({.lane = work.lane(h), .memory = work.memory(h)});
  }
  return DigestCompletePages(lanes, work.device);
}

absl::Status Attention::Answer(Work& work) {
  work.recall = work.sequence().recall;
  if (work.call.phase == Phase::kPrefill) {
    const bool is_exact = work.sequence().prefill.mode == PrefillMode::kExact;
    work.recall = {.mode = is_exact ? RecallMode::kExact : RecallMode::kOff};
  }
  work.queries = QueriesByLane(work.geometry, *work.item.q);
  work.query_index.resize(static_cast<size_t>(work.tokens));
  std::iota(work.query_index.begin(), work.query_index.end(), work.ticket.first_index);

  const auto heads = static_cast<size_t>(work.geometry.query_heads);
  const auto tokens = static_cast<size_t>(work.tokens);
  StepAnswer& answer = work.answer;
  answer.output.resize(tokens * heads * static_cast<size_t>(work.geometry.head_dim) *
                       gpu::DtypeBytes(work.item.output_dtype));
  answer.lse.resize(tokens * heads);
  answer.certificate.mass_bound.resize(tokens * heads);
  answer.certificate.error_bound.resize(tokens * heads);
  answer.certificate.met.resize(tokens);

  work.history = work.recall_history();
  work.reads_exactly = work.has_target() && work.history.reads_exactly();
  work.notes.resize(static_cast<size_t>(work.geometry.kv_heads));
  const int32_t tile = TileOf(work);
  for (int32_t first = 0; first < work.tokens; first += tile) {
    EBBTIDE_RETURN_IF_ERROR(AnswerTile(work, first, std::min(tile, work.tokens - first)));
  }
  if (work.has_target()) work.history.NoteAnswer(work.spent, work.exact);
  work.observed_end = work.ticket.first_index + work.tokens;
  return work.call.phase == Phase::kDecode ? CountAnswer(work) : absl::OkStatus();
}

int32_t Attention::TileOf(const Work& work) const {
  // Logits are kept only where scores want them, and then for a few queries at a time.
  int64_t tile = work.tokens;
  if (work.sequence().policy.scorer->wants_logits()) {
    const int64_t row = static_cast<int64_t>(work.geometry.group()) *
                        (work.lane(0).length() + work.lane(0).slots());
    tile = std::clamp<int64_t>(kSpillMax / row, 1, tile);
  }
  // Bounds are kept by page and query, some twenty numbers each, and of forms their outputs too.
  if (work.recall.mode != RecallMode::kExact) {
    const int64_t outputs = work.recall.mode == RecallMode::kOff ? 0 : work.geometry.head_dim * 8;
    const int64_t query =
        int64_t{work.geometry.query_heads} * work.lane(0).pages() * (outputs + 80);
    tile = std::clamp<int64_t>(
        static_cast<int64_t>(options_.recall_bytes) / std::max<int64_t>(query, 1), 1, tile);
  }
  return static_cast<int32_t>(tile);
}

// What a worker may do where an answer had to be met and is not for this reason.
struct NotMetAdvice {
  absl::StatusCode code;
  std::string_view text;
};
NotMetAdvice AdviceFor(std::string_view not_met_reason) {
  if (not_met_reason == "RECALL_OFF" || not_met_reason == "ESTIMATED") {
    return {absl::StatusCode::kFailedPrecondition,
            "asking again will not help: open the sequence with recall bounded(TAU) or exact"};
  }
  if (not_met_reason == "ARITHMETIC") {
    return {absl::StatusCode::kFailedPrecondition,
            "asking again will not help: ask for a wider output_dtype, or a larger target"};
  }
  if (not_met_reason == "CORRUPT_PAGE" || not_met_reason == "MISSING_PAGE") {
    return {absl::StatusCode::kFailedPrecondition,
            "asking again will not help, a page is lost: prefill the sequence anew, or ask without "
            "require_met"};
  }
  return {absl::StatusCode::kUnavailable, "ask again, or without require_met"};
}

// Counts a decode answer, and refuses it where it had to be met and is not.
absl::Status Attention::CountAnswer(const Work& work) {
  const Certificate& certificate = work.answer.certificate;
  const auto tokens = static_cast<uint64_t>(work.tokens);
  const auto not_met = static_cast<uint64_t>(std::ranges::count(certificate.met, 0));
  const bool has_aim = work.recall.mode != RecallMode::kOff;
  cache_.Count([&](Stats& stats) {
    stats.answers += tokens;
    if (!has_aim) return;
    stats.answers_with_target += tokens;
    if (not_met > 0) stats.answers_not_met[std::string(certificate.not_met_reason)] += not_met;
  });
  if (!work.item.require_met || not_met == 0) return absl::OkStatus();
  const NotMetAdvice advice = AdviceFor(certificate.not_met_reason);
  return Refuse(
      advice.code, "NOT_MET",
      absl::StrCat("sequence \"", std::string(work.item.sequence), "\", layer ", work.call.layer,
                   ": ", not_met, " of ", tokens, " tokens are not within recall ",
                   RecallText(work.recall), " (", std::string(certificate.not_met_reason),
                   "); the tokens stay appended; ", std::string(advice.text)));
}

absl::Status Attention::AnswerTile(Work& work, int32_t first_query, int32_t queries) {
  const Geometry& geometry = work.geometry;
  const auto head_dim = static_cast<size_t>(geometry.head_dim);
  const auto group = static_cast<size_t>(geometry.group());
  const std::span<const int32_t> index =
      std::span(work.query_index)
          .subspan(static_cast<size_t>(first_query), static_cast<size_t>(queries));

  std::vector<std::vector<float>> query(static_cast<size_t>(geometry.kv_heads));
  std::vector<LaneAnswer> lanes;
  lanes.reserve(query.size());
  LaneQuery tile;
  for (int head = 0; head < geometry.kv_heads; ++head) {
    std::vector<float>& rows = query[static_cast<size_t>(head)];
    const std::vector<float>& all = work.queries[static_cast<size_t>(head)];
    for (size_t g = 0; g < group; ++g) {
      const auto begin =
          all.begin() +
          static_cast<ptrdiff_t>(
              (g * static_cast<size_t>(work.tokens) + static_cast<size_t>(first_query)) * head_dim);
      rows.insert(rows.end(), begin,
                  begin + static_cast<ptrdiff_t>(static_cast<size_t>(queries) * head_dim));
    }
    tile = {.head_dim = geometry.head_dim,
            .group = geometry.group(),
            .queries = queries,
            .scale = geometry.scale,
            .keeps_logits = work.observes() && work.sequence().policy.scorer->wants_logits(),
            .needs_bounds = work.recall.mode != RecallMode::kExact,
            .needs_guess = work.recall.mode == RecallMode::kEstimated,
            .query = rows,
            .query_index = index};
    lanes.emplace_back(tile, work.lane(head), work.memory(head));
  }
  std::vector<gpu::AttendArgs> attends;
  for (LaneAnswer& lane : lanes) attends.push_back(lane.ResidentArgs());
  EBBTIDE_RETURN_IF_ERROR(work.device.Run(attends));
  parallel_.Run(geometry.kv_heads,
                [&](int head) { lanes[static_cast<size_t>(head)].TakeResident(); });

  PageSource source(cache_, tiers_, staging_, work.device, work.ticket);
  RecallResult result = Recall(work.recall, lanes,
                               {.source = source,
                                .parallel = parallel_,
                                .device = work.device,
                                .clock = clock_,
                                .deadline = work.read_until,
                                .output_dtype = work.item.output_dtype,
                                .reads_exactly = work.reads_exactly});
  EBBTIDE_RETURN_IF_ERROR(result.status);
  work.spent += result.spent;
  work.exact += result.exact;
  NoteWork(lanes, result, work.answer);
  cache_.Count([&](Stats& stats) {
    for (const TouchedRung& touched : result.touched) {
      stats.pages_recalled += touched.pages;
      stats.bytes_recalled += touched.bytes;
    }
  });
  WriteTile(work, lanes, first_query);
  JudgeTile(work, lanes, first_query, result.stopped_by);
  if (work.observes()) Observe(work, lanes, tile, first_query);
  return absl::OkStatus();
}

void Attention::WriteTile(Work& work, std::span<const LaneAnswer> lanes, int32_t first_query) {
  const auto group = static_cast<size_t>(work.geometry.group());
  const auto heads = static_cast<size_t>(work.geometry.query_heads);
  const auto head_dim = static_cast<size_t>(work.geometry.head_dim);
  const int queries = lanes.front().queries();
  Certificate& certificate = work.answer.certificate;
  const size_t element = gpu::DtypeBytes(work.item.output_dtype);
  parallel_.Run(static_cast<int>(lanes.size()), [&](int l) {
    const LaneAnswer& lane = lanes[static_cast<size_t>(l)];
    for (size_t row = 0; row < static_cast<size_t>(lane.rows()); ++row) {
      const size_t m = static_cast<size_t>(first_query) + row % static_cast<size_t>(queries);
      const size_t at =
          m * heads + static_cast<size_t>(l) * group + row / static_cast<size_t>(queries);
      const RowBound bound = lane.Bound(static_cast<int>(row));
      std::byte* out = work.answer.output.data() + at * head_dim * element;
      for (int d = 0; d < work.geometry.head_dim; ++d) {
        gpu::StoreElement(work.item.output_dtype, out, d,
                          lane.output(static_cast<int>(row))[static_cast<size_t>(d)]);
      }
      const double rounding = lane.RoundingError(static_cast<int>(row), work.item.output_dtype);
      work.answer.lse[at] = lane.lse()[row];
      certificate.error_bound[at] = static_cast<float>((bound.error + rounding) * (1 + 1e-6));
      certificate.mass_bound[at] = bound.mass;
    }
  });
}

// Which tokens are within their target, and why the others are not.
void Attention::JudgeTile(Work& work, std::span<const LaneAnswer> lanes, int32_t first_query,
                          std::string_view stopped_by) {
  const auto heads = static_cast<size_t>(work.geometry.query_heads);
  const auto is_read = [](const AbsentPage& page) { return page.rung == Rung::kExact; };
  const bool nothing_left_out = std::ranges::all_of(
      lanes, [&](const LaneAnswer& lane) { return std::ranges::all_of(lane.pages(), is_read); });
  Certificate& certificate = work.answer.certificate;
  for (int m = 0; m < lanes.front().queries(); ++m) {
    const auto token = static_cast<size_t>(first_query + m);
    const auto errors = std::span(certificate.error_bound).subspan(token * heads, heads);
    // Nothing is proven of an output beyond the range of its dtype, though all was read for it.
    const bool is_met = work.has_target()
                            ? IsMet(errors, OutputNorms(lanes, m), work.recall.tau)
                            : nothing_left_out && std::ranges::all_of(errors, [](float e) {
                                return std::isfinite(e);
                              });
    certificate.met[token] = is_met ? 1 : 0;
    if (is_met || !certificate.not_met_reason.empty()) continue;  // The first one's counts.
    certificate.not_met_reason = !stopped_by.empty()                          ? stopped_by
                                 : nothing_left_out                           ? "ARITHMETIC"
                                 : work.recall.mode == RecallMode::kOff       ? "RECALL_OFF"
                                 : work.recall.mode == RecallMode::kEstimated ? "ESTIMATED"
                                                                              : "ARITHMETIC";
  }
}

void Attention::Observe(Work& work, std::span<const LaneAnswer> lanes, const LaneQuery& tile,
                        int32_t first_query) {
  const std::span<const int32_t> index =
      std::span(work.query_index)
          .subspan(static_cast<size_t>(first_query), static_cast<size_t>(tile.queries));
  if (index.back() < work.ticket.observed_end) return;
  const bool is_last = first_query + tile.queries == work.tokens;
  parallel_.Run(static_cast<int>(lanes.size()), [&](int l) {
    const LaneAnswer& lane = lanes[static_cast<size_t>(l)];
    std::vector<float> lse(lane.lse().begin(), lane.lse().end());
    for (size_t row = 0; row < lse.size(); ++row) {
      if (index[row % index.size()] < work.ticket.observed_end)
        lse[row] = kNothing;  // Seen before.
    }
    const std::vector<AttendedPart> parts = lane.Parts();
    work.sequence().policy.scorer->Observe(
        {.group = tile.group,
         .queries = tile.queries,
         .query = lane.query(),
         .query_index = index,
         .parts = parts,
         .lse = lse,
         .ends_prefill_call = is_last && work.call.phase == Phase::kPrefill},
        work.memory(l), work.notes[static_cast<size_t>(l)]);
  });
}

// What the answer taught, where all of it was made. Cannot fail.
void Attention::TakeNotes(Work& work) noexcept {
  if (work.observed_end <= work.ticket.observed_end) return;
  for (int head = 0; head < work.geometry.kv_heads; ++head) {
    work.sequence().policy.scorer->Take(work.notes[static_cast<size_t>(head)], work.memory(head));
  }
  work.recall_history() = work.history;
}

}  // namespace ebbtide::service
