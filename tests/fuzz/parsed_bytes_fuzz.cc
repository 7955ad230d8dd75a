// SPDX-License-Identifier: Apache-2.0
//
// Can a message take more than what was told from its bytes? Whatever protobuf parses must have
// been taken for a message before, however its bytes were sliced, and take no more than was said.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>

#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

#include "ebbtide/v1/cache.pb.h"
#include "service/rpc/parsed_bytes.h"

namespace {

using ebbtide::service::MessageLayout;

std::optional<uint64_t> ParsedBytes(const MessageLayout& layout, const uint8_t* data, int size,
                                    int slice_bytes, uint64_t limit) {
  google::protobuf::io::ArrayInputStream bytes(data, size, slice_bytes);
  return layout.ParsedBytes(bytes, size, limit);
}

template <typename Request>
void Check(const uint8_t* data, int size) {
  constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();
  static const MessageLayout* const layout = new MessageLayout(*Request::descriptor());
  const std::optional<uint64_t> parsed_bytes = ParsedBytes(*layout, data, size, size + 1, kNoLimit);
  for (const int slice_bytes : {1, 2, 7}) {
    if (ParsedBytes(*layout, data, size, slice_bytes, kNoLimit) != parsed_bytes) std::abort();
  }
  Request message;
  if (message.ParseFromArray(data, size)) {
    if (!parsed_bytes.has_value() || *parsed_bytes < message.SpaceUsedLong()) std::abort();
    // Where there is less room than it takes, that is what is said.
    const uint64_t limit = *parsed_bytes - 1;
    if (!(ParsedBytes(*layout, data, size, 7, limit) > limit)) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  google::protobuf::LogSilencer no_complaints;
  Check<ebbtide::v1::AppendRequest>(data, static_cast<int>(size));
  Check<ebbtide::v1::AttendRequest>(data, static_cast<int>(size));
  Check<ebbtide::v1::OpenSequenceRequest>(data, static_cast<int>(size));
  return 0;
}
