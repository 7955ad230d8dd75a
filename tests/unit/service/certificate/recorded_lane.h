// SPDX-License-Identifier: Apache-2.0
//
// A lane of a recorded model (tests/data/README.md) with what its pages leave behind when they are
// absent: digests, codes and what they decode to; and the answers that can be made of them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/kernels/codes.h"
#include "gpu/shape.h"
#include "service/attention/certificate.h"
#include "tests/support/recorded_trace.h"

namespace ebbtide::service {

using test::ReadRecorded;
using test::RecordedTensor;

// How a page takes part in an answer.
enum class PageRung { kUnread, kCoarse, kFine, kExact };

struct RecordedAnswer {
  RowBound bound;
  double error = 0;        // |answer - full attention|
  double unread = 0;       // Share of full attention in unread pages.
  double full_norm = 0;    // |full attention|
  double answer_norm = 0;  // |answer|
};

class RecordedLane {
 public:
  RecordedLane(const RecordedTensor& keys, const RecordedTensor& values, int head);

  int pages() const { return static_cast<int>(pages_.size()); }

  // Log mass of each page that ends before `token`, of `query` [head_dim].
  std::vector<double> PageMasses(std::span<const float> query, float scale, int token) const;

  // The answer of a query at index `token`. rungs[p] for the first pages; what follows is exact.
  RecordedAnswer Answer(std::span<const float> query, float scale, int token,
                        std::span<const PageRung> rungs) const;

 private:
  struct Page {
    std::vector<std::byte> bytes;
    std::vector<std::byte> digest;
    std::vector<std::byte> coarse;
    std::vector<std::byte> fine;
    std::vector<float> decoded[2];  // 4 and 8 bits
  };
  struct Form {
    FormPart part = {};
    double lse = 0;
    double key_error = 0;
    std::vector<float> output;
    std::vector<float> focal_output;
  };

  Form AttendForm(const Page& page, gpu::CodeForm form, std::span<const float> query,
                  float scale) const;
  void NoteSpread(std::span<const float> values, std::span<const float> logits, Form& form) const;
  void AttendExact(std::span<const float> query, float scale, int token,
                   std::span<const PageRung> rungs, std::vector<float>& output, double& lse) const;
  UnreadPage Unread(const Page& page, std::span<const float> query, float scale,
                    std::span<const float> answer) const;
  // exp(logit) by token, in units of the largest, and the output they make.
  std::vector<double> Full(std::span<const float> query, float scale, int token,
                           std::vector<double>& output) const;

  gpu::PageShape shape_;
  int tokens_;
  std::vector<uint16_t> keys_;    // [tokens, head_dim]
  std::vector<uint16_t> values_;  // [tokens, head_dim]
  std::vector<Page> pages_;
  double key_norm_max_ = 0;
  double value_norm_max_ = 0;
};

}  // namespace ebbtide::service
