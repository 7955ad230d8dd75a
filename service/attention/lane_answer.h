// SPDX-License-Identifier: Apache-2.0
//
// One lane's part of an answer while it is being made: what is attended exactly, which absent pages
// are attended in a low-bit form, and which are unread. Rows are [group, queries]. Knows arrays and
// pages, no tiers. Tested by tests/unit/service/recall_trace_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "gpu/device.h"
#include "gpu/extent.h"
#include "gpu/kernels/attend.h"
#include "gpu/shape.h"
#include "service/attention/certificate.h"
#include "service/attention/lane_forms.h"
#include "service/model/lane.h"
#include "service/policy/lane_memory.h"
#include "service/policy/scorer.h"

namespace ebbtide::service {

// How much of an absent page the answer has read.
enum class Rung : uint8_t { kDigest, kCoarse, kFine, kExact };

// Small, since a long context has thousands of them in every step.
struct AbsentPage {
  int32_t page = 0;
  int32_t absent = 0;         // Tokens of it that are not resident.
  int touched = -1;           // Where recall counts it.
  bool is_split = false;      // Some query may not see all of them.
  bool is_lost = false;       // Its exact bytes can't be had now: it stays where it is.
  bool is_code_lost = false;  // The same of a low-bit part.
  Rung rung = Rung::kDigest;
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
  // the fine one of a page whose coarse form is attended. Room first; then different pages may be
  // attended at the same time.
  void MakeRoomForForms() { forms_.MakeRoom(pages_.size()); }
  void AttendForm(AbsentPage& page, Rung rung, std::span<const std::byte> part);
  // Exact attention over pages, bytes[i] being pages[i] in the model's dtype, as one run: run the
  // args, then take the results of all runs, in the order in which they were asked for.
  gpu::AttendArgs ExactArgs(std::span<AbsentPage* const> pages,
                            std::span<const std::span<const std::byte>> bytes);
  void TakeExact();
  // Draws the digests' bounds where that was put off, since some page stays unread after all.
  //   kResourceExhausted, kUnavailable  as gpu::Device::Run
  absl::Status EnsureBounds(const gpu::Device& device);

  // The answer as it stands: output [rows, head_dim], lse [rows]; and how far its pages lie from
  // it, at most.
  void Compose();
  std::span<const float> output() const { return output_; }
  std::span<const float> lse() const { return lse_; }
  std::span<const float> output(int row) const {
    return output().subspan(static_cast<size_t>(row) * head_dim(), head_dim());
  }
  // The norm of what the row's output loses where it is sent in `dtype`; infinite beyond its range.
  double RoundingError(int row, gpu::Dtype dtype) const;

  // What the composed answer of `row` may be off by: proven, once that was drawn for all rows.
  void DrawBounds();
  bool has_bounds() const { return !bounds_.empty(); }
  const RowBound& Bound(int row) const { return bounds_[static_cast<size_t>(row)]; }
  // Weighs what each page adds to that, about, or to what it is by experience.
  void Weigh(bool by_experience);
  double Weight(size_t page, int row) const { return weight_[page * row_count() + size_t(row)]; }
  double Estimate(int row) const { return estimate_[static_cast<size_t>(row)]; }

  // What scorers may look at: everything attended.
  std::vector<AttendedPart> Parts() const;

 private:
  // Tokens attended exactly, and what came of it.
  struct Run {
    std::vector<gpu::Extent> extents;
    std::vector<int32_t> index;  // [slots]
    std::vector<float> logits;   // [rows, slots]; where they are kept
    std::vector<float> output;   // [rows, head_dim]
    std::vector<float> lse;      // [rows]
  };

  size_t head_dim() const { return static_cast<size_t>(query_.head_dim); }
  size_t row_count() const { return static_cast<size_t>(query_.rows()); }
  void FindAbsentPages();
  // Which tokens of `page` are absent: bit t.
  uint64_t AbsentBits(const AbsentPage& page) const;
  void NameTokens(const AbsentPage& page, std::span<int32_t> index) const;
  size_t NumberOf(const AbsentPage& page) const {
    return static_cast<size_t>(&page - pages_.data());
  }
  // Where page number `p` lies in what is kept by [rows, pages].
  size_t At(size_t p, int row) const { return static_cast<size_t>(row) * pages_.size() + p; }
  void BoundFromDigests();
  std::vector<float> ResidentLogitSums() const;
  gpu::AttendArgs Args(Run& run, gpu::Dtype dtype) const;
  void TakeRun(const Run& run);
  void ComposeForms();
  void MeasureDistances();
  bool HasMovedFar() const;
  RowBound BoundOf(int row, const Rounding& rounding) const;
  void WidenGuess(size_t p);
  std::vector<float> LogitVariances(const AbsentPage& page) const;
  FormPart PartOf(size_t p, int row) const;
  double Noise(size_t p, int row) const;
  double UnreadWeight(size_t p, int row, bool by_experience) const;

  const LaneQuery query_;
  const Lane& lane_;
  const LaneMemory& memory_;
  std::vector<float> query_norm_;  // [rows]
  // Attended exactly: joined in f64, so that each run is rounded once however many there are.
  std::vector<double> exact_output_;  // [rows, head_dim]
  std::vector<double> exact_lse_;     // [rows]
  int32_t exact_slots_ = 0;           // Of the longest run.
  Run resident_;
  std::vector<Run> recalled_;
  size_t taken_runs_ = 0;  // Of those recalled.
  std::vector<AbsentPage> pages_;
  // [rows, pages] of whole pages, from their digests:
  std::vector<float> mass_low_;  // Log mass, proven
  std::vector<float> mass_high_;
  std::vector<float> mass_guess_;   // By experience
  std::vector<float> distance_;     // >= |value - anchor| of each token, of unread pages
  LaneForms forms_;                 // By number in pages_.
  std::vector<size_t> form_pages_;  // Numbers of the pages in forms.
  std::vector<float> output_;
  std::vector<float> lse_;
  // Distances are measured from an earlier answer as long as the answer stays near it.
  std::vector<float> anchor_;     // [rows, head_dim]; empty: none yet
  std::vector<double> moved_;     // [rows] >= |answer - anchor|
  std::vector<double> share_;     // [pages, rows] of the answer, of pages in forms
  std::vector<double> weight_;    // [pages, rows]
  std::vector<double> estimate_;  // [rows]
  std::vector<RowBound> bounds_;  // [rows] of the composed answer; empty: not drawn yet.
};

}  // namespace ebbtide::service
