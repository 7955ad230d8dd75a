// SPDX-License-Identifier: Apache-2.0
//
// What a layer's last answers taught about recall: where low-bit forms had to be followed by exact
// pages so often that reading exactly at once would have been cheaper, it is, for a while.

#pragma once

namespace ebbtide::service {

struct RecallHistory {
  int exact_answers_left = 0;  // Answers to come that read exactly at once.
};

inline constexpr int kExactAnswers = 16;  // Then forms are tried again.

}  // namespace ebbtide::service
