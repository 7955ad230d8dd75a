// SPDX-License-Identifier: Apache-2.0
//
// YAML text into a protobuf message by the message's own schema, keeping the line of every field
// and finding every mistake in one pass. It knows types, not meaning; load_config.h checks values.
//
// Of YAML it takes mappings of scalars, which includes JSON. protobuf's own JSON reader stops at
// the first mistake and knows no lines.

#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "google/protobuf/message.h"

#include "service/config/load_config.h"

namespace ebbtide::service {

inline constexpr size_t kYamlBytesMax = 64 << 10;

struct YamlRead {
  FieldLines lines;
  // By field, quoted: what stands for a number and is none, or one that its type can't hold.
  // Whoever knows the field's limits calls it a mistake.
  std::map<std::string, std::string> no_numbers;
  std::set<std::string>
      unread_sections;  // "host" where a mistake is in it; "" where it is outside all.
  std::vector<ConfigMistake> mistakes;
};

// Sets the fields of `message` that `text` says. What is mistaken stays unset, and so does a number
// that is none.
YamlRead ReadYaml(std::string_view text, google::protobuf::Message& message);

}  // namespace ebbtide::service
