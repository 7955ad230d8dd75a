// SPDX-License-Identifier: Apache-2.0
//
// What one sequence should hold and answer, for the simulation: it knows what its worker sent, and
// nothing of how the service keeps it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "service/calls.h"
#include "service/engine.h"
#include "service/policy/policy.h"
#include "tests/support/engine_stand.h"

namespace ebbtide::test {

struct OracleCounts {
  uint64_t answers = 0;
  uint64_t not_met = 0;
  uint64_t lost_pages = 0;  // Reported corrupt or missing.
  uint64_t checked_pages = 0;
};

Tokens TokensOf(uint64_t seed);  // Of SmallGeometry; dtypes of tokens and of answers by turns.

class SequenceOracle {
 public:
  SequenceOracle(service::Engine& engine, std::string name, uint64_t seed,
                 const service::OpenArgs& args);

  const std::string& name() const { return name_; }
  int32_t length() const { return length_; }
  const OracleCounts& counts() const { return counts_; }
  bool is_open() const { return is_open_; }

  // Opens the sequence; false where the service refused it for want of room.
  bool Open();
  // A whole step of `count` tokens in every layer, retried as an honest worker does; false where
  // the service is full and the step stays half done, to be resumed by the next Step.
  bool Step(int32_t count, service::Phase phase, absl::Duration patience);
  // Asks again about the last token without appending.
  void AskAgain();
  void Truncate(int32_t length);
  void Close();
  // Reads every page of a lane back: right bytes, or an honest loss.
  void CheckBytes(int layer, int kv_head);
  // Which tokens of the lanes are resident, for comparing twins.
  std::string Residents();

 private:
  // Where in a call's answer a token stands.
  struct AnsweredToken {
    service::Phase phase = service::Phase::kDecode;
    int layer = 0;
    int32_t index = 0;
    size_t row = 0;
  };
  void CheckAnswer(const service::StepAnswer& answer, const AnsweredToken& token);
  // Whether it is met, by what the worker was sent.
  void CheckMet(const service::StepAnswer& answer, const AnsweredToken& token,
                const std::vector<double>& output);
  service::RecallSpec RecallIn(service::Phase phase) const;

  service::Engine& engine_;
  const std::string name_;
  Tokens tokens_;
  Worker worker_;
  service::RecallSpec recall_;
  service::PrefillSpec prefill_;
  bool is_open_ = false;
  int32_t length_ = 0;      // Committed.
  int32_t step_count_ = 0;  // Of a step under way.
  int next_layer_ = 0;      // Of a step under way.
  OracleCounts counts_;
};

}  // namespace ebbtide::test
