// SPDX-License-Identifier: Apache-2.0

#include "service/attention/lane_answer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/container/inlined_vector.h"

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/bound.h"

namespace ebbtide::service {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// An estimate is this many standard deviations of what codes' rounding does, by experience
// (docs/decisions/0002-digest-ladder.md: the 99th percentile of true errors is then below it).
constexpr double kDeviations = 4;

// Of the answer's length: how far it may move before distances are measured anew. They grow by as
// much at most, and values lie an answer's length from it or more (decision 0002: one to ten).
constexpr double kAnchorReach = 1.0 / 64;

double Norm(std::span<const float> v) {
  double sum = 0;
  for (const float x : v) sum += static_cast<double>(x) * x;
  return std::sqrt(sum);
}

// From above.
double Distance(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) {
    const double off = static_cast<double>(a[d]) - b[d];
    sum += off * off;
  }
  return std::sqrt(sum) * (1 + 1e-12);
}

// An f16 as f32, but 65536 and more for what is not finite: no branch, so that it is done in
// vectors.
float NearHalf(uint16_t half) {
  const uint32_t bits = (half & 0x7FFFU) << 13 | (half & 0x8000U) << 16;
  return std::bit_cast<float>(bits) * 0x1p112F;
}

bool IsForm(const AbsentPage& page) {
  return page.rung == Rung::kCoarse || page.rung == Rung::kFine;
}

gpu::CodeForm FormOf(Rung rung) {
  return rung == Rung::kCoarse ? gpu::CodeForm::k4Bit : gpu::CodeForm::k8Bit;
}

}  // namespace

LaneAnswer::LaneAnswer(const LaneQuery& query, const Lane& lane, const LaneMemory& memory)
    : query_(query),
      lane_(lane),
      memory_(memory),
      exact_output_(row_count() * head_dim()),
      exact_lse_(row_count(), kNothing),
      forms_({.shape = memory.shape,
              .scale = query.scale,
              .rows = query.rows(),
              .keeps_logits = query.keeps_logits,
              .query = query.query}),
      output_(row_count() * head_dim()),
      lse_(row_count()),
      moved_(row_count()),
      estimate_(row_count()) {
  for (size_t r = 0; r < row_count(); ++r) {
    query_norm_.push_back(
        static_cast<float>(Norm(query.query.subspan(r * head_dim(), head_dim())) * (1 + 1e-6)));
  }
}

gpu::AttendArgs LaneAnswer::Args(Run& run, gpu::Dtype dtype) const {
  run.output.resize(row_count() * head_dim());
  run.lse.resize(row_count());
  return {.dtype = dtype,
          .head_dim = query_.head_dim,
          .group = query_.group,
          .queries = query_.queries,
          .scale = query_.scale,
          .extents = run.extents,
          .query = query_.query,
          .query_index = query_.query_index,
          .output = run.output,
          .lse = run.lse,
          .logits = run.logits};
}

gpu::AttendArgs LaneAnswer::ResidentArgs() {
  WorkingFrames frames = FindWorkingFrames(memory_, lane_.slot_index());
  resident_.extents = std::move(frames.extents);
  resident_.index = std::move(frames.slot_index);
  if (query_.keeps_logits || query_.needs_bounds)
    resident_.logits.resize(row_count() * resident_.index.size());
  return Args(resident_, memory_.shape.dtype);
}

void LaneAnswer::TakeResident() {
  TakeRun(resident_);
  FindAbsentPages();
  if (query_.needs_bounds) BoundFromDigests();
}

absl::Status LaneAnswer::EnsureBounds(const gpu::Device& device) {
  if (!mass_low_.empty()) return absl::OkStatus();
  // Nobody thought that anything would stay unread: the resident logits are drawn anew.
  resident_.logits.resize(row_count() * resident_.index.size());
  const gpu::AttendArgs args = Args(resident_, memory_.shape.dtype);
  EBBTIDE_RETURN_IF_ERROR(device.Run(std::span<const gpu::AttendArgs>(&args, 1)));
  BoundFromDigests();
  return absl::OkStatus();
}

void LaneAnswer::FindAbsentPages() {
  const int32_t tokens = memory_.shape.tokens;
  const int32_t newest = query_.query_index.back();
  const int32_t oldest = query_.query_index.front();
  pages_.reserve(static_cast<size_t>(lane_.pages()));
  for (int32_t page = 0; page < lane_.pages() && page * tokens <= newest; ++page) {
    const int32_t absent = lane_.absent(page);
    if (absent == 0) continue;
    EBBTIDE_CHECK(page < memory_.digested_pages(), "a page with absent tokens has a digest");
    AbsentPage& entry = pages_.emplace_back();
    entry.page = page;
    entry.absent = absent;
    entry.is_split = (page + 1) * tokens - 1 > oldest;
  }
}

uint64_t LaneAnswer::AbsentBits(const AbsentPage& page) const {
  const int32_t tokens = memory_.shape.tokens;
  const uint64_t all = tokens == 64 ? ~uint64_t{0} : (uint64_t{1} << tokens) - 1;
  return ~lane_.resident_bits(page.page) & all;
}

// The absent ones, so that the others hide.
void LaneAnswer::NameTokens(const AbsentPage& page, std::span<int32_t> index) const {
  const uint64_t absent = AbsentBits(page);
  for (size_t t = 0; t < index.size(); ++t) {
    index[t] = (absent >> t & 1) != 0 ? page.page * memory_.shape.tokens + static_cast<int32_t>(t)
                                      : gpu::kNoToken;
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
  for (std::vector<float>* bound : {&mass_low_, &mass_high_, &mass_guess_})
    bound->resize(static_cast<size_t>(rows()) * count);
  gpu::BoundCpu({.head_dim = query_.head_dim,
                 .rows = rows(),
                 .pages = static_cast<int>(count),
                 .scale = query_.scale,
                 .query = query_.query,
                 .digest = digests,
                 .absent = absent,
                 .resident_logit_sum = sums,
                 .resident_logit_error = error,
                 .mass_low = mass_low_,
                 .mass_high = mass_high_,
                 .mass_estimate = mass_guess_});
  for (size_t p = 0; p < count; ++p) {
    if (pages_[p].is_split) {
      for (int row = 0; row < rows(); ++row) mass_low_[At(p, row)] = kNothing;
    }
    if (query_.needs_guess) WidenGuess(p);
  }
}

// Logits that spread normally around their mean add half their variance.
void LaneAnswer::WidenGuess(size_t p) {
  const std::vector<float> variance = LogitVariances(pages_[p]);
  for (int row = 0; row < rows(); ++row) {
    float& guess = mass_guess_[At(p, row)];
    guess = std::min(mass_high_[At(p, row)], guess + variance[static_cast<size_t>(row)] / 2);
  }
}

// [rows] by experience, how far apart the logits of a page lie: of its 32 keys the box is about
// four deviations wide.
std::vector<float> LaneAnswer::LogitVariances(const AbsentPage& page) const {
  const gpu::DigestView digest(memory_.digest(page.page).data(), query_.head_dim);
  std::array<float, gpu::kHeadDimMax> deviation;  // Of a channel.
  for (size_t d = 0; d < head_dim(); ++d) {
    const float width = NearHalf(digest.key_high[d]) - NearHalf(digest.key_low[d]);
    deviation[d] = 0.25F * query_.scale * width;
  }
  std::vector<float> variance;
  for (size_t r = 0; r < row_count(); ++r) {
    const float* const query = &query_.query[r * head_dim()];
    float sums[8] = {};
    size_t d = 0;
    for (; d + 8 <= head_dim(); d += 8) {
      for (size_t l = 0; l < 8; ++l) {
        const float product = query[d + l] * deviation[d + l];
        sums[l] += product * product;
      }
    }
    for (; d < head_dim(); ++d) sums[0] += query[d] * deviation[d] * query[d] * deviation[d];
    variance.push_back(std::accumulate(std::begin(sums), std::end(sums), 0.0F));
  }
  return variance;
}

void LaneAnswer::AttendForm(AbsentPage& page, Rung rung, std::span<const std::byte> part) {
  const int32_t tokens = memory_.shape.tokens;
  const uint64_t absent = AbsentBits(page);
  absl::InlinedVector<uint64_t, 16> visible(row_count(), absent);
  for (size_t r = 0; page.is_split && r < row_count(); ++r) {
    const auto m = r % static_cast<size_t>(query_.queries);
    const int32_t seen = std::clamp(query_.query_index[m] - page.page * tokens + 1, 0, tokens);
    if (seen < tokens) visible[r] &= (uint64_t{1} << seen) - 1;
  }
  absl::InlinedVector<int32_t, gpu::kPageTokensMax> index(
      query_.keeps_logits ? static_cast<size_t>(tokens) : 0);
  NameTokens(page, {index.data(), index.size()});
  forms_.Attend(NumberOf(page), {.form = FormOf(rung),
                                 .digest = memory_.digest(page.page),
                                 .part = part,
                                 .visible = {visible.data(), visible.size()},
                                 .index = {index.data(), index.size()}});
  page.rung = rung;
}

gpu::AttendArgs LaneAnswer::ExactArgs(std::span<AbsentPage* const> pages,
                                      std::span<const std::span<const std::byte>> bytes) {
  const gpu::PageShape shape = memory_.shape;
  const auto tokens = static_cast<size_t>(shape.tokens);
  Run& run = recalled_.emplace_back();
  run.index.resize(pages.size() * tokens);
  for (size_t i = 0; i < pages.size(); ++i) {
    const std::span<int32_t> index = std::span(run.index).subspan(i * tokens, tokens);
    NameTokens(*pages[i], index);
    run.extents.push_back({.key = bytes[i].data(),
                           .value = bytes[i].data() + shape.half_bytes(),
                           .index = index.data(),
                           .slots = shape.tokens});
    pages[i]->rung = Rung::kExact;
  }
  if (query_.keeps_logits) run.logits.resize(row_count() * run.index.size());
  return Args(run, shape.dtype);
}

void LaneAnswer::TakeExact() {
  for (; taken_runs_ < recalled_.size(); ++taken_runs_) {
    Run& run = recalled_[taken_runs_];
    TakeRun(run);
    run.output = {};
  }
  if (query_.keeps_logits) return;
  recalled_.clear();
  taken_runs_ = 0;
}

void LaneAnswer::TakeRun(const Run& run) {
  exact_slots_ = std::max(exact_slots_, static_cast<int32_t>(run.index.size()));
  for (size_t r = 0; r < row_count(); ++r) {
    const double part = run.lse[r];
    if (part == kNothing) continue;
    const double peak = std::max(exact_lse_[r], part);
    const double old_weight = std::exp(exact_lse_[r] - peak);
    const double weight = std::exp(part - peak);
    const double total = old_weight + weight;
    for (size_t d = r * head_dim(); d < (r + 1) * head_dim(); ++d)
      exact_output_[d] = (old_weight * exact_output_[d] + weight * run.output[d]) / total;
    exact_lse_[r] = peak + std::log(total);
  }
}

void LaneAnswer::Compose() {
  bounds_.clear();
  form_pages_.clear();
  for (size_t p = 0; p < pages_.size(); ++p) {
    if (IsForm(pages_[p])) form_pages_.push_back(p);
  }
  if (form_pages_.empty()) {
    std::ranges::transform(exact_output_, output_.begin(),
                           [](double x) { return static_cast<float>(x); });
    std::ranges::transform(exact_lse_, lse_.begin(),
                           [](double x) { return static_cast<float>(x); });
  } else {
    ComposeForms();
  }
  MeasureDistances();
}

// Merges the forms into the exact part, page after page.
void LaneAnswer::ComposeForms() {
  share_.resize(pages_.size() * row_count());
  std::vector<double> peak = exact_lse_;
  for (const size_t p : form_pages_) {
    const std::span<const float> lse = forms_.lse(p);
    for (size_t r = 0; r < row_count(); ++r) peak[r] = std::max<double>(peak[r], lse[r]);
  }
  std::vector<double> total(row_count());
  std::vector<double> sum(output_.size());
  for (size_t r = 0; r < row_count(); ++r) {
    if (peak[r] == kNothing) peak[r] = 0;
    total[r] = std::exp(exact_lse_[r] - peak[r]);
    for (size_t d = r * head_dim(); d < (r + 1) * head_dim(); ++d)
      sum[d] = total[r] * exact_output_[d];
  }
  for (const size_t p : form_pages_) {
    const std::span<const float> lse = forms_.lse(p);
    const float* output = forms_.output(p).data();
    for (size_t r = 0; r < row_count(); ++r, output += head_dim()) {
      const double weight = std::exp(lse[r] - peak[r]);
      share_[p * row_count() + r] = weight;
      total[r] += weight;
      double* const into = &sum[r * head_dim()];
      for (size_t d = 0; d < head_dim(); ++d) into[d] += weight * output[d];
    }
  }
  for (size_t r = 0; r < row_count(); ++r) {
    lse_[r] = static_cast<float>(peak[r] + std::log(total[r]));
    const double whole = total[r] > 0 ? total[r] : 1;
    for (size_t d = r * head_dim(); d < (r + 1) * head_dim(); ++d)
      output_[d] = static_cast<float>(sum[d] / whole);
    total[r] = whole;
  }
  for (const size_t p : form_pages_) {
    for (size_t r = 0; r < row_count(); ++r) share_[p * row_count() + r] /= total[r];
  }
}

bool LaneAnswer::HasMovedFar() const {
  for (size_t r = 0; r < row_count(); ++r) {
    if (moved_[r] > kAnchorReach * Norm(output(static_cast<int>(r)))) return true;
  }
  return false;
}

// Of what is unread, and of forms; only of new ones where the answer has hardly moved.
void LaneAnswer::MeasureDistances() {
  const bool has_anchor = !anchor_.empty();
  for (size_t r = 0; has_anchor && r < row_count(); ++r) {
    moved_[r] = Distance(output(static_cast<int>(r)),
                         std::span(anchor_).subspan(r * head_dim(), head_dim()));
  }
  const bool is_anew = !has_anchor || HasMovedFar();
  if (is_anew) {
    anchor_ = output_;
    std::ranges::fill(moved_, 0.0);
  }
  for (const size_t p : form_pages_) {
    if (is_anew || !forms_.page(p).is_measured) forms_.Measure(p, anchor_);
  }
  if (!is_anew) return;
  std::vector<size_t> unread;  // Numbers of pages.
  std::vector<const std::byte*> digests;
  for (size_t p = 0; p < pages_.size(); ++p) {
    if (pages_[p].rung != Rung::kDigest) continue;
    unread.push_back(p);
    digests.push_back(memory_.digest(pages_[p].page).data());
  }
  if (unread.empty()) return;
  std::vector<float> distance(row_count() * unread.size());
  gpu::ValueDistanceCpu({.head_dim = query_.head_dim,
                         .rows = rows(),
                         .pages = static_cast<int>(unread.size()),
                         .output = anchor_,
                         .digest = digests,
                         .distance = distance});
  distance_.resize(row_count() * pages_.size());
  for (size_t r = 0; r < row_count(); ++r) {
    for (size_t u = 0; u < unread.size(); ++u)
      distance_[r * pages_.size() + unread[u]] = distance[r * unread.size() + u];
  }
}

FormPart LaneAnswer::PartOf(size_t p, int row) const {
  const auto r = static_cast<size_t>(row);
  const FormPage& page = forms_.page(p);
  const gpu::Spread& spread = forms_.spread(p)[r];
  // The longest of its decoded values.
  const double longest = memory_.value_norm_max + double{page.value_error};
  return {
      .mass = share_[p * row_count() + r],
      .distance = forms_.distance(p)[r] + moved_[r],
      .spread = spread.each,
      .logit_error = forms_.logit_error(p)[r],
      .value_error = page.value_error,
      .tokens = pages_[p].absent,
      .focus = spread.focus,
      .focal_distance = forms_.focal_distance(p)[r] + moved_[r] + gpu::kFocalOutputError * longest,
      .focal_spread = spread.focal,
      .logit_error_joint = forms_.logit_error_joint(p)[r],
      .value_error_joint = page.value_error_joint};
}

// By experience, the standard deviation of what a form adds to the error: differences of its tokens
// are independent, weights are off by a log-normal factor (docs/decisions/0002-digest-ladder.md).
double LaneAnswer::Noise(size_t p, int row) const {
  const auto r = static_cast<size_t>(row);
  const gpu::Spread& spread = forms_.spread(p)[r];
  const FormPage& page = forms_.page(p);
  const double distance = forms_.focal_distance(p)[r];
  const double apart = double{spread.focal} * spread.focal + spread.focus * distance * distance;
  const double values = double{spread.focus} * page.value_deviation * page.value_deviation;
  return share_[p * row_count() + r] *
         std::sqrt(double{forms_.weight_variance(p)[r]} * apart + values);
}

double LaneAnswer::UnreadWeight(size_t p, int row, bool by_experience) const {
  const auto r = static_cast<size_t>(row);
  const size_t at = At(p, row);
  const double mass = by_experience ? mass_guess_[at] : mass_high_[at];
  // A share of the whole at most: what is unread may outweigh all that is read.
  const double ratio = std::exp(std::min(mass - lse_[r], 40.0));
  return ratio / (1 + ratio) * (distance_[at] + moved_[r]);
}

void LaneAnswer::Weigh(bool by_experience) {
  weight_.assign(pages_.size() * row_count(), 0);
  std::vector<double> squares(row_count());  // Of forms: their errors are independent.
  std::vector<double> sum(row_count());      // Of unread pages: what is left out adds up.
  for (size_t p = 0; p < pages_.size(); ++p) {
    const AbsentPage& page = pages_[p];
    if (page.rung == Rung::kExact) continue;
    for (size_t r = 0; r < row_count(); ++r) {
      const auto row = static_cast<int>(r);
      double& weight = weight_[p * row_count() + r];
      if (page.rung == Rung::kDigest) {
        weight = UnreadWeight(p, row, by_experience);
        sum[r] += weight;
      } else if (forms_.lse(p)[r] != kNothing) {
        weight = by_experience ? kDeviations * Noise(p, row) : FormShare(PartOf(p, row));
        squares[r] += weight * weight;
      }
    }
  }
  for (size_t r = 0; r < row_count(); ++r) estimate_[r] = sum[r] + std::sqrt(squares[r]);
}

void LaneAnswer::DrawBounds() {
  // Decoded keys and values may be longer than any that were encoded.
  double key_error = 0;
  double value_error = 0;
  for (const size_t p : form_pages_) {
    key_error = std::max(key_error, double{forms_.page(p).key_error});
    value_error = std::max(value_error, double{forms_.page(p).value_error});
  }
  const auto key_norm = static_cast<float>((memory_.key_norm_max + key_error) * (1 + 1e-6));
  const int32_t slots = std::max(exact_slots_, form_pages_.empty() ? 0 : memory_.shape.tokens);
  bounds_.clear();
  for (size_t r = 0; r < row_count(); ++r) {
    const auto row = static_cast<int>(r);
    bounds_.push_back(BoundOf(row, {.logit_error = gpu::AttendLogitError(
                                        query_.head_dim, query_.scale, query_norm_[r], key_norm),
                                    .sum_error = gpu::AttendSumError(static_cast<size_t>(slots)),
                                    .merges = 1,
                                    .value_norm_max = memory_.value_norm_max + value_error,
                                    .output_norm = Norm(output(row))}));
  }
}

double LaneAnswer::RoundingError(int row, gpu::Dtype dtype) const {
  double squares = 0;
  for (const float x : output(row)) {
    std::array<std::byte, sizeof(float)> sent;
    gpu::StoreElement(dtype, sent.data(), 0, x);
    const double off = static_cast<double>(gpu::ElementAt(dtype, sent.data(), 0)) - x;
    squares += off * off;
  }
  return std::sqrt(squares);
}

RowBound LaneAnswer::BoundOf(int row, const Rounding& rounding) const {
  const auto r = static_cast<size_t>(row);
  std::vector<FormPart> forms;
  std::vector<UnreadPage> unread;
  for (size_t p = 0; p < pages_.size(); ++p) {
    if (pages_[p].rung == Rung::kDigest) {
      const size_t at = At(p, row);
      unread.push_back({.mass_low = mass_low_[at],
                        .mass_high = mass_high_[at],
                        .distance = distance_[at] + moved_[r]});
    } else if (IsForm(pages_[p]) && forms_.lse(p)[r] != kNothing) {
      forms.push_back(PartOf(p, row));
    }
  }
  return BoundRow({.lse = lse_[r],
                   .exact_mass = std::exp(exact_lse_[r] - lse_[r]),
                   .forms = forms,
                   .unread = unread,
                   .rounding = rounding});
}

std::vector<AttendedPart> LaneAnswer::Parts() const {
  std::vector<AttendedPart> parts;
  if (!query_.keeps_logits) return parts;
  parts.push_back({.index = resident_.index, .logits = resident_.logits});
  for (const Run& run : recalled_) parts.push_back({.index = run.index, .logits = run.logits});
  for (const size_t p : form_pages_)
    parts.push_back({.index = forms_.index(p), .logits = forms_.logits(p)});
  return parts;
}

}  // namespace ebbtide::service
