// SPDX-License-Identifier: Apache-2.0
//
// The daemon as a whole: builds every part from the configuration, bottom up, and takes them down
// in reverse. The only place that names concrete classes. Tested by
// tests/integration/daemon_test.cc.

#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "service/calls.h"
#include "service/config/load_config.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

// Adds what the parts would refuse about values that the configuration's own reader can't judge.
void CheckWithParts(LoadedConfig& loaded);

// Thread-safe.
class Daemon {
 public:
  // Serves from the moment it returns. Waits for disks and devices as long as they take; meanwhile
  // `waits_for` is the field of the configuration that it is at.
  //   kInvalidArgument  a part refuses what the configuration gives it
  //   others            a folder, a socket or memory can't be had: the part's own words
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Config& config,
                                                       std::atomic<const char*>& waits_for);
  // Cuts off calls in progress.
  ~Daemon();

  const ServerFacts& facts() const;
  std::string target() const;  // What a client dials.
  Stats GetStats();

  // Closes idle sequences and refreshes health; called about once a second. Never waits.
  void Tick();

  // New calls of workers are refused from now on, and health says so.
  void StopAdmitting();
  // Waits until none of their calls is in progress, at most `patience`; returns whether none is.
  bool WaitIdle(absl::Duration patience);

 private:
  struct Parts;

  explicit Daemon(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace ebbtide::service
