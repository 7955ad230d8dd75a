// SPDX-License-Identifier: Apache-2.0

#include "service/daemon_banner.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"

#include "base/bytes.h"
#include "base/printable.h"

namespace ebbtide::service {
namespace {

const char* NameOf(TierName tier) {
  switch (tier) {
    case TierName::kDevice:
      return "device";
    case TierName::kHost:
      return "host";
    case TierName::kRocksdb:
      return "rocksdb";
  }
  return "?";
}

std::string NextCommand(const BannerFacts& facts) {
  return facts.is_default_target ? "ebbctl status"
                                 : absl::StrFormat("ebbctl --socket %s status", facts.target);
}

}  // namespace

std::string BannerForPeople(const BannerFacts& facts) {
  std::string text =
      absl::StrFormat("ebbtided %s, process %d\n\n", facts.server.version, facts.pid);
  absl::StrAppendFormat(&text, "  config    %s\n", facts.config_source);
  for (const std::string& transport : facts.server.transports) {
    absl::StrAppendFormat(&text, "  listens   %s\n", transport);
  }
  absl::StrAppendFormat(&text, "  backend   %s%s\n", facts.server.backend,
                        facts.server.simulated_device ? ", simulated device" : "");
  for (const TierReport& tier : facts.stats.tiers) {
    absl::StrAppendFormat(&text, "  %-9s %10s  %s%s\n", NameOf(tier.tier),
                          FormatBytes(tier.budget_bytes), tier.place,
                          tier.degraded ? ", degraded: " + tier.degraded_why : "");
  }
  for (const std::string& note : facts.server.notes) {
    absl::StrAppendFormat(&text, "  note      %s\n", note);
  }
  absl::StrAppendFormat(&text, "\ntry: %s\n", NextCommand(facts));
  return PrintableLines(text);
}

std::string BannerForPrograms(const BannerFacts& facts) {
  nlohmann::ordered_json line = {{"event", "serving"},
                                 {"version", facts.server.version},
                                 {"pid", facts.pid},
                                 {"boot_id", facts.server.boot_id},
                                 {"config", facts.config_source},
                                 {"transports", facts.server.transports},
                                 {"target", facts.target},
                                 {"backend", facts.server.backend},
                                 {"simulated_device", facts.server.simulated_device}};
  for (const TierReport& tier : facts.stats.tiers) {
    line["tiers"].push_back({{"tier", NameOf(tier.tier)},
                             {"budget_bytes", tier.budget_bytes},
                             {"place", tier.place},
                             {"degraded", tier.degraded}});
  }
  line["notes"] = facts.server.notes;
  line["next"] = NextCommand(facts);
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace ebbtide::service
