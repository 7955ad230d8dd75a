// SPDX-License-Identifier: Apache-2.0
//
// What the daemon says once it serves: a screen for a person, one JSON line for anything else.

#pragma once

#include <string>

#include "service/calls.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

struct BannerFacts {
  const ServerFacts& server;
  const Stats& stats;
  std::string target;         // What a client dials.
  std::string config_source;  // A file, or "defaults".
  int pid = 0;
  bool is_default_target = true;  // Clients find it without being told.
};

std::string BannerForPeople(const BannerFacts& facts);
std::string BannerForPrograms(const BannerFacts& facts);

}  // namespace ebbtide::service
