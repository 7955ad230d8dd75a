// SPDX-License-Identifier: Apache-2.0
//
// A daemon small enough to be plainly right: keeps everything in memory, attends in float64 over
// all tokens (recall off: over the last `budget` ones), knows the true error and certifies it with
// some room. Lies when told to. gRPC stays in the .cc.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ebbtide::cli {

struct PlayedCall {
  uint32_t layer = 0;
  bool is_decode = false;
  bool prompt_end = false;
  uint64_t first_index = 0;
  uint64_t count = 0;
  bool operator==(const PlayedCall&) const = default;
};

struct TinyFaults {
  double bound_factor = 1.5;  // Below 1, error bounds are too small.
  double mass_factor = 1.5;
  int64_t flip_key_of = -1;   // This token's first key byte comes back changed, in layer 0, head 0.
  int64_t corrupt_page = -1;  // This page of layer 0, head 0 comes back as corrupt.
  int64_t refuse_at = -1;     // The call that begins at this index is refused.
};

// Thread-safe.
class TinyDaemon {
 public:
  static constexpr uint32_t kPageTokens = 16;

  explicit TinyDaemon(const std::string& socket_path);
  ~TinyDaemon();

  std::string target() const;
  void set_faults(const TinyFaults& faults);
  std::vector<PlayedCall> calls() const;
  int open_sequences() const;

 private:
  class Service;
  std::unique_ptr<Service> service_;
};

}  // namespace ebbtide::cli
