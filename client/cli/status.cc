// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl status` and `ebbctl tiers`: is the daemon well, and what lies where.

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "base/printable.h"
#include "base/status_macros.h"
#include "client/cli/json.h"
#include "client/cli/table.h"
#include "client/cli/units.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {
namespace {

std::string Share(uint64_t part, uint64_t whole) {
  return whole == 0 ? "-" : FormatPercent(static_cast<double>(part) / static_cast<double>(whole));
}

uint64_t Sum(const std::map<std::string, uint64_t>& counts) {
  uint64_t sum = 0;
  for (const auto& [reason, count] : counts) sum += count;
  return sum;
}

// "17 (DEADLINE 12, RECALL_OFF 5)"
std::string WithReasons(const std::map<std::string, uint64_t>& counts) {
  std::string text = FormatCount(Sum(counts));
  std::vector<std::string> parts;
  for (const auto& [reason, count] : counts) {
    if (count > 0) parts.push_back(absl::StrFormat("%s %s", reason, FormatCount(count)));
  }
  if (!parts.empty()) text += absl::StrFormat(" (%s)", absl::StrJoin(parts, ", "));
  return text;
}

std::string State(const client::TierStats& tier) {
  if (tier.degraded) return "degraded";
  return tier.corrupt_pages > 0 ? "pages lost" : "ok";
}

Json TiersJson(const client::Stats& stats) {
  Json tiers = Json::array();
  for (const client::TierStats& tier : stats.tiers) tiers.push_back(ToJson(tier));
  return tiers;
}

// Complaints go to stderr, so that stdout stays what was asked for.
bool Report(const std::vector<std::string>& complaints) {
  for (const std::string& complaint : complaints) {
    absl::FPrintF(stderr, "ebbctl: %s\n", Printable(complaint));
  }
  return complaints.empty();
}

}  // namespace

std::vector<std::string> Complaints(const client::Stats& stats) {
  std::vector<std::string> complaints;
  for (const client::TierStats& tier : stats.tiers) {
    const auto name = client::TierName(tier.tier);
    if (tier.degraded) {
      complaints.push_back(absl::StrFormat("%s tier is degraded: %s", name, tier.degraded_why));
    }
    if (tier.corrupt_pages > 0) {
      complaints.push_back(absl::StrFormat(
          "%s tier: %s reads of pages failed their checksum; answers left those pages out", name,
          FormatCount(tier.corrupt_pages)));
    }
  }
  if (!stats.pages_lost.empty()) {
    complaints.push_back(absl::StrFormat("lost pages: %s; the daemon's log names them",
                                         WithReasons(stats.pages_lost)));
  }
  return complaints;
}

std::string RenderTiers(const client::Stats& stats) {
  Table table({{"tier"},
               {"state"},
               {"used", Align::kRight},
               {"budget", Align::kRight},
               {"full", Align::kRight},
               {"blocks", Align::kRight},
               {"lane-tokens", Align::kRight},
               {"corrupt reads", Align::kRight},
               {"place"}});
  for (const client::TierStats& tier : stats.tiers) {
    table.AddRow({std::string(client::TierName(tier.tier)), State(tier),
                  FormatBytes(tier.used_bytes), FormatBytes(tier.budget_bytes),
                  Share(tier.used_bytes, tier.budget_bytes), FormatCount(tier.blocks),
                  FormatCount(tier.tokens), FormatCount(tier.corrupt_pages), tier.place});
  }
  return table.Render();
}

std::string RenderStatus(const client::ServerInfo& info, const client::Stats& stats) {
  std::string text = absl::StrFormat(
      "ebbtided %s, up %s, boot id %s\n"
      "listens    %s\n"
      "backend    %s%s\n"
      "limits     %s per message, %s tokens per item\n"
      "recall     %s unless a sequence says otherwise\n\n",
      info.version, FormatElapsed(info.uptime), info.boot_id, absl::StrJoin(info.transports, ", "),
      info.backend, info.simulated_device ? ", simulated device (host memory)" : "",
      FormatBytes(info.message_bytes_max), FormatCount(info.chunk_tokens_max), info.default_recall);
  text += RenderTiers(stats);
  text += absl::StrFormat(
      "\nsequences  %s open\n"
      "tokens     %s appended, %s demoted, %s forgotten (lane-tokens)\n"
      "answers    %s in decode; with recall %s, of them not met %s\n"
      "recalled   %s pages, %s; lost %s\n"
      "blocks     %s sealed, %s moved down to rocksdb; failed %s\n"
      "refused    %s\n",
      FormatCount(stats.sequences), FormatCount(stats.tokens_appended),
      FormatCount(stats.tokens_demoted), WithReasons(stats.tokens_forgotten),
      FormatCount(stats.answers), FormatCount(stats.answers_with_target),
      WithReasons(stats.answers_not_met), FormatCount(stats.pages_recalled),
      FormatBytes(stats.bytes_recalled), WithReasons(stats.pages_lost),
      FormatCount(stats.blocks_sealed), FormatCount(stats.blocks_moved_down),
      WithReasons(stats.carries_failed), WithReasons(stats.refused));
  for (const std::string& note : info.notes) text += absl::StrFormat("note       %s\n", note);
  return text;
}

absl::StatusOr<bool> RunStatus(const Common& common) {
  EBBTIDE_ASSIGN_OR_RETURN(const client::Client client, client::Client::Connect(common.socket));
  EBBTIDE_ASSIGN_OR_RETURN(const client::ServerInfo info, client.GetServerInfo());
  EBBTIDE_ASSIGN_OR_RETURN(const client::Stats stats, client.GetStats());
  const std::vector<std::string> complaints = Complaints(stats);
  if (common.output == Output::kJson) {
    const Json json = {{"endpoint", client.target()},
                       {"server", ToJson(info)},
                       {"tiers", TiersJson(stats)},
                       {"stats", ToJson(stats)},
                       {"complaints", complaints}};
    PrintJson(json);
  } else {
    Print(RenderStatus(info, stats));
  }
  return Report(complaints);
}

absl::StatusOr<bool> RunTiers(const Common& common) {
  EBBTIDE_ASSIGN_OR_RETURN(const client::Client client, client::Client::Connect(common.socket));
  EBBTIDE_ASSIGN_OR_RETURN(const client::Stats stats, client.GetStats());
  common.output == Output::kJson ? PrintJson(TiersJson(stats)) : Print(RenderTiers(stats));
  return Report(Complaints(stats));
}

void Print(const std::string& text) {
  const std::string shown = PrintableLines(text);
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  std::fflush(stdout);
}

}  // namespace ebbtide::cli
