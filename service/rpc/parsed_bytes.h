// SPDX-License-Identifier: Apache-2.0
//
// What a message takes in memory once it is parsed, told from its bytes before anything is kept of
// them: an empty item has two bytes on the wire and some hundred in memory, a field that nobody
// knows likewise. Tested by tests/unit/service/parsed_bytes_test.cc and
// tests/fuzz/parsed_bytes_fuzz.cc.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace ebbtide::service {

// A type of message, and those within it, as far as memory goes. Thread-safe once made.
class MessageLayout {
 public:
  explicit MessageLayout(const google::protobuf::Descriptor& type);
  MessageLayout(const MessageLayout&) = delete;
  MessageLayout& operator=(const MessageLayout&) = delete;

  // About what the message of the next `size` bytes takes, never less than its SpaceUsedLong();
  // where that is over `limit`, some number over it. Reads no further than it must, and allocates
  // nothing. Nothing where no parser would take the bytes either.
  std::optional<uint64_t> ParsedBytes(google::protobuf::io::ZeroCopyInputStream& bytes, int size,
                                      uint64_t limit) const;

 private:
  class Sum;
  struct Fields;

  // What one more of a field adds.
  struct Field {
    int wire_type = -1;               // Of one value; -1: not a field of this message.
    uint64_t bytes = 0;               // Of one value; without what it holds.
    const Fields* message = nullptr;  // What it holds, where it is a message.
    uint32_t packed_value_bytes = 0;  // Of values that may come packed: on the wire; 0: a varint.
    bool may_be_packed = false;
  };
  struct Fields {
    uint64_t bytes = 0;            // Of a message with nothing in it.
    std::vector<Field> by_number;  // At each field's own number.
  };

  const Fields& FieldsOf(const google::protobuf::Descriptor& type);

  std::map<const google::protobuf::Descriptor*, std::unique_ptr<Fields>> types_;
  const Fields& fields_;
};

}  // namespace ebbtide::service
