// SPDX-License-Identifier: Apache-2.0
//
// A worker's hand on one open sequence: append, attend, read back, truncate, close. It remembers
// which run of the daemon it was opened in, so that a restart is noticed and never mistaken for an
// empty history.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "ebbtide/types.h"

namespace ebbtide::client {

class Connection;
class Sequence;

// One sequence's part of a batched Append. `k` and `v` are [m, kv_heads, head_dim].
struct AppendItem {
  const Sequence* sequence = nullptr;  // Sequence::Append fills it in.
  uint64_t first_index = 0;
  TensorView k = {};
  TensorView v = {};
  std::span<const int64_t> positions = {};  // [m] what RoPE used; empty: the indices.
};

// One sequence's part of a batched Attend. `q` is [m, query_heads, head_dim]; k and v are appended
// first, both or neither.
struct AttendItem {
  const Sequence* sequence = nullptr;  // Sequence::Attend fills it in.
  uint64_t first_index = 0;
  TensorView q = {};
  TensorView k = {};
  TensorView v = {};
  std::span<const int64_t> positions = {};
  Dtype output_dtype = Dtype::kUnspecified;  // q's.
  bool require_met = false;
};

// Thread-compatible: calls on one layer of one sequence follow each other. Calls block, at most to
// the client's time limit. After a restart of the daemon every method answers kAborted with reason
// DAEMON_RESTARTED: open the sequence again and prefill what it does not hold.
class Sequence {
 public:
  Sequence(std::shared_ptr<Connection> connection, std::string name, std::string boot_id,
           OpenedSequence opened);

  const std::string& name() const { return name_; }
  const std::string& boot_id() const { return boot_id_; }
  const OpenedSequence& opened() const { return opened_; }

  // Adds tokens to one layer. The same call again is answered with `replayed`, so a lost answer is
  // asked for again here; codes as CacheService.Append (proto/ebbtide/v1/cache.proto).
  absl::StatusOr<AppendResult> Append(const Step& step, AppendItem item) const;

  // Attention of `item.q` over the whole sequence as its policy and recall mode allow.
  //   kUnavailable         with require_met: reason NOT_MET; the tokens stay appended
  //   kFailedPrecondition  likewise, where asking again will not help
  // Other codes as CacheService.Attend.
  absl::StatusOr<AttendResult> Attend(const Step& step, AttendItem item) const;

  // Keys and values of `page_count` pages (0: to the end) of a lane, verified. A page that is
  // missing or corrupt is an answer.
  absl::StatusOr<std::vector<Page>> ReadPages(LaneId lane, uint64_t first_page = 0,
                                              uint64_t page_count = 0) const;

  // Drops the tokens from `length` on, in every layer. Answers the length.
  absl::StatusOr<uint64_t> Truncate(uint64_t length) const;

  // Forgets the sequence in every tier. Nothing closes it by itself but the idle time-out. Waits
  // for its calls in flight, such as one that was given up, as long as `control_timeout` allows.
  absl::Status Close() const;

 private:
  std::shared_ptr<Connection> connection_;
  std::string name_;
  std::string boot_id_;
  OpenedSequence opened_;
};

}  // namespace ebbtide::client
