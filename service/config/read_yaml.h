// SPDX-License-Identifier: Apache-2.0
//
// YAML text into a protobuf message by the message's own schema, keeping the line of every field
// and finding every mistake in one pass. It knows types, not meaning; load_config.h checks values.
//
// Of YAML it takes mappings of scalars, which includes JSON. protobuf's own JSON reader stops at
// the first mistake and knows no lines.

#pragma once

#include <string_view>
#include <vector>

#include "google/protobuf/message.h"

#include "service/config/load_config.h"

namespace ebbtide::service {

inline constexpr size_t kYamlBytesMax = 64 << 10;

struct YamlRead {
  FieldLines lines;
  std::vector<ConfigMistake> mistakes;
};

// Sets the fields of `message` that `text` says. What is mistaken stays unset.
YamlRead ReadYaml(std::string_view text, google::protobuf::Message& message);

}  // namespace ebbtide::service
