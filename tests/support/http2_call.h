// SPDX-License-Identifier: Apache-2.0
//
// A worker's call by hand, frame by frame (RFC 9113), on a connection of its own: one that takes
// its answer only when the test says so.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ebbtide::test {

struct Http2Frame {
  enum Type : uint8_t {
    kData = 0,
    kHeaders = 1,
    kReset = 3,
    kSettings = 4,
    kPing = 6,
    kGoAway = 7,
    kWindowUpdate = 8
  };
  static constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;

  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;
  std::string payload = {};
};

class Http2Call {
 public:
  // Sends `request` to "/package.Service/Method" of a server at a unix socket, as stream 1. No byte
  // of the answer is taken until TakeAnswer.
  Http2Call(const std::string& socket_path, const std::string& method, const std::string& request);
  ~Http2Call();
  Http2Call(const Http2Call&) = delete;
  Http2Call& operator=(const Http2Call&) = delete;

  void TakeAnswer();
  // There and back; false where the connection ends before.
  bool RoundTrip();

  // What comes next, pings answered; nothing once the connection ends, or after thirty seconds,
  // which fails the test.
  std::optional<Http2Frame> Next();
  // The next frame of a type; those before it are dropped.
  std::optional<Http2Frame> Await(Http2Frame::Type type);

 private:
  void Send(const std::string& bytes) const;

  int fd_ = -1;
  std::string arrived_;
};

}  // namespace ebbtide::test
