// SPDX-License-Identifier: Apache-2.0
//
// Answers to try certificates on: what a sample row may be made of, drawn at random.

#pragma once

#include <cmath>
#include <cstddef>
#include <random>
#include <utility>
#include <vector>

#include "tests/unit/service/certificate/sample_row.h"

namespace ebbtide::service {

// Of 1 to 4 channels, up to 10 parts of each kind, from almost nothing open to almost everything.
// An answer has something attended.
inline SampleRow RandomRow(std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  const auto below = [&](size_t end) { return random() % end; };
  const size_t dim = 1 + below(4);
  const double sharpness = std::exp(normal(random));
  const double openness = std::exp(2 * normal(random) - 2);
  const auto part = [&](SamplePart::Kind kind) {
    SamplePart made{.kind = kind};
    const bool is_open = kind != SamplePart::Kind::kExact;
    if (is_open) made.logit_error = openness * std::fabs(normal(random));
    if (is_open)
      made.value_error =
          (kind == SamplePart::Kind::kForm ? openness : 1) * std::fabs(normal(random));
    const Vector centre(dim, below(3) == 0 ? 3 * normal(random) : 0);
    for (size_t t = 0, tokens = 1 + below(9); t < tokens; ++t) {
      SampleToken token{.logit = sharpness * normal(random), .value = centre};
      for (long double& element : token.value) element += normal(random);
      made.tokens.push_back(token);
    }
    // In three forms of four less together than each of the tokens might be.
    if (kind == SamplePart::Kind::kForm && below(4) > 0) {
      const double most = std::sqrt(made.tokens.size());
      made.logit_error_joint = made.logit_error * most * std::fabs(std::cos(normal(random)));
      made.value_error_joint = made.value_error * most * std::fabs(std::cos(normal(random)));
    }
    return made;
  };
  std::vector<SamplePart> parts;
  for (size_t i = 0, count = below(4); i < count; ++i)
    parts.push_back(part(SamplePart::Kind::kExact));
  for (size_t i = 0, count = below(10); i < count; ++i)
    parts.push_back(part(SamplePart::Kind::kForm));
  for (size_t i = 0, count = below(10); i < count; ++i)
    parts.push_back(part(SamplePart::Kind::kUnread));
  parts.push_back(part(SamplePart::Kind::kForm));
  return SampleRow(std::move(parts));
}

}  // namespace ebbtide::service
