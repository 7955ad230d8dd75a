// SPDX-License-Identifier: Apache-2.0
//
// A replay's numbers in order: what was asked, how wrong the answers were, what was proven of them,
// what became of the bytes, and what it cost.

#include "client/cli/report.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "client/cli/table.h"
#include "client/cli/units.h"

namespace ebbtide::cli {
namespace {

Json ToJson(const Summary& summary) {
  return {{"mean", summary.mean}, {"p50", summary.p50}, {"p99", summary.p99}, {"max", summary.max}};
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

Json ToJson(const PerStep& touched) {
  Json by_rung = Json::object();
  const std::map<std::string, double, LadderOrder> rungs(touched.by_rung.begin(),
                                                         touched.by_rung.end());
  for (const auto& [rung, value] : rungs) by_rung[rung] = value;
  return {{"total", touched.total}, {"by_rung", by_rung}, {"by_tier", touched.by_tier}};
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
          {"worst_head_rel_error", run.worst_head_rel_error},
          {"certificate_violations", run.certificate_violations},
          {"not_met", {{"count", run.not_met}, {"by_reason", run.not_met_by_reason}}},
          {"answers_above_target",
           run.answers_above_target.has_value() ? Json(*run.answers_above_target) : Json(nullptr)},
          {"bytes_checked", run.bytes_checked},
          {"byte_mismatches", run.byte_mismatches},
          {"bytes_lost", run.bytes_lost},
          {"bytes_checked_by_tier", run.bytes_checked_by_tier},
          {"tokens", cli::ToJson(run.tokens)},
          {"demotions", run.demotions},
          {"absent_pages", run.absent_pages},
          {"touched_pages_per_step", ToJson(run.touched_pages)},
          {"touched_bytes_per_step", ToJson(run.touched_bytes)},
          {"bound_over_error", {{"p50", run.bound_over_error_p50}}},
          {"step_seconds", {{"p50", run.step_seconds.p50}, {"p99", run.step_seconds.p99}}},
          {"wall_seconds", run.wall_seconds}};
}

std::string Seconds(double seconds) {
  return FormatElapsed(absl::Seconds(seconds));
}

std::string Bytes(double bytes) {
  return FormatBytes(static_cast<uint64_t>(bytes));
}

// A line of the table: what it is called, and what a run has to say to it.
struct Line {
  std::string name;
  std::function<std::string(const RunReport&)> text;
};

std::vector<Line> QualityLines() {
  return {
      {"relative error mean", [](const auto& run) { return FormatNumber(run.rel_error.mean); }},
      {"  p50", [](const auto& run) { return FormatNumber(run.rel_error.p50); }},
      {"  p99", [](const auto& run) { return FormatNumber(run.rel_error.p99); }},
      {"  max", [](const auto& run) { return FormatNumber(run.rel_error.max); }},
      {"  worst head", [](const auto& run) { return FormatNumber(run.worst_head_rel_error); }},
      {"  prefill max", [](const auto& run) { return FormatNumber(run.prefill_rel_error.max); }},
      {"  certified p50",
       [](const auto& run) { return FormatNumber(run.certified_rel_error.p50); }},
      {"bound / error p50", [](const auto& run) { return FormatNumber(run.bound_over_error_p50); }},
      {"certificate violations",
       [](const auto& run) { return FormatCount(run.certificate_violations); }},
      {"answers above target",
       [](const auto& run) {
         return run.answers_above_target.has_value() ? FormatPercent(*run.answers_above_target)
                                                     : "-";
       }},
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
      {"absent pages", [](const auto& run) { return FormatNumber(run.absent_pages); }},
      {"  touched per step", [](const auto& run) { return FormatNumber(run.touched_pages.total); }},
  };
}

std::vector<Line> CostLines() {
  return {
      {"  bytes per step", [](const auto& run) { return Bytes(run.touched_bytes.total); }},
      {"step p50", [](const auto& run) { return Seconds(run.step_seconds.p50); }},
      {"  p99", [](const auto& run) { return Seconds(run.step_seconds.p99); }},
      {"whole run", [](const auto& run) { return Seconds(run.wall_seconds); }},
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
  Json json = {{"trace", report.trace},
               {"steps", report.steps},
               {"layers", report.layers},
               {"prompt_length", report.prompt_length},
               {"runs", Json::array()}};
  for (const RunReport& run : report.runs) json["runs"].push_back(ToJson(run));
  return json;
}

std::string RenderReport(const ReplayReport& report) {
  std::string text = absl::StrFormat("%s: %s prompt tokens, then %s decode steps; layers %s\n\n",
                                     report.trace, FormatCount(report.prompt_length),
                                     FormatCount(report.steps), absl::StrJoin(report.layers, ", "));
  std::vector<Column> columns = {{"policy"}};
  for (const RunReport& run : report.runs) columns.push_back({run.policy, Align::kRight});
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
  return text + table.Render();
}

}  // namespace ebbtide::cli
