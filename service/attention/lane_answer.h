// SPDX-License-Identifier: Apache-2.0
//
// One lane's part of an answer while it is being made: what is attended exactly, which absent pages
// are attended in a low-bit form, and which are unread. Rows are [group, queries]. Knows arrays and
// pages, no tiers. Tested by tests/unit/service/recall_trace_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "gpu/device.h"
#include "gpu/extent.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/spread.h"
#include "gpu/shape.h"
#include "service/attention/certificate.h"
#include "service/model/lane.h"
#include "service/policy/lane_memory.h"
#include "service/policy/scorer.h"

namespace ebbtide::service {

// How much of an absent page the answer has read.
enum class Rung : uint8_t { kDigest, kCoarse, kFine, kExact };

// A page attended in a low-bit form.
struct PageForm {
  std::vector<float> output;             // [rows, head_dim]
  std::vector<float> focal_output;       // [rows, head_dim] its values' mean by squares of shares
  std::vector<float> lse;                // [rows]
  std::vector<gpu::Spread> spread;       // [rows]
  std::vector<float> logit_error;        // [rows] proven, of each token
  std::vector<float> logit_error_joint;  // [rows] and of all together
  std::vector<float> weight_variance;    // [rows] by experience, of e^(what a logit is off by)
  std::vector<float> logits;             // [rows, page_tokens]; only where scores want them
  float key_error = 0;                   // Of its decoded keys, in l2 norm, proven
  float value_error = 0;                 // Proven, of each token
  float value_error_joint = 0;           // and of all together
  float value_deviation = 0;             // By experience
  std::vector<std::byte> coarse;         // Kept for the finer form.
  std::vector<FormPart> part;            // [rows] of the composed answer
};

// Small, since a long context has thousands of them in every step.
struct AbsentPage {
  int32_t page = 0;
  int32_t absent = 0;         // Tokens of it that are not resident.
  int touched = -1;           // Where recall counts it.
  bool is_split = false;      // Some query may not see all of them.
  bool is_lost = false;       // Its exact bytes can't be had now: it stays where it is.
  bool is_code_lost = false;  // The same of a low-bit part.
  Rung rung = Rung::kDigest;
  std::vector<int32_t> index;      // [page_tokens] absent tokens, else gpu::kNoToken; once attended
  std::unique_ptr<PageForm> form;  // Where a low-bit form is attended.
};

struct LaneQuery {
  int head_dim = 0;
  int group = 1;
  int queries = 1;
  float scale = 0;
  bool keeps_logits = false;             // Scores want the logits of everything attended.
  bool needs_bounds = false;             // Something may be left unread.
  bool needs_guess = false;              // And what is read goes by experience.
  std::span<const float> query;          // [group, queries, head_dim]
  std::span<const int32_t> query_index;  // [queries] ascending
  int rows() const { return group * queries; }
};

// Thread-compatible.
class LaneAnswer {
 public:
  // `lane` and `memory` must not change meanwhile: the layer belongs to the call.
  LaneAnswer(const LaneQuery& query, const Lane& lane, const LaneMemory& memory);

  int rows() const { return query_.rows(); }
  int queries() const { return query_.queries; }
  std::span<const float> query() const { return query_.query; }
  std::vector<AbsentPage>& pages() { return pages_; }
  const std::vector<AbsentPage>& pages() const { return pages_; }

  // Attention over the working set: run the args, then take their results, first of all. That draws
  // each absent page's bounds from its digest too.
  gpu::AttendArgs ResidentArgs();
  void TakeResident();
  // Attends a page in a low-bit form, in place of a lower rung of it. `part` is the coarse part, or
  // the fine one of a page whose coarse form is attended.
  void AttendForm(AbsentPage& page, Rung rung, std::span<const std::byte> part);
  // Exact attention over pages, bytes[i] being pages[i] in the model's dtype: run the args, then
  // take their results.
  gpu::AttendArgs ExactArgs(std::span<AbsentPage* const> pages,
                            std::span<const std::span<const std::byte>> bytes);
  void TakeExact();
  // Draws the digests' bounds where that was put off, since some page stays unread after all.
  //   kResourceExhausted, kUnavailable  as gpu::Device::Run
  absl::Status EnsureBounds(const gpu::Device& device);

  // The answer as it stands: output [rows, head_dim], lse [rows]; and how far its pages lie from
  // it.
  void Compose();
  std::span<const float> output() const { return output_; }
  std::span<const float> lse() const { return lse_; }
  std::span<const float> output(int row) const {
    return output().subspan(static_cast<size_t>(row) * head_dim(), head_dim());
  }

  // What the composed answer of `row` may be off by: proven, once that was drawn for all rows, and
  // by experience.
  void DrawBounds();
  bool has_bounds() const { return !bounds_.empty(); }
  const RowBound& Bound(int row) const { return bounds_[static_cast<size_t>(row)]; }
  double Estimate(int row) const;
  // What `page` adds to either, about.
  double Contribution(const AbsentPage& page, int row, bool by_experience) const;

  // What scorers may look at: everything attended.
  std::vector<AttendedPart> Parts() const;

 private:
  struct Spill {
    std::vector<int32_t> index;  // [slots]
    std::vector<float> logits;   // [rows, slots]
  };

  size_t head_dim() const { return static_cast<size_t>(query_.head_dim); }
  void FindAbsentPages();
  void NameTokens(AbsentPage& page) const;
  // Where `page` lies in what is kept by [rows, pages].
  size_t At(const AbsentPage& page, int row) const {
    return static_cast<size_t>(row) * pages_.size() + static_cast<size_t>(&page - pages_.data());
  }
  void BoundFromDigests();
  std::vector<float> ResidentLogitSums() const;
  gpu::AttendArgs Args(std::span<const gpu::Extent> extents, gpu::Dtype dtype) const;
  void ComposeRow(size_t row, std::span<double> sum);
  void MeasureDistances();
  RowBound BoundOf(int row) const;
  void WidenGuess(const AbsentPage& page);
  std::vector<float> LogitVariances(const AbsentPage& page) const;
  double ShareOf(const AbsentPage& page, int row) const;
  FormPart PartOf(const AbsentPage& page, int row) const;
  double Noise(const AbsentPage& page, int row) const;
  Rounding RoundingOf(int row) const;

  const LaneQuery query_;
  const Lane& lane_;
  const LaneMemory& memory_;
  std::vector<float> query_norm_;     // [rows]
  std::vector<float> exact_output_;   // [rows, head_dim]
  std::vector<float> exact_lse_;      // [rows]
  std::vector<gpu::Extent> extents_;  // Of the args that are being run.
  std::vector<float> part_output_;    // Their results, where they are to be merged.
  std::vector<float> part_lse_;
  int exact_parts_ = 0;  // Partial attentions merged into it.
  int32_t exact_slots_ = 0;
  Spill resident_;
  std::vector<Spill> recalled_;
  std::vector<AbsentPage> pages_;
  // [rows, pages] of whole pages, from their digests:
  std::vector<float> mass_low_;  // Log mass, proven
  std::vector<float> mass_high_;
  std::vector<float> mass_guess_;  // By experience
  std::vector<float> distance_;    // >= |value - composed answer| of each token, of unread pages
  std::vector<float> output_;
  std::vector<float> lse_;
  std::vector<RowBound> bounds_;  // [rows] of the composed answer; empty: not drawn yet.
};

}  // namespace ebbtide::service
