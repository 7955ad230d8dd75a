// SPDX-License-Identifier: Apache-2.0

#include "service/attention/lane_answer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/merge.h"

namespace ebbtide::service {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// An estimate is this many standard deviations of what codes' rounding does, by experience
// (docs/decisions/0002-digest-ladder.md: the 99th percentile of true errors is then below it).
constexpr double kDeviations = 4;

double Norm(std::span<const float> v) {
  double sum = 0;
  for (const float x : v) sum += static_cast<double>(x) * x;
  return std::sqrt(sum);
}

// In f32, in eight sums that don't wait for each other; off by less than one part in 10^5.
double SquaredDistance(std::span<const float> a, std::span<const float> b) {
  float sums[8] = {};
  size_t d = 0;
  for (; d + 8 <= a.size(); d += 8) {
    for (size_t l = 0; l < 8; ++l) {
      const float x = a[d + l] - b[d + l];
      sums[l] += x * x;
    }
  }
  for (; d < a.size(); ++d) sums[0] += (a[d] - b[d]) * (a[d] - b[d]);
  double sum = 0;
  for (const float part : sums) sum += part;
  return sum;
}

// From above.
double Distance(std::span<const float> a, std::span<const float> b) {
  return std::sqrt(SquaredDistance(a, b)) * (1 + 1e-5);
}

bool IsForm(const AbsentPage& page) {
  return page.rung == Rung::kCoarse || page.rung == Rung::kFine;
}

// A channel of the digest's key box.
double BoxWidth(const gpu::DigestView& digest, int d) {
  const double low = gpu::HalfToFloat(digest.key_low[d]);
  const double high = gpu::HalfToFloat(digest.key_high[d]);
  return high - low;
}

gpu::CodeForm FormOf(Rung rung) {
  return rung == Rung::kCoarse ? gpu::CodeForm::k4Bit : gpu::CodeForm::k8Bit;
}

}  // namespace

LaneAnswer::LaneAnswer(const LaneQuery& query, const Lane& lane, const LaneMemory& memory)
    : query_(query), lane_(lane), memory_(memory) {
  const auto rows = static_cast<size_t>(query.rows());
  exact_output_.resize(rows * head_dim());
  exact_lse_.resize(rows);
  output_.resize(rows * head_dim());
  lse_.resize(rows);
  for (size_t r = 0; r < rows; ++r) {
    query_norm_.push_back(
        static_cast<float>(Norm(query.query.subspan(r * head_dim(), head_dim())) * (1 + 1e-6)));
  }
}

gpu::AttendArgs LaneAnswer::Args(std::span<const gpu::Extent> extents, gpu::Dtype dtype) const {
  return {.dtype = dtype,
          .head_dim = query_.head_dim,
          .group = query_.group,
          .queries = query_.queries,
          .scale = query_.scale,
          .extents = extents,
          .query = query_.query,
          .query_index = query_.query_index,
          .output = {},
          .lse = {},
          .logits = {}};
}

gpu::AttendArgs LaneAnswer::ResidentArgs() {
  extents_ = FrameExtents(memory_, lane_.slot_index());
  resident_.index.assign(lane_.slot_index().begin(), lane_.slot_index().end());
  if (query_.keeps_logits || query_.needs_bounds) {
    resident_.logits.resize(static_cast<size_t>(rows()) * resident_.index.size());
  }
  gpu::AttendArgs args = Args(extents_, memory_.shape.dtype);
  args.output = exact_output_;
  args.lse = exact_lse_;
  args.logits = resident_.logits;
  return args;
}

void LaneAnswer::TakeResident() {
  exact_parts_ = 1;
  exact_slots_ = lane_.slots();
  FindAbsentPages();
  if (query_.needs_bounds) BoundFromDigests();
}

void LaneAnswer::EnsureBounds() {
  if (pages_.empty() || !pages_.front().mass_low.empty()) return;
  // Nobody thought that anything would stay unread: the resident logits are drawn anew.
  resident_.logits.resize(static_cast<size_t>(rows()) * resident_.index.size());
  extents_ = FrameExtents(memory_, lane_.slot_index());
  std::vector<float> output(exact_output_.size());
  std::vector<float> lse(exact_lse_.size());
  gpu::AttendArgs args = Args(extents_, memory_.shape.dtype);
  args.output = output;
  args.lse = lse;
  args.logits = resident_.logits;
  gpu::AttendCpu(args);
  BoundFromDigests();
}

void LaneAnswer::FindAbsentPages() {
  const int32_t tokens = memory_.shape.tokens;
  const int32_t newest = query_.query_index.back();
  const int32_t oldest = query_.query_index.front();
  for (int32_t page = 0; page < lane_.pages() && page * tokens <= newest; ++page) {
    const int32_t absent = lane_.absent(page);
    if (absent == 0) continue;
    EBBTIDE_CHECK(page < memory_.digested_pages(), "a page with absent tokens has a digest");
    AbsentPage& entry = pages_.emplace_back();
    entry.page = page;
    entry.absent = absent;
    entry.is_split = (page + 1) * tokens - 1 > oldest;
    entry.index.assign(static_cast<size_t>(tokens), gpu::kNoToken);
    for (int32_t t = 0; t < tokens; ++t) {
      if ((lane_.resident_bits(page) >> t & 1) == 0)
        entry.index[static_cast<size_t>(t)] = page * tokens + t;
    }
  }
}

// [rows, pages] sums of the working set's logits by the page of their tokens.
std::vector<float> LaneAnswer::ResidentLogitSums() const {
  std::vector<int32_t> number(static_cast<size_t>(lane_.pages()), -1);
  for (size_t p = 0; p < pages_.size(); ++p)
    number[static_cast<size_t>(pages_[p].page)] = static_cast<int32_t>(p);

  const size_t slots = resident_.index.size();
  std::vector<float> sums(static_cast<size_t>(rows()) * pages_.size());
  std::vector<double> sum(pages_.size());
  for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) {
    std::ranges::fill(sum, 0.0);
    for (size_t s = 0; s < slots; ++s) {
      const int32_t index = resident_.index[s];
      if (index == gpu::kNoToken) continue;
      const int32_t p = number[static_cast<size_t>(index / memory_.shape.tokens)];
      if (p >= 0) sum[static_cast<size_t>(p)] += resident_.logits[r * slots + s];
    }
    for (size_t p = 0; p < pages_.size(); ++p)
      sums[r * pages_.size() + p] = static_cast<float>(sum[p]);
  }
  return sums;
}

void LaneAnswer::BoundFromDigests() {
  if (pages_.empty()) return;
  const size_t count = pages_.size();
  std::vector<const std::byte*> digests;
  std::vector<int32_t> absent;
  for (const AbsentPage& page : pages_) {
    digests.push_back(memory_.digest(page.page).data());
    absent.push_back(page.absent);
  }
  std::vector<float> error;
  for (const float norm : query_norm_) {
    error.push_back(
        gpu::AttendLogitError(query_.head_dim, query_.scale, norm, memory_.key_norm_max));
  }
  const std::vector<float> sums = ResidentLogitSums();
  std::vector<float> low(static_cast<size_t>(rows()) * count);
  std::vector<float> high(low.size());
  std::vector<float> guess(low.size());
  gpu::BoundCpu({.head_dim = query_.head_dim,
                 .rows = rows(),
                 .pages = static_cast<int>(count),
                 .scale = query_.scale,
                 .query = query_.query,
                 .digest = digests,
                 .absent = absent,
                 .resident_logit_sum = sums,
                 .resident_logit_error = error,
                 .mass_low = low,
                 .mass_high = high,
                 .mass_estimate = guess});
  for (size_t p = 0; p < count; ++p) {
    AbsentPage& page = pages_[p];
    for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) {
      // Logits that spread normally around their mean add half their variance.
      const double noise = LogitSpread(page, static_cast<int>(r));
      page.mass_high.push_back(high[r * count + p]);
      page.mass_low.push_back(page.is_split ? kNothing : low[r * count + p]);
      page.mass_guess.push_back(std::min(
          high[r * count + p], static_cast<float>(guess[r * count + p] + noise * noise / 2)));
    }
  }
}

// By experience, how far apart the logits of a page lie: of its 32 keys the box is about four
// deviations wide.
double LaneAnswer::LogitSpread(const AbsentPage& page, int row) const {
  const gpu::DigestView digest(memory_.digest(page.page).data(), query_.head_dim);
  const std::span<const float> q =
      query_.query.subspan(static_cast<size_t>(row) * head_dim(), head_dim());
  double sum = 0;
  for (int d = 0; d < query_.head_dim; ++d) {
    const double x = q[static_cast<size_t>(d)] * BoxWidth(digest, d) * 0.25;
    sum += x * x;
  }
  return query_.scale * std::sqrt(sum);
}

void LaneAnswer::AttendForm(AbsentPage& page, Rung rung, std::span<const std::byte> part) {
  const bool is_coarse = rung == Rung::kCoarse;
  const gpu::CodeForm form = FormOf(rung);
  if (is_coarse) page.coarse.assign(part.begin(), part.end());
  const std::span<const std::byte> coarse = page.coarse;
  const std::span<const std::byte> fine = is_coarse ? std::span<const std::byte>() : part;
  const gpu::PageShape shape = memory_.shape;
  const auto elements = static_cast<size_t>(shape.tokens) * head_dim();
  std::vector<float> decoded(2 * elements);
  gpu::DecodeCpu({.shape = shape,
                  .form = form,
                  .digest = memory_.digest(page.page),
                  .coarse = coarse,
                  .fine = fine,
                  .page = decoded});
  page.rung = rung;
  page.output.resize(static_cast<size_t>(rows()) * head_dim());
  page.lse.resize(static_cast<size_t>(rows()));
  page.logit_error.resize(static_cast<size_t>(rows()));
  page.logit_error_joint.resize(static_cast<size_t>(rows()));
  page.logit_deviation.resize(static_cast<size_t>(rows()));
  gpu::CodeErrorsCpu({.shape = shape,
                      .form = form,
                      .scale = query_.scale,
                      .rows = rows(),
                      .query = query_.query,
                      .digest = memory_.digest(page.page),
                      .coarse = coarse,
                      .logit_error = page.logit_error,
                      .logit_error_joint = page.logit_error_joint,
                      .logit_deviation = page.logit_deviation,
                      .key_error = &page.key_error,
                      .value_error = &page.value_error,
                      .value_error_joint = &page.value_error_joint,
                      .value_deviation = &page.value_deviation});
  const gpu::Extent extent{.key = reinterpret_cast<const std::byte*>(decoded.data()),
                           .value = reinterpret_cast<const std::byte*>(decoded.data() + elements),
                           .index = page.index.data(),
                           .slots = shape.tokens};
  std::vector<float> logits(static_cast<size_t>(rows() * shape.tokens));
  gpu::AttendArgs args = Args({&extent, 1}, gpu::Dtype::kF32);
  args.output = page.output;
  args.lse = page.lse;
  args.logits = logits;
  gpu::AttendCpu(args);
  NoteForm(page, decoded, logits);
  if (query_.keeps_logits) page.logits = std::move(logits);
}

// How far apart the form's values lie, by their tokens' shares and by the squares of those.
void LaneAnswer::NoteForm(AbsentPage& page, std::span<const float> decoded,
                          std::span<const float> logits) {
  const auto tokens = static_cast<size_t>(memory_.shape.tokens);
  const auto value = [&](size_t t) {
    return decoded.subspan((tokens + t) * head_dim(), head_dim());
  };
  page.spread.assign(static_cast<size_t>(rows()), {});
  page.focal_output.assign(page.output.size(), 0.0F);
  std::vector<double> share(tokens);
  std::vector<double> sum(head_dim());
  for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) {
    if (page.lse[r] == kNothing) continue;
    double total = 0;
    for (size_t t = 0; t < tokens; ++t) {
      share[t] = std::exp(static_cast<double>(logits[r * tokens + t]) - page.lse[r]);
      total += share[t];
    }
    double focus = 0;
    std::ranges::fill(sum, 0.0);
    for (size_t t = 0; t < tokens; ++t) {
      share[t] /= total;
      const double square = share[t] * share[t];
      if (square == 0) continue;
      focus += square;
      for (size_t d = 0; d < head_dim(); ++d) sum[d] += square * value(t)[d];
    }
    const std::span<float> focal = std::span(page.focal_output).subspan(r * head_dim(), head_dim());
    for (size_t d = 0; d < head_dim(); ++d) focal[d] = static_cast<float>(sum[d] / focus);

    const std::span<const float> own = std::span(page.output).subspan(r * head_dim(), head_dim());
    double squares = 0;
    double focal_squares = 0;
    for (size_t t = 0; t < tokens; ++t) {
      if (share[t] == 0) continue;
      squares += share[t] * SquaredDistance(value(t), own);
      focal_squares += share[t] * share[t] * SquaredDistance(value(t), focal);
    }
    // Above the rounding of the f32 sums.
    constexpr double kAbove = 1 + 1e-4;
    page.spread[r] = {.spread = static_cast<float>(std::sqrt(squares) * kAbove),
                      .focus = static_cast<float>(focus * kAbove),
                      .focal_spread = static_cast<float>(std::sqrt(focal_squares) * kAbove)};
  }
}

gpu::AttendArgs LaneAnswer::ExactArgs(std::span<AbsentPage* const> pages,
                                      std::span<const std::span<const std::byte>> bytes) {
  const gpu::PageShape shape = memory_.shape;
  extents_.clear();
  recalled_.emplace_back();
  Spill& spill = recalled_.back();
  for (size_t i = 0; i < pages.size(); ++i) {
    extents_.push_back({.key = bytes[i].data(),
                        .value = bytes[i].data() + shape.half_bytes(),
                        .index = pages[i]->index.data(),
                        .slots = shape.tokens});
    spill.index.insert(spill.index.end(), pages[i]->index.begin(), pages[i]->index.end());
    pages[i]->rung = Rung::kExact;
  }
  if (query_.keeps_logits) spill.logits.resize(static_cast<size_t>(rows()) * spill.index.size());
  part_output_.resize(exact_output_.size());
  part_lse_.resize(exact_lse_.size());
  gpu::AttendArgs args = Args(extents_, shape.dtype);
  args.output = part_output_;
  args.lse = part_lse_;
  args.logits = spill.logits;
  return args;
}

void LaneAnswer::TakeExact() {
  gpu::MergeCpu({.rows = rows(),
                 .head_dim = query_.head_dim,
                 .part_output = part_output_,
                 .part_lse = part_lse_,
                 .output = exact_output_,
                 .lse = exact_lse_});
  ++exact_parts_;
  exact_slots_ += static_cast<int32_t>(recalled_.back().index.size());
  if (!query_.keeps_logits) recalled_.pop_back();
}

void LaneAnswer::Compose() {
  std::ranges::copy(exact_output_, output_.begin());
  std::ranges::copy(exact_lse_, lse_.begin());
  std::vector<double> sum(head_dim());
  for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) {
    double peak = exact_lse_[r];
    for (const AbsentPage& page : pages_) {
      if (IsForm(page)) peak = std::max<double>(peak, page.lse[r]);
    }
    if (peak == kNothing) continue;
    const double exact_weight = std::exp(exact_lse_[r] - peak);
    double total = exact_weight;
    for (size_t d = 0; d < head_dim(); ++d)
      sum[d] = exact_weight * exact_output_[r * head_dim() + d];
    for (const AbsentPage& page : pages_) {
      if (!IsForm(page)) continue;
      const double weight = std::exp(page.lse[r] - peak);
      total += weight;
      for (size_t d = 0; d < head_dim(); ++d) sum[d] += weight * page.output[r * head_dim() + d];
    }
    for (size_t d = 0; d < head_dim(); ++d)
      output_[r * head_dim() + d] = static_cast<float>(sum[d] / total);
    lse_[r] = static_cast<float>(peak + std::log(total));
  }
}

double LaneAnswer::ValueDistance(const AbsentPage& page, int row) const {
  const std::byte* digest = memory_.digest(page.page).data();
  float distance = 0;
  gpu::ValueDistanceCpu({.head_dim = query_.head_dim,
                         .rows = 1,
                         .pages = 1,
                         .output = output(row),
                         .digest = {&digest, 1},
                         .distance = {&distance, 1}});
  return distance;
}

// A form's share of the composed answer.
double LaneAnswer::ShareOf(const AbsentPage& page, int row) const {
  return std::exp(static_cast<double>(page.lse[static_cast<size_t>(row)]) -
                  lse_[static_cast<size_t>(row)]);
}

FormPart LaneAnswer::PartOf(const AbsentPage& page, int row) const {
  const auto r = static_cast<size_t>(row);
  const auto own = std::span(page.output).subspan(r * head_dim(), head_dim());
  const auto focal = std::span(page.focal_output).subspan(r * head_dim(), head_dim());
  const FormSpread& spread = page.spread[r];
  return {.mass = ShareOf(page, row),
          .distance = Distance(own, output(row)),
          .spread = spread.spread,
          .logit_error = page.logit_error[r],
          .value_error = page.value_error,
          .tokens = page.absent,
          .focus = spread.focus,
          // The mean was rounded to f32.
          .focal_distance = Distance(focal, output(row)) + 0x1p-22 * Norm(focal),
          .focal_spread = spread.focal_spread,
          .logit_error_joint = page.logit_error_joint[r],
          .value_error_joint = page.value_error_joint};
}

// By experience, the standard deviation of what a form adds to the error: differences of its tokens
// are independent, weights are off by a log-normal factor (docs/decisions/0002-digest-ladder.md).
double LaneAnswer::Noise(const AbsentPage& page, int row) const {
  constexpr double kVarianceMax = 4;  // Beyond, nothing is known anyhow.
  const FormPart part = PartOf(page, row);
  const double logit = page.logit_deviation[static_cast<size_t>(row)];
  const double variance = std::min(logit * logit, kVarianceMax);
  const double weights = std::exp(variance) * std::expm1(variance);
  const double apart = part.focal_spread * part.focal_spread +
                       part.focus * part.focal_distance * part.focal_distance;
  const double values = part.focus * page.value_deviation * page.value_deviation;
  return part.mass * std::sqrt(weights * apart + values);
}

double LaneAnswer::Contribution(const AbsentPage& page, int row, bool by_experience) const {
  const auto r = static_cast<size_t>(row);
  if (page.rung == Rung::kExact) return 0;
  if (page.rung == Rung::kDigest) {
    const double mass = by_experience ? page.mass_guess[r] : page.mass_high[r];
    // A share of the whole at most: what is unread may outweigh all that is read.
    const double ratio = std::exp(std::min(mass - lse_[r], 40.0));
    return ratio / (1 + ratio) * ValueDistance(page, row);
  }
  if (page.lse[r] == kNothing) return 0;
  return by_experience ? kDeviations * Noise(page, row) : FormShare(PartOf(page, row));
}

double LaneAnswer::Estimate(int row) const {
  double squares = 0;  // Of forms: their errors are independent.
  double sum = 0;      // Of unread pages: what is left out adds up.
  for (const AbsentPage& page : pages_) {
    const double part = Contribution(page, row, true);
    (page.rung == Rung::kDigest ? sum : squares) += page.rung == Rung::kDigest ? part : part * part;
  }
  return sum + std::sqrt(squares);
}

Rounding LaneAnswer::RoundingOf(int row) const {
  // Decoded keys and values may be longer than any that were encoded.
  double key_norm = memory_.key_norm_max;
  double value_norm = memory_.value_norm_max;
  int32_t slots = exact_slots_;
  for (const AbsentPage& page : pages_) {
    if (!IsForm(page)) continue;
    key_norm = std::max(key_norm, memory_.key_norm_max + double{page.key_error});
    value_norm = std::max(value_norm, memory_.value_norm_max + double{page.value_error});
    slots = std::max(slots, memory_.shape.tokens);
  }
  return {.logit_error = gpu::AttendLogitError(query_.head_dim, query_.scale,
                                               query_norm_[static_cast<size_t>(row)],
                                               static_cast<float>(key_norm * (1 + 1e-6))),
          .sum_error = gpu::AttendSumError(static_cast<size_t>(slots)),
          .merges = exact_parts_,
          .value_norm_max = value_norm,
          .output_norm = Norm(output(row))};
}

RowBound LaneAnswer::Bound(int row) const {
  const auto r = static_cast<size_t>(row);
  std::vector<FormPart> forms;
  std::vector<UnreadPage> unread;
  for (const AbsentPage& page : pages_) {
    if (page.rung == Rung::kDigest) {
      unread.push_back({.mass_low = page.mass_low[r],
                        .mass_high = page.mass_high[r],
                        .distance = ValueDistance(page, row)});
    } else if (IsForm(page) && page.lse[r] != kNothing) {
      forms.push_back(PartOf(page, row));
    }
  }
  return BoundRow({.lse = lse_[r],
                   .exact_mass = std::exp(static_cast<double>(exact_lse_[r]) - lse_[r]),
                   .forms = forms,
                   .unread = unread,
                   .rounding = RoundingOf(row)});
}

std::vector<AttendedPart> LaneAnswer::Parts() const {
  std::vector<AttendedPart> parts;
  if (!query_.keeps_logits) return parts;
  parts.push_back({.index = resident_.index, .logits = resident_.logits});
  for (const Spill& spill : recalled_)
    parts.push_back({.index = spill.index, .logits = spill.logits});
  for (const AbsentPage& page : pages_) {
    if (IsForm(page)) {
      parts.push_back({.index = page.index, .logits = page.logits});
    }
  }
  return parts;
}

}  // namespace ebbtide::service
