// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl sequences` and `ebbctl describe`: who is open, and where each of its tokens lies.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

#include "base/status_macros.h"
#include "client/cli/json.h"
#include "client/cli/table.h"
#include "client/cli/units.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {
namespace {

std::string RenderLanes(const std::vector<client::LaneDescription>& lanes) {
  Table table({{"layer", Align::kRight},
               {"kv head", Align::kRight},
               {"length", Align::kRight},
               {"resident", Align::kRight},
               {"absent", Align::kRight},
               {"demoted so far", Align::kRight}});
  for (const client::LaneDescription& lane : lanes) {
    table.AddRow({FormatCount(lane.layer), FormatCount(lane.kv_head), FormatCount(lane.length),
                  FormatCount(lane.resident), FormatCount(lane.absent), FormatCount(lane.demoted)});
  }
  return table.Render();
}

// In lines, since its names are long.
std::string RenderSummary(const client::SequenceSummary& sequence) {
  return absl::StrFormat(
      "sequence     %s\n"
      "model        %s\n"
      "policy       %s\n"
      "recall       %s\n"
      "prefill      %s\n"
      "tokens       %s in every layer, budget %s per lane\n"
      "device       %s slots, %s reserved for its lanes\n"
      "lane-tokens  %s in host, %s in rocksdb, %s in open blocks\n"
      "idle         %s\n",
      sequence.name, sequence.model, sequence.policy, sequence.recall, sequence.prefill,
      FormatCount(sequence.committed), FormatCount(sequence.budget_tokens),
      FormatCount(sequence.tokens.device), FormatBytes(sequence.device_bytes),
      FormatCount(sequence.tokens.host), FormatCount(sequence.tokens.rocksdb),
      FormatCount(sequence.tokens.open), FormatElapsed(sequence.idle));
}

std::string RenderTokens(const std::vector<client::TokenDescription>& tokens) {
  Table table({{"index", Align::kRight},
               {"position", Align::kRight},
               {"working set"},
               {"tier"},
               {"score", Align::kRight},
               {"why"}});
  for (const client::TokenDescription& token : tokens) {
    table.AddRow({FormatCount(token.index), absl::StrFormat("%d", token.position),
                  token.resident ? "resident" : "absent", std::string(client::TierName(token.tier)),
                  FormatNumber(token.score), token.why});
  }
  return table.Render();
}

}  // namespace

absl::StatusOr<client::LaneId> ParseLane(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  client::LaneId lane;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &lane.layer) ||
      !absl::SimpleAtoi(parts[1], &lane.kv_head)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--lane \"%s\": give LAYER/KV_HEAD, such as 0/0", text));
  }
  return lane;
}

std::string RenderSequences(const std::vector<client::SequenceSummary>& sequences) {
  if (sequences.empty()) return "no sequence is open\n";
  Table table({{"sequence"},
               {"policy"},
               {"tokens", Align::kRight},
               {"budget", Align::kRight},
               {"device slots", Align::kRight},
               {"lane-tokens in host", Align::kRight},
               {"in rocksdb", Align::kRight},
               {"in open blocks", Align::kRight},
               {"idle", Align::kRight}});
  for (const client::SequenceSummary& sequence : sequences) {
    table.AddRow({sequence.name, WithoutArguments(sequence.policy), FormatCount(sequence.committed),
                  FormatCount(sequence.budget_tokens), FormatCount(sequence.tokens.device),
                  FormatCount(sequence.tokens.host), FormatCount(sequence.tokens.rocksdb),
                  FormatCount(sequence.tokens.open), FormatElapsed(sequence.idle)});
  }
  return table.Render();
}

absl::StatusOr<client::SequenceDescription> OnlyLane(client::SequenceDescription description,
                                                     client::LaneId lane) {
  uint32_t last_layer = 0, last_kv_head = 0;
  for (const client::LaneDescription& each : description.lanes) {
    last_layer = std::max(last_layer, each.layer);
    last_kv_head = std::max(last_kv_head, each.kv_head);
  }
  std::erase_if(description.lanes, [&](const client::LaneDescription& each) {
    return each.layer != lane.layer || each.kv_head != lane.kv_head;
  });
  if (!description.lanes.empty()) return description;
  return absl::InvalidArgumentError(absl::StrFormat(
      "lane %u/%u: sequence \"%s\" has layers 0 to %u and kv heads 0 to %u", lane.layer,
      lane.kv_head, description.summary.name, last_layer, last_kv_head));
}

std::string RenderDescription(const client::SequenceDescription& description) {
  std::string text = RenderSummary(description.summary);
  text += "\n" + RenderLanes(description.lanes);
  if (!description.tokens.empty()) text += "\n" + RenderTokens(description.tokens);
  return text;
}

absl::StatusOr<bool> RunSequences(const Common& common) {
  EBBTIDE_ASSIGN_OR_RETURN(const client::Client client, client::Client::Connect(common.socket));
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<client::SequenceSummary> sequences,
                           client.ListSequences());
  if (common.output == Output::kTable) {
    Print(RenderSequences(sequences));
    return true;
  }
  Json json = Json::array();
  for (const client::SequenceSummary& sequence : sequences) json.push_back(ToJson(sequence));
  PrintJson(json);
  return true;
}

absl::StatusOr<bool> RunDescribe(const Common& common, const DescribeArgs& args) {
  client::DescribeOptions options{.sequence = args.sequence, .with_lanes = true};
  std::optional<client::LaneId> lane;
  if (!args.lane.empty()) {
    EBBTIDE_ASSIGN_OR_RETURN(lane, ParseLane(args.lane));
  }
  if (args.with_tokens) {
    if (!lane.has_value()) {
      return absl::InvalidArgumentError(
          "--tokens lists one lane's tokens: name it with --lane LAYER/KV_HEAD");
    }
    options.tokens_of = lane;
  }
  EBBTIDE_ASSIGN_OR_RETURN(const client::Client client, client::Client::Connect(common.socket));
  EBBTIDE_ASSIGN_OR_RETURN(client::SequenceDescription description,
                           client.DescribeSequence(options));
  if (lane.has_value()) {
    EBBTIDE_ASSIGN_OR_RETURN(description, OnlyLane(std::move(description), *lane));
  }
  common.output == Output::kJson ? PrintJson(ToJson(description))
                                 : Print(RenderDescription(description));
  return true;
}

}  // namespace ebbtide::cli
