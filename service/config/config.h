// SPDX-License-Identifier: Apache-2.0
//
// The configuration, resolved: a plain value in which nothing is left open. It knows no file and no
// protobuf; load_config.h makes it, and docs/configuration.md explains each field.

#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

#include "base/log.h"

namespace ebbtide::service {

// Where the server listens: a unix socket where `socket_path` is set, else host and port.
struct ListenConfig {
  std::string socket_path;
  uint32_t socket_mode = 0600;
  std::string host;
  uint16_t port = 0;  // 0: any free one
  friend bool operator==(const ListenConfig&, const ListenConfig&) = default;
};

struct ServerConfig {
  ListenConfig listen;
  uint32_t threads = 1;
  LogLevel log_level = LogLevel::kInfo;
  uint64_t message_bytes_max = 0;
  uint32_t calls_in_flight_max = 0;
  absl::Duration call_deadline;
  absl::Duration drain;
  friend bool operator==(const ServerConfig&, const ServerConfig&) = default;
};

// What computes on the device tier, and where that lies. kAuto: CUDA where it can be had, else the
// simulated device.
enum class BackendChoice : uint8_t { kAuto, kCpu, kCuda };

struct DeviceTierConfig {
  uint64_t budget_bytes = 0;
  BackendChoice backend = BackendChoice::kCpu;
  friend bool operator==(const DeviceTierConfig&, const DeviceTierConfig&) = default;
};

struct MemoryTierConfig {
  uint64_t budget_bytes = 0;
  friend bool operator==(const MemoryTierConfig&, const MemoryTierConfig&) = default;
};

struct RocksdbConfig {
  bool disabled = false;
  std::string path;
  uint64_t budget_bytes = 0;
  friend bool operator==(const RocksdbConfig&, const RocksdbConfig&) = default;
};

struct SequencesConfig {
  absl::Duration idle_timeout;
  std::string recall;
  friend bool operator==(const SequencesConfig&, const SequencesConfig&) = default;
};

struct Config {
  ServerConfig server;
  DeviceTierConfig device;
  MemoryTierConfig host;
  RocksdbConfig rocksdb;
  SequencesConfig sequences;
  friend bool operator==(const Config&, const Config&) = default;
};

}  // namespace ebbtide::service
