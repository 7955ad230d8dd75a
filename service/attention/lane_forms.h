// SPDX-License-Identifier: Apache-2.0
//
// What a lane's pages attended in low-bit forms come to, by page and row, in flat arrays: a long
// context has thousands of them in every step. Knows arrays, no tiers and no answer. Tested with
// the answers that are made of them (tests/unit/service/recall_trace_test.cc).

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gpu/kernels/attend_page.h"
#include "gpu/kernels/codes.h"
#include "gpu/shape.h"

namespace ebbtide::service {

// One page in its form, for all rows.
struct FormPage {
  float key_error = 0;          // Of its decoded keys, in l2 norm, proven
  float value_error = 0;        // Proven, of each token
  float value_error_joint = 0;  // and of all together
  float value_deviation = 0;    // By experience
  bool is_measured = false;     // Distances are set.
};

struct FormQuery {
  gpu::PageShape shape;
  float scale = 0;
  int rows = 0;
  bool keeps_logits = false;
  std::span<const float> query;  // [rows, head_dim]
};

// Thread-compatible; different pages may be attended at the same time.
class LaneForms {
 public:
  explicit LaneForms(const FormQuery& query) : query_(query) {}

  // Room for the forms of `pages` pages; nothing where there is room already.
  void MakeRoom(size_t pages);

  struct Source {
    gpu::CodeForm form = gpu::CodeForm::k4Bit;
    std::span<const std::byte> digest;
    std::span<const std::byte> part;      // The coarse part, or the fine one of a page attended so.
    std::span<const uint64_t> visible;    // [rows] bit t: the row sees token t
    std::span<const int32_t> index = {};  // [page_tokens] what logits are of; where they are kept
  };
  // In place of what is there of page number `p`.
  void Attend(size_t p, const Source& source);
  // Sets the distances of a page's outputs from those given, [rows, head_dim].
  void Measure(size_t p, std::span<const float> from);

  const FormPage& page(size_t p) const { return page_[p]; }
  // [rows] of page number `p`:
  std::span<const float> lse(size_t p) const { return Rows(lse_, p); }
  std::span<const gpu::Spread> spread(size_t p) const { return Rows(spread_, p); }
  // Proven, of each token; and of all together.
  std::span<const float> logit_error(size_t p) const { return Rows(logit_error_, p); }
  std::span<const float> logit_error_joint(size_t p) const { return Rows(logit_error_joint_, p); }
  // By experience, of e^(what a logit is off by).
  std::span<const float> weight_variance(size_t p) const { return Rows(weight_variance_, p); }
  // >= |its output - what was measured from|, and the same of its values' mean by squares of
  // shares.
  std::span<const float> distance(size_t p) const { return Rows(distance_, p); }
  std::span<const float> focal_distance(size_t p) const { return Rows(focal_distance_, p); }
  std::span<const float> output(size_t p) const {  // [rows, head_dim]
    return {&output_[p * row_elements()], row_elements()};
  }
  std::span<const float> logits(size_t p) const {  // [rows, page_tokens]
    return {&logits_[p * row_count() * tokens()], row_count() * tokens()};
  }
  std::span<const int32_t> index(size_t p) const { return {&index_[p * tokens()], tokens()}; }

 private:
  size_t tokens() const { return static_cast<size_t>(query_.shape.tokens); }
  size_t head_dim() const { return static_cast<size_t>(query_.shape.head_dim); }
  size_t row_count() const { return static_cast<size_t>(query_.rows); }
  size_t row_elements() const { return row_count() * head_dim(); }
  template <class T>
  std::span<T> Rows(const std::unique_ptr<T[]>& of, size_t p) const {
    return {&of[p * row_count()], row_count()};
  }
  template <class T>
  std::span<T> RowElements(const std::unique_ptr<T[]>& of, size_t p) const {
    return {&of[p * row_elements()], row_elements()};
  }

  const FormQuery query_;
  // By page number. Memory that no form has come to is never touched.
  std::unique_ptr<FormPage[]> page_;
  std::unique_ptr<float[]> lse_;  // [pages, rows], and so on
  std::unique_ptr<gpu::Spread[]> spread_;
  std::unique_ptr<float[]> logit_error_;
  std::unique_ptr<float[]> logit_error_joint_;
  std::unique_ptr<float[]> weight_variance_;
  std::unique_ptr<float[]> distance_;
  std::unique_ptr<float[]> focal_distance_;
  std::unique_ptr<float[]> output_;        // [pages, rows, head_dim]
  std::unique_ptr<float[]> focal_output_;  // [pages, rows, head_dim]
  std::unique_ptr<std::byte[]> coarse_;    // [pages, CoarseBytes] kept for the finer form
  std::unique_ptr<float[]> logits_;        // [pages, rows, page_tokens]; where scores want them
  std::unique_ptr<int32_t[]> index_;       // [pages, page_tokens]
};

}  // namespace ebbtide::service
