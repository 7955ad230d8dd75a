// SPDX-License-Identifier: Apache-2.0

#include "service/attention/lane_forms.h"

#include <algorithm>
#include <cmath>

namespace ebbtide::service {
namespace {

// A decoded page, in the first-level cache while it is attended. Written before it is read.
struct Decoded {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): see above
  Decoded() {}
  alignas(64) float element[2 * gpu::kPageTokensMax * gpu::kHeadDimMax];
};

// In f32, in sixteen sums that don't wait for each other, from above: off by less than one part in
// 10^5 of the square.
float Distance(std::span<const float> a, std::span<const float> b) {
  constexpr size_t kSums = 16;
  float sums[kSums] = {};
  size_t d = 0;
  for (; d + kSums <= a.size(); d += kSums) {
    for (size_t l = 0; l < kSums; ++l) {
      const float x = a[d + l] - b[d + l];
      sums[l] += x * x;
    }
  }
  for (; d < a.size(); ++d) sums[0] += (a[d] - b[d]) * (a[d] - b[d]);
  float sum = 0;
  for (const float part : sums) sum += part;
  return std::sqrt(sum) * (1 + 2e-5F);
}

// Of e^x, x normal with mean 0.
float LogNormalVariance(double deviation) {
  constexpr double kVarianceMax = 4;  // Beyond, nothing is known anyhow.
  const double variance = std::min(deviation * deviation, kVarianceMax);
  const double above = std::expm1(variance);
  return static_cast<float>((1 + above) * above);
}

}  // namespace

void LaneForms::MakeRoom(size_t pages) {
  if (page_ != nullptr || pages == 0) return;
  page_ = std::make_unique_for_overwrite<FormPage[]>(pages);
  spread_ = std::make_unique_for_overwrite<gpu::Spread[]>(pages * row_count());
  for (std::unique_ptr<float[]>* of : {&lse_, &logit_error_, &logit_error_joint_, &weight_variance_,
                                       &distance_, &focal_distance_}) {
    *of = std::make_unique_for_overwrite<float[]>(pages * row_count());
  }
  output_ = std::make_unique_for_overwrite<float[]>(pages * row_elements());
  focal_output_ = std::make_unique_for_overwrite<float[]>(pages * row_elements());
  coarse_ = std::make_unique_for_overwrite<std::byte[]>(pages * gpu::CoarseBytes(query_.shape));
  if (!query_.keeps_logits) return;
  logits_ = std::make_unique_for_overwrite<float[]>(pages * row_count() * tokens());
  index_ = std::make_unique_for_overwrite<int32_t[]>(pages * tokens());
}

void LaneForms::Attend(size_t p, const Source& source) {
  const size_t coarse_bytes = gpu::CoarseBytes(query_.shape);
  const std::span<std::byte> coarse(&coarse_[p * coarse_bytes], coarse_bytes);
  const bool is_coarse = source.form == gpu::CodeForm::k4Bit;
  if (is_coarse) std::ranges::copy(source.part, coarse.begin());
  Decoded buffer;
  const std::span<float> decoded = std::span(buffer.element).first(2 * tokens() * head_dim());
  gpu::DecodeCpu({.shape = query_.shape,
                  .form = source.form,
                  .digest = source.digest,
                  .coarse = coarse,
                  .fine = is_coarse ? std::span<const std::byte>() : source.part,
                  .page = decoded});
  gpu::AttendPageCpu(
      {.rows = query_.rows,
       .tokens = query_.shape.tokens,
       .head_dim = query_.shape.head_dim,
       .scale = query_.scale,
       .query = query_.query,
       .page = decoded,
       .visible = source.visible,
       .output = RowElements(output_, p),
       .lse = Rows(lse_, p),
       .focal_output = RowElements(focal_output_, p),
       .spread = Rows(spread_, p),
       .logits = query_.keeps_logits
                     ? std::span(&logits_[p * row_count() * tokens()], row_count() * tokens())
                     : std::span<float>()});
  if (query_.keeps_logits) std::ranges::copy(source.index, &index_[p * tokens()]);
  FormPage& page = page_[p];
  page.is_measured = false;
  const std::span<float> deviation = Rows(weight_variance_, p);
  gpu::CodeErrorsCpu({.shape = query_.shape,
                      .form = source.form,
                      .scale = query_.scale,
                      .rows = query_.rows,
                      .query = query_.query,
                      .digest = source.digest,
                      .coarse = coarse,
                      .logit_error = Rows(logit_error_, p),
                      .logit_error_joint = Rows(logit_error_joint_, p),
                      .logit_deviation = deviation,
                      .key_error = &page.key_error,
                      .value_error = &page.value_error,
                      .value_error_joint = &page.value_error_joint,
                      .value_deviation = &page.value_deviation});
  for (float& each : deviation) each = LogNormalVariance(each);
}

void LaneForms::Measure(size_t p, std::span<const float> from) {
  for (size_t r = 0; r < row_count(); ++r) {
    const auto row = [&](std::span<const float> rows) {
      return rows.subspan(r * head_dim(), head_dim());
    };
    Rows(distance_, p)[r] = Distance(row(RowElements(output_, p)), row(from));
    Rows(focal_distance_, p)[r] = Distance(row(RowElements(focal_output_, p)), row(from));
  }
  page_[p].is_measured = true;
}

}  // namespace ebbtide::service
