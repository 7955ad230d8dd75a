// SPDX-License-Identifier: Apache-2.0
//
// The client's values as JSON, field for field under the names of the wire. Keys keep their order.

#pragma once

#include <nlohmann/json.hpp>

#include "ebbtide/types.h"

namespace ebbtide::cli {

using Json = nlohmann::ordered_json;

// Writes it to stdout, whole. What is no UTF-8, as a file's name may be, is U+FFFD.
void PrintJson(const Json& json);

Json ToJson(const client::ServerInfo& info);
Json ToJson(const client::TierStats& tier);
Json ToJson(const client::Stats& stats);  // Tiers left out.
Json ToJson(const client::TokensByTier& tokens);
Json ToJson(const client::SequenceSummary& sequence);
Json ToJson(const client::SequenceDescription& description);

}  // namespace ebbtide::cli
