// SPDX-License-Identifier: Apache-2.0

#include "tests/unit/service/certificate/recorded_lane.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "gpu/element.h"
#include "gpu/extent.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/digest.h"

namespace ebbtide::service {
namespace {

constexpr gpu::CodeForm kForms[] = {gpu::CodeForm::k4Bit, gpu::CodeForm::k8Bit};

template <class T>
double Norm(const T& x) {
  double sum = 0;
  for (const auto element : x) sum += static_cast<double>(element) * static_cast<double>(element);
  return std::sqrt(sum);
}

template <class T, class U>
double Distance(const T& x, const U& y) {
  double sum = 0;
  for (size_t d = 0; d < x.size(); ++d) {
    sum += std::pow(static_cast<double>(x[d]) - static_cast<double>(y[d]), 2);
  }
  return std::sqrt(sum);
}

std::vector<double> Widen(std::span<const uint16_t> halves) {
  std::vector<double> wide;
  for (const uint16_t half : halves) wide.push_back(gpu::HalfToFloat(half));
  return wide;
}

}  // namespace

RecordedLane::RecordedLane(const RecordedTensor& keys, const RecordedTensor& values, int head)
    : shape_{.tokens = 32, .head_dim = keys.head_dim, .dtype = gpu::Dtype::kF16},
      tokens_(keys.tokens) {
  for (int token = 0; token < tokens_; ++token) {
    const auto key = keys.Row(token, head);
    const auto value = values.Row(token, head);
    keys_.insert(keys_.end(), key.begin(), key.end());
    values_.insert(values_.end(), value.begin(), value.end());
    key_norm_max_ = std::max(key_norm_max_, Norm(Widen(key)));
    value_norm_max_ = std::max(value_norm_max_, Norm(Widen(value)));
  }
  for (int p = 0; p < tokens_ / shape_.tokens; ++p) {
    Page& page = pages_.emplace_back();
    page.bytes.resize(shape_.page_bytes());
    const size_t first = static_cast<size_t>(p) * shape_.half_bytes() / 2;
    std::memcpy(page.bytes.data(), &keys_[first], shape_.half_bytes());
    std::memcpy(page.bytes.data() + shape_.half_bytes(), &values_[first], shape_.half_bytes());
    page.digest.resize(gpu::DigestBytes(shape_.head_dim));
    page.coarse.resize(gpu::CoarseBytes(shape_));
    page.fine.resize(gpu::FineBytes(shape_));
    gpu::DigestCpu(
        {.shape = shape_, .tokens = shape_.tokens, .page = page.bytes, .digest = page.digest});
    gpu::EncodeCpu({.shape = shape_,
                    .page = page.bytes,
                    .digest = page.digest,
                    .coarse = page.coarse,
                    .fine = page.fine});
    for (const gpu::CodeForm form : kForms) {
      std::vector<float>& decoded = page.decoded[form == gpu::CodeForm::k8Bit];
      decoded.resize(shape_.page_bytes() / 2);
      gpu::DecodeCpu({.shape = shape_,
                      .form = form,
                      .digest = page.digest,
                      .coarse = page.coarse,
                      .fine = page.fine,
                      .page = decoded});
    }
  }
}

// `values` are decoded, [tokens, head_dim].
void RecordedLane::NoteSpread(std::span<const float> values, std::span<const float> logits,
                              Form& form) const {
  const size_t dim = form.output.size();
  std::vector<double> share;
  double total = 0;
  for (const float logit : logits) {
    share.push_back(std::exp(logit - form.lse));
    total += share.back();
  }
  std::vector<double> focal(dim);
  double focus = 0;
  for (size_t t = 0; t < share.size(); ++t) {
    share[t] /= total;
    focus += share[t] * share[t];
    for (size_t d = 0; d < dim; ++d) focal[d] += share[t] * share[t] * values[t * dim + d];
  }
  for (double& element : focal) element /= focus;
  form.focal_output.assign(focal.begin(), focal.end());
  double squares = 0;
  double focal_squares = 0;
  for (size_t t = 0; t < share.size(); ++t) {
    const std::span<const float> value = values.subspan(t * dim, dim);
    squares += share[t] * std::pow(Distance(value, form.output), 2);
    focal_squares += share[t] * share[t] * std::pow(Distance(value, form.focal_output), 2);
  }
  form.part.spread = std::sqrt(squares) * (1 + 1e-5);
  form.part.focus = focus * (1 + 1e-5);
  form.part.focal_spread = std::sqrt(focal_squares) * (1 + 1e-5);
}

RecordedLane::Form RecordedLane::AttendForm(const Page& page, gpu::CodeForm form,
                                            std::span<const float> query, float scale) const {
  const std::vector<float>& decoded = page.decoded[form == gpu::CodeForm::k8Bit];
  const size_t dim = query.size();
  std::vector<int32_t> index(static_cast<size_t>(shape_.tokens), 0);
  const gpu::Extent extent{
      .key = reinterpret_cast<const std::byte*>(decoded.data()),
      .value = reinterpret_cast<const std::byte*>(decoded.data() + decoded.size() / 2),
      .index = index.data(),
      .slots = shape_.tokens};
  const int32_t last = 0;
  float lse = 0;
  std::vector<float> logits(index.size());
  Form made{.output = std::vector<float>(dim), .focal_output = {}};
  gpu::AttendCpu({.dtype = gpu::Dtype::kF32,
                  .head_dim = shape_.head_dim,
                  .scale = scale,
                  .extents = {&extent, 1},
                  .query = query,
                  .query_index = {&last, 1},
                  .output = made.output,
                  .lse = {&lse, 1},
                  .logits = logits});
  made.lse = lse;
  NoteSpread(std::span(decoded).subspan(decoded.size() / 2), logits, made);
  float logit_error = 0;
  float logit_error_joint = 0;
  float key_error = 0;
  float value_error = 0;
  float value_error_joint = 0;
  gpu::CodeErrorsCpu({.shape = shape_,
                      .form = form,
                      .scale = scale,
                      .rows = 1,
                      .query = query,
                      .digest = page.digest,
                      .coarse = page.coarse,
                      .logit_error = {&logit_error, 1},
                      .logit_error_joint = {&logit_error_joint, 1},
                      .key_error = &key_error,
                      .value_error = &value_error,
                      .value_error_joint = &value_error_joint});
  made.part.logit_error = logit_error;
  made.part.value_error = value_error;
  made.part.tokens = shape_.tokens;
  made.part.logit_error_joint = logit_error_joint;
  made.part.value_error_joint = value_error_joint;
  made.key_error = key_error;
  return made;
}

void RecordedLane::AttendExact(std::span<const float> query, float scale, int token,
                               std::span<const PageRung> rungs, std::vector<float>& output,
                               double& lse) const {
  std::vector<int32_t> index(static_cast<size_t>(tokens_));
  std::iota(index.begin(), index.end(), 0);
  std::vector<gpu::Extent> extents;
  for (int first = 0; first <= token; first += shape_.tokens) {
    const auto page = static_cast<size_t>(first / shape_.tokens);
    if (page < rungs.size() && rungs[page] != PageRung::kExact) continue;
    const auto at = static_cast<size_t>(first * shape_.head_dim);
    extents.push_back({.key = reinterpret_cast<const std::byte*>(&keys_[at]),
                       .value = reinterpret_cast<const std::byte*>(&values_[at]),
                       .index = &index[static_cast<size_t>(first)],
                       .slots = std::min(shape_.tokens, tokens_ - first)});
  }
  float rounded = 0;
  gpu::AttendCpu({.dtype = gpu::Dtype::kF16,
                  .head_dim = shape_.head_dim,
                  .scale = scale,
                  .extents = extents,
                  .query = query,
                  .query_index = {&token, 1},
                  .output = output,
                  .lse = {&rounded, 1},
                  .logits = {}});
  lse = rounded;
}

UnreadPage RecordedLane::Unread(const Page& page, std::span<const float> query, float scale,
                                std::span<const float> answer) const {
  const std::byte* digest = page.digest.data();
  const int32_t absent = shape_.tokens;
  float low = 0;
  float high = 0;
  float guess = 0;
  gpu::BoundCpu({.head_dim = shape_.head_dim,
                 .rows = 1,
                 .pages = 1,
                 .scale = scale,
                 .query = query,
                 .digest = {&digest, 1},
                 .absent = {&absent, 1},
                 .mass_low = {&low, 1},
                 .mass_high = {&high, 1},
                 .mass_estimate = {&guess, 1}});
  float distance = 0;
  gpu::ValueDistanceCpu({.head_dim = shape_.head_dim,
                         .rows = 1,
                         .pages = 1,
                         .output = answer,
                         .digest = {&digest, 1},
                         .distance = {&distance, 1}});
  return {.mass_low = low, .mass_high = high, .distance = distance};
}

std::vector<double> RecordedLane::Full(std::span<const float> query, float scale, int token,
                                       std::vector<double>& output) const {
  std::vector<double> weight;
  const size_t dim = query.size();
  for (size_t t = 0; t <= static_cast<size_t>(token); ++t) {
    double logit = 0;
    for (size_t d = 0; d < dim; ++d) {
      logit += static_cast<double>(query[d]) * gpu::HalfToFloat(keys_[t * dim + d]);
    }
    weight.push_back(logit * scale);
  }
  const double largest = *std::ranges::max_element(weight);
  double sum = 0;
  for (double& w : weight) sum += w = std::exp(w - largest);
  output.assign(dim, 0);
  for (size_t t = 0; t < weight.size(); ++t) {
    weight[t] /= sum;
    for (size_t d = 0; d < dim; ++d)
      output[d] += weight[t] * gpu::HalfToFloat(values_[t * dim + d]);
  }
  return weight;
}

std::vector<double> RecordedLane::PageMasses(std::span<const float> query, float scale,
                                             int token) const {
  std::vector<double> output;
  const std::vector<double> weight = Full(query, scale, token, output);
  std::vector<double> masses;
  for (int first = 0; first + shape_.tokens <= token; first += shape_.tokens) {
    masses.push_back(
        std::accumulate(weight.begin() + first, weight.begin() + first + shape_.tokens, 0.0));
  }
  return masses;
}

RecordedAnswer RecordedLane::Answer(std::span<const float> query, float scale, int token,
                                    std::span<const PageRung> rungs) const {
  std::vector<float> exact_output(query.size());
  double exact_lse = 0;
  AttendExact(query, scale, token, rungs, exact_output, exact_lse);
  std::vector<Form> forms;
  double key_norm = key_norm_max_;
  double value_norm = value_norm_max_;
  double total = 1;  // In units of e^exact_lse.
  for (size_t p = 0; p < rungs.size(); ++p) {
    if (rungs[p] != PageRung::kCoarse && rungs[p] != PageRung::kFine) continue;
    const bool is_coarse = rungs[p] == PageRung::kCoarse;
    forms.push_back(AttendForm(pages_[p], kForms[is_coarse ? 0 : 1], query, scale));
    key_norm = std::max(key_norm, key_norm_max_ + forms.back().key_error);
    value_norm = std::max(value_norm, value_norm_max_ + forms.back().part.value_error);
    total += std::exp(forms.back().lse - exact_lse);
  }
  std::vector<float> answer(query.size());
  for (size_t d = 0; d < answer.size(); ++d) {
    double sum = exact_output[d];
    for (const Form& form : forms) sum += std::exp(form.lse - exact_lse) * form.output[d];
    answer[d] = static_cast<float>(sum / total);
  }
  const double lse = static_cast<float>(exact_lse + std::log(total));

  std::vector<FormPart> parts;
  for (Form& form : forms) {
    form.part.mass = std::exp(form.lse - lse);
    form.part.distance = Distance(form.output, answer);
    form.part.focal_distance = Distance(form.focal_output, answer) * (1 + 1e-5);
    parts.push_back(form.part);
  }
  std::vector<UnreadPage> unread;
  std::vector<double> full;
  const std::vector<double> weight = Full(query, scale, token, full);
  RecordedAnswer made;
  for (size_t p = 0; p < rungs.size(); ++p) {
    if (rungs[p] != PageRung::kUnread) continue;
    unread.push_back(Unread(pages_[p], query, scale, answer));
    for (size_t t = 0; t < static_cast<size_t>(shape_.tokens); ++t) {
      made.unread += weight[p * static_cast<size_t>(shape_.tokens) + t];
    }
  }
  made.bound = BoundRow(
      {.lse = lse,
       .exact_mass = std::exp(exact_lse - lse),
       .forms = parts,
       .unread = unread,
       .rounding = {.logit_error = gpu::AttendLogitError(
                        shape_.head_dim, scale, static_cast<float>(Norm(query) * (1 + 1e-6)),
                        static_cast<float>(key_norm * (1 + 1e-6))),
                    .sum_error = gpu::AttendSumError(static_cast<size_t>(token + 1)),
                    .merges = 1,
                    .value_norm_max = value_norm,
                    .output_norm = Norm(answer)}});
  made.error = Distance(full, answer);
  made.full_norm = Norm(full);
  made.answer_norm = Norm(answer);
  return made;
}

}  // namespace ebbtide::service
