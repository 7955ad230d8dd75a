// SPDX-License-Identifier: Apache-2.0

#include "service/engine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "base/log.h"
#include "base/status_macros.h"
#include "gpu/device.h"
#include "gpu/loss_noting_backend.h"
#include "service/attention/attention.h"
#include "service/cache.h"
#include "service/movement/mover.h"
#include "service/movement/page_source.h"
#include "service/reason.h"

namespace ebbtide::service {
namespace {

// Of a page's positions and what surrounds it in an answer, about.
constexpr uint64_t kPositionBytes = 10;
constexpr uint64_t kPageFrameBytes = 64;

absl::Status CheckPagesFit(const Geometry& geometry, uint64_t pages, const ReadPagesArgs& args) {
  const uint64_t page_bytes = geometry.page_shape().page_bytes() + kPageFrameBytes +
                              static_cast<uint64_t>(geometry.page_tokens) * kPositionBytes;
  const uint64_t pages_max = args.answer_bytes_max / page_bytes;
  if (pages <= pages_max) {
    return args.admit == nullptr ? absl::OkStatus() : args.admit(pages * page_bytes);
  }
  return Refuse(absl::StatusCode::kResourceExhausted, "ANSWER_TOO_LARGE",
                absl::StrCat(pages, " pages would make about ", pages * page_bytes,
                             " B, over the limit of ", args.answer_bytes_max,
                             " B for a message; ask for at most ", pages_max, " pages per call"));
}

// Opening a sequence moves blocks down for so long to make room for what it keeps in host memory.
constexpr absl::Duration kOpenPatience = absl::Seconds(1);

constexpr uint64_t kPagesAtOnceMax = 32;  // Of one lane, between looks at the clock.

// A page that a tier may give another time.
absl::Status CheckWithinReach(const PageRequest& request) {
  if (request.state == FetchState::kUnavailable) {
    return Refuse(absl::StatusCode::kUnavailable, "TIER_UNAVAILABLE",
                  absl::StrCat("page ", request.page,
                               " lies in the rocksdb tier, which does not answer now; retry"));
  }
  if (request.state == FetchState::kOutOfTime) {
    return Refuse(absl::StatusCode::kDeadlineExceeded, "OUT_OF_TIME",
                  absl::StrCat("time ran out while the rocksdb tier read page ", request.page,
                               "; ask for fewer per call, or give it longer"));
  }
  if (request.state == FetchState::kNoStaging) {
    return Refuse(absl::StatusCode::kUnavailable, "STAGING_BUSY",
                  absl::StrCat("page ", request.page,
                               " has to be staged, and other calls kept all of the staging until ",
                               "the deadline; retry, or raise the host budget, an eighth of which ",
                               "it is, up to 64 MiB"));
  }
  return absl::OkStatus();
}

PageBytes AnswerOf(const PageRequest& request, const Ticket& ticket,
                   std::span<const int64_t> positions) {
  const Geometry& geometry = ticket.sequence->model->geometry;
  const int32_t first = request.page * geometry.page_tokens;
  const int32_t tokens = std::min(geometry.page_tokens, ticket.length - first);
  const std::span<const int64_t> own =
      positions.subspan(static_cast<size_t>(first), static_cast<size_t>(tokens));
  PageBytes answer{.first_index = static_cast<uint64_t>(first),
                   .tokens = static_cast<uint32_t>(tokens),
                   .tier = request.tier,
                   .state = request.state == FetchState::kOk        ? PageAnswer::kOk
                            : request.state == FetchState::kCorrupt ? PageAnswer::kCorrupt
                                                                    : PageAnswer::kMissing,
                   .k = {},
                   .v = {},
                   .positions = {own.begin(), own.end()}};
  if (request.state != FetchState::kOk) return answer;
  const gpu::PageShape shape = geometry.page_shape();
  const size_t bytes = static_cast<size_t>(tokens) * shape.row_bytes();
  const auto keys = request.bytes.first(bytes);
  const auto values = request.bytes.subspan(shape.half_bytes(), bytes);
  answer.k.assign(keys.begin(), keys.end());
  answer.v.assign(values.begin(), values.end());
  return answer;
}

class PlainEngine final : public Engine {
 public:
  PlainEngine(const EngineOptions& options, const EngineParts& parts, gpu::DeviceBuffer pool,
              storage::ByteCharge staging)
      : parts_(parts),
        device_(parts.backend),
        pool_(std::move(pool)),
        staging_charge_(std::move(staging)),
        below_(parts.rocksdb == nullptr
                   ? std::nullopt
                   : std::make_optional<storage::CircuitBreaker>(*parts.rocksdb, parts.clock)),
        tiers_{.host = parts.host,
               .host_budget = parts.host_budget,
               .staging_bytes = staging_charge_.bytes(),
               .rocksdb = below_.has_value() ? &*below_ : nullptr},
        staging_(staging_charge_.bytes()),
        cache_({.device_budget_bytes = pool_.bytes().size(),
                .default_recall = options.default_recall,
                .idle_timeout = options.idle_timeout,
                .look_at_room = [this](auto sizes) { return mover_.RoomOf(sizes); }},
               parts.clock),
        mover_(cache_, parts.clock, parts.carriers, device_, tiers_),
        attention_({.recall_bytes = options.recall_bytes}, cache_, mover_, staging_, tiers_,
                   parts.clock, parts.parallel, device_) {}

  absl::StatusOr<Geometry> RegisterModel(std::string_view name, const Geometry& geometry,
                                         std::string_view weights) override {
    return Counted(cache_.RegisterModel(name, geometry, weights));
  }

  absl::StatusOr<OpenAnswer> OpenSequence(const OpenArgs& args) override {
    return Counted(Open(args));
  }

  std::vector<StepAnswer> Step(const StepCall& call, std::span<const StepItem> items) override {
    std::vector<StepAnswer> answers;
    answers.reserve(items.size());
    for (const StepItem& item : items) answers.push_back(attention_.Step(call, item));
    return answers;
  }

  absl::StatusOr<std::vector<PageBytes>> ReadPages(const ReadPagesArgs& args) override {
    return Counted(ReadPagesOf(args));
  }

  absl::StatusOr<uint64_t> Truncate(std::string_view sequence, uint64_t length) override {
    EBBTIDE_ASSIGN_OR_RETURN(const Cache::Truncated truncated,
                             Counted(cache_.Truncate(sequence, length)));
    mover_.ReleaseHost(truncated.metadata_bytes);
    return truncated.length;
  }

  absl::Status CloseSequence(std::string_view sequence) override {
    EBBTIDE_ASSIGN_OR_RETURN(const auto closed, Counted(cache_.Close(sequence, "CLOSED")));
    if (closed.has_value()) Forget(*closed);
    return absl::OkStatus();
  }

  Stats GetStats() override;

  std::vector<SequenceSummary> ListSequences(std::string_view after, size_t limit) override {
    return cache_.List(after, limit);
  }
  absl::StatusOr<SequenceDescription> Describe(const DescribeArgs& args) override {
    return Counted(cache_.Describe(args));
  }

  void CloseIdle() override {
    for (const std::string& name : cache_.Idle()) {
      const auto closed = cache_.CloseIdle(name);
      if (!closed.has_value()) continue;
      Forget(*closed);
      const Sequence& facts = closed->sequence->facts;
      Log(LogLevel::kInfo, "sequence forgotten: it was idle for its time-out",
          {{"sequence", name},
           {"tokens", facts.committed},
           {"idle_timeout_seconds", absl::ToInt64Seconds(facts.answer.idle_timeout)}});
    }
    mover_.ProbeBelow();
    mover_.Kick();
  }

  bool Settle(absl::Duration deadline) override {
    while (cache_.HasUnsealed() && parts_.clock.SinceStart() < deadline) {
      mover_.Kick();
      cache_.WaitForSeals(std::min(deadline, parts_.clock.SinceStart() + absl::Milliseconds(20)));
    }
    return !cache_.HasUnsealed();
  }

  bool is_device_lost() override { return device_.has_failed(); }

  void CheckInvariants() override { cache_.CheckInvariants(); }

 private:
  template <typename T>
  T Counted(T result) {
    const absl::Status status = WithDeviceReason(StatusOf(result));
    if (!status.ok()) cache_.Count([&](Stats& stats) { ++stats.refused[ReasonOf(status)]; });
    return status.ok() ? std::move(result) : T(status);
  }
  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status StatusOf(const absl::StatusOr<T>& result) {
    return result.status();
  }

  absl::StatusOr<OpenAnswer> Open(const OpenArgs& args);
  void Forget(const Cache::Closed& closed);
  absl::StatusOr<std::vector<PageBytes>> ReadPagesOf(const ReadPagesArgs& args);

  const EngineParts parts_;
  gpu::LossNotingBackend device_;
  const gpu::DeviceBuffer pool_;
  const storage::ByteCharge staging_charge_;
  std::optional<storage::CircuitBreaker> below_;
  const LowerTiers tiers_;
  Staging staging_;
  Cache cache_;
  Mover mover_;
  Attention attention_;
};

absl::StatusOr<OpenAnswer> PlainEngine::Open(const OpenArgs& args) {
  EBBTIDE_ASSIGN_OR_RETURN(const Cache::OpenNeed need, cache_.NeedToOpen(args));
  EBBTIDE_ASSIGN_OR_RETURN(
      storage::ByteCharge charge,
      mover_.ChargeHost(need.metadata_bytes, parts_.clock.SinceStart() + kOpenPatience));
  EBBTIDE_ASSIGN_OR_RETURN(
      Cache::Opened opened,
      cache_.Open(args, {.pool = pool_.bytes().data(), .charged_bytes = charge.bytes()}));
  charge.Keep(opened.metadata_bytes);
  return std::move(opened.answer);
}

void PlainEngine::Forget(const Cache::Closed& closed) {
  mover_.Erase(closed.blocks);
  mover_.ReleaseHost(closed.sequence->facts.metadata_bytes);
  mover_.Reap(closed.sequence);
}

absl::StatusOr<std::vector<PageBytes>> PlainEngine::ReadPagesOf(const ReadPagesArgs& args) {
  // Holds the layer for the while, so that no slot is reused under the read.
  Lengths lengths;
  EBBTIDE_ASSIGN_OR_RETURN(const SequenceRef sequence, cache_.Find(args.sequence));
  EBBTIDE_ASSIGN_OR_RETURN(const Ticket ticket,
                           cache_.Begin(sequence, {.layer = args.layer}, &lengths));
  struct Hold {
    Cache& cache;
    const Ticket& ticket;
    ~Hold() { cache.Abandon(ticket); }
  } const hold{cache_, ticket};
  const Geometry& geometry = ticket.sequence->model->geometry;
  if (args.kv_head >= static_cast<uint32_t>(geometry.kv_heads)) {
    return Refuse(
        absl::StatusCode::kInvalidArgument, "LANE_OUT_OF_RANGE",
        absl::StrCat("kv_head is ", args.kv_head, "; model \"", ticket.sequence->model->name,
                     "\" has kv heads 0 to ", geometry.kv_heads - 1));
  }
  const auto pages =
      static_cast<uint64_t>((ticket.length + geometry.page_tokens - 1) / geometry.page_tokens);
  if (args.first_page > pages || args.page_count > pages - args.first_page) {
    return Refuse(absl::StatusCode::kInvalidArgument, "PAGE_OUT_OF_RANGE",
                  absl::StrCat("pages from ", args.first_page, ", ", args.page_count,
                               " of them; the lane has ", pages));
  }
  const uint64_t count = args.page_count == 0 ? pages - args.first_page : args.page_count;
  EBBTIDE_RETURN_IF_ERROR(CheckPagesFit(geometry, count, args));
  const auto head = static_cast<int>(args.kv_head);
  std::vector<PageBytes> answers;
  EBBTIDE_ASSIGN_OR_RETURN(const gpu::Device device, gpu::Device::Open(device_));
  PageSource source(cache_, tiers_, staging_, device, ticket);
  const std::vector<int64_t> positions = cache_.Positions(ticket);
  const uint64_t at_once = std::clamp<uint64_t>(
      source.group_bytes() / geometry.page_shape().page_bytes(), 1, kPagesAtOnceMax);
  for (uint64_t page = args.first_page; page < args.first_page + count; page += at_once) {
    if (parts_.clock.SinceStart() >= args.deadline) {
      return Refuse(absl::StatusCode::kDeadlineExceeded, "OUT_OF_TIME",
                    absl::StrCat("time ran out at page ", page, " of ", args.first_page, " to ",
                                 args.first_page + count - 1, "; ask for fewer per call"));
    }
    std::vector<PageRequest> requests(std::min(at_once, args.first_page + count - page));
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i] = {.kv_head = head, .page = static_cast<int32_t>(page + i)};
    }
    source.Fetch(requests, args.deadline - parts_.clock.SinceStart());
    EBBTIDE_RETURN_IF_ERROR(source.status());
    for (const PageRequest& request : requests) {
      EBBTIDE_RETURN_IF_ERROR(CheckWithinReach(request));
      answers.push_back(AnswerOf(request, ticket, positions));
    }
    source.GiveUp();
  }
  return answers;
}

Stats PlainEngine::GetStats() {
  Stats stats = cache_.Counters();
  TierReport device = cache_.DeviceReport();
  device.place = parts_.backend.is_simulated() ? "host memory, simulated device"
                                               : std::string(parts_.backend.name());
  const TokensByTier tokens = cache_.Tokens();
  device.tokens = tokens.open;
  stats.tiers.push_back(std::move(device));

  const storage::TierUsage host = parts_.host.Usage();
  stats.tiers.push_back({.tier = TierName::kHost,
                         .budget_bytes = parts_.host_budget.limit_bytes(),
                         .used_bytes = parts_.host_budget.used_bytes(),
                         .blocks = host.blocks,
                         .tokens = tokens.host,
                         .corrupt_pages = host.corrupt_pages + stats.corrupt_in_place,
                         .metadata_bytes = cache_.metadata_bytes(),
                         .degraded = false,
                         .degraded_why = "",
                         .place = "host memory"});
  if (!below_.has_value()) return stats;
  const storage::TierUsage below = below_->Usage();
  const std::string degraded = below_->why_degraded();
  stats.tiers.push_back({.tier = TierName::kRocksdb,
                         .budget_bytes = below.budget_bytes,
                         .used_bytes = below.used_bytes,
                         .blocks = below.blocks,
                         .tokens = tokens.rocksdb,
                         .corrupt_pages = below.corrupt_pages,
                         .metadata_bytes = 0,
                         .degraded = !degraded.empty(),
                         .degraded_why = degraded,
                         .place = parts_.rocksdb_place});
  return stats;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       const EngineParts& parts) {
  EBBTIDE_RETURN_IF_ERROR(ParseRecall(options.default_recall).status());
  // An eighth of the host tier, at most 64 MiB, stages pages on their way back.
  const uint64_t staging = std::min<uint64_t>(64 << 20, parts.host_budget.limit_bytes() / 8);
  auto charge = storage::ByteCharge::Try(parts.host_budget, staging);
  if (!charge) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host tier: ", staging, " B of staging do not fit its budget of ",
                     parts.host_budget.limit_bytes(), " B; raise host.budget"));
  }
  EBBTIDE_ASSIGN_OR_RETURN(gpu::DeviceBuffer pool,
                           parts.backend.Allocate(options.device_budget_bytes));
  return std::make_unique<PlainEngine>(options, parts, std::move(pool), *std::move(charge));
}

}  // namespace ebbtide::service
