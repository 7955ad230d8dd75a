// SPDX-License-Identifier: Apache-2.0
//
// Tensor cores: products of small matrices that a warp holds together, each lane a fragment. Its
// registers are those of the PTX ISA's "mma.m16n8k16" for f16 or bf16 with f32 sums.
//
// How a device rounds is not specified. Here it is the coarsest that was seen of one (Fasi, Higham,
// Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, 2021): products are exact; eight
// of them and what they are added to are aligned to the largest, cut off behind its 24th bit,
// added, and the sum is cut off again. Devices keep a bit or two more. Tested by
// tests/cuemu/cuemu_test.cc.

#pragma once

#include "tests/cuemu/machine.h"

namespace cuemu {

// What one lane brings and gets.
struct Fragments {
  float sum[4];
  unsigned a[4];  // Two elements each, the first in the lower half.
  unsigned b[2];
  double (*widen)(unsigned short);  // An element.
  Place place;
};

// out[l]->sum := in[l]'s sum + a b, of all lanes together. Stops the process where one is missing.
void MultiplyAddFragments(unsigned lanes, const Fragments* const* in, Fragments* const* out);

}  // namespace cuemu
