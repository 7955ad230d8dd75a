// SPDX-License-Identifier: Apache-2.0
//
// Text to Config, or every mistake at once. Fields left out get their defaults from the
// surroundings; where each value comes from is kept beside it. Tested by
// tests/unit/service/load_config_test.cc, fuzzed by tests/fuzz/config_fuzz.cc.

#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "service/config/config.h"
#include "service/config/surroundings.h"

namespace ebbtide::service {

struct ConfigMistake {
  int line = 0;  // From 1; 0: of no line.
  std::string message;
  friend bool operator==(const ConfigMistake&, const ConfigMistake&) = default;
};

// By field: "line 3", or "default: …" with what it was drawn from.
using ConfigOrigins = std::map<std::string, std::string>;

using FieldLines = std::map<std::string, int>;  // "server.threads" to the line that says it

struct LoadedConfig {
  Config config;  // Not to be used where there are mistakes.
  ConfigOrigins origins;
  FieldLines lines;
  std::vector<ConfigMistake> mistakes;  // In order of line.

  bool ok() const { return mistakes.empty(); }
  // Adds what somebody else finds wrong with a field's value.
  void AddMistake(const std::string& field, std::string_view what);
};

// Of the YAML in `text`, which may be empty.
LoadedConfig LoadConfig(std::string_view text, const Surroundings& surroundings);

// Of a file; one that can't be read is a mistake, never a reason for defaults.
LoadedConfig LoadConfigFile(const std::string& path, const Surroundings& surroundings);

// "ebbtide.yaml:3: server.threads: …", one line each.
std::string FormatMistakes(std::string_view source, const std::vector<ConfigMistake>& mistakes);

// As YAML that LoadConfig reads back to an equal Config, with each value's origin in a comment.
std::string PrintConfig(const Config& config, const ConfigOrigins& origins);

}  // namespace ebbtide::service
