// SPDX-License-Identifier: Apache-2.0
//
// The model behind its one lock: which sequences are open, what each layer holds, where each block
// lies, who may grow. It decides and notes; it moves no byte, waits for nothing but its own
// condition, and knows no gRPC. Tested by tests/unit/service/cache_test.cc and its neighbours.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/clock.h"
#include "service/cache_carry.h"
#include "service/cache_sequence.h"
#include "service/calls.h"
#include "service/model/block_queue.h"
#include "service/model/frame_pool.h"
#include "service/model/lower_room.h"
#include "service/policy/policy.h"
#include "storage/block_key.h"

namespace ebbtide::service {

// A layer of a sequence, held by one call from Begin to Finish or Abandon.
struct Ticket {
  SequenceRef sequence;
  int layer = 0;
  int32_t first_index = 0;
  int32_t tokens = 0;  // To append; 0 where replayed or nothing is to be appended.
  bool replayed = false;
  int32_t length = 0;     // Of the layer, before.
  int32_t committed = 0;  // Of the sequence, before.
  int32_t observed_end = 0;
  int32_t candidate_end = 0;  // Tokens below may be victims.
};

struct BeginArgs {
  uint32_t layer = 0;
  uint64_t first_index = 0;
  int32_t queries = 0;  // 0: none.
  int32_t tokens = 0;   // To append; 0: none.
  CallDigest digest = {};
};

struct Lengths {
  uint64_t length = 0;
  uint64_t committed = 0;
};

struct CacheOptions {
  uint64_t device_budget_bytes = 0;
  std::string default_recall;
  absl::Duration idle_timeout;
  LookAtRoom look_at_room;  // Asked under the cache's lock.
};

// Thread-safe. What is noexcept changes the model in many places: memory that runs out half-way
// ends the process, since half a change would be wrong bytes later.
class Cache {
 public:
  Cache(const CacheOptions& options, Clock& clock);

  // --- what workers open and close
  absl::StatusOr<Geometry> RegisterModel(std::string_view name, const Geometry& geometry,
                                         std::string_view weights) ABSL_LOCKS_EXCLUDED(mu_);
  struct OpenNeed {
    uint64_t metadata_bytes = 0;  // Of host memory; 0 where the sequence is open.
  };
  absl::StatusOr<OpenNeed> NeedToOpen(const OpenArgs& args) ABSL_LOCKS_EXCLUDED(mu_);
  // The caller has charged the metadata of NeedToOpen, and gives back what was not taken.
  //   kUnavailable        CALL_IN_FLIGHT: it was open when asked, and was closed since
  //   kResourceExhausted  DEVICE_FULL; LOWER_TIERS_FULL: others' blocks are promised the room
  struct OpenGrant {
    std::byte* pool = nullptr;  // The device pool's memory.
    uint64_t charged_bytes = 0;
  };
  struct Opened {
    OpenAnswer answer;
    uint64_t metadata_bytes = 0;
  };
  absl::StatusOr<Opened> Open(const OpenArgs& args, const OpenGrant& grant)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The caller gives back the host memory of the metadata that went.
  struct Truncated {
    uint64_t length = 0;
    uint64_t metadata_bytes = 0;
  };
  absl::StatusOr<Truncated> Truncate(std::string_view name, uint64_t length) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets the sequence; none where its id was closed before in this boot. The caller erases the
  // blocks returned, zeroes the frames, and calls Reap.
  struct Closed {
    SequenceRef sequence;
    std::vector<storage::BlockKey> blocks;
  };
  absl::StatusOr<std::optional<Closed>> Close(std::string_view name,
                                              std::string_view reason) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for a sequence that Idle named, unless it was called or opened anew since.
  std::optional<Closed> CloseIdle(std::string_view name) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  // Is a closed sequence's memory still to be given back, and read by nobody? Then zero it and
  // Reap.
  bool MayReap(const SequenceRef& sequence) ABSL_LOCKS_EXCLUDED(mu_);
  void Reap(const SequenceRef& sequence) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<std::string> Idle() ABSL_LOCKS_EXCLUDED(mu_);

  // --- one call on one layer
  // On the sequence that was found, never on another that has taken its name since.
  //   kNotFound  SEQUENCE_UNKNOWN: it was closed meanwhile
  absl::StatusOr<Ticket> Begin(const SequenceRef& sequence, const BeginArgs& args, Lengths* lengths)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the ticket's tokens find slots once `victims` [kv_heads] have left: slots come free
  // as seals are confirmed, and stay free for this call alone.
  //   kResourceExhausted  DEVICE_FULL
  absl::Status AwaitSlots(const Ticket& ticket, std::span<const std::vector<int32_t>> victims,
                          absl::Duration deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // Blocks that the ticket's tokens begin, each with a record of the lower tiers, and what they
  // take of host memory for metadata. Less by the time of Place where another layer begins them
  // first, more where one that had begun them was withdrawn.
  struct Need {
    int32_t blocks = 0;
    uint64_t metadata_bytes = 0;
  };
  Need NeedOf(const Ticket& ticket) ABSL_LOCKS_EXCLUDED(mu_);
  // The fixed point, after AwaitSlots: `victims` leave, then the ticket's tokens take slots
  // ([kv_heads] out), and what they need is noted and returned.
  struct PlaceArgs {
    std::span<const std::vector<int32_t>> victims;
    std::span<const int64_t> positions;
    // Of host memory, by NeedOf; the caller gives back what is not taken.
    uint64_t charged_bytes = std::numeric_limits<uint64_t>::max();
  };
  //   kAborted            INDEX_CONFLICT: another layer brought other tokens of this step
  //   kResourceExhausted  LOWER_TIERS_FULL
  //   kUnavailable        CALL_IN_FLIGHT: the need has grown over what was charged
  // Nothing changed where it is refused, or ends in an exception.
  absl::StatusOr<Need> Place(const Ticket& ticket, const PlaceArgs& args,
                             std::vector<std::vector<int32_t>>* slots) ABSL_LOCKS_EXCLUDED(mu_);
  // Commits the ticket's tokens; returns whether blocks became complete.
  bool Finish(const Ticket& ticket, const CallDigest& digest, int32_t observed_end,
              Lengths* lengths) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  void Abandon(const Ticket& ticket) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  // Abandons after Place: the tokens have left their slots again, victims stay away. Returns the
  // metadata bytes that the caller gives back.
  uint64_t Withdraw(const Ticket& ticket) noexcept ABSL_LOCKS_EXCLUDED(mu_);

  // --- what carriers do
  size_t BlocksToSeal() ABSL_LOCKS_EXCLUDED(mu_);
  // The next block, those of record sizes in `full` apart.
  std::optional<CarryPlan> PlanSeal(std::span<const storage::RecordSize> full = {}) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  // `tier`: where the block now lies; where it could not be written, as far as is known, it keeps
  // its place among those that wait. Returns whether it was closed meanwhile, so that what may have
  // been written must be erased.
  bool CommitSeal(const CarryPlan& plan, const absl::StatusOr<TierName>& tier) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  // The block longest in the host tier; `full` as above.
  std::optional<CarryPlan> PlanMoveDown(std::span<const storage::RecordSize> full = {}) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  bool CommitMoveDown(const CarryPlan& plan, CarryOutcome outcome) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  // May the tier below begin a segment for records of `size`: is there room still, after
  // it, for all that is promised? Then EndSegment follows, when it was begun or will not be. One at
  // a time: others wait.
  bool BeginSegment(const storage::RecordSize& size) ABSL_LOCKS_EXCLUDED(mu_);
  void EndSegment() noexcept ABSL_LOCKS_EXCLUDED(mu_);
  // Where each block lies now.
  std::vector<Block> Places(const SequenceRef& sequence) ABSL_LOCKS_EXCLUDED(mu_);
  // Counts the pages of a layer that no tier has whole; returns those not noted before.
  std::vector<LostPage> NoteLost(const SequenceRef& sequence, int layer,
                                 std::span<const LostPage> pages) ABSL_LOCKS_EXCLUDED(mu_);
  bool HasUnsealed() ABSL_LOCKS_EXCLUDED(mu_);
  void WaitForSeals(absl::Duration deadline) ABSL_LOCKS_EXCLUDED(mu_);

  // --- what watchers see
  absl::StatusOr<SequenceRef> Find(std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<SequenceSummary> List(std::string_view after, size_t limit) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<SequenceDescription> Describe(const DescribeArgs& args) ABSL_LOCKS_EXCLUDED(mu_);
  TierReport DeviceReport() ABSL_LOCKS_EXCLUDED(mu_);
  TokensByTier Tokens() ABSL_LOCKS_EXCLUDED(mu_);  // Of all sequences.
  std::vector<int64_t> Positions(const Ticket& ticket) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `update` on the counters.
  void Count(const std::function<void(Stats&)>& update) ABSL_LOCKS_EXCLUDED(mu_);
  Stats Counters() ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t metadata_bytes() ABSL_LOCKS_EXCLUDED(mu_);

  // Stops the process where the model contradicts itself.
  void CheckInvariants() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::StatusOr<SequenceRef> FindLocked(std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static absl::Status CheckReopen(const Sequence& facts, const OpenArgs& args);
  // What the arguments mean here.
  struct Opening {
    std::shared_ptr<const Model> model;
    ResolvedPolicy policy = {};
    PrefillSpec prefill = {};
    RecallSpec recall = {};
    int32_t budget_tokens = 0;
    int32_t chunk_tokens = 0;
    int32_t frames = 0;  // Of each lane.
    uint64_t metadata_bytes = 0;
    uint64_t lane_bytes() const {
      return static_cast<uint64_t>(frames) * model->geometry.page_shape().page_bytes();
    }
    uint64_t pool_bytes() const {
      return static_cast<uint64_t>(model->geometry.lanes()) * lane_bytes();
    }
  };
  absl::StatusOr<Opening> Resolve(const OpenArgs& args) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A segment that a carrier may begin: taken from the room, whether it is there already or not.
  struct Growth {
    storage::RecordSize size;
    uint64_t segments_before = 0;  // Begun for its size.
  };
  // The room for all that is promised, and for records of `size`. A tier that takes no records now
  // has room for those alone that it holds: slots of closed sequences come free when it is well.
  LowerRoom RoomBeside(const storage::RecordSize& size) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  PromisedRecords HeldBelow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckPromises(std::string_view name, const Opening& opening) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The lanes' frames, as their offset in the device pool.
  absl::StatusOr<uint64_t> ReservePool(std::string_view name, const Opening& opening)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckRoom(const Sequence& facts, const Need& need) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<Need> CheckPlace(const Ticket& ticket, const PlaceArgs& args) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PlaceChecked(const Ticket& ticket, const PlaceArgs& args, const Need& need,
                    std::vector<std::vector<int32_t>>* slots) noexcept
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckStart(const Sequence& facts, const BeginArgs& args, Ticket* ticket)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Need NeedOfBlocks(const OpenedSequence& sequence, int32_t blocks) const;
  QueuedBlock PopOpen(BlockQueue& queue, std::span<const storage::RecordSize> full)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Records that blocks no longer need a place for.
  void GiveUpPromise(const Model& model, uint64_t records) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Need NeedLocked(const Ticket& ticket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Tokens from `new_length` on go, with what was promised for their blocks; metadata bytes given
  // back.
  uint64_t DropTail(OpenedSequence& sequence, int32_t new_length)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<int32_t> BlocksDue(const Ticket& ticket,
                                 std::span<const std::vector<int32_t>> victims) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  SequenceSummary Summarise(const OpenedSequence& sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountForgotten(const Sequence& facts, std::string_view reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsIdle(const Sequence& facts) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Closed CloseLocked(SequenceRef sequence, std::string_view reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Fixed after construction.
  const CacheOptions options_;
  Clock& clock_;

  // Guarded by mu_.
  absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<const Model>, std::less<>> models_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, SequenceRef, std::less<>> sequences_ ABSL_GUARDED_BY(mu_);
  // Hashes of names, at most kClosedMax.
  absl::flat_hash_set<uint64_t> closed_ ABSL_GUARDED_BY(mu_);
  std::deque<uint64_t> closed_order_ ABSL_GUARDED_BY(mu_);
  FramePool pool_ ABSL_GUARDED_BY(mu_);
  BlockQueue to_seal_ ABSL_GUARDED_BY(mu_);  // In the order they became complete.
  BlockQueue in_host_ ABSL_GUARDED_BY(mu_);  // In the order they came there.
  uint64_t next_number_ ABSL_GUARDED_BY(mu_) = 1;
  PromisedRecords promised_ ABSL_GUARDED_BY(mu_);  // One for each block of an open sequence.
  std::optional<Growth> growth_ ABSL_GUARDED_BY(mu_);
  uint64_t metadata_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int unsealed_ ABSL_GUARDED_BY(mu_) = 0;  // Complete blocks whose copy below is not confirmed.
  Stats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::service
