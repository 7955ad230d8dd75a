// SPDX-License-Identifier: Apache-2.0
//
// Golden vectors of keys in few bits: encoding, decoding and the bound of a page must keep what the
// vectors say must hold. Their own codes are middles of cells, ours the nearest of steps, so bounds
// are compared in kind and size, not to the last digit.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <span>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "tests/unit/gpu/each_target.h"
#include "tests/unit/gpu/golden.h"

namespace ebbtide::gpu {
namespace {

class GoldenCodesTest : public OnReferenceAndTarget {
 protected:
  // Decoded keys, and in `logit_error` the bound for `query`.
  std::vector<float> Code(const PageShape& shape, CodeForm form, const std::vector<float>& keys,
                          const std::vector<float>& query, float& logit_error) {
    std::vector<float> page(2 * keys.size());
    std::ranges::copy(keys, page.begin());
    std::vector<std::byte> digest(DigestBytes(shape.head_dim));
    std::vector<std::byte> coarse(CoarseBytes(shape));
    std::vector<std::byte> fine(FineBytes(shape));
    const std::span<const std::byte> bytes = std::as_bytes(std::span(page));
    Choose(DigestReference, DigestCpu,
           DigestOnCuda)({.shape = shape, .tokens = shape.tokens, .page = bytes, .digest = digest});
    Choose(EncodeReference, EncodeCpu, EncodeOnCuda)(
        {.shape = shape, .page = bytes, .digest = digest, .coarse = coarse, .fine = fine});
    std::vector<float> decoded(page.size());
    Choose(DecodeReference, DecodeCpu, DecodeOnCuda)({.shape = shape,
                                                      .form = form,
                                                      .digest = digest,
                                                      .coarse = coarse,
                                                      .fine = fine,
                                                      .page = decoded});
    Choose(CodeErrorsReference, CodeErrorsCpu,
           CodeErrorsOnCuda)({.shape = shape,
                              .form = form,
                              .scale = 1,
                              .rows = 1,
                              .query = query,
                              .digest = digest,
                              .coarse = coarse,
                              .logit_error = {&logit_error, 1}});
    decoded.resize(keys.size());
    return decoded;
  }
};
INSTANTIATE_TEST_SUITE_P(Every, GoldenCodesTest, ReferenceTargetsAndCuda(), TargetName);

std::vector<double> Logits(const std::vector<float>& query, const std::vector<float>& keys) {
  std::vector<double> logits(keys.size() / query.size());
  for (size_t j = 0; j < logits.size(); ++j) {
    for (size_t d = 0; d < query.size(); ++d) {
      logits[j] += static_cast<double>(query[d]) * keys[j * query.size() + d];
    }
  }
  return logits;
}

double LogSumExp(const std::vector<double>& logits) {
  const double largest = *std::ranges::max_element(logits);
  double sum = 0;
  for (const double z : logits) sum += std::exp(z - largest);
  return largest + std::log(sum);
}

TEST_P(GoldenCodesTest, LogitsAndMassLieWithinTheBound) {
  int not_run = 0;
  for (const golden::Case& c : golden::Cases("lowbit_bounds")) {
    SCOPED_TRACE(c.name);
    const int bits = c.inputs.at("bits");
    if (bits != 4 && bits != 8) {
      ++not_run;
      continue;
    }
    const std::vector<float> query = golden::Floats(c.inputs.at("q"));
    const std::vector<float> keys = golden::Floats(c.inputs.at("K"));
    const std::vector<int> key_shape = golden::Shape(c.inputs.at("K"));
    const PageShape shape{key_shape[0], key_shape[1], Dtype::kF32};
    float error = 0;
    const std::vector<float> decoded =
        Code(shape, bits == 4 ? CodeForm::k4Bit : CodeForm::k8Bit, keys, query, error);

    const std::vector<double> exact = Logits(query, keys);
    const std::vector<double> coded = Logits(query, decoded);
    for (size_t j = 0; j < exact.size(); ++j) EXPECT_LE(std::fabs(exact[j] - coded[j]), error);
    const double true_lse = LogSumExp(exact);
    EXPECT_NEAR(true_lse, c.expect.at("true_lse").get<double>(), 1e-6);  // Queries round to f32.
    EXPECT_LE(LogSumExp(coded) - error, true_lse);
    EXPECT_GE(LogSumExp(coded) + error, true_lse);
    // A step of 15 is wider than a cell of 16, and the box is rounded to f16.
    const double bound = c.expect.at("R");
    EXPECT_LE(error, bound * (bits == 4 ? 17.0 / 15 : 16.0 / 15) * 1.02 + 0.005);
  }
  if (not_run > 0) std::cout << "not run: " << not_run << " cases of 2 bits, which is no form\n";
}

}  // namespace
}  // namespace ebbtide::gpu
