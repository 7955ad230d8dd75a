// SPDX-License-Identifier: Apache-2.0

#include "tests/cuemu/mma.h"

#include <cmath>

namespace cuemu {
namespace {

constexpr int kRows = 16;
constexpr int kColumns = 8;
constexpr int kChannels = 16;
constexpr int kAtOnce = 8;  // Products that are added in one step.
constexpr int kSignificand = 24;

// As f32, towards zero.
float CutOff(double x) {
  const auto nearest = static_cast<float>(x);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(x) ? std::nextafter(nearest, 0.0F)
                                                                : nearest;
}

// sum + the terms, each cut off where the largest of all ends.
float AddAligned(float sum, const double* terms) {
  double all[kAtOnce + 1];
  double largest = all[0] = static_cast<double>(sum);
  double plain = all[0];
  for (int i = 0; i < kAtOnce; ++i) {
    all[i + 1] = terms[i];
    largest = std::fmax(std::fabs(largest), std::fabs(terms[i]));
    plain += terms[i];
  }
  if (!std::isfinite(plain) || largest == 0) return static_cast<float>(plain);
  const double unit = std::ldexp(1.0, std::ilogb(largest) - (kSignificand - 1));
  double total = 0;
  for (const double term : all) total += std::trunc(term / unit);  // Whole numbers: exact.
  return CutOff(total * unit);
}

}  // namespace

void MultiplyAddFragments(unsigned lanes, const Fragments* const* in, Fragments* const* out) {
  double a[kRows][kChannels];
  double b[kChannels][kColumns];
  for (int l = 0; l < kWarpLanes; ++l) {
    if ((lanes >> l & 1U) == 0) {
      for (int present = 0; present < kWarpLanes; ++present) {
        if ((lanes >> present & 1U) == 0) continue;
        Fail("a product of a warp's matrices lacks lanes of the warp", in[present]->place);
      }
    }
    const int group = l / 4;
    for (int i = 0; i < 2; ++i) {
      const int channel = l % 4 * 2 + i;
      const auto element = [&](unsigned pair) {
        return in[l]->widen(static_cast<unsigned short>(pair >> 16 * i));
      };
      a[group][channel] = element(in[l]->a[0]);
      a[group + 8][channel] = element(in[l]->a[1]);
      a[group][channel + 8] = element(in[l]->a[2]);
      a[group + 8][channel + 8] = element(in[l]->a[3]);
      b[channel][group] = element(in[l]->b[0]);
      b[channel + 8][group] = element(in[l]->b[1]);
    }
  }
  for (int l = 0; l < kWarpLanes; ++l) {
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + i / 2 * 8;
      const int column = l % 4 * 2 + i % 2;
      float sum = in[l]->sum[i];
      for (int first = 0; first < kChannels; first += kAtOnce) {
        double terms[kAtOnce];
        for (int c = 0; c < kAtOnce; ++c) terms[c] = a[row][first + c] * b[first + c][column];
        sum = AddAligned(sum, terms);
      }
      out[l]->sum[i] = sum;
    }
  }
}

}  // namespace cuemu
