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
// A form's tokens together: |e| <= l as a vector, so |e^(e_j) - 1| <= |e_j| (e^R - 1) / R makes the
// vector of all e^(e_j) - 1 no longer than x = l (e^R - 1) / R, and by Cauchy-Schwarz over tokens,
// with p_j = u.(w_j - o),
//
//   sum_j a_j e^(e_j) (p_j - f) <= W (t - f) + x (sum_j a_j^2 (p_j - f)^2)^(1/2),
//   sum_j a_j^2 (p_j - f)^2 <= W^2 (focal_spread^2 + focus focal_distance^2
//                                   + 2 f focus focal_distance + f^2 focus),
//
// where W t falls away as above. What values are off by is apart then, as it may be in h: along u
//
//   sum_j a_j e^(e_j) (v_j - w_j) <= W min(e^R rho, e^R focus^(1/2) l',
//                                          focus^(1/2) l' + min(e^R - 1, x focus^(1/2)) rho),
//
// l' what they may be off by together. Each of these holds, so the least of them does, for each
// form and each f anew.
//
// So S(f) is a sum of known terms; any f with S(f) <= 0 is a bound, and is only ever accepted by
// looking. Attained: one form, two tokens in weights and places of the worst.
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

// Weighted values below f32's normal numbers are off by 2^-150 each, however small they are: 2^24
// tokens and as many merges, over 2^8 channels.
constexpr double kUnderflow = 0x1p-121;

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
                    sums * rounding.value_norm_max +
                    (rounding.value_norm_max > 0 ? kUnderflow : 0)};
}

// At most top - f * bottom, for every f.
struct Line {
  double top = 0;
  double bottom = 0;
};

// The least that is proven of a sum at some f, and its slope.
struct Point {
  double value = 0;
  double slope = 0;

  void TakeLeast(const Point& other) {
    if (other.value < value) *this = other;  // Never NaN.
  }
};

// A form in the terms of the comment above, for a mass of 1.
class Form {
 public:
  // Logits are off by `rounding` more, each in its own way; own outputs by `output`.
  Form(const FormPart& part, double rounding, double mass_error, double output)
      : mass_(part.mass),
        distance_(part.distance + output),
        fixed_(std::expm1(mass_error) * distance_),
        spread_squared_(part.spread * part.spread),
        value_error_(part.value_error),
        focus_(part.focus),
        focal_distance_(part.focal_distance + output),
        focal_squared_(part.focal_spread * part.focal_spread +
                       focus_ * focal_distance_ * focal_distance_) {
    const double error = part.logit_error + rounding;
    const double joint = part.logit_error_joint + std::sqrt(part.tokens) * rounding;
    cosh_ = std::cosh(error);
    sinh_ = std::sinh(error);
    gain_ = joint * (error > 1e-6 ? std::expm1(error) / error : 1 + error);
    const double root = std::sqrt(focus_);
    const double joint_values = root * part.value_error_joint;
    value_apart_ = std::min({up() * value_error_, up() * joint_values,
                             joint_values + std::min(up() - 1, gain_ * root) * value_error_});
  }

  double mass() const { return mass_; }
  double up() const { return cosh_ + sinh_; }

  // Lines above each of the two ways to bound it.
  Line EachLine() const {
    return {
        .top = (up() - 1) * distance_ + sinh_ * std::sqrt(spread_squared_) + value_apart_ + fixed_,
        .bottom = 1 / up()};
  }
  Line JointLine() const {
    return {.top = gain_ * std::sqrt(focal_squared_) + value_apart_ + fixed_,
            .bottom = 1 - gain_ * std::sqrt(focus_)};
  }

  // Its most at `f`, and into `size` what rounding is relative to.
  Point At(double f, double& size) const {
    Point least{.value = kInfinity};
    const Point inside = Each(f, value_error_);
    const Point apart = Each(f, 0);
    least.TakeLeast({inside.value + fixed_, inside.slope});
    least.TakeLeast({apart.value + value_apart_ + fixed_, apart.slope});
    least.TakeLeast(Joint(f));
    size += mass_ * (std::fabs(least.value) +
                     up() * (f + distance_ + std::sqrt(spread_squared_) + value_error_));
    return {.value = mass_ * least.value, .slope = mass_ * least.slope};
  }

 private:
  // The larger end of h(t) - t, `rho` being what values add inside.
  Point Each(double f, double rho) const {
    const auto end = [&](double t) {
      const double mean = t + rho - f;
      const double root = std::sqrt(spread_squared_ + mean * mean);
      return Point{.value = cosh_ * mean + sinh_ * root - t,
                   .slope = -cosh_ - (root > 0 ? sinh_ * mean / root : 0)};
    };
    const Point near = end(-distance_);
    const Point far = end(distance_);
    return near.value > far.value ? near : far;
  }

  Point Joint(double f) const {
    const double cross = focus_ * focal_distance_;
    const double root = std::sqrt(focal_squared_ + 2 * f * cross + f * f * focus_);
    return {.value = gain_ * root - f + value_apart_ + fixed_,
            .slope = (root > 0 ? gain_ * (cross + f * focus_) / root : 0) - 1};
  }

  double mass_;
  double distance_;
  double fixed_;  // What the mass may be off by, times the distance.
  double spread_squared_;
  double value_error_;
  double focus_;
  double focal_distance_;
  double focal_squared_;
  double cosh_ = 1;  // Of all that its logits may be off by.
  double sinh_ = 0;
  double gain_ = 0;  // x
  double value_apart_ = 0;
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
      forms_.emplace_back(part, logit_error + mass_error, mass_error, noise_.output);
    }
    unread_.reserve(args.unread.size());
    for (const UnreadPage& page : args.unread) {
      unread_.push_back({.low = std::exp(std::min(page.mass_low - args.lse - noise_.lse, 700.0)),
                         .high = std::exp(page.mass_high - args.lse + noise_.lse),
                         .distance = page.distance});
    }
  }

  // Not below S(f), nor above but for rounding.
  Point At(double f) const {
    double sum = noise_.output - f * exact_low_;
    double size = noise_.output + f * exact_low_;
    double slope = -exact_low_;
    for (const Form& form : forms_) {
      const Point at = form.At(f, size);
      sum += at.value;
      slope += at.slope;
    }
    for (const Unread& page : unread_) {
      const double mass = page.distance > f ? page.high : page.low;
      sum += mass * (page.distance - f);
      size += mass * std::fabs(page.distance - f);
      slope -= mass;
    }
    return {.value = sum + size * kSumSlack, .slope = slope};
  }

  // An f with S(f) <= 0, but for rounding: where lines above S(f) meet 0. Those above each token's
  // worst always do; then each form takes the line that is lower there.
  double Start() const {
    Line each{.top = noise_.output, .bottom = exact_low_};
    for (const Form& form : forms_) {
      const Line line = form.EachLine();
      each.top += form.mass() * line.top;
      each.bottom += form.mass() * line.bottom;
    }
    const double first = Meets(each);
    Line least{.top = noise_.output, .bottom = exact_low_};
    for (const Form& form : forms_) {
      Line line = form.EachLine();
      const Line joint = form.JointLine();
      if (!(line.top - first * line.bottom <= joint.top - first * joint.bottom)) line = joint;
      least.top += form.mass() * line.top;
      least.bottom += form.mass() * line.bottom;
    }
    const double second = least.bottom > 0 ? Meets(least) : first;
    return (second < first ? second : first) * (1 + 1e-9);
  }

  double UnreadShare() const {
    double attended = exact_low_;
    for (const Form& form : forms_) {
      attended += form.mass() * std::max(1 / form.up(), form.JointLine().bottom);
    }
    double unread = 0;
    for (const Unread& page : unread_) unread += page.high;
    if (unread == 0) return 0;
    return unread < kInfinity ? std::min(unread / (unread + attended), 1.0) : 1;
  }

 private:
  // With unread pages counted at their most, or with f beyond all their distances.
  double Meets(const Line& attended) const {
    double most = attended.top;
    double least = attended.top;
    double bottom = attended.bottom;
    double farthest = 0;
    for (const Unread& page : unread_) {
      most += page.high * page.distance;
      least += page.low * page.distance;
      farthest = std::max(farthest, page.distance);
      bottom += page.low;
    }
    const double beyond = std::max(farthest, least / bottom);
    const double within = most / bottom;
    return within < beyond ? within : beyond;
  }

  // Of a share of the answer, in the logarithm: it is the difference of two lse.
  double MassError(double mass) const {
    return 2 * noise_.lse + noise_.per_log_mass * std::fabs(std::log(mass));
  }

  const Noise noise_;
  double exact_low_ = 0;
  std::vector<Form> forms_;
  std::vector<Unread> unread_;
};

// The least f found with S(f) <= 0. Where S is convex, tangents from the left meet 0 before it does
// and chords after; halving makes sure elsewhere.
double Least(const Excess& excess) {
  double high = excess.Start();
  Point at_high = excess.At(high);
  for (int doubling = 0; at_high.value > 0 && doubling < 8; ++doubling) {
    high *= 2;
    at_high = excess.At(high);
  }
  if (!(at_high.value <= 0)) return kInfinity;  // NaN too: nothing is proven.
  double low = 0;
  Point at_low = excess.At(low);
  const auto look = [&](double f) {
    if (!(f > low && f < high)) return;
    const Point at = excess.At(f);
    (at.value <= 0 ? high : low) = f;
    (at.value <= 0 ? at_high : at_low) = at;
  };
  if (at_low.value <= 0) return low;
  for (int round = 0; round < 30 && high - low > 1e-3 * high; ++round) {
    const double width = high - low;
    look(low - at_low.value / at_low.slope);
    // A little past it: rounding must not turn the end that is wanted into the other.
    look(low + (high - low) * at_low.value / (at_low.value - at_high.value) + 1e-4 * high);
    if (high - low > width / 2) look(low + (high - low) / 2);
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

double FormShare(const FormPart& form) {
  const Form alone(form, 0, 0, 0);
  Point least{.value = kInfinity};
  least.TakeLeast({.value = alone.EachLine().top});
  least.TakeLeast({.value = alone.JointLine().top});
  return std::isinf(least.value) ? least.value : form.mass * least.value;
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
