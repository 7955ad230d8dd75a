// SPDX-License-Identifier: Apache-2.0
//
// KeyDiff in two passes over the keys: their norms and the sum of unit keys, a tile at a time so
// that the second use comes from the cache; then each key's cosine to that sum. `score` holds the
// inverse norms in between.

#include "gpu/kernels/geometry.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/geometry_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gpu/cpu/padded_rows.h"
#include "gpu/cpu/simd-inl.h"
#include "gpu/cpu/slot_tiles.h"
#include "gpu/cpu/tile_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr int kTileSlots = SlotTile::kSlotsMax;

struct SquaredNorm {
  HWY_INLINE Floats Add(Floats key, int /*d*/, Floats sum) const {
    return hn::MulAdd(key, key, sum);
  }
};

struct DotWith {
  const float* anchor;
  HWY_INLINE Floats Add(Floats key, int d, Floats sum) const {
    return hn::MulAdd(key, hn::Load(FloatTag(), anchor + d), sum);
  }
};

// out[j] = sum over channels of what `product` makes of key j; out is padded to whole vectors.
template <class Rows, class Product>
HWY_INLINE void SumKeys(const Rows& keys, const Product& product, float* out) {
  const FloatTag f;
  for (int first = 0; first < keys.slots(); first += kLanes) {
    Floats sums[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int j = std::min(first + l, keys.slots() - 1);
      keys.PrefetchNext(first + l);
      sums[l] = hn::Zero(f);
      for (int d = 0; d < keys.dim(); d += kLanes) {
        sums[l] = product.Add(keys.At(j, d), d, sums[l]);
      }
    }
    hn::Store(Sums(sums), f, out + first);
  }
}

template <class T>
class KeyDiffKernel {
 public:
  explicit KeyDiffKernel(const GeometryArgs& args)
      : args_(args),
        options_{.extents = args.extents,
                 .count = args.extents.size(),
                 .row_bytes = static_cast<size_t>(args.head_dim) * sizeof(T),
                 .index_limit = std::numeric_limits<int32_t>::max()} {}

  void Run() {
    std::fill(args_.score.begin(), args_.score.end(), 0.0F);
    const PaddedRows anchor = Anchor();
    SlotTiles tiles(options_);
    while (tiles.Advance()) {
      alignas(64) float dot[kTileSlots + kLanes];
      SumKeys(TileRows<T, Part::kKey>(tiles, args_.head_dim), DotWith{anchor[0]}, dot);
      for (int j = 0; j < tiles.tile().slots; ++j) args_.score[Column(tiles.tile(), j)] *= -dot[j];
    }
  }

 private:
  // The sum of unit keys, made a unit vector. Leaves 1 / |key| in score.
  PaddedRows Anchor() {
    std::vector<double> sum(static_cast<size_t>(args_.head_dim) + PaddedRows::kAlign);
    double count = 0;
    SlotTiles tiles(options_);
    while (tiles.Advance()) {
      const TileRows<T, Part::kKey> keys(tiles, args_.head_dim);
      alignas(64) float inverse[kTileSlots + kLanes];
      SumKeys(keys, SquaredNorm(), inverse);
      const SlotTile& tile = tiles.tile();
      for (int j = 0; j < tile.slots; ++j) {
        count += inverse[j] > 0 ? 1 : 0;
        inverse[j] = inverse[j] > 0 ? 1 / std::sqrt(inverse[j]) : 0;
        args_.score[Column(tile, j)] = inverse[j];
      }
      const float* weight = inverse;
      double* total = sum.data();
      AddWeighted<1, /*kPrefetch=*/false>(keys, &weight, &total);
    }
    double squares = 0;
    for (const double x : sum) squares += x * x;
    const double norm = std::sqrt(squares);
    const double scale = norm > kAnchorMin * count ? 1 / norm : 0;
    std::vector<float> unit;
    for (int d = 0; d < args_.head_dim; ++d) {
      unit.push_back(static_cast<float>(scale * sum[static_cast<size_t>(d)]));
    }
    return PaddedRows(unit, args_.head_dim);
  }

  const GeometryArgs& args_;
  const SlotTiles::Options options_;
};

void KeyDiffTarget(const GeometryArgs& args) {
  WithElement(args.dtype, [&](auto element) { KeyDiffKernel<decltype(element)>(args).Run(); });
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(KeyDiffTarget);

void KeyDiffCpu(const GeometryArgs& args) {
  CheckGeometry(args);
  HWY_DYNAMIC_DISPATCH(KeyDiffTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
