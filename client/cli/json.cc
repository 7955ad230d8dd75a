// SPDX-License-Identifier: Apache-2.0
//
// Values to JSON; numbers stay numbers, durations become milliseconds as on the wire.

#include "client/cli/json.h"

#include <cstdio>

namespace ebbtide::cli {
namespace {

std::string Name(client::Tier tier) {
  return std::string(client::TierName(tier));
}

}  // namespace

void PrintJson(const Json& json) {
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

Json ToJson(const client::ServerInfo& info) {
  return {{"version", info.version},
          {"boot_id", info.boot_id},
          {"backend", info.backend},
          {"simulated_device", info.simulated_device},
          {"transports", info.transports},
          {"message_bytes_max", info.message_bytes_max},
          {"chunk_tokens_max", info.chunk_tokens_max},
          {"default_recall", info.default_recall},
          {"default_idle_timeout_ms", absl::ToInt64Milliseconds(info.default_idle_timeout)},
          {"uptime_ms", absl::ToInt64Milliseconds(info.uptime)},
          {"notes", info.notes}};
}

Json ToJson(const client::TierStats& tier) {
  return {{"tier", Name(tier.tier)},
          {"budget_bytes", tier.budget_bytes},
          {"used_bytes", tier.used_bytes},
          {"blocks", tier.blocks},
          {"tokens", tier.tokens},
          {"corrupt_pages", tier.corrupt_pages},
          {"metadata_bytes", tier.metadata_bytes},
          {"degraded", tier.degraded},
          {"degraded_why", tier.degraded_why},
          {"place", tier.place}};
}

Json ToJson(const client::Stats& stats) {
  return {{"sequences", stats.sequences},
          {"tokens_appended", stats.tokens_appended},
          {"tokens_demoted", stats.tokens_demoted},
          {"tokens_forgotten", stats.tokens_forgotten},
          {"answers", stats.answers},
          {"answers_with_target", stats.answers_with_target},
          {"answers_not_met", stats.answers_not_met},
          {"pages_recalled", stats.pages_recalled},
          {"bytes_recalled", stats.bytes_recalled},
          {"blocks_sealed", stats.blocks_sealed},
          {"blocks_moved_down", stats.blocks_moved_down},
          {"refused", stats.refused},
          {"pages_lost", stats.pages_lost},
          {"carries_failed", stats.carries_failed}};
}

Json ToJson(const client::TokensByTier& tokens) {
  return {{"device", tokens.device},
          {"host", tokens.host},
          {"rocksdb", tokens.rocksdb},
          {"open", tokens.open}};
}

Json ToJson(const client::SequenceSummary& sequence) {
  return {{"sequence", sequence.name},
          {"model", sequence.model},
          {"policy", sequence.policy},
          {"recall", sequence.recall},
          {"prefill", sequence.prefill},
          {"committed", sequence.committed},
          {"budget_tokens", sequence.budget_tokens},
          {"device_bytes", sequence.device_bytes},
          {"idle_ms", absl::ToInt64Milliseconds(sequence.idle)},
          {"tokens", ToJson(sequence.tokens)}};
}

Json ToJson(const client::SequenceDescription& description) {
  Json json = ToJson(description.summary);
  json["layer_lengths"] = description.layer_lengths;
  json["lanes"] = Json::array();
  for (const client::LaneDescription& lane : description.lanes) {
    json["lanes"].push_back({{"layer", lane.layer},
                             {"kv_head", lane.kv_head},
                             {"length", lane.length},
                             {"resident", lane.resident},
                             {"absent", lane.absent},
                             {"demoted", lane.demoted}});
  }
  json["token_list"] = Json::array();
  for (const client::TokenDescription& token : description.tokens) {
    json["token_list"].push_back({{"index", token.index},
                                  {"position", token.position},
                                  {"resident", token.resident},
                                  {"tier", Name(token.tier)},
                                  {"score", token.score},
                                  {"why", token.why}});
  }
  return json;
}

}  // namespace ebbtide::cli
