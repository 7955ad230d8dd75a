// SPDX-License-Identifier: Apache-2.0
//
// A daemon of a few lines in the test's own process: it keeps a length per layer, answers repeats
// as CacheService promises, and loses, delays or refuses answers when told. gRPC stays in the .cc.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ebbtide::client {

// What a call saw, in order.
struct SeenCall {
  std::string name;  // "Attend"
  int items = 0;
};

// Thread-safe.
class FakeDaemon {
 public:
  // Listens on unix:`socket_path`.
  explicit FakeDaemon(std::string socket_path, std::string boot_id = "boot-1");
  ~FakeDaemon();

  std::string target() const;

  // The next `count` calls are carried out, and their answers lost: the caller sees UNAVAILABLE.
  void LoseAnswers(int count);

  // The next `count` Append and Attend answers that arrive name item `item` CALL_IN_FLIGHT, or the
  // first where fewer are asked for again.
  void HoldItem(int item, int count);

  // Calls from now on are carried out, and their answers held back: until their caller gives them
  // up, or until Speak.
  void FallSilent();
  void Speak();

  // Stops, and starts again under another boot id, knowing nothing.
  void Restart(std::string boot_id);

  // Stops; nobody answers any more.
  void Stop();

  // The next `count` calls fail with this gRPC code, `reason` in the trailer.
  void RefuseNext(int code, std::string reason, std::string message, int count = 1);

  void set_message_bytes_max(uint64_t bytes);

  // Returns once `count` calls of this name have come, or fails the test after half a minute.
  void AwaitCalls(const std::string& name, int count) const;

  std::vector<SeenCall> calls() const;
  int open_sequences() const;
  uint64_t appended() const;  // Tokens taken, each once, over all sequences and layers.

 private:
  class Service;
  std::unique_ptr<Service> service_;
};

}  // namespace ebbtide::client
