// SPDX-License-Identifier: Apache-2.0
//
// What an answer may be off by: a proven bound on |answer - full attention| in l2 norm, for one
// query token and query head, from what is known of everything that was not attended exactly. Knows
// numbers alone. The proof is in certificate.cc. Tested by
// tests/unit/service/certificate/certificate_test.cc.

#pragma once

#include <span>

namespace ebbtide::service {

// A page attended in a low-bit form. Its own output and log-sum-exp are those over the form alone.
struct FormPart {
  double mass = 0;      // Its share of the answer: e^(its lse - the answer's lse).
  double distance = 0;  // |its own output - answer|
  double spread = 0;    // >= root of the mean square of |decoded value - its own output|, weighted
                        // by its attention; the largest deviation along any direction will do
  double logit_error = 0;  // R >= |logit - logit of the form| for each of its tokens
  double value_error = 0;  // rho >= |value - decoded value|
};

// A page, or the absent tokens of one, that was not attended at all.
struct UnreadPage {
  double mass_low = 0;  // Bounds of log sum_j e^(logit_j), natural logarithm
  double mass_high = 0;
  double distance = 0;  // >= |value - answer| for each of its tokens
};

// What f32 arithmetic may have done to the answer, before it is rounded to the dtype it leaves in.
struct Rounding {
  double logit_error = 0;     // Of the logits attended: AttendLogitError (gpu/kernels/attend.h).
  double sum_error = 0;       // Relative, of weighted sums: AttendSumError.
  int merges = 0;             // Partial attentions merged one after the other, each rounded to f32.
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
//   Cost      about eight passes over forms and unread pages
//   Source    docs/architecture.md, certificate
RowBound BoundRow(const RowBoundArgs& args);

// Is the true error of a token and layer proven to be at most `tau` of the true output, in l2 norm
// over its heads? Errors and norms are those of each query head.
bool IsMet(std::span<const float> errors, std::span<const double> output_norms, double tau);

}  // namespace ebbtide::service
