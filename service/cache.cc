// SPDX-License-Identifier: Apache-2.0

#include "service/cache.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "base/status_macros.h"
#include "service/reason.h"
#include "xxhash.h"

namespace ebbtide::service {
namespace {

constexpr size_t kClosedMax = 1 << 20;  // Closed names remembered, in 28 MiB at most.

constexpr size_t kModelsMax = 1024;

// How long slots linger: a block has so many tokens' time to be confirmed before a decode step
// waits for it. Slots that linger are holes that attention passes over.
int32_t LingerTokens(int32_t budget_tokens, int page_tokens) {
  return std::max(budget_tokens / 4, 2 * page_tokens);
}

uint64_t HashOf(std::string_view name) {
  return XXH3_64bits(name.data(), name.size());
}

absl::Status NoSuchSequence(std::string_view name, bool was_closed) {
  return Refuse(
      absl::StatusCode::kNotFound, "SEQUENCE_UNKNOWN",
      was_closed ? absl::StrCat("sequence \"", std::string(name),
                                "\" is closed, by a call or because it was idle for its time-out; "
                                "open it again and send its tokens from 0")
                 : absl::StrCat("no sequence \"", std::string(name), "\" is open; open it first"));
}

absl::Status InFlight(std::string_view name, std::string_view what) {
  return Refuse(absl::StatusCode::kUnavailable, "CALL_IN_FLIGHT",
                absl::StrCat("sequence \"", std::string(name), "\": ", std::string(what),
                             " while another call is not yet answered; retry after its answer"));
}

// Host bytes of a sequence beside its lanes: itself, its layers, and its texts, of which the name
// is kept twice. So little that it counts only where there are very many sequences.
uint64_t MetadataBytesPerSequence(const OpenArgs& args, const Geometry& geometry) {
  constexpr uint64_t kAround = 512;  // Nodes of maps, what malloc adds, and what was resolved.
  return sizeof(OpenedSequence) + kAround +
         static_cast<uint64_t>(geometry.layers) * (sizeof(Layer) + sizeof(RecallHistory)) +
         2 * args.sequence.size() + args.model.size() + args.policy.size() + args.prefill.size() +
         args.recall.size();
}

}  // namespace

OpenedSequence::OpenedSequence(uint64_t number, const OpenArgs& args,
                               std::shared_ptr<const Model> sequence_model,
                               const ResolvedPolicy& resolved)
    : facts(number, args, sequence_model),
      model(std::move(sequence_model)),
      policy(resolved),
      recall_history(static_cast<size_t>(model->geometry.layers)) {}

Cache::Cache(const CacheOptions& options, Clock& clock)
    : options_(options), clock_(clock), pool_(options.device_budget_bytes) {}

absl::StatusOr<Geometry> Cache::RegisterModel(std::string_view name, const Geometry& geometry,
                                              std::string_view weights) {
  EBBTIDE_RETURN_IF_ERROR(geometry.Validate());
  const uint64_t fingerprint = ModelFingerprint(name, weights, geometry);
  if (absl::Status record = geometry.record(fingerprint).Validate(); !record.ok()) {
    return Refuse(record.code(), "GEOMETRY_INVALID", std::string(record.message()));
  }

  const absl::MutexLock lock(&mu_);
  if (models_.size() >= kModelsMax && models_.find(name) == models_.end()) {
    return Refuse(absl::StatusCode::kResourceExhausted, "TOO_MANY_MODELS",
                  absl::StrCat("model \"", std::string(name), "\" would be one more than the ",
                               kModelsMax, " that a daemon knows; use the names registered"));
  }
  auto& model = models_[std::string(name)];
  if (model == nullptr) {
    model = std::make_shared<const Model>(Model{.name = std::string(name),
                                                .weights_fingerprint = std::string(weights),
                                                .geometry = geometry,
                                                .fingerprint = fingerprint});
  }
  if (model->geometry != geometry || model->weights_fingerprint != weights) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "GEOMETRY_DIFFERS",
                  absl::StrCat("model \"", std::string(name),
                               "\" is registered with another geometry or weights ",
                               "fingerprint; register this one under another name"));
  }
  return model->geometry;
}

absl::Status Cache::CheckReopen(const Sequence& facts, const OpenArgs& args) {
  if (facts.args == args) return absl::OkStatus();
  return Refuse(absl::StatusCode::kFailedPrecondition, "SEQUENCE_DIFFERS",
                absl::StrCat("sequence \"", args.sequence,
                             "\" is open with other arguments; close it, or ", "use another name"));
}

absl::StatusOr<Cache::Opening> Cache::Resolve(const OpenArgs& args) const {
  const auto model = models_.find(args.model);
  if (model == models_.end()) {
    return Refuse(
        absl::StatusCode::kNotFound, "MODEL_UNKNOWN",
        absl::StrCat("model \"", args.model, "\" is not registered; call RegisterModel first"));
  }
  const Geometry& geometry = model->second->geometry;
  if (args.budget_tokens > static_cast<uint32_t>(kSequenceTokensMax) ||
      args.chunk_tokens > kChunkTokensMax) {
    return Refuse(
        absl::StatusCode::kInvalidArgument, "BUDGET_TOO_LARGE",
        absl::StrCat("budget of ", args.budget_tokens, " tokens (at most ", kSequenceTokensMax,
                     ") with chunks of ", args.chunk_tokens, " (at most ", kChunkTokensMax, ")"));
  }
  Opening opening{.model = model->second};
  opening.budget_tokens = static_cast<int32_t>(args.budget_tokens);
  opening.chunk_tokens =
      args.chunk_tokens == 0 ? kChunkTokensMax : static_cast<int32_t>(args.chunk_tokens);
  EBBTIDE_ASSIGN_OR_RETURN(
      opening.policy,
      ResolvePolicy(args.policy, args.sends_queries, opening.budget_tokens, geometry.page_tokens));
  EBBTIDE_ASSIGN_OR_RETURN(opening.prefill, ParsePrefill(args.prefill));
  EBBTIDE_ASSIGN_OR_RETURN(
      opening.recall, ParseRecall(args.recall.empty() ? options_.default_recall : args.recall));

  // A lane holds its budget, one chunk, and a page whose tokens wait for their seal.
  const int32_t page_tokens = geometry.page_tokens;
  opening.frames =
      (opening.budget_tokens + opening.chunk_tokens + page_tokens - 1) / page_tokens + 1;
  const PolicySpec& spec = opening.policy.spec;
  opening.metadata_bytes =
      MetadataBytesPerSequence(args, geometry) +
      static_cast<uint64_t>(geometry.lanes()) *
          MetadataBytesPerLane(geometry.head_dim, geometry.group(), opening.frames * page_tokens,
                               spec.is_windowed() ? spec.window : 0);
  return opening;
}

absl::StatusOr<Cache::OpenNeed> Cache::NeedToOpen(const OpenArgs& args) {
  const absl::MutexLock lock(&mu_);
  if (const auto open = sequences_.find(args.sequence); open != sequences_.end()) {
    EBBTIDE_RETURN_IF_ERROR(CheckReopen(open->second->facts, args));
    return OpenNeed();
  }
  EBBTIDE_ASSIGN_OR_RETURN(const Opening opening, Resolve(args));
  return OpenNeed{.metadata_bytes = opening.metadata_bytes};
}

absl::StatusOr<Cache::Opened> Cache::Open(const OpenArgs& args, const OpenGrant& grant) {
  const absl::MutexLock lock(&mu_);
  if (const auto open = sequences_.find(args.sequence); open != sequences_.end()) {
    Sequence& facts = open->second->facts;
    EBBTIDE_RETURN_IF_ERROR(CheckReopen(facts, args));
    facts.last_call = clock_.SinceStart();
    Opened again{.answer = facts.answer};
    again.answer.length = static_cast<uint64_t>(facts.committed);
    return again;
  }
  EBBTIDE_ASSIGN_OR_RETURN(const Opening opening, Resolve(args));
  if (opening.metadata_bytes > grant.charged_bytes) return InFlight(args.sequence, "opened");
  EBBTIDE_RETURN_IF_ERROR(CheckPromises(args.sequence, opening));
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t pool_offset, ReservePool(args.sequence, opening));
  absl::Cleanup give_back = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    pool_.Release(pool_offset, opening.pool_bytes());
  };
  auto sequence =
      std::make_shared<OpenedSequence>(next_number_++, args, opening.model, opening.policy);
  sequence->prefill = opening.prefill;
  sequence->recall = opening.recall;
  sequence->budget_tokens = opening.budget_tokens;
  sequence->chunk_tokens = opening.chunk_tokens;

  const Geometry& geometry = opening.model->geometry;
  Sequence& facts = sequence->facts;
  facts.pool_offset = pool_offset;
  facts.pool_bytes = opening.pool_bytes();
  facts.metadata_at_open = opening.metadata_bytes;
  facts.metadata_bytes = opening.metadata_bytes;
  facts.last_call = clock_.SinceStart();
  facts.lanes.reserve(static_cast<size_t>(geometry.lanes()));
  sequence->memory.reserve(static_cast<size_t>(geometry.lanes()));
  for (int lane = 0; lane < geometry.lanes(); ++lane) {
    facts.lanes.emplace_back(geometry.page_tokens, opening.frames * geometry.page_tokens,
                             LingerTokens(opening.budget_tokens, geometry.page_tokens));
    LaneMemory& memory = sequence->memory.emplace_back();
    memory.shape = geometry.page_shape();
    memory.frames = grant.pool + pool_offset + static_cast<uint64_t>(lane) * opening.lane_bytes();
  }
  facts.answer = {.policy = PolicyText(opening.policy.spec),
                  .why = opening.policy.why,
                  .prefill = PrefillText(opening.prefill),
                  .recall = RecallText(opening.recall),
                  .budget_tokens = args.budget_tokens,
                  .protected_tokens = static_cast<uint32_t>(opening.policy.protected_tokens),
                  .chunk_tokens = static_cast<uint32_t>(opening.chunk_tokens),
                  .device_bytes = facts.pool_bytes,
                  .length = 0,
                  .idle_timeout = args.idle_timeout == absl::ZeroDuration() ? options_.idle_timeout
                                                                            : args.idle_timeout};
  Opened opened{.answer = facts.answer, .metadata_bytes = opening.metadata_bytes};
  sequences_.emplace(args.sequence, std::move(sequence));
  metadata_bytes_ += opening.metadata_bytes;
  std::move(give_back).Cancel();
  return opened;
}

absl::StatusOr<uint64_t> Cache::ReservePool(std::string_view name, const Opening& opening) {
  const auto offset = pool_.Reserve(opening.pool_bytes());
  if (offset.has_value()) return *offset;
  const std::string held = sequences_.empty() ? "and no sequence is open; raise device.budget, or "
                                              : absl::StrCat("the rest held by ", sequences_.size(),
                                                             " sequences; close some, or ");
  return Refuse(
      absl::StatusCode::kResourceExhausted, "DEVICE_FULL",
      absl::StrCat("sequence \"", std::string(name), "\" needs ", opening.pool_bytes(),
                   " B of the device tier in one run (", opening.model->geometry.lanes(),
                   " lanes of ", opening.frames, " frames); ", pool_.free_bytes(), " of ",
                   pool_.budget_bytes(), " B are free, at most ", pool_.longest_run(),
                   " of them in one run, ", held, "ask for a smaller budget or chunk_tokens"));
}

absl::StatusOr<Cache::Truncated> Cache::Truncate(std::string_view name, uint64_t length) noexcept {
  const absl::MutexLock lock(&mu_);
  EBBTIDE_ASSIGN_OR_RETURN(const SequenceRef sequence, FindLocked(name));
  Sequence& facts = sequence->facts;
  if (facts.any_in_flight()) return InFlight(name, "truncated");
  if (length > static_cast<uint64_t>(facts.longest)) {
    return Refuse(absl::StatusCode::kInvalidArgument, "LENGTH_BEYOND_END",
                  absl::StrCat("sequence \"", std::string(name), "\": truncate to ", length,
                               ", but it has ", facts.longest, " tokens"));
  }
  if (length < static_cast<uint64_t>(facts.sealable_end())) {
    return Refuse(absl::StatusCode::kFailedPrecondition, "SEALED",
                  absl::StrCat("sequence \"", std::string(name), "\": truncate to ", length,
                               ", but the tokens before ", facts.sealable_end(),
                               " are sealed; close it and prefill again"));
  }
  facts.last_call = clock_.SinceStart();
  const auto new_length = static_cast<int32_t>(length);
  if (new_length == facts.longest) return Truncated{.length = length};  // A no-op.

  uint64_t dropped = 0;
  for (const Layer& layer : facts.layers) {
    dropped += static_cast<uint64_t>(std::max(0, layer.length - new_length)) *
               static_cast<uint64_t>(facts.geometry().kv_heads);
  }
  stats_.tokens_forgotten["TRUNCATED"] += dropped;
  return Truncated{.length = length, .metadata_bytes = DropTail(*sequence, new_length)};
}

uint64_t Cache::DropTail(OpenedSequence& sequence, int32_t new_length) {
  Sequence& facts = sequence.facts;
  const Need needed = NeedOfBlocks(
      sequence, static_cast<int32_t>(facts.blocks.size()) - facts.blocks_of(new_length));
  facts.Truncate(new_length);
  facts.metadata_bytes -= needed.metadata_bytes;
  GiveUpPromise(*facts.model, static_cast<uint64_t>(needed.blocks));
  metadata_bytes_ -= needed.metadata_bytes;
  for (LaneMemory& memory : sequence.memory) memory.Truncate(new_length);
  return needed.metadata_bytes;
}

absl::StatusOr<std::optional<Cache::Closed>> Cache::Close(std::string_view name,
                                                          std::string_view reason) noexcept {
  const absl::MutexLock lock(&mu_);
  const auto found = sequences_.find(name);
  if (found == sequences_.end()) {
    if (closed_.contains(HashOf(name))) return std::optional<Closed>();
    return NoSuchSequence(name, false);
  }
  if (found->second->facts.any_in_flight()) return InFlight(name, "closed");
  return std::optional<Closed>(CloseLocked(found->second, reason));
}

std::optional<Cache::Closed> Cache::CloseIdle(std::string_view name) noexcept {
  const absl::MutexLock lock(&mu_);
  const auto found = sequences_.find(name);
  if (found == sequences_.end() || !IsIdle(found->second->facts)) return std::nullopt;
  return CloseLocked(found->second, "IDLE");
}

Cache::Closed Cache::CloseLocked(SequenceRef sequence, std::string_view reason) {
  Sequence& facts = sequence->facts;
  Closed closed{.sequence = std::move(sequence), .blocks = {}};
  for (size_t block = 0; block < facts.blocks.size(); ++block) {
    const BlockStage stage = facts.blocks[block].stage;
    if (stage == BlockStage::kSealing) --unsealed_;
    // A block that is being sealed may have been written by a call that was given up.
    if (stage != BlockStage::kOpen) closed.blocks.push_back(facts.key(static_cast<int32_t>(block)));
  }
  CountForgotten(facts, reason);
  facts.is_closed = true;
  GiveUpPromise(*facts.model, facts.blocks.size());
  metadata_bytes_ -= facts.metadata_bytes;
  const std::string& name = facts.args.sequence;
  sequences_.erase(name);
  if (closed_.insert(HashOf(name)).second) closed_order_.push_back(HashOf(name));
  if (closed_order_.size() > kClosedMax) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
  return closed;
}

bool Cache::MayReap(const SequenceRef& sequence) {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = sequence->facts;
  if (!facts.is_closed || facts.is_reaped || facts.carriers > 0) return false;
  facts.is_reaped = true;  // One caller alone goes on.
  return true;
}

void Cache::Reap(const SequenceRef& sequence) noexcept {
  const absl::MutexLock lock(&mu_);
  pool_.Release(sequence->facts.pool_offset, sequence->facts.pool_bytes);
}

absl::StatusOr<SequenceRef> Cache::FindLocked(std::string_view name) {
  const auto found = sequences_.find(name);
  if (found == sequences_.end()) return NoSuchSequence(name, closed_.contains(HashOf(name)));
  return found->second;
}

absl::StatusOr<SequenceRef> Cache::Find(std::string_view name) {
  const absl::MutexLock lock(&mu_);
  return FindLocked(name);
}

// Where a call may start: at the committed length, or just where the layer's last call did.
absl::Status Cache::CheckStart(const Sequence& facts, const BeginArgs& args, Ticket* ticket) {
  const Layer& layer = facts.layers[args.layer];
  const auto first = static_cast<int64_t>(args.first_index);
  if (args.tokens == 0) {  // Queries alone: of tokens that the layer holds.
    if (first + args.queries <= layer.length) return absl::OkStatus();
    return Refuse(absl::StatusCode::kAborted, "INDEX_GAP",
                  absl::StrCat("sequence \"", facts.args.sequence, "\", layer ", args.layer,
                               ": queries of tokens ", first, " to ", first + args.queries - 1,
                               ", but the layer holds ", layer.length, " tokens (", facts.committed,
                               " committed); append them first"));
  }
  if (first == layer.length && first == facts.committed) return absl::OkStatus();
  if (layer.last.tokens == args.tokens && layer.last.first_index == first &&
      layer.last.digest == args.digest) {
    ticket->replayed = true;
    return absl::OkStatus();
  }
  const bool is_gap = first > layer.length || (first == layer.length && first > facts.committed);
  return Refuse(
      absl::StatusCode::kAborted, is_gap ? "INDEX_GAP" : "INDEX_CONFLICT",
      absl::StrCat(
          "sequence \"", facts.args.sequence, "\", layer ", args.layer, ": tokens from ", first,
          ", but the layer holds ", layer.length, " and ", facts.committed, " are committed; ",
          is_gap
              ? "bring the other layers up, or start at the committed length"
              : "the tokens there are others; truncate first, or start at the committed length"));
}

absl::StatusOr<Ticket> Cache::Begin(const SequenceRef& sequence, const BeginArgs& args,
                                    Lengths* lengths) {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = sequence->facts;
  if (facts.is_closed) return NoSuchSequence(facts.args.sequence, true);
  if (args.layer >= facts.layers.size()) {
    return Refuse(absl::StatusCode::kInvalidArgument, "LAYER_OUT_OF_RANGE",
                  absl::StrCat("layer is ", args.layer, "; model \"", facts.model->name,
                               "\" has layers 0 to ", facts.layers.size() - 1));
  }
  Layer& layer = facts.layers[args.layer];
  *lengths = {static_cast<uint64_t>(layer.length), static_cast<uint64_t>(facts.committed)};
  if (layer.in_flight)
    return InFlight(facts.args.sequence, absl::StrCat("layer ", args.layer, " called"));
  const int32_t count = std::max(args.tokens, args.queries);
  if (args.first_index > static_cast<uint64_t>(kSequenceTokensMax - count)) {
    return Refuse(absl::StatusCode::kInvalidArgument, "SEQUENCE_TOO_LONG",
                  absl::StrCat("tokens up to ", args.first_index, " + ", count,
                               "; a sequence holds at most ", kSequenceTokensMax));
  }
  Ticket ticket{.sequence = sequence,
                .layer = static_cast<int>(args.layer),
                .first_index = static_cast<int32_t>(args.first_index)};
  EBBTIDE_RETURN_IF_ERROR(CheckStart(facts, args, &ticket));

  ticket.tokens = ticket.replayed ? 0 : args.tokens;
  ticket.length = layer.length;
  ticket.committed = facts.committed;
  ticket.observed_end = layer.observed_end;
  ticket.candidate_end = facts.sealable_end();
  layer.in_flight = true;
  facts.last_call = clock_.SinceStart();
  return ticket;
}

Cache::Need Cache::NeedOfBlocks(const OpenedSequence& sequence, int32_t blocks) const {
  const Geometry& geometry = sequence.model->geometry;
  const uint64_t each = MetadataBytesPerBlock(geometry.page_shape(), geometry.lanes(),
                                              sequence.policy.scorer->wants_logits());
  return {.blocks = blocks, .metadata_bytes = static_cast<uint64_t>(blocks) * each};
}

Cache::Need Cache::NeedLocked(const Ticket& ticket) const {
  const Sequence& facts = ticket.sequence->facts;
  const int32_t end = std::max(facts.longest, ticket.length + ticket.tokens);
  return NeedOfBlocks(*ticket.sequence,
                      facts.blocks_of(end) - static_cast<int32_t>(facts.blocks.size()));
}

Cache::Need Cache::NeedOf(const Ticket& ticket) {
  const absl::MutexLock lock(&mu_);
  return NeedLocked(ticket);
}

// The blocks whose tokens' slots the step takes again.
std::vector<int32_t> Cache::BlocksDue(const Ticket& ticket,
                                      std::span<const std::vector<int32_t>> victims) const {
  const Sequence& facts = ticket.sequence->facts;
  std::vector<int32_t> blocks;
  for (size_t head = 0; head < victims.size(); ++head) {
    const Lane& lane = facts.lane(ticket.layer, static_cast<int>(head));
    for (const int32_t index : lane.Due(ticket.tokens, victims[head])) {
      const int32_t block = index / facts.geometry().page_tokens;
      if (!facts.is_confirmed(block)) blocks.push_back(block);
    }
  }
  std::ranges::sort(blocks);
  blocks.erase(std::ranges::unique(blocks).begin(), blocks.end());
  return blocks;
}

absl::Status Cache::AwaitSlots(const Ticket& ticket, std::span<const std::vector<int32_t>> victims,
                               absl::Duration deadline) {
  const absl::MutexLock lock(&mu_);
  const Sequence& facts = ticket.sequence->facts;
  // Lanes of a layer in flight are changed by its call alone.
  const std::vector<int32_t> due = BlocksDue(ticket, victims);
  const auto is_unconfirmed = [&](int32_t block) { return !facts.is_confirmed(block); };
  const auto has_slots = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return std::ranges::none_of(due, is_unconfirmed);
  };
  while (!has_slots()) {
    const absl::Duration left = deadline - clock_.SinceStart();
    if (left > absl::ZeroDuration()) {
      mu_.AwaitWithTimeout(absl::Condition(&has_slots), std::min(left, absl::Milliseconds(100)));
      continue;
    }
    return Refuse(
        absl::StatusCode::kResourceExhausted, "DEVICE_FULL",
        absl::StrCat("sequence \"", facts.args.sequence, "\", layer ", ticket.layer,
                     ": no free slots for ", ticket.tokens, " tokens in time: those that left ",
                     "wait for ", std::ranges::count_if(due, is_unconfirmed),
                     " blocks to be confirmed in a lower tier; see ebbctl tiers for what holds ",
                     "it up, and retry"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Cache::Need> Cache::Place(const Ticket& ticket, const PlaceArgs& args,
                                         std::vector<std::vector<int32_t>>* slots) {
  const absl::MutexLock lock(&mu_);
  EBBTIDE_ASSIGN_OR_RETURN(const Need need, CheckPlace(ticket, args));
  PlaceChecked(ticket, args, need, slots);
  return need;
}

absl::StatusOr<Cache::Need> Cache::CheckPlace(const Ticket& ticket, const PlaceArgs& args) const {
  const Sequence& facts = ticket.sequence->facts;
  const bool is_under_way = facts.longest > facts.committed;
  if (ticket.tokens > 0 && is_under_way && ticket.length + ticket.tokens != facts.longest) {
    return Refuse(
        absl::StatusCode::kAborted, "INDEX_CONFLICT",
        absl::StrCat("sequence \"", facts.args.sequence, "\", layer ", ticket.layer,
                     ": tokens up to ", ticket.length + ticket.tokens,
                     ", but other layers brought this step's tokens up to ", facts.longest,
                     "; bring as many, or truncate to ", facts.committed, " first"));
  }
  const Need need = NeedLocked(ticket);
  if (need.metadata_bytes > args.charged_bytes) {
    return Refuse(absl::StatusCode::kUnavailable, "CALL_IN_FLIGHT",
                  absl::StrCat("sequence \"", facts.args.sequence, "\", layer ", ticket.layer,
                               ": another layer's tokens of this step were withdrawn meanwhile; ",
                               "call again"));
  }
  if (need.blocks > 0) EBBTIDE_RETURN_IF_ERROR(CheckRoom(facts, need));
  return need;
}

void Cache::PlaceChecked(const Ticket& ticket, const PlaceArgs& args, const Need& need,
                         std::vector<std::vector<int32_t>>* slots) noexcept {
  Sequence& facts = ticket.sequence->facts;
  EBBTIDE_CHECK(BlocksDue(ticket, args.victims).empty(), "slots are awaited before they are taken");
  slots->resize(args.victims.size());
  for (size_t head = 0; head < args.victims.size(); ++head) {
    Lane& lane = facts.lane(ticket.layer, static_cast<int>(head));
    for (const int32_t victim : args.victims[head]) lane.Demote(victim);
    stats_.tokens_demoted += args.victims[head].size();
    lane.Append(ticket.tokens, &(*slots)[head]);
  }
  facts.Lengthen(std::max(facts.longest, ticket.length + ticket.tokens), args.positions);
  facts.metadata_bytes += need.metadata_bytes;
  if (need.blocks > 0) promised_[facts.model->record_size()] += static_cast<uint64_t>(need.blocks);
  metadata_bytes_ += need.metadata_bytes;
  stats_.tokens_appended += static_cast<uint64_t>(ticket.tokens) * args.victims.size();
}

bool Cache::Finish(const Ticket& ticket, const CallDigest& digest, int32_t observed_end,
                   Lengths* lengths) noexcept {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = ticket.sequence->facts;
  Layer& layer = facts.layers[static_cast<size_t>(ticket.layer)];
  layer.in_flight = false;
  layer.observed_end = std::max(layer.observed_end, observed_end);
  facts.last_call = clock_.SinceStart();
  std::vector<int32_t> complete;
  if (ticket.tokens > 0) {
    layer.last = {.first_index = ticket.first_index, .tokens = ticket.tokens, .digest = digest};
    complete = facts.Extend(ticket.layer, ticket.tokens);
  }
  for (const int32_t block : complete) {
    to_seal_.Push(
        {.sequence = ticket.sequence, .block = block, .size = facts.model->record_size()});
  }
  unsealed_ += static_cast<int>(complete.size());
  *lengths = {static_cast<uint64_t>(layer.length), static_cast<uint64_t>(facts.committed)};
  return !complete.empty();
}

uint64_t Cache::Withdraw(const Ticket& ticket) noexcept {
  EBBTIDE_CHECK(ticket.tokens > 0, "a call that placed nothing has nothing to withdraw");
  const absl::MutexLock lock(&mu_);
  Sequence& facts = ticket.sequence->facts;
  facts.layers[static_cast<size_t>(ticket.layer)].in_flight = false;
  facts.last_call = clock_.SinceStart();
  const auto heads = static_cast<size_t>(facts.geometry().kv_heads);
  for (size_t head = 0; head < heads; ++head) {
    facts.lane(ticket.layer, static_cast<int>(head)).Truncate(ticket.length);
    ticket.sequence->memory[static_cast<size_t>(ticket.layer) * heads + head].Truncate(
        ticket.length);
  }
  stats_.tokens_appended -= static_cast<uint64_t>(ticket.tokens) * heads;
  // Where no other layer has begun the step, it was reserved by this call.
  const bool is_held = std::ranges::any_of(
      facts.lanes, [&](const Lane& lane) { return lane.length() > ticket.length; });
  return is_held ? 0 : DropTail(*ticket.sequence, ticket.length);
}

void Cache::Abandon(const Ticket& ticket) noexcept {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = ticket.sequence->facts;
  facts.layers[static_cast<size_t>(ticket.layer)].in_flight = false;
  facts.last_call = clock_.SinceStart();
}

void Cache::CountForgotten(const Sequence& facts, std::string_view reason) {
  uint64_t tokens = 0;
  for (const Layer& layer : facts.layers) {
    tokens +=
        static_cast<uint64_t>(layer.length) * static_cast<uint64_t>(facts.geometry().kv_heads);
  }
  stats_.tokens_forgotten[std::string(reason)] += tokens;
}

}  // namespace ebbtide::service
