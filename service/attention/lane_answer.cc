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

// Of e^x, x normal with mean 0.
float LogNormalVariance(double deviation) {
  constexpr double kVarianceMax = 4;  // Beyond, nothing is known anyhow.
  const double variance = std::min(deviation * deviation, kVarianceMax);
  return static_cast<float>(std::exp(variance) * std::expm1(variance));
}

bool IsForm(const AbsentPage& page) {
  return page.rung == Rung::kCoarse || page.rung == Rung::kFine;
}

// A decoded page, in the first-level cache while it is attended. Written before it is read.
struct Decoded {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): see above
  Decoded() {}
  float element[2 * gpu::kPageTokensMax * gpu::kHeadDimMax];
};

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

absl::Status LaneAnswer::EnsureBounds(const gpu::Device& device) {
  if (!mass_low_.empty()) return absl::OkStatus();
  // Nobody thought that anything would stay unread: the resident logits are drawn anew.
  resident_.logits.resize(static_cast<size_t>(rows()) * resident_.index.size());
  extents_ = FrameExtents(memory_, lane_.slot_index());
  std::vector<float> output(exact_output_.size());
  std::vector<float> lse(exact_lse_.size());
  gpu::AttendArgs args = Args(extents_, memory_.shape.dtype);
  args.output = output;
  args.lse = lse;
  args.logits = resident_.logits;
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

// The absent ones, so that the others hide.
void LaneAnswer::NameTokens(AbsentPage& page) const {
  if (!page.index.empty()) return;
  const int32_t tokens = memory_.shape.tokens;
  page.index.assign(static_cast<size_t>(tokens), gpu::kNoToken);
  for (int32_t t = 0; t < tokens; ++t) {
    if ((lane_.resident_bits(page.page) >> t & 1) == 0)
      page.index[static_cast<size_t>(t)] = page.page * tokens + t;
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
  for (const AbsentPage& page : pages_) {
    if (page.is_split) {
      for (int row = 0; row < rows(); ++row) mass_low_[At(page, row)] = kNothing;
    }
    if (query_.needs_guess) WidenGuess(page);
  }
}

// Logits that spread normally around their mean add half their variance.
void LaneAnswer::WidenGuess(const AbsentPage& page) {
  const std::vector<float> variance = LogitVariances(page);
  for (int row = 0; row < rows(); ++row) {
    float& guess = mass_guess_[At(page, row)];
    guess = std::min(mass_high_[At(page, row)], guess + variance[static_cast<size_t>(row)] / 2);
  }
}

// [rows] by experience, how far apart the logits of a page lie: of its 32 keys the box is about
// four deviations wide.
std::vector<float> LaneAnswer::LogitVariances(const AbsentPage& page) const {
  const gpu::DigestView digest(memory_.digest(page.page).data(), query_.head_dim);
  std::vector<float> deviation;  // Of a channel.
  deviation.reserve(head_dim());
  for (size_t d = 0; d < head_dim(); ++d) {
    const float width = gpu::HalfToFloat(digest.key_high[d]) - gpu::HalfToFloat(digest.key_low[d]);
    deviation.push_back(0.25F * query_.scale * width);
  }
  const std::vector<float> zero(head_dim());
  std::vector<float> product(head_dim());
  std::vector<float> variance;
  for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) {
    for (size_t d = 0; d < head_dim(); ++d)
      product[d] = query_.query[r * head_dim() + d] * deviation[d];
    variance.push_back(static_cast<float>(SquaredDistance(product, zero)));
  }
  return variance;
}

void LaneAnswer::AttendForm(AbsentPage& page, Rung rung, std::span<const std::byte> part) {
  const bool is_coarse = rung == Rung::kCoarse;
  NameTokens(page);
  if (page.form == nullptr) page.form = std::make_unique<PageForm>();
  PageForm& form = *page.form;
  if (is_coarse) form.coarse.assign(part.begin(), part.end());
  const std::span<const std::byte> coarse = form.coarse;
  const std::span<const std::byte> fine = is_coarse ? std::span<const std::byte>() : part;
  const gpu::PageShape shape = memory_.shape;
  const auto elements = static_cast<size_t>(shape.tokens) * head_dim();
  Decoded buffer;
  const std::span<float> decoded = std::span(buffer.element).first(2 * elements);
  gpu::DecodeCpu({.shape = shape,
                  .form = FormOf(rung),
                  .digest = memory_.digest(page.page),
                  .coarse = coarse,
                  .fine = fine,
                  .page = decoded});
  page.rung = rung;
  form.output.resize(static_cast<size_t>(rows()) * head_dim());
  form.lse.resize(static_cast<size_t>(rows()));
  form.logit_error.resize(static_cast<size_t>(rows()));
  form.logit_error_joint.resize(static_cast<size_t>(rows()));
  std::vector<float> deviation(static_cast<size_t>(rows()));
  gpu::CodeErrorsCpu({.shape = shape,
                      .form = FormOf(rung),
                      .scale = query_.scale,
                      .rows = rows(),
                      .query = query_.query,
                      .digest = memory_.digest(page.page),
                      .coarse = coarse,
                      .logit_error = form.logit_error,
                      .logit_error_joint = form.logit_error_joint,
                      .logit_deviation = deviation,
                      .key_error = &form.key_error,
                      .value_error = &form.value_error,
                      .value_error_joint = &form.value_error_joint,
                      .value_deviation = &form.value_deviation});
  const gpu::Extent extent{.key = reinterpret_cast<const std::byte*>(decoded.data()),
                           .value = reinterpret_cast<const std::byte*>(decoded.data() + elements),
                           .index = page.index.data(),
                           .slots = shape.tokens};
  std::vector<float> logits(static_cast<size_t>(rows() * shape.tokens));
  gpu::AttendArgs args = Args({&extent, 1}, gpu::Dtype::kF32);
  args.output = form.output;
  args.lse = form.lse;
  args.logits = logits;
  gpu::AttendCpu(args);
  form.spread.resize(static_cast<size_t>(rows()));
  form.focal_output.resize(form.output.size());
  gpu::SpreadCpu({.rows = rows(),
                  .tokens = shape.tokens,
                  .head_dim = query_.head_dim,
                  .value = decoded.subspan(elements),
                  .logits = logits,
                  .lse = form.lse,
                  .output = form.output,
                  .focal_output = form.focal_output,
                  .spread = form.spread});
  form.weight_variance.clear();
  for (const float logit : deviation) form.weight_variance.push_back(LogNormalVariance(logit));
  if (query_.keeps_logits) form.logits = std::move(logits);
}

gpu::AttendArgs LaneAnswer::ExactArgs(std::span<AbsentPage* const> pages,
                                      std::span<const std::span<const std::byte>> bytes) {
  const gpu::PageShape shape = memory_.shape;
  extents_.clear();
  recalled_.emplace_back();
  Spill& spill = recalled_.back();
  for (size_t i = 0; i < pages.size(); ++i) {
    NameTokens(*pages[i]);
    extents_.push_back({.key = bytes[i].data(),
                        .value = bytes[i].data() + shape.half_bytes(),
                        .index = pages[i]->index.data(),
                        .slots = shape.tokens});
    spill.index.insert(spill.index.end(), pages[i]->index.begin(), pages[i]->index.end());
    pages[i]->rung = Rung::kExact;
    pages[i]->form.reset();
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
  bounds_.clear();
  std::ranges::copy(exact_output_, output_.begin());
  std::ranges::copy(exact_lse_, lse_.begin());
  if (std::ranges::any_of(pages_, IsForm)) {
    std::vector<double> sum(head_dim());
    for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) ComposeRow(r, sum);
  }
  MeasureDistances();
}

// Merges the forms into the exact part. `sum` is scratch.
void LaneAnswer::ComposeRow(size_t row, std::span<double> sum) {
  double peak = exact_lse_[row];
  for (const AbsentPage& page : pages_) {
    if (IsForm(page)) peak = std::max<double>(peak, page.form->lse[row]);
  }
  if (peak == kNothing) return;
  const double exact_weight = std::exp(exact_lse_[row] - peak);
  double total = exact_weight;
  const size_t first = row * head_dim();
  for (size_t d = 0; d < head_dim(); ++d) sum[d] = exact_weight * exact_output_[first + d];
  for (const AbsentPage& page : pages_) {
    if (!IsForm(page)) continue;
    const double weight = std::exp(page.form->lse[row] - peak);
    total += weight;
    for (size_t d = 0; d < head_dim(); ++d) sum[d] += weight * page.form->output[first + d];
  }
  for (size_t d = 0; d < head_dim(); ++d) output_[first + d] = static_cast<float>(sum[d] / total);
  lse_[row] = static_cast<float>(peak + std::log(total));
}

void LaneAnswer::MeasureDistances() {
  std::vector<size_t> unread;  // Numbers of pages.
  std::vector<const std::byte*> digests;
  for (size_t p = 0; p < pages_.size(); ++p) {
    AbsentPage& page = pages_[p];
    if (page.rung == Rung::kDigest) {
      unread.push_back(p);
      digests.push_back(memory_.digest(page.page).data());
    } else if (IsForm(page)) {
      page.form->part.clear();
      page.form->part.reserve(static_cast<size_t>(rows()));
      for (int row = 0; row < rows(); ++row) page.form->part.push_back(PartOf(page, row));
    }
  }
  if (unread.empty()) return;
  std::vector<float> distance(static_cast<size_t>(rows()) * unread.size());
  gpu::ValueDistanceCpu({.head_dim = query_.head_dim,
                         .rows = rows(),
                         .pages = static_cast<int>(unread.size()),
                         .output = output_,
                         .digest = digests,
                         .distance = distance});
  distance_.resize(static_cast<size_t>(rows()) * pages_.size());
  for (size_t r = 0; r < static_cast<size_t>(rows()); ++r) {
    for (size_t u = 0; u < unread.size(); ++u)
      distance_[r * pages_.size() + unread[u]] = distance[r * unread.size() + u];
  }
}

// A form's share of the composed answer.
double LaneAnswer::ShareOf(const AbsentPage& page, int row) const {
  return std::exp(static_cast<double>(page.form->lse[static_cast<size_t>(row)]) -
                  lse_[static_cast<size_t>(row)]);
}

FormPart LaneAnswer::PartOf(const AbsentPage& page, int row) const {
  const auto r = static_cast<size_t>(row);
  const auto own = std::span(page.form->output).subspan(r * head_dim(), head_dim());
  const auto focal = std::span(page.form->focal_output).subspan(r * head_dim(), head_dim());
  const gpu::Spread& spread = page.form->spread[r];
  // The longest of its decoded values.
  const double longest = memory_.value_norm_max + double{page.form->value_error};
  return {.mass = ShareOf(page, row),
          .distance = Distance(own, output(row)),
          .spread = spread.each,
          .logit_error = page.form->logit_error[r],
          .value_error = page.form->value_error,
          .tokens = page.absent,
          .focus = spread.focus,
          .focal_distance = Distance(focal, output(row)) + gpu::kFocalOutputError * longest,
          .focal_spread = spread.focal,
          .logit_error_joint = page.form->logit_error_joint[r],
          .value_error_joint = page.form->value_error_joint};
}

// By experience, the standard deviation of what a form adds to the error: differences of its tokens
// are independent, weights are off by a log-normal factor (docs/decisions/0002-digest-ladder.md).
double LaneAnswer::Noise(const AbsentPage& page, int row) const {
  const FormPart& part = page.form->part[static_cast<size_t>(row)];
  const double weights = page.form->weight_variance[static_cast<size_t>(row)];
  const double apart = part.focal_spread * part.focal_spread +
                       part.focus * part.focal_distance * part.focal_distance;
  const double values = part.focus * page.form->value_deviation * page.form->value_deviation;
  return part.mass * std::sqrt(weights * apart + values);
}

double LaneAnswer::Contribution(const AbsentPage& page, int row, bool by_experience) const {
  const auto r = static_cast<size_t>(row);
  if (page.rung == Rung::kExact) return 0;
  if (page.rung == Rung::kDigest) {
    const size_t at = At(page, row);
    const double mass = by_experience ? mass_guess_[at] : mass_high_[at];
    // A share of the whole at most: what is unread may outweigh all that is read.
    const double ratio = std::exp(std::min(mass - lse_[r], 40.0));
    return ratio / (1 + ratio) * distance_[at];
  }
  if (page.form->lse[r] == kNothing) return 0;
  return by_experience ? kDeviations * Noise(page, row) : FormShare(page.form->part[r]);
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
    key_norm = std::max(key_norm, memory_.key_norm_max + double{page.form->key_error});
    value_norm = std::max(value_norm, memory_.value_norm_max + double{page.form->value_error});
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

void LaneAnswer::DrawBounds() {
  bounds_.clear();
  for (int row = 0; row < rows(); ++row) bounds_.push_back(BoundOf(row));
}

RowBound LaneAnswer::BoundOf(int row) const {
  const auto r = static_cast<size_t>(row);
  std::vector<FormPart> forms;
  std::vector<UnreadPage> unread;
  for (const AbsentPage& page : pages_) {
    if (page.rung == Rung::kDigest) {
      const size_t at = At(page, row);
      unread.push_back(
          {.mass_low = mass_low_[at], .mass_high = mass_high_[at], .distance = distance_[at]});
    } else if (IsForm(page) && page.form->lse[r] != kNothing) {
      forms.push_back(page.form->part[r]);
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
      parts.push_back({.index = page.index, .logits = page.form->logits});
    }
  }
  return parts;
}

}  // namespace ebbtide::service
