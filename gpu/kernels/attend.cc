// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of attend shares: its contract's checks and its error bounds.

#include "gpu/kernels/attend.h"

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "gpu/cpu/attend_part.h"
#include "gpu/outward.h"

namespace ebbtide::gpu {
namespace {

constexpr double kUnit = 0x1p-24;  // Relative error of one rounding to f32.

// What `roundings` in a row add up to (Higham, Accuracy and Stability of Numerical
// Algorithms, 3.1).
double Gamma(double roundings) {
  return roundings * kUnit / (1 - roundings * kUnit);
}

}  // namespace

size_t AttendSlots(const AttendArgs& args) {
  size_t slots = 0;
  for (const Extent& extent : args.extents) slots += static_cast<size_t>(extent.slots);
  return slots;
}

void CheckAttend(const AttendArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax, "attend: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.group >= 1 && args.group <= kGroupMax, "attend: group is 1 to 16");
  EBBTIDE_CHECK(args.queries >= 0, "attend: queries is not negative");
  const size_t rows = static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.query.size() == rows * head_dim,
                "attend: query is [group, queries, head_dim]");
  EBBTIDE_CHECK(args.output.size() == rows * head_dim,
                "attend: output is [group, queries, head_dim]");
  EBBTIDE_CHECK(args.query_index.size() == static_cast<size_t>(args.queries),
                "attend: query_index is [queries]");
  EBBTIDE_CHECK(args.lse.size() == rows, "attend: lse is [group, queries]");
  for (const Extent& extent : args.extents) {
    EBBTIDE_CHECK(extent.slots >= 0 && extent.slots <= kPageTokensMax,
                  "attend: an extent has 0 to 64 slots");
    EBBTIDE_CHECK(extent.slots == 0 ||
                      (extent.key != nullptr && extent.value != nullptr && extent.index != nullptr),
                  "attend: an extent has slots but no memory");
  }
  EBBTIDE_CHECK(args.logits.empty() || args.logits.size() == rows * AttendSlots(args),
                "attend: logits is [group, queries, slots] or empty");
  EBBTIDE_CHECK(args.part_lse.empty() || args.part_lse.size() == args.extents.size() * rows,
                "attend: part_lse is [extents, group, queries] or empty");
  EBBTIDE_CHECK(
      args.part_output.size() == args.part_lse.size() * head_dim,
      "attend: part_output is [extents, group, queries, head_dim], or empty with part_lse");
}

// A logit is head_dim products, summed in at least four lanes (the narrowest SIMD target), the
// lanes summed pairwise, the sum scaled. Each product is rounded at most once, and meets at most
// ceil(head_dim / 4) - 1 rounded additions in its lane, 2 between lanes, and the scaling: 3 +
// ceil(head_dim / 4) roundings in a row, relative to scale * sum_d |q_d k_d|, which is at most
// scale |query| |key| (Cauchy-Schwarz). With L lanes the count is ceil(head_dim / L) + min(log2 L,
// log2 head_dim) + 1, never more. Softmax subtracts the running maximum, rounded too: |z - max| is
// at most twice that size, two roundings more. A product below the normal range loses 2^-150 at
// most. CUDA adds up in 8 to 32 threads, each up to 8 neighbouring channels of fused products in a
// row, the threads pairwise: min(head_dim, 8) + log2(threads that hold any) + 1.
float AttendLogitError(int head_dim, float scale, float query_norm, float key_norm) {
  const double size = std::fabs(static_cast<double>(scale));
  const double roundings = 3.0 + std::max((head_dim + 3) / 4, std::min(head_dim, 8)) + 2.0;
  const double underflow = (head_dim * size + 1) * 0x1p-149;
  return FloatUp(Gamma(roundings) * size * query_norm * key_norm * (1 + 1e-12) + underflow);
}

// Roundings in a row that a value meets on its way into the output, and a weight into the mass that
// divides it (gpu/kernels/attend_cpu.cc):
//   weight     e^x, three roundings' worth (gpu/cpu/simd-inl.h); once more for each tile that
//   raises
//              the maximum
//   tile       a product and an addition for each slot before it, 64 at most
//   run        a product and an addition for each tile, 17 at most: 1024 slots and one extent more
//   division   the mass, which is f64 by then, inverted and multiplied
//   merge      one rounding a run; its weights are f64, and cancel between output and mass
// Where parts are wanted, a tile is one extent and a run adds its tiles up in f64: fewer.
// CUDA (attend_cuda.cu) meets fewer, for any number of slots: e^x is four roundings' worth, a
// thread adds up at most 64 fused products, threads 5 sums, and one rounding follows parts joined
// in f64; a mass meets 9 additions. That is 87 from 64 slots on, and 2 * slots + 13 at most below,
// since adding nothing rounds nothing. Weights below e^-87 count as 0, which adds slots * 2^-125 *
// max |value| at most, and is left out. Where parts are wanted, an extent of s slots adds up s
// fused products and 2 sums, and meets those of its split with a weight and a product that are
// rounded, after at most 2 extents and 3 warps; masses are joined in f64: 77 and 11, or s + 7 and s
// + 4.
float AttendSumError(size_t slots) {
  const double tile_slots = static_cast<double>(std::min<size_t>(slots, 64));
  const double tiles = static_cast<double>(std::min<size_t>((slots + 63) / 64, 17));
  const double runs = static_cast<double>(slots / kAttendRunSlots + 1);
  const double weight = 3 * (1 + tiles);
  const double output = weight + tile_slots + 2 * tiles + 2;
  const double mass = weight + tile_slots;
  return FloatUp(Gamma(output + mass + runs) * (1 + 1e-12));
}

}  // namespace ebbtide::gpu
