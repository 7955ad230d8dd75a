// SPDX-License-Identifier: Apache-2.0
//
// A replay's numbers in order: what was asked, how wrong the answers were, what was proven of them,
// what became of the bytes, and what it cost.

#include "client/cli/report.h"

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "client/cli/table.h"
#include "client/cli/units.h"

namespace ebbtide::cli {
namespace {

constexpr size_t kWidthMax = 120;  // Of the wider terminals.

// Of what there was none of nothing is known, not that it was 0.
Json OrNull(bool is_known, double number) {
  return is_known ? Json(number) : Json(nullptr);
}

std::string OrDash(bool is_known, const std::string& text) {
  return is_known ? text : "-";
}

Json ToJson(const Summary& summary) {
  const bool is_known = summary.count > 0;
  return {{"mean", OrNull(is_known, summary.mean)},
          {"p50", OrNull(is_known, summary.p50)},
          {"p99", OrNull(is_known, summary.p99)},
          {"max", OrNull(is_known, summary.max)}};
}

// Only these of its numbers.
Json Ranks(const Summary& summary, std::initializer_list<const char*> names) {
  const Json all = ToJson(summary);
  Json some = Json::object();
  for (const char* name : names) some[name] = all[name];
  return some;
}

// As a page climbs: the daemon's words (proto/ebbtide/v1/cache.proto), others after them.
constexpr std::array<std::string_view, 4> kLadder = {"digest", "coarse", "fine", "exact"};

struct LadderOrder {
  static size_t Place(const std::string& rung) {
    return static_cast<size_t>(std::ranges::find(kLadder, rung) - kLadder.begin());
  }
  bool operator()(const std::string& a, const std::string& b) const {
    return std::pair(Place(a), a) < std::pair(Place(b), b);
  }
};

Json ToJson(const PerStep& touched, bool has_steps) {
  Json by_rung = Json::object();
  const std::map<std::string, double, LadderOrder> rungs(touched.by_rung.begin(),
                                                         touched.by_rung.end());
  for (const auto& [rung, value] : rungs) by_rung[rung] = value;
  return {{"total", OrNull(has_steps, touched.total)},
          {"by_rung", by_rung},
          {"by_tier", touched.by_tier}};
}

Json ToJson(const RunReport& run) {
  return {{"policy", run.policy},
          {"policy_resolved", run.policy_resolved},
          {"recall", run.recall},
          {"prefill", run.prefill},
          {"budget_tokens", run.budget_tokens},
          {"protected_tokens", run.protected_tokens},
          {"host_budget_bytes", run.host_budget_bytes},
          {"rel_error", ToJson(run.rel_error)},
          {"certified_error", ToJson(run.certified_rel_error)},
          {"prefill_rel_error", ToJson(run.prefill_rel_error)},
          {"worst_head_rel_error", OrNull(run.has_steps(), run.worst_head_rel_error)},
          {"certificate_violations", run.certificate_violations},
          {"not_met", {{"count", run.not_met}, {"by_reason", run.not_met_by_reason}}},
          {"answers_above_target",
           OrNull(run.answers_above_target.has_value(), run.answers_above_target.value_or(0))},
          {"bytes_checked", run.bytes_checked},
          {"byte_mismatches", run.byte_mismatches},
          {"bytes_lost", run.bytes_lost},
          {"bytes_checked_by_tier", run.bytes_checked_by_tier},
          {"tokens", cli::ToJson(run.tokens)},
          {"demotions", run.demotions},
          {"absent_pages", OrNull(run.has_steps(), run.absent_pages)},
          {"touched_pages_per_step", ToJson(run.touched_pages, run.has_steps())},
          {"touched_bytes_per_step", ToJson(run.touched_bytes, run.has_steps())},
          {"bound_over_error", Ranks(run.bound_over_error, {"p50"})},
          {"step_seconds", Ranks(run.step_seconds, {"p50", "p99"})},
          {"wall_seconds", run.wall_seconds}};
}

std::string Number(const Summary& summary, double Summary::*which) {
  return OrDash(summary.count > 0, FormatNumber(summary.*which));
}

std::string Seconds(const Summary& summary, double Summary::*which) {
  return OrDash(summary.count > 0, FormatElapsed(absl::Seconds(summary.*which)));
}

// Of the decode steps, where there was one.
std::string PerStepNumber(const RunReport& run, double number) {
  return OrDash(run.has_steps(), FormatNumber(number));
}

std::string PerStepBytes(const RunReport& run) {
  return OrDash(run.has_steps(), FormatBytes(static_cast<uint64_t>(run.touched_bytes.total)));
}

std::string AboveTarget(const RunReport& run) {
  return OrDash(run.answers_above_target.has_value(),
                FormatPercent(run.answers_above_target.value_or(0)));
}

// A daemon knows of no layers but those it is sent, and counts them from 0.
std::string DaemonsNumbers(const std::vector<uint32_t>& layers) {
  std::vector<uint32_t> numbers(layers.size());
  std::iota(numbers.begin(), numbers.end(), 0U);
  if (numbers == layers) return "";
  return absl::StrFormat(" (%s to the daemon)", absl::StrJoin(numbers, ", "));
}

// A line of the table: what it is called, and what a run has to say to it.
struct Line {
  std::string name;
  std::function<std::string(const RunReport&)> text;
};

std::vector<Line> QualityLines() {
  return {
      {"relative error mean",
       [](const auto& run) { return Number(run.rel_error, &Summary::mean); }},
      {"  p50", [](const auto& run) { return Number(run.rel_error, &Summary::p50); }},
      {"  p99", [](const auto& run) { return Number(run.rel_error, &Summary::p99); }},
      {"  max", [](const auto& run) { return Number(run.rel_error, &Summary::max); }},
      {"  worst head",
       [](const auto& run) { return PerStepNumber(run, run.worst_head_rel_error); }},
      {"  prefill max",
       [](const auto& run) { return Number(run.prefill_rel_error, &Summary::max); }},
      {"  certified p50",
       [](const auto& run) { return Number(run.certified_rel_error, &Summary::p50); }},
      {"bound / error p50",
       [](const auto& run) { return Number(run.bound_over_error, &Summary::p50); }},
      {"certificate violations",
       [](const auto& run) { return FormatCount(run.certificate_violations); }},
      {"answers above target", AboveTarget},
      {"answers not met", [](const auto& run) { return FormatCount(run.not_met); }},
  };
}

std::vector<Line> PlaceLines() {
  return {
      {"lane-tokens in host", [](const auto& run) { return FormatCount(run.tokens.host); }},
      {"  in rocksdb", [](const auto& run) { return FormatCount(run.tokens.rocksdb); }},
      {"  in open blocks", [](const auto& run) { return FormatCount(run.tokens.open); }},
      {"  working set slots", [](const auto& run) { return FormatCount(run.tokens.device); }},
      {"demotions", [](const auto& run) { return FormatCount(run.demotions); }},
      {"bytes checked", [](const auto& run) { return FormatBytes(run.bytes_checked); }},
      {"  mismatches", [](const auto& run) { return FormatCount(run.byte_mismatches); }},
      {"  lost, and named so", [](const auto& run) { return FormatBytes(run.bytes_lost); }},
  };
}

std::vector<Line> PageLines() {
  return {
      {"absent pages", [](const auto& run) { return PerStepNumber(run, run.absent_pages); }},
      {"  touched per step",
       [](const auto& run) { return PerStepNumber(run, run.touched_pages.total); }},
  };
}

std::vector<Line> CostLines() {
  return {
      {"  bytes per step", PerStepBytes},
      {"step p50", [](const auto& run) { return Seconds(run.step_seconds, &Summary::p50); }},
      {"  p99", [](const auto& run) { return Seconds(run.step_seconds, &Summary::p99); }},
      {"whole run", [](const auto& run) { return FormatElapsed(absl::Seconds(run.wall_seconds)); }},
  };
}

// Rungs and reasons are named by the daemon, so their lines come from what the runs hold.
std::vector<Line> NamedLines(const std::vector<RunReport>& runs, const std::string& what,
                             std::map<std::string, double> PerStep::*by) {
  std::map<std::string, bool, LadderOrder> names;
  for (const RunReport& run : runs) {
    for (const auto& [name, pages] : run.touched_pages.*by) names[name] = true;
  }
  std::vector<Line> lines;
  for (const auto& entry : names) {
    const std::string name = entry.first;
    lines.push_back({absl::StrFormat("  %s %s", what, name), [name, by](const RunReport& run) {
                       const auto found = (run.touched_pages.*by).find(name);
                       return found == (run.touched_pages.*by).end() ? "-"
                                                                     : FormatNumber(found->second);
                     }});
  }
  return lines;
}

bool ShareOne(const std::vector<RunReport>& runs, std::string RunReport::*what) {
  return std::ranges::all_of(runs,
                             [&](const RunReport& run) { return run.*what == runs.front().*what; });
}

// What runs are compared by; all that fits a line.
std::vector<Line> RowLines() {
  return {
      {"error p50", [](const auto& run) { return Number(run.rel_error, &Summary::p50); }},
      {"p99", [](const auto& run) { return Number(run.rel_error, &Summary::p99); }},
      {"certified p50",
       [](const auto& run) { return Number(run.certified_rel_error, &Summary::p50); }},
      {"above target", AboveTarget},
      {"not met", [](const auto& run) { return FormatCount(run.not_met); }},
      {"sound", [](const auto& run) { return run.is_sound() ? "yes" : "no"; }},
      {"read per step", PerStepBytes},
      {"step p50", [](const auto& run) { return Seconds(run.step_seconds, &Summary::p50); }},
  };
}

std::string RowPerRun(const std::vector<RunReport>& runs) {
  const RunReport& first = runs.front();
  const bool one_prefill = ShareOne(runs, &RunReport::prefill);
  std::vector<Column> columns = {{"policy"}, {"recall"}};
  if (!one_prefill) columns.push_back({"prefill"});
  const std::vector<Line> lines = RowLines();
  for (const Line& line : lines) columns.push_back({line.name, Align::kRight});
  Table table(columns);
  std::string unsound;
  for (const RunReport& run : runs) {
    std::vector<std::string> cells = {PolicyLabel(run), run.recall};
    if (!one_prefill) cells.push_back(run.prefill);
    for (const Line& line : lines) cells.push_back(line.text(run));
    table.AddRow(std::move(cells));
    if (run.is_sound()) continue;
    absl::StrAppendFormat(
        &unsound, "not sound: %s, %s, %s: %s certificate violations, %s mismatches, %s lost\n",
        PolicyLabel(run), run.recall, run.prefill, FormatCount(run.certificate_violations),
        FormatCount(run.byte_mismatches), FormatBytes(run.bytes_lost));
  }
  return absl::StrFormat(
      "budget per lane %s, host budget %s%s\n\n%s%s\n-o json has all numbers of each run.\n",
      FormatCount(first.budget_tokens), FormatBytes(first.host_budget_bytes),
      one_prefill ? ", prefill " + first.prefill : "", table.Render(), unsound);
}

void AddLines(const std::vector<Line>& lines, const std::vector<RunReport>& runs, Table& table) {
  for (const Line& line : lines) {
    std::vector<std::string> cells = {line.name};
    for (const RunReport& run : runs) cells.push_back(line.text(run));
    table.AddRow(std::move(cells));
  }
}

}  // namespace

bool ReplayReport::is_sound() const {
  return std::all_of(runs.begin(), runs.end(), [](const RunReport& run) { return run.is_sound(); });
}

Json ToJson(const ReplayReport& report) {
  Json json = {{"trace", report.trace},     {"steps", report.steps},
               {"layers", report.layers},   {"prompt_length", report.prompt_length},
               {"backend", report.backend}, {"simulated_device", report.simulated_device},
               {"runs", Json::array()}};
  for (const RunReport& run : report.runs) json["runs"].push_back(ToJson(run));
  return json;
}

std::string PolicyLabel(const RunReport& run) {
  return run.policy == "auto" ? "auto: " + WithoutArguments(run.policy_resolved) : run.policy;
}

std::string RenderReport(const ReplayReport& report) {
  const std::string text = absl::StrFormat(
      "%s: %s prompt tokens, then %s decode steps; layers %s of the model%s\n"
      "backend %s%s\n\n",
      report.trace, FormatCount(report.prompt_length), FormatCount(report.steps),
      absl::StrJoin(report.layers, ", "), DaemonsNumbers(report.layers), report.backend,
      report.simulated_device ? ", simulated device (host memory)" : "");
  std::vector<Column> columns = {{"policy"}};
  for (const RunReport& run : report.runs) columns.push_back({PolicyLabel(run), Align::kRight});
  Table table(columns);
  AddLines(
      {{"recall", [](const auto& run) { return run.recall; }},
       {"prefill", [](const auto& run) { return run.prefill; }},
       {"budget per lane", [](const auto& run) { return FormatCount(run.budget_tokens); }},
       {"  of it protected", [](const auto& run) { return FormatCount(run.protected_tokens); }},
       {"host budget", [](const auto& run) { return FormatBytes(run.host_budget_bytes); }}},
      report.runs, table);
  AddLines(QualityLines(), report.runs, table);
  AddLines(PlaceLines(), report.runs, table);
  AddLines(PageLines(), report.runs, table);
  AddLines(NamedLines(report.runs, "touched pages:", &PerStep::by_rung), report.runs, table);
  AddLines(NamedLines(report.runs, "touched pages in", &PerStep::by_tier), report.runs, table);
  AddLines(CostLines(), report.runs, table);
  return text + (table.Width() <= kWidthMax ? table.Render() : RowPerRun(report.runs));
}

}  // namespace ebbtide::cli
