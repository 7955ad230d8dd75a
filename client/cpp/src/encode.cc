// SPDX-License-Identifier: Apache-2.0
//
// On the wire a message may come in pieces: where a message field comes twice, its fields are
// merged. So an item is what protobuf writes of all but the tensors' data, and then each tensor
// once more with its data alone.

#include "client/cpp/src/encode.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/io/coded_stream.h"

#include "base/status_macros.h"
#include "client/cpp/src/convert.h"
#include "ebbtide/v1/cache.pb.h"

namespace ebbtide::client {
namespace {

using google::protobuf::io::CodedOutputStream;

struct TensorData {
  int field = 0;  // Of the item.
  std::span<const std::byte> bytes;
};

std::array<TensorData, 2> DataOf(const AppendItem& item) {
  return {{{v1::AppendItem::kKFieldNumber, item.k.bytes},
           {v1::AppendItem::kVFieldNumber, item.v.bytes}}};
}
std::array<TensorData, 3> DataOf(const AttendItem& item) {
  return {{{v1::AttendItem::kQFieldNumber, item.q.bytes},
           {v1::AttendItem::kKFieldNumber, item.k.bytes},
           {v1::AttendItem::kVFieldNumber, item.v.bytes}}};
}

// A field of `bytes` with its tag, which takes one byte up to field 15, and its length.
size_t FieldBytes(size_t bytes) {
  return 1 + CodedOutputStream::VarintSize64(bytes) + bytes;
}
size_t DataBytes(const TensorData& data) {
  return data.bytes.empty() ? 0 : FieldBytes(FieldBytes(data.bytes.size()));
}

uint8_t* WriteHead(int field, size_t bytes, uint8_t* to) {
  constexpr int kLengthDelimited = 2;
  *to = static_cast<uint8_t>(field << 3 | kLengthDelimited);
  return CodedOutputStream::WriteVarint64ToArray(bytes, to + 1);
}
uint8_t* WriteBytes(const void* from, size_t bytes, uint8_t* to) {
  std::memcpy(to, from, bytes);
  return to + bytes;
}
uint8_t* WriteData(const TensorData& data, uint8_t* to) {
  if (data.bytes.empty()) return to;
  to = WriteHead(data.field, FieldBytes(data.bytes.size()), to);
  to = WriteHead(v1::Tensor::kDataFieldNumber, data.bytes.size(), to);
  return WriteBytes(data.bytes.data(), data.bytes.size(), to);
}

template <typename Request, typename WireItem, typename Item>
Encoded EncodeStep(const Step& step, std::span<const Item> items, SendBuffers& buffers) {
  Request request;
  request.set_layer(step.layer);
  request.set_phase(static_cast<v1::Phase>(step.phase));
  request.set_prompt_end(step.prompt_end);
  const std::string head = request.SerializeAsString();
  struct Part {
    std::string head;  // All of the item but its data.
    size_t bytes = 0;  // With its data.
  };
  std::vector<Part> parts;
  size_t bytes = head.size();
  for (const Item& item : items) {
    WireItem wire;
    ToWire(item, &wire);
    Part part{.head = wire.SerializeAsString()};
    part.bytes = part.head.size();
    for (const TensorData& data : DataOf(item)) part.bytes += DataBytes(data);
    bytes += FieldBytes(part.bytes);
    parts.push_back(std::move(part));
  }
  const std::shared_ptr<uint8_t[]> memory = buffers.Take(bytes);
  uint8_t* to = WriteBytes(head.data(), head.size(), memory.get());
  for (size_t i = 0; i < items.size(); ++i) {
    to = WriteHead(Request::kItemsFieldNumber, parts[i].bytes, to);
    to = WriteBytes(parts[i].head.data(), parts[i].head.size(), to);
    for (const TensorData& data : DataOf(items[i])) to = WriteData(data, to);
  }
  EBBTIDE_CHECK(to == memory.get() + bytes, "a message is as long as was reckoned");
  return {.memory = memory, .bytes = bytes};
}

}  // namespace

Encoded Encode(const Step& step, std::span<const AppendItem> items, SendBuffers& buffers) {
  return EncodeStep<v1::AppendRequest, v1::AppendItem>(step, items, buffers);
}

Encoded Encode(const Step& step, std::span<const AttendItem> items, SendBuffers& buffers) {
  return EncodeStep<v1::AttendRequest, v1::AttendItem>(step, items, buffers);
}

}  // namespace ebbtide::client
