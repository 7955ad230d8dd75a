// SPDX-License-Identifier: Apache-2.0
//
// An answer of which everything is known: what was attended, in which form, what was not, and what
// the truth may be within what is promised. The truth can be drawn at random, or as the worst that
// a climb finds. All in long double, so that its own rounding is out of the question.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "service/attention/certificate.h"

namespace ebbtide::service {

using Vector = std::vector<long double>;

inline long double Norm(const Vector& x) {
  long double sum = 0;
  for (const long double element : x) sum += element * element;
  return std::sqrt(sum);
}

inline Vector Minus(const Vector& x, const Vector& y) {
  Vector difference = x;
  for (size_t d = 0; d < x.size(); ++d) difference[d] -= y[d];
  return difference;
}

inline long double Dot(const Vector& x, const Vector& y) {
  long double sum = 0;
  for (size_t d = 0; d < x.size(); ++d) sum += x[d] * y[d];
  return sum;
}

struct SampleToken {
  long double logit = 0;  // Used, or of unread tokens: in the middle of what is promised.
  Vector value = {};
  long double true_logit = 0;
  Vector true_value = {};
};

struct SamplePart {
  enum class Kind { kExact, kForm, kUnread };
  Kind kind = Kind::kExact;
  long double logit_error = 0;  // Of forms; of unread tokens half of what their mass is open by.
  long double value_error = 0;  // Of forms; of unread tokens the distance from the answer.
  // Of forms, for all tokens together: l2 norms of what logits and values are off by.
  long double logit_error_joint = std::numeric_limits<long double>::infinity();
  long double value_error_joint = std::numeric_limits<long double>::infinity();
  std::vector<SampleToken> tokens = {};
};

// The factor that brings `pull`, cut at +-limit in each element, to `length`; large where its
// elements may all be at the limit.
inline long double WithinBoth(const Vector& pull, long double limit, long double length) {
  const auto reached = [&](long double factor) {
    long double sum = 0;
    for (const long double x : pull) {
      const long double cut = std::min(std::fabs(x * factor), limit);
      sum += cut * cut;
    }
    return std::sqrt(sum);
  };
  long double low = 0;
  long double high = 1e9L;
  if (reached(high) <= length) return high;
  for (int step = 0; step < 70; ++step) {
    const long double middle = (low + high) / 2;
    (reached(middle) <= length ? low : high) = middle;
  }
  return low;
}

class SampleRow {
 public:
  explicit SampleRow(std::vector<SamplePart> parts) : parts_(std::move(parts)) {
    std::vector<SampleToken> attended;
    for (const SamplePart& part : parts_) {
      if (part.kind != SamplePart::Kind::kUnread) {
        attended.insert(attended.end(), part.tokens.begin(), part.tokens.end());
      }
    }
    answer_ = Mean(attended, lse_);
    Describe();
  }

  RowBoundArgs Args() const {
    return {.lse = static_cast<double>(lse_),
            .exact_mass = static_cast<double>(exact_mass_),
            .forms = forms_,
            .unread = unread_,
            .rounding = {}};
  }
  std::vector<FormPart>& forms() { return forms_; }
  std::vector<UnreadPage>& unread() { return unread_; }

  // |answer - full attention| for the truth as it stands.
  long double Error() const { return Norm(Difference()); }

  // The share of full attention that unread tokens have.
  long double UnreadShare() const {
    const long double top = Top();
    long double all = 0;
    long double unread = 0;
    for (const SamplePart& part : parts_) {
      for (const SampleToken& token : part.tokens) {
        const long double mass = std::exp(token.true_logit - top);
        all += mass;
        if (part.kind == SamplePart::Kind::kUnread) unread += mass;
      }
    }
    return unread / all;
  }

  // A truth within what is promised.
  void DrawTruth(std::mt19937_64& random) {
    std::uniform_real_distribution<double> uniform(-1, 1);
    for (SamplePart& part : parts_) {
      Vector direction(answer_.size());
      for (long double& element : direction) element = uniform(random);
      Vector logits;
      Vector lengths;
      for (size_t t = 0; t < part.tokens.size(); ++t) {
        logits.push_back(uniform(random) * part.logit_error);
        lengths.push_back(uniform(random) * part.value_error);
      }
      PlaceLogits(part, logits,
                  std::min(WithinBoth(logits, part.logit_error, part.logit_error_joint), 1.0L));
      PlaceValues(part, lengths, direction,
                  std::min(WithinBoth(lengths, part.value_error, part.value_error_joint), 1.0L));
    }
  }

  // The worst truth that steps from the present one lead to: whatever draws the difference further
  // along its own direction.
  void WorsenTruth(int steps) {
    for (int step = 0; step < steps; ++step) {
      const Vector direction = Difference();
      const long double error = Norm(direction);
      if (error == 0) return;
      const long double top = Top();
      for (SamplePart& part : parts_) {
        Vector lengths;
        for (const SampleToken& token : part.tokens) {
          lengths.push_back(std::exp(token.true_logit - top));
        }
        PlaceValues(part, lengths, direction,
                    WithinBoth(lengths, part.value_error, part.value_error_joint));
        Vector pulls;
        for (const SampleToken& token : part.tokens) {
          const long double pull = Dot(Minus(token.true_value, answer_), direction) / error;
          pulls.push_back(std::exp(token.true_logit - top) * (pull - error));
        }
        PlaceLogits(part, pulls, WithinBoth(pulls, part.logit_error, part.logit_error_joint));
      }
    }
  }

 private:
  using Kind = SamplePart::Kind;

  static Vector Mean(const std::vector<SampleToken>& tokens, long double& lse) {
    long double mass = 0;
    Vector mean(tokens[0].value.size());
    for (const SampleToken& token : tokens) {
      mass += std::exp(token.logit);
      for (size_t d = 0; d < mean.size(); ++d) mean[d] += std::exp(token.logit) * token.value[d];
    }
    for (long double& element : mean) element /= mass;
    lse = std::log(mass);
    return mean;
  }

  // Along one direction: what values are off by together is the l2 norm of their lengths then.
  void PlaceValues(SamplePart& part, const Vector& lengths, const Vector& direction,
                   long double factor) const {
    const long double unit = Norm(direction);
    for (size_t t = 0; t < part.tokens.size(); ++t) {
      SampleToken& token = part.tokens[t];
      token.true_value = part.kind == Kind::kUnread ? answer_ : token.value;
      if (unit == 0) continue;
      const long double length =
          std::clamp(lengths[t] * factor, -part.value_error, part.value_error);
      for (size_t d = 0; d < answer_.size(); ++d) {
        token.true_value[d] += length * direction[d] / unit;
      }
    }
  }

  static void PlaceLogits(SamplePart& part, const Vector& pulls, long double factor) {
    for (size_t t = 0; t < part.tokens.size(); ++t) {
      part.tokens[t].true_logit =
          part.tokens[t].logit + std::clamp(pulls[t] * factor, -part.logit_error, part.logit_error);
    }
  }

  // Of the truth: less this, no logit's power leaves the range.
  long double Top() const {
    long double top = -std::numeric_limits<long double>::infinity();
    for (const SamplePart& part : parts_) {
      for (const SampleToken& token : part.tokens) top = std::max(top, token.true_logit);
    }
    return top;
  }

  Vector Difference() const {
    Vector sum(answer_.size());
    const long double top = Top();
    long double mass = 0;
    for (const SamplePart& part : parts_) {
      for (const SampleToken& token : part.tokens) {
        const long double weight = std::exp(token.true_logit - top);
        mass += weight;
        for (size_t d = 0; d < sum.size(); ++d) {
          sum[d] += weight * (token.true_value[d] - answer_[d]);
        }
      }
    }
    for (long double& element : sum) element /= mass;
    return sum;
  }

  void Describe() {
    for (SamplePart& part : parts_) {
      long double lse = 0;
      const Vector mean = Mean(part.tokens, lse);
      const long double mass = std::exp(lse - lse_);
      for (SampleToken& token : part.tokens) {
        token.true_logit = token.logit;
        token.true_value = part.kind == Kind::kUnread ? answer_ : token.value;
      }
      if (part.kind == Kind::kExact) exact_mass_ += mass;
      if (part.kind == Kind::kUnread) {
        unread_.push_back({.mass_low = static_cast<double>(lse - part.logit_error),
                           .mass_high = static_cast<double>(lse + part.logit_error),
                           .distance = static_cast<double>(part.value_error)});
      }
      if (part.kind == Kind::kForm) {
        forms_.push_back(Describe(part, mean, lse));
      }
    }
  }

  FormPart Describe(const SamplePart& part, const Vector& mean, long double lse) const {
    long double focus = 0;
    Vector focal(mean.size());
    for (const SampleToken& token : part.tokens) {
      const long double square = std::exp(2 * (token.logit - lse));
      focus += square;
      for (size_t d = 0; d < focal.size(); ++d) focal[d] += square * token.value[d];
    }
    for (long double& element : focal) element /= focus;
    long double squares = 0;
    long double focal_squares = 0;
    for (const SampleToken& token : part.tokens) {
      const long double share = std::exp(token.logit - lse);
      const Vector off = Minus(token.value, mean);
      const Vector focal_off = Minus(token.value, focal);
      squares += share * Dot(off, off);
      focal_squares += share * share * Dot(focal_off, focal_off);
    }
    return {.mass = static_cast<double>(std::exp(lse - lse_)),
            .distance = static_cast<double>(Norm(Minus(mean, answer_))),
            .spread = static_cast<double>(std::sqrt(squares)),
            .logit_error = static_cast<double>(part.logit_error),
            .value_error = static_cast<double>(part.value_error),
            .tokens = static_cast<int>(part.tokens.size()),
            .focus = static_cast<double>(focus),
            .focal_distance = static_cast<double>(Norm(Minus(focal, answer_))),
            .focal_spread = static_cast<double>(std::sqrt(focal_squares)),
            .logit_error_joint = static_cast<double>(part.logit_error_joint),
            .value_error_joint = static_cast<double>(part.value_error_joint)};
  }

  std::vector<SamplePart> parts_;
  Vector answer_;
  long double lse_ = 0;
  long double exact_mass_ = 0;
  std::vector<FormPart> forms_;
  std::vector<UnreadPage> unread_;
};

}  // namespace ebbtide::service
