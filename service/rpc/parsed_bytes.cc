// SPDX-License-Identifier: Apache-2.0
//
// Sizes are those of protobuf 3.21, libstdc++ and glibc; where they move a little, so does a limit
// that nobody comes near.

#include "service/rpc/parsed_bytes.h"

#include <algorithm>
#include <string>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wire_format_lite.h"

namespace ebbtide::service {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedInputStream;
using Wire = google::protobuf::internal::WireFormatLite;

constexpr uint64_t kAllocationBytes = 16;  // What an allocation takes beside its bytes.
// The string, an allocation, and another for what it holds.
constexpr uint64_t kStringBytes = sizeof(std::string) + 2 * kAllocationBytes;
constexpr uint64_t kArrayFactor = 2;  // Arrays double.
constexpr uint64_t kPointerBytes = kArrayFactor * sizeof(void*);
constexpr uint64_t kFirstArrayBytes = 40 + kAllocationBytes;  // A head, and four values.
// A place in an array, and what a message's first brings along.
constexpr uint64_t kUnknownBytes = kArrayFactor * 16 + 64;
constexpr uint64_t kUnknownGroupBytes = kUnknownBytes + 24 + kAllocationBytes;
constexpr int kGroupsDeepMax = 100;  // The parser's own limit.

int WireTypeOf(const FieldDescriptor& field) {
  return Wire::WireTypeForFieldType(static_cast<Wire::FieldType>(field.type()));
}

// In an array of numbers.
uint64_t NumberBytes(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_UINT64:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return 8;
    case FieldDescriptor::CPPTYPE_BOOL:
      return 1;
    default:
      return 4;
  }
}

}  // namespace

MessageLayout::MessageLayout(const google::protobuf::Descriptor& type) : fields_(FieldsOf(type)) {}

const MessageLayout::Fields& MessageLayout::FieldsOf(const google::protobuf::Descriptor& type) {
  std::unique_ptr<Fields>& made = types_[&type];
  if (made != nullptr) return *made;  // Or being made, where a type holds itself.
  made = std::make_unique<Fields>();
  Fields& fields = *made;
  // The prototype holds nothing, so this is the size of its class.
  fields.bytes =
      kAllocationBytes +
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type)->SpaceUsedLong();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& of = *type.field(i);
    const auto number = static_cast<size_t>(of.number());
    fields.by_number.resize(std::max(fields.by_number.size(), number + 1));
    Field field{.wire_type = WireTypeOf(of)};
    if (of.is_repeated()) fields.bytes += kFirstArrayBytes;
    if (field.wire_type == Wire::WIRETYPE_LENGTH_DELIMITED) {
      field.bytes = of.is_repeated() ? kPointerBytes : 0;
      if (of.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        field.message = &FieldsOf(*of.message_type());
      } else {
        field.bytes += kStringBytes;
      }
    } else if (of.is_repeated()) {
      field.bytes = kArrayFactor * NumberBytes(of);
      field.may_be_packed = true;
      field.packed_value_bytes = field.wire_type == Wire::WIRETYPE_FIXED64   ? 8
                                 : field.wire_type == Wire::WIRETYPE_FIXED32 ? 4
                                                                             : 0;
    }
    fields.by_number[number] = field;
  }
  return fields;
}

// Goes through one message's bytes.
class MessageLayout::Sum {
 public:
  Sum(google::protobuf::io::ZeroCopyInputStream& bytes, int size, uint64_t limit)
      : in_(&bytes), limit_(limit) {
    in_.PushLimit(size);
  }

  // Adds a message from here to the stream's limit, or the group `group` from here to its end; of
  // unknown fields where `fields` is null. False where it can't go on, or must not.
  bool AddFields(const Fields* fields, uint32_t group);

  uint64_t bytes() const { return bytes_; }
  bool is_over() const { return bytes_ > limit_; }

 private:
  bool AddField(const Field& field, uint32_t tag);
  bool AddDelimited(const Field& field);
  bool AddMessage(const Fields& fields, int length);
  bool AddVarints(const Field& field, int length);
  bool AddGroup(uint32_t number);

  CodedInputStream in_;
  const uint64_t limit_;
  uint64_t bytes_ = 0;
  int groups_deep_ = 0;
};

bool MessageLayout::Sum::AddFields(const Fields* fields, uint32_t group) {
  if (fields != nullptr) bytes_ += fields->bytes;
  while (!is_over()) {
    if (in_.BytesUntilLimit() == 0) return group == 0;
    const uint32_t tag = in_.ReadTag();
    const auto number = static_cast<uint32_t>(Wire::GetTagFieldNumber(tag));
    if (number == 0) return false;  // Or a tag that is cut off.
    if (Wire::GetTagWireType(tag) == Wire::WIRETYPE_END_GROUP) return number == group;
    const bool is_known = fields != nullptr && number < fields->by_number.size();
    if (!AddField(is_known ? fields->by_number[number] : Field(), tag)) return false;
  }
  return false;
}

bool MessageLayout::Sum::AddField(const Field& field, uint32_t tag) {
  const int wire_type = Wire::GetTagWireType(tag);
  if (wire_type == Wire::WIRETYPE_LENGTH_DELIMITED) return AddDelimited(field);
  if (wire_type == Wire::WIRETYPE_START_GROUP) {
    return AddGroup(static_cast<uint32_t>(Wire::GetTagFieldNumber(tag)));
  }
  // A value of another kind than the field's is kept as unknown.
  bytes_ += wire_type == field.wire_type ? field.bytes : kUnknownBytes;
  uint64_t ignored = 0;
  switch (wire_type) {
    case Wire::WIRETYPE_VARINT:
      return in_.ReadVarint64(&ignored);
    case Wire::WIRETYPE_FIXED64:
      return in_.Skip(8);
    case Wire::WIRETYPE_FIXED32:
      return in_.Skip(4);
    default:
      return false;
  }
}

bool MessageLayout::Sum::AddDelimited(const Field& field) {
  int length = 0;
  if (!in_.ReadVarintSizeAsInt(&length) || length > in_.BytesUntilLimit()) return false;
  if (field.message != nullptr) {
    bytes_ += field.bytes;
    return AddMessage(*field.message, length);
  }
  if (field.may_be_packed && field.packed_value_bytes == 0) return AddVarints(field, length);
  if (field.may_be_packed) {
    bytes_ += field.bytes * (static_cast<uint32_t>(length) / field.packed_value_bytes);
  } else {
    const bool is_text = field.wire_type == Wire::WIRETYPE_LENGTH_DELIMITED;
    bytes_ +=
        static_cast<uint32_t>(length) + (is_text ? field.bytes : kUnknownBytes + kStringBytes);
  }
  return in_.Skip(length);
}

bool MessageLayout::Sum::AddMessage(const Fields& fields, int length) {
  const CodedInputStream::Limit outer = in_.PushLimit(length);
  const bool is_whole = AddFields(&fields, 0);
  in_.PopLimit(outer);
  return is_whole;
}

// A packed varint ends with the byte whose highest bit is clear.
bool MessageLayout::Sum::AddVarints(const Field& field, int length) {
  while (length > 0 && !is_over()) {
    const void* data = nullptr;
    int size = 0;
    if (!in_.GetDirectBufferPointer(&data, &size)) return false;
    size = std::min(size, length);
    const auto* begin = static_cast<const int8_t*>(data);
    const auto values = std::count_if(begin, begin + size, [](int8_t byte) { return byte >= 0; });
    bytes_ += field.bytes * static_cast<uint64_t>(values);
    in_.Skip(size);
    length -= size;
  }
  return length == 0;
}

bool MessageLayout::Sum::AddGroup(uint32_t number) {
  bytes_ += kUnknownGroupBytes;
  if (++groups_deep_ > kGroupsDeepMax) return false;
  const bool is_whole = AddFields(nullptr, number);
  --groups_deep_;
  return is_whole;
}

std::optional<uint64_t> MessageLayout::ParsedBytes(google::protobuf::io::ZeroCopyInputStream& bytes,
                                                   int size, uint64_t limit) const {
  Sum sum(bytes, size, limit);
  const bool is_whole = sum.AddFields(&fields_, 0);
  if (!is_whole && !sum.is_over()) return std::nullopt;
  return sum.bytes();
}

}  // namespace ebbtide::service
