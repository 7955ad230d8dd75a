// SPDX-License-Identifier: Apache-2.0
//
// What a layer's last answers taught about recall: where low-bit forms had to be followed by exact
// pages so often that reading exactly at once would have been cheaper, it is, for a while.

#pragma once

#include <cstdint>

namespace ebbtide::service {

inline constexpr int kExactAnswers = 16;  // Then forms are tried again.

struct RecallHistory {
  int exact_answers_left = 0;  // Answers to come that read exactly at once.

  bool reads_exactly() const { return exact_answers_left > 0; }

  // An answer that pursued a target was given, however many tiles it was made in. Its reads cost
  // `spent`; all its pages exactly, at once, would have cost `exact`.
  void NoteAnswer(uint64_t spent, uint64_t exact) {
    if (reads_exactly()) {
      --exact_answers_left;
    } else if (spent > exact) {
      exact_answers_left = kExactAnswers;
    }
  }
};

}  // namespace ebbtide::service
