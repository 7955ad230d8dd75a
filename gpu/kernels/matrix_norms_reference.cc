// SPDX-License-Identifier: Apache-2.0
//
// Gram matrices by plain loops. Every product is made exactly in f64 and rounded to f32 once, so
// that no compiler can fuse it with the addition after it.

#include <cstddef>

#include "gpu/kernels/matrix_norms.h"

namespace ebbtide::gpu {
namespace {

void GramReference(const GramArgs& args) {
  const auto at = [](int i, int j) { return static_cast<size_t>(i * kMatrixRowsMax + j); };
  for (int i = 0; i < args.rows; ++i) {
    for (int j = 0; j < kMatrixRowsMax; ++j) {
      float sum = 0;
      for (int k = 0; k < args.products; ++k) {
        const double product = static_cast<double>(args.factor[at(k, i)]) * args.factor[at(k, j)];
        sum += static_cast<float>(product);
      }
      args.gram[at(i, j)] = sum;
    }
  }
}

}  // namespace

MatrixNorms MatrixNormsReference(const MatrixNormsArgs& args) {
  return MatrixNormsBy(&GramReference, args);
}

}  // namespace ebbtide::gpu
