// SPDX-License-Identifier: Apache-2.0
//
// A step's request as the bytes that go out. Protobuf would copy each tensor twice, into the
// message and from there into the wire's memory; here it is copied once. Tested by
// tests/unit/client/encode_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "client/cpp/src/send_buffers.h"
#include "ebbtide/sequence.h"

namespace ebbtide::client {

struct Encoded {
  std::shared_ptr<const uint8_t[]> memory;
  size_t bytes = 0;
};

// An AppendRequest.
Encoded Encode(const Step& step, std::span<const AppendItem> items, SendBuffers& buffers);
// An AttendRequest.
Encoded Encode(const Step& step, std::span<const AttendItem> items, SendBuffers& buffers);

}  // namespace ebbtide::client
