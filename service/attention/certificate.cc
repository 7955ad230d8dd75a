// SPDX-License-Identifier: Apache-2.0
//
// The bound, and why it holds.
//
// Let the answer be o = sum_j a_j w_j over everything attended, with sum_j a_j = 1 and w_j the
// value used. Truly token j has the logit of a_j plus e_j, |e_j| <= R, and the value v_j, |v_j -
// w_j| <= rho (both 0 where it was attended exactly); unread pages P have masses x_P in units of
// e^lse, and values v with |v - o| <= D_P. Then
//
//   full - o = N / Z,  N = sum_j a_j e^(e_j) (v_j - o) + sum_P x_P (v_P - o),
//                      Z = sum_j a_j e^(e_j) + sum_P x_P.
//
// |N| / Z <= f holds if u.N - f Z <= 0 for every unit vector u and all that is possible. With
// g_j = u.(w_j - o) + rho - f, that is at most
//
//   S(f) = sup_u sum_j (a_j e^(e_j) g_j) + sum_P x_P (D_P - f).
//
// Unread: the most is at x_P's upper end where D_P > f, else at its lower end.
//
// A form with mass W, own output c, t = u.(c - o): each term is linear in e^(e_j), so its most is
// at an end, a_j (cosh R g_j + sinh R |g_j|). The g_j have the mean b = t + rho - f by weight, and
// the variance along u, at most spread^2; sum_j a_j |g_j| <= W sqrt(spread^2 + b^2) by
// Cauchy-Schwarz. Together h(t) = W (cosh R b + sinh R sqrt(spread^2 + b^2)).
//
// Exact: sum_j a_j (w_j - o) = 0 over everything, so the exact part is -f of its mass less sum W t
// over the forms. h(t) - W t is convex in t, and |t| <= distance: its most is at an end.
//
// So S(f) is a sum of known terms; it falls in f and is convex. Any f with S(f) <= 0 is a bound,
// and is only ever accepted by looking. Attained: one form, two tokens in weights and places of the
// worst.
//
// Rounding: o as computed is such a sum too, for logits that are off by a little more, but for a
// vector that is added to |N|. Masses, and own outputs, are true but for as little.

#include "service/attention/certificate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ebbtide::service {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloatUnit = 0x1p-24;  // A rounding to f32, relative.

// Relative to the sum of what is added up, whatever its sign: f64 rounding of up to 2^13 terms.
constexpr double kSumSlack = 0x1p-39;

// FloatUp of a bound that f64 arithmetic may have made a little small.
float RoundedUp(double bound) {
  if (!(bound < kInfinity)) return std::numeric_limits<float>::infinity();
  const double wide = bound * (1 + 1e-12);
  const auto nearest = static_cast<float>(wide);
  return nearest < wide ? std::nextafter(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

// What rounding did, in the terms of the comment above.
struct Noise {
  double lse = 0;           // A log-sum-exp of the answer's size is off by no more.
  double per_log_mass = 0;  // And one of a part, by so much more for each nat that it is below.
  double output = 0;        // Length of the vector to add to |N|.
};

// A merge rounds lse and output. Parts far below the answer have larger lse, but a small share of
// it: sum share |ln share| is below 10 for 20 000 of them.
//
// A weight is off by its logit and two lse, and so is the sum that divides it, on distances of at
// most |value| + |answer|.
Noise NoiseOf(const Rounding& rounding, double lse) {
  const double roundings = rounding.merges + 2;
  const double off = kFloatUnit * roundings * (std::fabs(lse) + 10) + rounding.sum_error;
  const double weights = std::expm1(2 * rounding.logit_error + 4 * off);
  const double sums = rounding.sum_error + kFloatUnit * roundings;
  return {.lse = off,
          .per_log_mass = kFloatUnit * roundings,
          .output = weights * (rounding.value_norm_max + rounding.output_norm) +
                    sums * rounding.value_norm_max};
}

struct Form {
  double mass = 0;
  double mass_error = 0;  // Relative.
  double distance = 0;
  double spread_squared = 0;
  double value_error = 0;
  double cosh = 1;  // Of all that its logits may be off by.
  double sinh = 0;
};

struct Unread {
  double low = 0;  // Masses in units of e^lse.
  double high = 0;
  double distance = 0;
};

// S(f) of the comment above, and what is needed around it.
class Excess {
 public:
  explicit Excess(const RowBoundArgs& args) : noise_(NoiseOf(args.rounding, args.lse)) {
    const double logit_error = args.rounding.logit_error;
    if (args.exact_mass > 0) {
      exact_low_ = args.exact_mass * std::exp(-logit_error - MassError(args.exact_mass));
    }
    forms_.reserve(args.forms.size());
    for (const FormPart& part : args.forms) {
      if (part.mass == 0) continue;
      const double mass_error = MassError(part.mass);
      const double error = part.logit_error + logit_error + mass_error;
      forms_.push_back({.mass = part.mass,
                        .mass_error = std::expm1(mass_error),
                        .distance = part.distance + noise_.output,
                        .spread_squared = part.spread * part.spread,
                        .value_error = part.value_error,
                        .cosh = std::cosh(error),
                        .sinh = std::sinh(error)});
    }
    unread_.reserve(args.unread.size());
    for (const UnreadPage& page : args.unread) {
      unread_.push_back({.low = std::exp(std::min(page.mass_low - args.lse - noise_.lse, 700.0)),
                         .high = std::exp(page.mass_high - args.lse + noise_.lse),
                         .distance = page.distance});
    }
  }

  struct Point {
    double value = 0;  // Not below S(f), nor above but for rounding.
    double slope = 0;
  };

  Point At(double f) const {
    double sum = noise_.output - f * exact_low_;
    double size = noise_.output + f * exact_low_;
    double slope = -exact_low_;
    for (const Form& form : forms_) {
      const double near = form.value_error - f - form.distance;
      const double far = form.value_error - f + form.distance;
      const double near_root = std::sqrt(form.spread_squared + near * near);
      const double far_root = std::sqrt(form.spread_squared + far * far);
      const double at_near = form.cosh * near + form.sinh * near_root + form.distance;
      const double at_far = form.cosh * far + form.sinh * far_root - form.distance;
      const bool is_near = at_near > at_far;
      const double mean = is_near ? near : far;
      const double root = is_near ? near_root : far_root;
      sum += form.mass * ((is_near ? at_near : at_far) + form.distance * form.mass_error);
      size += form.mass * (form.cosh * std::fabs(mean) + form.sinh * root + form.distance);
      slope -= form.mass * (form.cosh + (root > 0 ? form.sinh * mean / root : 0));
    }
    for (const Unread& page : unread_) {
      const double mass = page.distance > f ? page.high : page.low;
      sum += mass * (page.distance - f);
      size += mass * std::fabs(page.distance - f);
      slope -= mass;
    }
    return {.value = sum + size * kSumSlack, .slope = slope};
  }

  // An f with S(f) <= 0, but for rounding. From sqrt(x^2 + y^2) <= |x| + |y| in every form, S(f) <=
  // top - f * bottom, with unread pages counted at their most, or with f beyond all their
  // distances.
  double Start() const {
    double top = noise_.output;
    double bottom = exact_low_;
    for (const Form& form : forms_) {
      const double up = form.cosh + form.sinh;
      top += form.mass * ((up - 1 + form.mass_error) * form.distance +
                          form.sinh * std::sqrt(form.spread_squared) + up * form.value_error);
      bottom += form.mass / up;
    }
    double most = top;
    double least = top;
    double farthest = 0;
    for (const Unread& page : unread_) {
      most += page.high * page.distance;
      least += page.low * page.distance;
      farthest = std::max(farthest, page.distance);
      bottom += page.low;
    }
    const double beyond = std::max(farthest, least / bottom);
    const double within = most / bottom;
    return (within < beyond ? within : beyond) * (1 + 1e-9);
  }

  double UnreadShare() const {
    double attended = exact_low_;
    for (const Form& form : forms_) attended += form.mass / (form.cosh + form.sinh);
    double unread = 0;
    for (const Unread& page : unread_) unread += page.high;
    if (unread == 0) return 0;
    return unread < kInfinity ? std::min(unread / (unread + attended), 1.0) : 1;
  }

 private:
  // Of a share of the answer, in the logarithm: it is the difference of two lse.
  double MassError(double mass) const {
    return 2 * noise_.lse + noise_.per_log_mass * std::fabs(std::log(mass));
  }

  const Noise noise_;
  double exact_low_ = 0;
  std::vector<Form> forms_;
  std::vector<Unread> unread_;
};

// The least f found with S(f) <= 0. Of a convex function, tangents from the left meet 0 before it
// does and chords after: two ends that close in fast.
double Least(const Excess& excess) {
  double high = excess.Start();
  Excess::Point at_high = excess.At(high);
  for (int doubling = 0; at_high.value > 0 && doubling < 8; ++doubling) {
    high *= 2;
    at_high = excess.At(high);
  }
  if (!(at_high.value <= 0)) return kInfinity;  // NaN too: nothing is proven.
  double low = 0;
  Excess::Point at_low = excess.At(low);
  const auto look = [&](double f) {
    if (!(f > low && f < high)) return;
    const Excess::Point at = excess.At(f);
    (at.value <= 0 ? high : low) = f;
    (at.value <= 0 ? at_high : at_low) = at;
  };
  if (at_low.value <= 0) return low;
  for (int round = 0; round < 30 && high - low > 1e-3 * high; ++round) {
    look(low - at_low.value / at_low.slope);
    // A little past it: rounding must not turn the end that is wanted into the other.
    look(low + (high - low) * at_low.value / (at_low.value - at_high.value) + 1e-4 * high);
  }
  return high;
}

}  // namespace

RowBound BoundRow(const RowBoundArgs& args) {
  if (args.lse == -kInfinity) {  // No answer: what is true lies among the unread values.
    double farthest = 0;
    for (const UnreadPage& page : args.unread) farthest = std::max(farthest, page.distance);
    return {.error = RoundedUp(farthest), .mass = args.unread.empty() ? 0.0F : 1.0F};
  }
  const Excess excess(args);
  return {.error = RoundedUp(Least(excess)),
          .mass = std::min(RoundedUp(excess.UnreadShare()), 1.0F)};
}

// With E the error, O the answer and F full attention over all heads: |E| <= tau / (1 + tau) |O|
// makes |F| >= |O| - |E| >= |O| / (1 + tau), so |E| <= tau |F|.
bool IsMet(std::span<const float> errors, std::span<const double> output_norms, double tau) {
  double error = 0;
  double output = 0;
  for (const float e : errors) error += static_cast<double>(e) * static_cast<double>(e);
  for (const double norm : output_norms) output += norm * norm;
  return std::sqrt(error) * (1 + 1e-12) <= tau / (1 + tau) * std::sqrt(output) * (1 - 1e-12);
}

}  // namespace ebbtide::service
