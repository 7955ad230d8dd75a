// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl replay`: reads traces, computes the truth once for each, plays the runs, reports.

#include "client/cli/replay.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

#include "base/clock.h"
#include "base/executor.h"
#include "base/printable.h"
#include "base/status_macros.h"
#include "client/cli/interrupt.h"
#include "client/cli/progress.h"
#include "client/cli/units.h"

namespace ebbtide::cli {
namespace {

constexpr int kTruthThreads = 2;                // The daemon needs the others.
constexpr uint32_t kBudgetTokensMax = 1 << 24;  // The daemon's.

Progress StderrProgress(std::string what, uint64_t total) {
  return Progress(std::move(what), total, stderr, isatty(STDERR_FILENO) != 0, SteadyClock());
}

absl::StatusOr<std::vector<uint32_t>> ParseLayers(const std::string& text) {
  std::vector<uint32_t> layers;
  if (text.empty()) return layers;
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<std::string> parts, SplitList("--layers", text));
  for (const std::string& part : parts) {
    uint32_t layer = 0;
    if (!absl::SimpleAtoi(part, &layer)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--layers: \"%s\" is not a layer number", part));
    }
    if (std::ranges::find(layers, layer) != layers.end()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--layers \"%s\": layer %u is named twice", text, layer));
    }
    layers.push_back(layer);
  }
  return layers;
}

// 0 where nothing is said.
absl::StatusOr<uint32_t> ParseChunk(const std::string& text) {
  uint32_t chunk = 0;
  if (text.empty() || (absl::SimpleAtoi(text, &chunk) && chunk > 0)) return chunk;
  return absl::InvalidArgumentError(absl::StrFormat(
      "--chunk \"%s\": give the tokens of a prefill call, from 1 to what the daemon takes (512)",
      text));
}

// Digits, and one point where it is a `share`: what other numbers look like, people do not write.
bool IsPlainNumber(absl::string_view text, bool is_share) {
  const auto points = std::count(text.begin(), text.end(), '.');
  return points <= (is_share ? 1 : 0) && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '.';
         });
}

// What a list option says, or the one empty choice that leaves it to the daemon.
absl::StatusOr<std::vector<std::string>> Choices(const std::string& option,
                                                 const std::string& text) {
  if (text.empty()) return std::vector<std::string>{""};
  return SplitList(option, text);
}

// A trace by what its header says, and the runs asked of it.
struct PlannedTrace {
  Trace header;
  std::vector<RunSpec> specs;
};

absl::StatusOr<PlannedTrace> PlanTrace(const ReplayArgs& args, const std::string& path) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<uint32_t> layers, ParseLayers(args.layers));
  EBBTIDE_ASSIGN_OR_RETURN(Trace header, ReadTraceHeader(path, layers));
  EBBTIDE_ASSIGN_OR_RETURN(std::vector<RunSpec> specs, PlanRuns(args, header.tokens));
  return PlannedTrace{.header = std::move(header), .specs = std::move(specs)};
}

absl::StatusOr<ReplayReport> ReplayOne(const client::Client& client, const ReplayArgs& args,
                                       const std::string& path, const std::stop_token& stop) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<uint32_t> layers, ParseLayers(args.layers));
  EBBTIDE_ASSIGN_OR_RETURN(const Trace trace, ReadTrace(path, layers, stop));
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<RunSpec> specs, PlanRuns(args, trace.tokens));
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<LayerTruth> truths, ComputeTruths(trace, stop));
  EBBTIDE_ASSIGN_OR_RETURN(const client::ServerInfo info, client.GetServerInfo());
  ReplayReport report = DescribeReplay(trace, path, info);
  EBBTIDE_ASSIGN_OR_RETURN(report.runs,
                           PlayRuns(client, {.trace = trace, .truths = truths}, specs));
  return report;
}

// Replays each in turn, up to the first that fails. A table is printed as its trace ends, JSON is
// added to `finished`.
absl::StatusOr<bool> ReplayAll(const client::Client& client, const Common& common,
                               const ReplayArgs& args, const std::stop_token& stop,
                               Json& finished) {
  bool is_sound = true;
  for (const std::string& path : args.traces) {
    const absl::StatusOr<ReplayReport> report = ReplayOne(client, args, path, stop);
    if (!report.ok()) return report.status();
    if (common.output == Output::kTable) {
      Print((finished.empty() ? "" : "\n") + RenderReport(*report));
    }
    finished.push_back(ToJson(*report));
    if (report->is_sound()) continue;
    is_sound = false;
    absl::FPrintF(
        stderr, "ebbctl: %s: not sound: bytes differ or are lost, or a certificate was violated\n",
        Printable(path));
  }
  return is_sound;
}

// Asks for all runs before the first is played: a mistake in the last would be found in an hour.
absl::StatusOr<bool> AskAndReplay(const Common& common, const ReplayArgs& args,
                                  const std::vector<PlannedTrace>& planned,
                                  const std::stop_token& stop) {
  EBBTIDE_ASSIGN_OR_RETURN(const client::Client client,
                           client::Client::Connect(common.socket, {.stop = stop}));
  for (const PlannedTrace& trace : planned) {
    EBBTIDE_RETURN_IF_ERROR(AskForRuns(client, trace.header, trace.specs));
  }
  Json finished = Json::array();
  const absl::StatusOr<bool> is_sound = ReplayAll(client, common, args, stop, finished);
  if (common.output == Output::kJson && !finished.empty()) {
    PrintJson(args.traces.size() == 1 ? finished.front() : finished);
  }
  return is_sound;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> SplitList(const std::string& option,
                                                   const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (depth < 0) break;
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  const bool has_empty =
      std::any_of(parts.begin(), parts.end(), [](const std::string& part) { return part.empty(); });
  if (depth != 0 || has_empty) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s \"%s\": %s", option, text,
                        depth != 0 ? "parentheses do not match" : "an entry of the list is empty"));
  }
  return parts;
}

absl::StatusOr<client::Budget> ParseBudget(const std::string& text, uint64_t tokens) {
  absl::string_view number = text;
  client::Budget budget;
  if (absl::ConsumeSuffix(&number, "%")) {
    absl::ConsumeSuffix(&number, " ");
    budget.of_tokens = static_cast<uint32_t>(tokens);
    if (IsPlainNumber(number, true) && absl::SimpleAtod(number, &budget.percent) &&
        budget.percent > 0 && budget.percent <= 100) {
      return budget;
    }
  } else if (IsPlainNumber(number, false) && absl::SimpleAtoi(number, &budget.tokens) &&
             budget.tokens > 0 && budget.tokens <= kBudgetTokensMax) {
    return budget;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("--budget \"%s\": give 1 to %s tokens per lane, such as 512, or a percentage "
                      "over 0 %% and up to 100 %% of the trace, such as 12.5%%",
                      text, FormatCount(kBudgetTokensMax)));
}

absl::StatusOr<std::vector<RunSpec>> PlanRuns(const ReplayArgs& args, uint64_t trace_tokens) {
  EBBTIDE_ASSIGN_OR_RETURN(const auto policies, SplitList("--policy", args.policies));
  EBBTIDE_ASSIGN_OR_RETURN(const auto recalls, Choices("--recall", args.recalls));
  EBBTIDE_ASSIGN_OR_RETURN(const auto prefills, Choices("--prefill", args.prefills));
  EBBTIDE_ASSIGN_OR_RETURN(const client::Budget budget, ParseBudget(args.budget, trace_tokens));
  EBBTIDE_ASSIGN_OR_RETURN(const uint32_t chunk, ParseChunk(args.chunk));
  std::vector<RunSpec> specs;
  for (const std::string& policy : policies) {
    for (const std::string& recall : recalls) {
      for (const std::string& prefill : prefills) {
        specs.push_back({.policy = policy,
                         .recall = recall,
                         .prefill = prefill,
                         .budget = budget,
                         .chunk = chunk});
      }
    }
  }
  return specs;
}

absl::Status AskForRuns(const client::Client& client, const Trace& trace,
                        const std::vector<RunSpec>& specs) {
  for (const RunSpec& spec : specs) EBBTIDE_RETURN_IF_ERROR(Ask(client, trace, spec));
  return absl::OkStatus();
}

ReplayReport DescribeReplay(const Trace& trace, const std::string& path,
                            const client::ServerInfo& info) {
  ReplayReport report{.trace = path,
                      .steps = trace.tokens - trace.prompt_length,
                      .prompt_length = trace.prompt_length,
                      .backend = info.backend,
                      .simulated_device = info.simulated_device};
  for (const TraceLayer& layer : trace.layers) report.layers.push_back(layer.layer);
  return report;
}

absl::StatusOr<std::vector<LayerTruth>> ComputeTruths(const Trace& trace,
                                                      const std::stop_token& stop) {
  const uint64_t per_layer = trace.tokens * trace.kv_heads;
  Progress progress = StderrProgress("exact attention in float64", per_layer * trace.layers.size());
  ParallelFor parallel(std::min(kTruthThreads, AvailableCpus()));
  const auto is_stopped = [&stop] { return stop.stop_requested(); };
  std::vector<LayerTruth> truths;
  for (const TraceLayer& layer : trace.layers) {
    const uint64_t before = truths.size() * per_layer;
    const auto advance = [&](uint64_t done) { progress.Update(before + done); };
    EBBTIDE_ASSIGN_OR_RETURN(LayerTruth truth,
                             ComputeTruth(trace, layer, parallel, advance, is_stopped));
    truths.push_back(std::move(truth));
  }
  return truths;
}

absl::StatusOr<std::vector<RunReport>> PlayRuns(const client::Client& client,
                                                const ReplaySource& source,
                                                const std::vector<RunSpec>& specs) {
  std::vector<RunReport> runs;
  for (const RunSpec& spec : specs) {
    Progress progress = StderrProgress(
        absl::StrFormat("run %u of %u, %s%s", runs.size() + 1, specs.size(), spec.policy,
                        spec.recall.empty() ? "" : ", recall " + spec.recall),
        source.trace.tokens);
    const auto advance = [&](uint64_t tokens) {
      progress.Update(tokens);
      return CheckInterrupted();
    };
    EBBTIDE_ASSIGN_OR_RETURN(RunReport run, Play(client, source, spec, advance));
    runs.push_back(std::move(run));
  }
  return runs;
}

absl::StatusOr<bool> RunReplay(const Common& common, const ReplayArgs& args) {
  const std::stop_token stop = CatchInterrupts();
  std::vector<PlannedTrace> planned;  // Its mistakes come first: no daemon is needed for them.
  for (const std::string& path : args.traces) {
    EBBTIDE_ASSIGN_OR_RETURN(PlannedTrace trace, PlanTrace(args, path));
    planned.push_back(std::move(trace));
  }
  const absl::StatusOr<bool> is_sound = AskAndReplay(common, args, planned, stop);
  // An open or a close that a stop found under way, and that was not answered in time.
  if (absl::IsDeadlineExceeded(is_sound.status()) && stop.stop_requested()) {
    return absl::CancelledError("replay: stopped");
  }
  return is_sound;
}

}  // namespace ebbtide::cli
