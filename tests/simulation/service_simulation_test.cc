// SPDX-License-Identifier: Apache-2.0
//
// The whole service under random calls, in any order of carrying and with any fault of its tiers.
// After each step the model's invariants are checked, budgets hold, every answer is within its
// certificate, and every byte read back is right or reported lost.

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/simulation/sequence_oracle.h"
#include "tests/support/engine_stand.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/random_seed.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::test {
namespace {

constexpr const char* kPolicies[] = {"streaming",     "keydiff", "h2o",          "h2o+caote",
                                     "tova",          "snapkv",  "snapkv+caote", "tova+fastcaote",
                                     "h2o+fastcaote", "auto"};
constexpr const char* kRecalls[] = {"off", "exact", "bounded(0.02)", "bounded(0.2)",
                                    "estimated(0.02)"};
constexpr const char* kPrefills[] = {"exact", "blockwise(32)"};

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed), stand_(Setup(seed)) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      OneStep();
      stand_.engine().CheckInvariants();
      ASSERT_LE(stand_.host_budget().used_bytes(), stand_.host_budget().limit_bytes());
    }
    Finish();
  }

  uint64_t pages_recalled() { return stand_.engine().GetStats().pages_recalled; }

 private:
  EngineSetup Setup(uint64_t seed) {
    EngineSetup setup;
    setup.device_bytes = 600 << 10;
    setup.host_bytes = (300 << 10) << (seed % 3);
    setup.rocksdb_bytes = seed % 3 == 0 ? 0 : 192 << 20;
    setup.carriers = &carriers_;
    setup.wrap_host = [this, seed](storage::Tier& tier) {
      auto faulty = std::make_unique<FaultyTier>(tier, seed);
      host_ = faulty.get();
      return faulty;
    };
    setup.wrap_rocksdb = [this, seed](storage::Tier& tier) {
      auto faulty = std::make_unique<FaultyTier>(tier, seed + 1);
      rocksdb_ = faulty.get();
      return faulty;
    };
    return setup;
  }

  uint64_t Draw(uint64_t below) { return random_() % below; }
  SequenceOracle& AnySequence() { return *sequences_[Draw(sequences_.size())]; }

  // Of a call: recall needs time, but where seals are due a call would wait for them on this
  // thread, which alone carries.
  absl::Duration Patience() {
    const bool is_settled = stand_.engine().Settle(absl::ZeroDuration());
    return is_settled ? absl::Seconds(10) : absl::ZeroDuration();
  }

  void OneStep() {
    const uint64_t choice = Draw(100);
    if (sequences_.empty() || (choice < 4 && sequences_.size() < 4)) {
      Open();
    } else if (choice < 60) {
      const bool is_prefill = Draw(3) == 0;
      AnySequence().Step(is_prefill ? 1 + static_cast<int32_t>(Draw(32)) : 1,
                         is_prefill ? service::Phase::kPrefill : service::Phase::kDecode,
                         Patience());
    } else if (choice < 75) {
      for (uint64_t jobs = 1 + Draw(3); jobs > 0 && carriers_.RunNext(); --jobs) {
      }
    } else if (choice < 80) {
      AnySequence().CheckBytes(static_cast<int>(Draw(2)), static_cast<int>(Draw(2)));
    } else if (choice < 84) {
      AnySequence().AskAgain();
    } else if (choice < 88) {
      SequenceOracle& sequence = AnySequence();
      sequence.Truncate(std::max(0, sequence.length() + 1 - static_cast<int32_t>(Draw(6))));
    } else if (choice < 91) {
      const size_t i = Draw(sequences_.size());
      sequences_[i]->Close();
      sequences_.erase(sequences_.begin() + static_cast<ptrdiff_t>(i));
    } else if (choice < 95) {
      ChangeFaults(host_);
    } else if (choice < 98) {
      ChangeFaults(rocksdb_);
    } else {
      stand_.engine().CloseIdle();
    }
  }

  void Open() {
    service::OpenArgs args;
    args.policy = kPolicies[Draw(std::size(kPolicies))];
    args.recall = kRecalls[Draw(std::size(kRecalls))];
    args.prefill = kPrefills[Draw(std::size(kPrefills))];
    args.budget_tokens = 40 + static_cast<uint32_t>(Draw(40));
    args.chunk_tokens = 32;
    auto sequence = std::make_unique<SequenceOracle>(
        stand_.engine(), "sequence " + std::to_string(++opened_), random_(), args);
    if (sequence->Open()) sequences_.push_back(std::move(sequence));
  }

  void ChangeFaults(FaultyTier* tier) {
    if (tier == nullptr) return;
    Faults faults;
    switch (Draw(6)) {
      case 0:
        faults.refuse = 0.5;
        break;
      case 1:
        faults.full = 0.5;
        break;
      case 2:
        faults.torn = 0.3;
        break;
      case 3:
        faults.flipped = 0.3;
        break;
      default:
        break;  // Healed.
    }
    tier->Set(faults);
    stand_.engine().CloseIdle();  // As each second: it looks whether the tier is well again.
  }

  // Everything heals; everything is sealed; nothing stays behind.
  void Finish() {
    if (host_ != nullptr) host_->Set({});
    if (rocksdb_ != nullptr) rocksdb_->Set({});
    stand_.engine().CloseIdle();
    carriers_.RunAll();
    uint64_t lost = 0;
    for (const auto& sequence : sequences_) {
      for (int layer = 0; layer < 2; ++layer) {
        for (int head = 0; head < 2; ++head) sequence->CheckBytes(layer, head);
      }
      lost += sequence->counts().lost_pages;
      sequence->Close();
    }
    const uint64_t damaged = (host_ != nullptr ? host_->damaged_records() : 0) +
                             (rocksdb_ != nullptr ? rocksdb_->damaged_records() : 0);
    ASSERT_TRUE(lost == 0 || damaged > 0) << "pages are lost, and no fault damaged any";
    stand_.engine().CloseIdle();
    carriers_.RunAll();
    stand_.engine().CheckInvariants();
    for (const service::TierReport& tier : stand_.engine().GetStats().tiers) {
      if (tier.tier != service::TierName::kDevice) {
        ASSERT_EQ(tier.blocks, 0U) << "blocks of closed sequences stay";
      }
      ASSERT_EQ(tier.tokens, 0U);
    }
  }

  std::mt19937_64 random_;
  SteppedExecutor carriers_;
  FaultyTier* host_ = nullptr;
  FaultyTier* rocksdb_ = nullptr;
  EngineStand stand_;
  std::vector<std::unique_ptr<SequenceOracle>> sequences_;
  int opened_ = 0;
};

TEST(ServiceSimulationTest, PromisesHoldUnderAnyOrderAndAnyFault) {
  uint64_t pages_recalled = 0;
  ForEachSeed(20, [&](uint64_t seed) {
    Simulation simulation(seed);
    simulation.Run(400);
    pages_recalled += simulation.pages_recalled();
  });
  EXPECT_GT(pages_recalled, 0U) << "recall was never given its time";
}

}  // namespace
}  // namespace ebbtide::test
