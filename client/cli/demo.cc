// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl demo`: plan, start, play, tell, stop, clean up.

#include "client/cli/demo.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <stop_token>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "base/clock.h"
#include "base/executor.h"
#include "base/status_macros.h"
#include "client/cli/daemon_process.h"
#include "client/cli/interrupt.h"
#include "client/cli/own_folder.h"
#include "client/cli/replay.h"
#include "client/cli/table.h"
#include "client/cli/units.h"

namespace ebbtide::cli {
namespace {

constexpr char kTrace[] = "tests/data/traces/smollm2-kjv-4096.safetensors";
constexpr double kTarget = 0.02;     // Of the relative error, as in the recall modes below.
constexpr uint64_t kStepsMax = 512;  // Decoded one by one; what comes before is prompt.
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr absl::Duration kStartTimeout = absl::Seconds(20);
constexpr absl::Duration kStopTimeout = absl::Seconds(20);

// What discarding costs, then the same budget with recall.
constexpr std::array<std::pair<const char*, const char*>, 5> kRuns = {
    {{"streaming", "off"},
     {"snapkv+caote", "off"},
     {"snapkv+caote", "bounded(0.02)"},
     {"snapkv+caote", "estimated(0.02)"},
     {"snapkv+caote", "exact"}}};

// The last lines of the daemon's log, for when it fails.
std::string LogTail(const DemoPlan& plan) {
  constexpr size_t kLines = 10;
  std::ifstream log(plan.log_file());
  std::vector<std::string> lines;
  for (std::string line; std::getline(log, line);) {
    lines.push_back(line);
    if (lines.size() > kLines) lines.erase(lines.begin());
  }
  return lines.empty() ? "its log is empty" : "its log ends:\n  " + absl::StrJoin(lines, "\n  ");
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> StartDaemon(const DemoPlan& plan) {
  std::ofstream file(plan.config_file());
  file << plan.config();
  file.close();
  if (!file) {
    return absl::UnavailableError(absl::StrFormat("demo: %s can't be written", plan.config_file()));
  }
  EBBTIDE_ASSIGN_OR_RETURN(const std::string daemon, FindDaemon());
  return DaemonProcess::Start({.program = daemon, .arguments = {"--config", plan.config_file()}},
                              plan.log_file());
}

// Asks until the daemon answers, has ended, or takes too long.
absl::StatusOr<client::Client> ConnectTo(DaemonProcess& daemon, const DemoPlan& plan,
                                         const std::stop_token& stop) {
  const absl::Duration deadline = SteadyClock().SinceStart() + kStartTimeout;
  const client::ClientOptions once = {
      .connect_timeout = absl::Seconds(1), .attempts_max = 1, .stop = stop};
  while (true) {
    if (client::Client::Connect(plan.socket(), once).ok()) {
      return client::Client::Connect(plan.socket(), {.stop = stop});
    }
    EBBTIDE_RETURN_IF_ERROR(CheckInterrupted());
    if (daemon.EndsWithin(absl::Milliseconds(50))) {
      return absl::UnavailableError("demo: the daemon ended at its start; " + LogTail(plan));
    }
    if (SteadyClock().SinceStart() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrFormat("demo: the daemon does not answer at %s after %s; %s", plan.socket(),
                          FormatElapsed(kStartTimeout), LogTail(plan)));
    }
  }
}

// With the daemon's last words, where its end is why a call failed.
absl::Status Explained(const absl::Status& status, DaemonProcess& daemon, const DemoPlan& plan) {
  if (status.ok() || absl::IsInvalidArgument(status) || daemon.IsRunning()) return status;
  return absl::UnavailableError(absl::StrFormat("demo: the daemon ended (%s); %s",
                                                std::string(status.message()), LogTail(plan)));
}

std::string LayerNumbers(const Trace& trace) {
  return absl::StrJoin(trace.layers, ", ", [](std::string* text, const TraceLayer& layer) {
    absl::StrAppend(text, layer.layer);
  });
}

std::string Introduction(const Trace& trace, const DemoPlan& plan, const client::ServerInfo& info) {
  return absl::StrFormat(
      "A real model's memory, in a place far too small for it.\n\n"
      "model      %s, layer%s %s\n"
      "text       %s\n"
      "           %s tokens, of which the last %s are decoded one by one; %s of keys and values\n"
      "machine    %d CPUs, %s of memory; device: %s%s\n"
      "daemon     ebbtided %s, started for this demo in %s\n"
      "           device pool %s, for the working set and a chunk of the prompt;\n"
      "           host tier %s, the rest goes to RocksDB on disk\n\n",
      trace.model, trace.layers.size() == 1 ? "" : "s", LayerNumbers(trace), trace.text,
      FormatCount(trace.tokens), FormatCount(trace.tokens - trace.prompt_length),
      FormatBytes(trace.kv_bytes()), AvailableCpus(), FormatBytes(AvailableMemoryBytes()),
      info.backend, info.simulated_device ? ", simulated in host memory" : "", info.version,
      plan.folder, FormatBytes(plan.device_budget_bytes), FormatBytes(plan.host_budget_bytes));
}

// "-" where nothing was decoded: a number would be made up.
std::string Percent(const Summary& summary, double Summary::*which) {
  return summary.count > 0 ? FormatPercent(summary.*which) : "-";
}

std::string Seconds(const Summary& summary, double Summary::*which) {
  return summary.count > 0 ? FormatElapsed(absl::Seconds(summary.*which)) : "-";
}

std::string RunsTable(const std::vector<RunReport>& runs) {
  Table table({{"policy"},
               {"recall"},
               {"error p50", Align::kRight},
               {"p99", Align::kRight},
               {absl::StrFormat("above %s", FormatPercent(kTarget)), Align::kRight},
               {"certified p50", Align::kRight},
               {"p99", Align::kRight},
               {"read per step", Align::kRight},
               {"step p50", Align::kRight},
               {"p99", Align::kRight}});
  for (const RunReport& run : runs) {
    table.AddRow(
        {PolicyLabel(run), run.recall, Percent(run.rel_error, &Summary::p50),
         Percent(run.rel_error, &Summary::p99),
         run.answers_above_target.has_value() ? FormatPercent(*run.answers_above_target) : "-",
         Percent(run.certified_rel_error, &Summary::p50),
         Percent(run.certified_rel_error, &Summary::p99),
         run.has_steps() ? FormatBytes(static_cast<uint64_t>(run.touched_bytes.total)) : "-",
         Seconds(run.step_seconds, &Summary::p50), Seconds(run.step_seconds, &Summary::p99)});
  }
  return table.Render();
}

// Sums of all runs, for the verdict.
struct Totals {
  uint64_t bytes_checked = 0;
  uint64_t byte_mismatches = 0;
  uint64_t bytes_lost = 0;
  uint64_t violations = 0;
};

std::vector<RunSpec> Specs(const client::Budget& budget) {
  std::vector<RunSpec> specs;
  specs.reserve(kRuns.size());
  for (const auto& [policy, recall] : kRuns) {
    specs.push_back({.policy = policy, .recall = recall, .budget = budget, .target = kTarget});
  }
  return specs;
}

absl::StatusOr<ReplayReport> PlayDemo(const client::Client& client, const Trace& trace,
                                      const std::vector<RunSpec>& specs, ReplayReport report,
                                      const std::stop_token& stop) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<LayerTruth> truths, ComputeTruths(trace, stop));
  EBBTIDE_ASSIGN_OR_RETURN(report.runs,
                           PlayRuns(client, {.trace = trace, .truths = truths}, specs));
  return report;
}

// What the demo plays, and where.
struct Demo {
  const std::string& path;
  const Trace& trace;
  const std::vector<RunSpec>& specs;
  const DemoPlan& plan;
};

// Plays it through the daemon that was just started, and stops that.
absl::StatusOr<bool> PlayThrough(DaemonProcess& daemon, const Demo& demo, Output output,
                                 const std::stop_token& stop) {
  const DemoPlan& plan = demo.plan;
  EBBTIDE_ASSIGN_OR_RETURN(const client::Client client, ConnectTo(daemon, plan, stop));
  const absl::StatusOr<client::ServerInfo> info = client.GetServerInfo();
  EBBTIDE_RETURN_IF_ERROR(Explained(info.status(), daemon, plan));
  EBBTIDE_RETURN_IF_ERROR(Explained(AskForRuns(client, demo.trace, demo.specs), daemon, plan));
  if (output == Output::kTable) Print(Introduction(demo.trace, plan, *info));
  const absl::StatusOr<ReplayReport> report =
      PlayDemo(client, demo.trace, demo.specs, DescribeReplay(demo.trace, demo.path, *info), stop);
  EBBTIDE_RETURN_IF_ERROR(Explained(report.status(), daemon, plan));
  output == Output::kJson ? PrintJson(ToJson(*report)) : Print(RenderDemo(demo.trace, *report));
  if (const absl::Status stopped = daemon.Stop(kStopTimeout); !stopped.ok()) {
    return absl::Status(
        stopped.code(),
        absl::StrFormat("demo: %s; %s", std::string(stopped.message()), LogTail(plan)));
  }
  return report->is_sound();
}

}  // namespace

std::string DemoPlan::config() const {
  return absl::StrFormat(
      "server:\n"
      "  listen: %s\n"
      "device:\n"
      "  budget: %uB\n"
      "host:\n"
      "  budget: %uB\n"
      "rocksdb:\n"
      "  path: %s/rocksdb\n"
      "  budget: %uB\n",
      socket(), device_budget_bytes, host_budget_bytes, folder, rocksdb_budget_bytes);
}

DemoPlan PlanDemo(const Trace& trace, const std::string& folder) {
  const uint64_t kv_bytes = trace.kv_bytes();
  const uint64_t records = std::max(kMiB, kv_bytes / 4);
  const uint64_t digests = kv_bytes / 4;  // Of absent pages; 22 % were measured on the model.
  return {.folder = folder,
          .device_budget_bytes = std::max(4 * kMiB, 2 * kv_bytes),
          .host_budget_bytes = records + digests,
          .rocksdb_budget_bytes = std::max(64 * kMiB, 4 * kv_bytes)};
}

absl::StatusOr<std::string> FindDemoTrace() {
  std::error_code error;
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (std::filesystem::path folder : {program, std::filesystem::current_path(error)}) {
    for (; !folder.empty(); folder = folder.parent_path()) {
      if (std::filesystem::exists(folder / kTrace, error)) return (folder / kTrace).string();
      if (folder == folder.root_path()) break;
    }
  }
  return absl::NotFoundError(absl::StrFormat(
      "demo: no %s in any folder above %s or the current one; name a trace with --trace", kTrace,
      program.string()));
}

std::string RenderDemo(const Trace& trace, const ReplayReport& report) {
  Totals totals;
  for (const RunReport& run : report.runs) {
    totals.bytes_checked += run.bytes_checked;
    totals.byte_mismatches += run.byte_mismatches;
    totals.bytes_lost += run.bytes_lost;
    totals.violations += run.certificate_violations;
  }
  const RunReport& last = report.runs.back();
  const std::string budget = FormatCount(last.budget_tokens), tokens = FormatCount(trace.tokens);
  const std::string held =
      last.budget_tokens < trace.tokens
          ? absl::StrFormat("%s of %s tokens per lane, and the token of the step", budget, tokens)
          : absl::StrFormat("all of %s tokens per lane: its budget is %s", tokens, budget);
  std::string text = absl::StrFormat(
      "The working set holds %s. Error: of a layer's\n"
      "output against full attention in float64; certified: what the daemon vouches for. Recall "
      "off is\n"
      "what discarding costs. bounded reads back until its certificate is within the target; "
      "estimated\n"
      "stops where errors are small by experience and proves nothing, so its certificate covers "
      "all that\n"
      "it left unread. Bytes and times are those of one step, a call of each layer.\n\n",
      held);
  text += RunsTable(report.runs);
  const uint64_t lanes = trace.kv_heads * trace.layers.size();
  text += absl::StrFormat(
      "\n%s tokens in %s lanes (layers: %s, kv heads: %s) are %s lane-tokens, a key and a value "
      "each. In the last\n"
      "run %s of them left the working set and %s are there still. All are kept below it: %s in\n"
      "host memory, %s in RocksDB, %s in blocks still open.\n\n",
      FormatCount(trace.tokens), FormatCount(lanes), FormatCount(trace.layers.size()),
      FormatCount(trace.kv_heads), FormatCount(trace.tokens * lanes), FormatCount(last.demotions),
      FormatCount(last.tokens.device), FormatCount(last.tokens.host),
      FormatCount(last.tokens.rocksdb), FormatCount(last.tokens.open));
  text += absl::StrFormat(
      "Every key and value read back and compared: %s, %s mismatches, %s lost.\n"
      "Every error held against its certificate: %s violations.\n",
      FormatBytes(totals.bytes_checked), FormatCount(totals.byte_mismatches),
      FormatBytes(totals.bytes_lost), FormatCount(totals.violations));
  return text;
}

absl::StatusOr<bool> RunDemo(const Common& common, const DemoArgs& args) {
  std::string path = args.trace;
  if (path.empty()) {
    EBBTIDE_ASSIGN_OR_RETURN(path, FindDemoTrace());
  }
  EBBTIDE_ASSIGN_OR_RETURN(Trace trace, ReadTrace(path, {}));
  EBBTIDE_ASSIGN_OR_RETURN(const client::Budget budget, ParseBudget(args.budget, trace.tokens));
  if (trace.tokens > kStepsMax) {
    trace.prompt_length = std::max(trace.prompt_length, trace.tokens - kStepsMax);
  }
  const std::stop_token stop = CatchInterrupts();
  EBBTIDE_ASSIGN_OR_RETURN(const OwnFolder folder, OwnFolder::Make("ebbtide-demo"));
  const DemoPlan plan = PlanDemo(trace, folder.path());
  EBBTIDE_ASSIGN_OR_RETURN(const std::unique_ptr<DaemonProcess> daemon, StartDaemon(plan));
  // Nobody else asks it anything: once a stop is asked for, it has nothing to end in order.
  const std::stop_callback end_daemon(stop, [&] { daemon->Kill(); });
  const std::vector<RunSpec> specs = Specs(budget);
  const absl::StatusOr<bool> is_sound = PlayThrough(
      *daemon, {.path = path, .trace = trace, .specs = specs, .plan = plan}, common.output, stop);
  // Without the daemon everything fails but what it had refused before.
  if (!is_sound.ok() && !absl::IsInvalidArgument(is_sound.status()) && stop.stop_requested()) {
    return absl::CancelledError("demo: stopped");
  }
  return is_sound;
}

}  // namespace ebbtide::cli
