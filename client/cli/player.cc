// SPDX-License-Identifier: Apache-2.0
//
// One run: open, prefill in chunks, decode token by token, look at what became of the tokens, read
// every byte back, close.

#include "client/cli/player.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

#include "base/clock.h"
#include "base/status_macros.h"
#include "client/cli/byte_check.h"
#include "client/cli/interrupt.h"

namespace ebbtide::cli {
namespace {

constexpr uint32_t kExactChunk = 512;
constexpr uint32_t kBlockwiseChunk = 128;

// "name(argument)": the argument, or none.
std::optional<std::string> ArgumentOf(const std::string& text, const std::string& name) {
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, name + "(") || !absl::ConsumeSuffix(&rest, ")")) return {};
  return std::string(rest);
}

// Every run has a name of its own, so that runs beside each other do not meet.
std::string SequenceName() {
  static std::atomic<uint32_t> count = 0;
  return absl::StrFormat("replay-%d-%u", getpid(), ++count);
}

// Two traces of one name have one geometry.
std::string ModelName(const Trace& trace) {
  std::string name = trace.model.substr(0, trace.model.find(" ("));  // Where it comes from is long.
  name.resize(std::min<size_t>(name.size(), 128));  // Of the 256 bytes that a name may have.
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return absl::StrFormat("%s [%ux %u/%u heads of %u, %s, scale %g]", name, trace.layers.size(),
                         trace.query_heads, trace.kv_heads, trace.head_dim,
                         client::DtypeName(trace.dtype()), trace.scale);
}

// The daemon closes it, once nobody has called it for long.
std::string ItIsLeft(const std::string& name, const std::string& why) {
  return absl::StrFormat("sequence \"%s\", where it is open, is left to its idle time-out: %s\n",
                         name, why);
}

void SayItIsLeft(const std::string& name, const absl::Status& why) {
  absl::FPrintF(stderr, "%s", ItIsLeft(name, std::string(why.message())));
}

// While the sequence is open: there is no closing it at a second signal.
std::string AtASecondSignal(const std::string& name) {
  return ItIsLeft(name, "a second signal ended its replay");
}

// "blockwise(B)": B, or none.
std::optional<uint32_t> BlockOf(const std::string& prefill) {
  const std::optional<std::string> block = ArgumentOf(prefill, "blockwise");
  uint32_t tokens = 0;
  if (!block.has_value() || !absl::SimpleAtoi(*block, &tokens) || tokens == 0) return {};
  return tokens;
}

// Tokens per prefill call. What was asked for is kept to or refused.
absl::StatusOr<uint32_t> ChunkOf(const RunSpec& spec, uint32_t daemons_max) {
  const uint32_t most = daemons_max == 0 ? kExactChunk : daemons_max;
  if (spec.chunk == 0) return std::min(ChunkFor(spec.prefill), most);
  if (spec.chunk > most) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--chunk %u: the daemon takes %u tokens per call at most", spec.chunk, most));
  }
  if (const auto block = BlockOf(spec.prefill); block.has_value() && spec.chunk > *block) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--chunk %u: prefill %s takes %u tokens per call at most", spec.chunk,
                        spec.prefill, *block));
  }
  return spec.chunk;
}

struct Opened {
  client::Sequence sequence;
  uint32_t page_tokens = 0;
  uint32_t chunk = 0;
};

absl::StatusOr<Opened> Open(const client::Client& client, const Trace& trace, const RunSpec& spec,
                            const std::string& name) {
  EBBTIDE_ASSIGN_OR_RETURN(const client::ServerInfo info, client.GetServerInfo());
  EBBTIDE_ASSIGN_OR_RETURN(const uint32_t chunk, ChunkOf(spec, info.chunk_tokens_max));
  const client::Model model = {.name = ModelName(trace), .geometry = trace.geometry()};
  EBBTIDE_ASSIGN_OR_RETURN(const client::RegisteredModel registered, client.RegisterModel(model));
  absl::StatusOr<client::Sequence> sequence = client.OpenSequence({.name = name,
                                                                   .model = model.name,
                                                                   .policy = spec.policy,
                                                                   .budget = spec.budget,
                                                                   .prefill = spec.prefill,
                                                                   .recall = spec.recall,
                                                                   .chunk_tokens = chunk});
  if (absl::IsDeadlineExceeded(sequence.status())) SayItIsLeft(name, sequence.status());
  EBBTIDE_RETURN_IF_ERROR(sequence.status());
  return Opened{.sequence = *std::move(sequence),
                .page_tokens = registered.geometry.page_tokens,
                .chunk = chunk};
}

class Run {
 public:
  Run(const client::Client& client, const ReplaySource& source, const RunSpec& spec,
      const std::function<absl::Status(uint64_t)>& progress)
      : client_(client), source_(source), spec_(spec), progress_(progress) {}

  absl::StatusOr<RunReport> Play() {
    const absl::Duration start = SteadyClock().SinceStart();
    EBBTIDE_RETURN_IF_ERROR(PlayFromOpenToClose());
    Conclude();
    report_.wall_seconds = absl::ToDoubleSeconds(SteadyClock().SinceStart() - start);
    return std::move(report_);
  }

 private:
  absl::Status PlayFromOpenToClose() {
    const std::string name = SequenceName();
    const LastWords last_words(AtASecondSignal(name));
    EBBTIDE_ASSIGN_OR_RETURN(const Opened opened, Open(client_, source_.trace, spec_, name));
    page_tokens_ = opened.page_tokens;
    chunk_ = opened.chunk;
    absl::Status played = PlayIn(opened.sequence);
    absl::Status closed = opened.sequence.Close();
    if (!closed.ok() && !absl::IsNotFound(closed) && client::ErrorReason(closed) != "UNREACHABLE") {
      SayItIsLeft(name, closed);
    }
    return played.ok() ? closed : played;
  }

  absl::Status PlayIn(const client::Sequence& sequence) {
    const client::OpenedSequence& opened = sequence.opened();
    report_ = {.policy = spec_.policy,
               .policy_resolved = opened.policy,
               .recall = opened.recall,
               .prefill = opened.prefill,
               .budget_tokens = opened.budget_tokens,
               .protected_tokens = opened.protected_tokens};
    target_ = TargetOf(opened.recall);
    if (!target_.has_value()) target_ = spec_.target;
    const Trace& trace = source_.trace;
    for (uint64_t first = 0; first < trace.prompt_length; first += chunk_) {
      const uint64_t count = std::min<uint64_t>(chunk_, trace.prompt_length - first);
      EBBTIDE_RETURN_IF_ERROR(Step(sequence, client::Phase::kPrefill, first, count));
    }
    for (uint64_t token = trace.prompt_length; token < trace.tokens; ++token) {
      EBBTIDE_RETURN_IF_ERROR(Step(sequence, client::Phase::kDecode, token, 1));
    }
    EBBTIDE_RETURN_IF_ERROR(LookAt(sequence));
    return CheckBytes(sequence);
  }

  // All layers' calls for tokens first … first + count - 1.
  absl::Status Step(const client::Sequence& sequence, client::Phase phase, uint64_t first,
                    uint64_t count) {
    const Trace& trace = source_.trace;
    absl::Duration spent;
    for (uint32_t i = 0; i < trace.layers.size(); ++i) {
      const TraceLayer& layer = trace.layers[i];
      const client::Step step = {
          .layer = i,
          .phase = phase,
          .prompt_end = phase == client::Phase::kPrefill && first + count == trace.prompt_length};
      const absl::Duration start = SteadyClock().SinceStart();
      EBBTIDE_ASSIGN_OR_RETURN(
          const client::AttendResult result,
          sequence.Attend(step, {.first_index = first,
                                 .q = layer.q.View(first, count),
                                 .k = layer.k.View(first, count),
                                 .v = layer.v.View(first, count),
                                 // The error of an f16 output would be the rounding's.
                                 .output_dtype = client::Dtype::kF32}));
      spent += SteadyClock().SinceStart() - start;
      EBBTIDE_RETURN_IF_ERROR(Weigh(i, phase, first, count, result));
    }
    if (phase == client::Phase::kDecode) step_seconds_.push_back(absl::ToDoubleSeconds(spent));
    return progress_(first + count);
  }

  absl::Status Weigh(uint32_t layer, client::Phase phase, uint64_t first, uint64_t count,
                     const client::AttendResult& result) {
    EBBTIDE_ASSIGN_OR_RETURN(const std::vector<TokenVerdict> verdicts,
                             Judge(source_.truths[layer], first, count, result));
    for (const TokenVerdict& verdict : verdicts) {
      report_.certificate_violations += verdict.error_violations + verdict.mass_violations;
      if (phase == client::Phase::kPrefill) {
        prefill_errors_.push_back(verdict.rel_error);
        continue;
      }
      errors_.push_back(verdict.rel_error);
      certified_.push_back(verdict.certified_rel_error);
      report_.worst_head_rel_error =
          std::max(report_.worst_head_rel_error, verdict.worst_head_rel_error);
      bound_over_error_.insert(bound_over_error_.end(), verdict.bound_over_error.begin(),
                               verdict.bound_over_error.end());
      above_target_ += target_.has_value() && !(verdict.rel_error <= *target_) ? 1 : 0;
    }
    if (phase == client::Phase::kDecode) CountWork(result);
    return absl::OkStatus();
  }

  void CountWork(const client::AttendResult& result) {
    if (!result.certificate.met.front()) {
      ++report_.not_met;
      const std::string& reason = result.certificate.not_met_reason;
      ++report_.not_met_by_reason[reason.empty() ? "UNSTATED" : reason];
    }
    report_.absent_pages += static_cast<double>(result.absent_pages);
    for (const client::TouchedRung& rung : result.touched) {
      const std::string tier(client::TierName(rung.tier));
      const auto pages = static_cast<double>(rung.pages);
      const auto bytes = static_cast<double>(rung.bytes);
      report_.touched_pages.total += pages;
      report_.touched_pages.by_rung[rung.rung] += pages;
      report_.touched_pages.by_tier[tier] += pages;
      report_.touched_bytes.total += bytes;
      report_.touched_bytes.by_rung[rung.rung] += bytes;
      report_.touched_bytes.by_tier[tier] += bytes;
    }
  }

  // Where the tokens lie now that all are played.
  absl::Status LookAt(const client::Sequence& sequence) {
    EBBTIDE_ASSIGN_OR_RETURN(
        const client::SequenceDescription description,
        client_.DescribeSequence({.sequence = sequence.name(), .with_lanes = true}));
    if (description.summary.committed != source_.trace.tokens) {
      return absl::FailedPreconditionError(
          absl::StrFormat("sequence \"%s\" holds %u tokens, the trace has %u", sequence.name(),
                          description.summary.committed, source_.trace.tokens));
    }
    report_.tokens = description.summary.tokens;
    for (const client::LaneDescription& lane : description.lanes) report_.demotions += lane.demoted;
    EBBTIDE_ASSIGN_OR_RETURN(const client::Stats stats, client_.GetStats());
    for (const client::TierStats& tier : stats.tiers) {
      if (tier.tier == client::Tier::kHost) report_.host_budget_bytes = tier.budget_bytes;
    }
    return absl::OkStatus();
  }

  absl::Status CheckBytes(const client::Sequence& sequence) {
    EBBTIDE_ASSIGN_OR_RETURN(ByteCheck check,
                             CheckEveryByte(source_.trace, sequence, page_tokens_));
    for (const std::string& complaint : check.complaints) {
      absl::FPrintF(stderr, "%s: %s\n", spec_.policy, complaint);
    }
    report_.bytes_checked = check.checked;
    report_.byte_mismatches = check.mismatches;
    report_.bytes_lost = check.lost;
    report_.bytes_checked_by_tier = std::move(check.checked_by_tier);
    return absl::OkStatus();
  }

  void Conclude() {
    report_.rel_error = Summarise(std::move(errors_));
    report_.certified_rel_error = Summarise(std::move(certified_));
    report_.prefill_rel_error = Summarise(std::move(prefill_errors_));
    report_.bound_over_error = Summarise(std::move(bound_over_error_));
    const auto answers = static_cast<double>(step_seconds_.size() * source_.trace.layers.size());
    if (target_.has_value() && answers > 0) {
      report_.answers_above_target = static_cast<double>(above_target_) / answers;
    }
    const double steps = std::max(1.0, static_cast<double>(step_seconds_.size()));
    report_.step_seconds = Summarise(std::move(step_seconds_));
    report_.absent_pages /= steps;
    for (PerStep* touched : {&report_.touched_pages, &report_.touched_bytes}) {
      touched->total /= steps;
      for (auto& [rung, sum] : touched->by_rung) sum /= steps;
      for (auto& [tier, sum] : touched->by_tier) sum /= steps;
    }
  }

  const client::Client& client_;
  const ReplaySource& source_;
  const RunSpec& spec_;
  const std::function<absl::Status(uint64_t)>& progress_;
  uint32_t page_tokens_ = 0;
  uint32_t chunk_ = 0;
  std::optional<double> target_;
  RunReport report_ = {};
  std::vector<double> errors_;  // Decode, per (step, layer).
  std::vector<double> certified_;
  std::vector<double> prefill_errors_;  // Per (token, layer).
  std::vector<double> bound_over_error_;
  std::vector<double> step_seconds_;
  uint64_t above_target_ = 0;
};

}  // namespace

uint32_t ChunkFor(const std::string& prefill) {
  const std::optional<uint32_t> block = BlockOf(prefill);
  return block.has_value() ? std::min(kBlockwiseChunk, *block) : kExactChunk;
}

std::optional<double> TargetOf(const std::string& recall) {
  for (const char* mode : {"bounded", "estimated"}) {
    const std::optional<std::string> argument = ArgumentOf(recall, mode);
    double target = 0;
    if (argument.has_value() && absl::SimpleAtod(*argument, &target)) return target;
  }
  return std::nullopt;
}

absl::Status Ask(const client::Client& client, const Trace& trace, const RunSpec& spec) {
  const std::string name = SequenceName();
  const LastWords last_words(AtASecondSignal(name));
  EBBTIDE_ASSIGN_OR_RETURN(const Opened opened, Open(client, trace, spec, name));
  return opened.sequence.Close();
}

absl::StatusOr<RunReport> Play(const client::Client& client, const ReplaySource& source,
                               const RunSpec& spec,
                               const std::function<absl::Status(uint64_t)>& progress) {
  return Run(client, source, spec, progress).Play();
}

}  // namespace ebbtide::cli
