// SPDX-License-Identifier: Apache-2.0
//
// What an answer may be off by: a proven bound on |answer - full attention| in l2 norm, for one
// query token and query head, from what is known of everything that was not attended exactly. Knows
// numbers alone. The proof is in certificate.cc. Tested by
// tests/unit/service/certificate/certificate_test.cc.

#pragma once

#include <limits>
#include <span>

namespace ebbtide::service {

// A page attended in a low-bit form. Its own output and log-sum-exp are those over the form alone;
// a token's share is its part of the form's mass.
struct FormPart {
  double mass = 0;      // Its part of the answer: e^(its lse - the answer's lse).
  double distance = 0;  // |its own output - answer|
  double spread = 0;    // >= root of the mean square of |decoded value - its own output|, weighted
                        // by share; the largest deviation along any direction will do
  double logit_error = 0;  // R >= |logit - logit of the form| for each of its tokens
  double value_error = 0;  // rho >= |value - decoded value| for each
  // Of its tokens together. With the squares of shares as weights, values have another mean, and
  // the squares a sum: 1 where one token has everything, 1 / tokens where all are alike.
  int tokens = 0;
  double focus = 1;                     // >= that sum
  double focal_distance = 0;            // >= |that mean - answer|
  double focal_spread = 0;              // >= root of sum_j share_j^2 |decoded value - that mean|^2
  double logit_error_joint = kUnknown;  // >= |logits - logits of the form|
  double value_error_joint = kUnknown;  // >= |sum_j c_j (value - decoded value)| where |c| = 1

  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
};

// A page, or the absent tokens of one, that was not attended at all.
struct UnreadPage {
  double mass_low = 0;  // Bounds of log sum_j e^(logit_j), natural logarithm
  double mass_high = 0;
  double distance = 0;  // >= |value - answer| for each of its tokens
};

// What f32 arithmetic may have done to the answer, before it is rounded to the dtype it leaves in.
struct Rounding {
  double logit_error = 0;  // Of the logits attended: AttendLogitError (gpu/kernels/attend.h).
  double sum_error = 0;    // Relative, of weighted sums: AttendSumError.
  int merges = 0;  // Of partial attentions, in a row that each is rounded to f32 in: 1 where they
                   // are joined in f64.
  double value_norm_max = 0;  // >= |value| of everything attended, decoded values too
  double output_norm = 0;     // |answer|
};

// Everything attended, exactly or in a form, and everything not.
struct RowBoundArgs {
  double lse = 0;         // Of everything attended; -inf: nothing was.
  double exact_mass = 0;  // Share of the answer that was attended exactly.
  std::span<const FormPart> forms = {};
  std::span<const UnreadPage> unread = {};
  Rounding rounding = {};
};

struct RowBound {
  float error = 0;  // >= |answer - full attention|; inf where nothing is proven
  float mass = 0;   // >= share of full attention that lies in unread pages
};

//   Numerics  f64, outward in every rounding, then rounded up to f32
//   Cost      about ten passes over forms and unread pages
//   Source    docs/architecture.md, certificate
RowBound BoundRow(const RowBoundArgs& args);

// What `form` alone adds to the error of its row, about: for choosing which form to read finer.
// Infinite where its codes prove nothing, though its mass be 0; never NaN, since it is sorted by.
double FormShare(const FormPart& form);

// Is the true error of a token and layer proven to be at most `tau` of the true output, in l2 norm
// over its heads? Errors and norms are those of each query head.
bool IsMet(std::span<const float> errors, std::span<const double> output_norms, double tau);

}  // namespace ebbtide::service
