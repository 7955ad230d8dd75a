// SPDX-License-Identifier: Apache-2.0

#include "tests/support/http2_call.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>

#include "gtest/gtest.h"

#include "base/status_macros.h"

namespace ebbtide::test {
namespace {

constexpr int kPatienceMs = 30'000;
constexpr size_t kHeadBytes = 9;
constexpr uint32_t kWide = 1U << 30;

std::string BigEndian(uint64_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text += static_cast<char>(value >> (8 * i));
  return text;
}

uint32_t FromBigEndian(const std::string& text, size_t at, size_t bytes) {
  uint32_t value = 0;
  for (size_t i = at; i < at + bytes; ++i) value = value << 8 | static_cast<uint8_t>(text[i]);
  return value;
}

std::string Encoded(const Http2Frame& frame) {
  return BigEndian(frame.payload.size(), 3) + BigEndian(frame.type, 1) + BigEndian(frame.flags, 1) +
         BigEndian(frame.stream, 4) + frame.payload;
}

// A literal of less than 127 bytes (RFC 7541).
std::string Text(const std::string& value) {
  return static_cast<char>(value.size()) + value;
}

std::string Opening(const std::string& method, const std::string& request) {
  const std::string headers = std::string("\x83\x86\x04") + Text(method) +  // POST, http, :path
                              "\x01" + Text("localhost") +                  // :authority
                              std::string("\x0f\x10") + Text("application/grpc") +
                              std::string(1, '\0') + Text("te") + Text("trailers");
  const std::string no_window = BigEndian(4, 2) + BigEndian(0, 4);     // INITIAL_WINDOW_SIZE
  const std::string message = BigEndian(request.size(), 5) + request;  // Not compressed.
  return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" +
         Encoded({.type = Http2Frame::kSettings, .payload = no_window}) +
         Encoded({.type = Http2Frame::kHeaders,
                  .flags = Http2Frame::kEndHeaders,
                  .stream = 1,
                  .payload = headers}) +
         Encoded({.type = Http2Frame::kData,
                  .flags = Http2Frame::kEndStream,
                  .stream = 1,
                  .payload = message});
}

}  // namespace

Http2Call::Http2Call(const std::string& socket_path, const std::string& method,
                     const std::string& request) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  socket_path.copy(address.sun_path, sizeof address.sun_path - 1);
  fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int error = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address);
  EBBTIDE_CHECK(error == 0, "the server's socket takes a connection");
  Send(Opening(method, request));
}

Http2Call::~Http2Call() {
  ::close(fd_);
}

void Http2Call::TakeAnswer() {
  for (const uint32_t stream : {0U, 1U}) {
    Send(Encoded(
        {.type = Http2Frame::kWindowUpdate, .stream = stream, .payload = BigEndian(kWide, 4)}));
  }
}

// Of settings that set nothing: a server takes few pings.
bool Http2Call::RoundTrip() {
  Send(Encoded({.type = Http2Frame::kSettings}));
  std::optional<Http2Frame> frame;
  do {
    frame = Await(Http2Frame::kSettings);
  } while (frame.has_value() && (frame->flags & Http2Frame::kAck) == 0);
  return frame.has_value();
}

std::optional<Http2Frame> Http2Call::Next() {
  const auto is_whole = [this] {
    return arrived_.size() >= kHeadBytes &&
           arrived_.size() >= kHeadBytes + FromBigEndian(arrived_, 0, 3);
  };
  std::array<char, 4096> bytes;
  while (!is_whole()) {
    pollfd ready = {.fd = fd_, .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, kPatienceMs) != 1) {
      ADD_FAILURE() << "nothing came for " << kPatienceMs << " ms";
      return std::nullopt;
    }
    const ssize_t count = ::recv(fd_, bytes.data(), bytes.size(), 0);
    if (count <= 0) return std::nullopt;
    arrived_.append(bytes.data(), static_cast<size_t>(count));
  }
  Http2Frame frame = {.type = static_cast<uint8_t>(arrived_[3]),
                      .flags = static_cast<uint8_t>(arrived_[4]),
                      .stream = FromBigEndian(arrived_, 5, 4)};
  frame.payload = arrived_.substr(kHeadBytes, FromBigEndian(arrived_, 0, 3));
  arrived_.erase(0, kHeadBytes + frame.payload.size());
  if (frame.type == Http2Frame::kPing && (frame.flags & Http2Frame::kAck) == 0) {
    Send(Encoded({.type = frame.type, .flags = Http2Frame::kAck, .payload = frame.payload}));
  }
  return frame;
}

std::optional<Http2Frame> Http2Call::Await(Http2Frame::Type type) {
  while (std::optional<Http2Frame> frame = Next()) {
    if (frame->type == type) return frame;
  }
  return std::nullopt;
}

void Http2Call::Send(const std::string& bytes) const {
  const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  EXPECT_EQ(sent, static_cast<ssize_t>(bytes.size()));
}

}  // namespace ebbtide::test
