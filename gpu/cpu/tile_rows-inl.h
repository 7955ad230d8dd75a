// SPDX-License-Identifier: Apache-2.0
//
// The keys or the values of a tile of slots (gpu/cpu/slot_tiles.h) for kernels that walk them row
// by row, and their weighted sums. Compiled once for each target; include it after
// <hwy/foreach_target.h>, inside no namespace.

#if defined(EBBTIDE_GPU_CPU_TILE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBBTIDE_GPU_CPU_TILE_ROWS_INL_H_
#undef EBBTIDE_GPU_CPU_TILE_ROWS_INL_H_
#else
#define EBBTIDE_GPU_CPU_TILE_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>

#include "gpu/cpu/simd-inl.h"
#include "gpu/cpu/slot_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

enum class Part { kKey, kValue };

template <class T, Part kPart>
class TileRows {
 public:
  HWY_INLINE TileRows(const SlotTiles& tiles, int dim)
      : row_(RowsOf(tiles.tile())),
        next_(RowsOf(tiles.next())),
        slots_(tiles.tile().slots),
        next_slots_(tiles.next().slots),
        dim_(dim) {}

  HWY_INLINE int slots() const { return slots_; }
  HWY_INLINE int dim() const { return dim_; }

  // kLanes channels of slot j from `d`; Last: those that are left of them, then zeros.
  HWY_INLINE Floats Whole(int j, int d) const { return Widen(Row(j) + d); }
  HWY_INLINE Floats Last(int j, int d) const { return WidenTail(Row(j) + d, dim_ - d); }
  HWY_INLINE Floats At(int j, int d) const { return d + kLanes <= dim_ ? Whole(j, d) : Last(j, d); }

  // Brings slot j of the next tile into the second-level cache.
  HWY_INLINE void PrefetchNext(int j) const {
    if (j >= next_slots_) return;
    const int row_bytes = dim_ * static_cast<int>(sizeof(T));
    for (int b = 0; b < row_bytes; b += 64) __builtin_prefetch(next_[j] + b, 0, 2);
  }

 private:
  HWY_INLINE const T* Row(int j) const { return reinterpret_cast<const T*>(row_[j]); }

  HWY_INLINE static const std::byte* const* RowsOf(const SlotTile& tile) {
    return kPart == Part::kKey ? tile.key.data() : tile.value.data();
  }

  const std::byte* const* row_;
  const std::byte* const* next_;
  int slots_;
  int next_slots_;
  int dim_;
};

// Where slot j of a tile stands in a row of logits or scores.
HWY_INLINE size_t Column(const SlotTile& tile, int j) {
  return static_cast<size_t>(tile.column[static_cast<size_t>(j)]);
}

// The tile's elements of a row over all slots.
HWY_INLINE void CopyColumns(const SlotTile& tile, const float* row, float* out) {
  const size_t first = Column(tile, 0);
  if (Column(tile, tile.slots - 1) - first == static_cast<size_t>(tile.slots) - 1) {
    std::copy_n(row + first, tile.slots, out);  // The usual case: no holes.
    return;
  }
  for (int j = 0; j < tile.slots; ++j) out[j] = row[Column(tile, j)];
}

// Adds to total[r][d] the tile's sum of weight[r][j] * row[j][d] for R rows of weights: f32 within
// the tile, f64 across tiles. C vectors of channels from `d` on, or what is left of one.
template <int R, int C, bool kIsWhole, bool kPrefetch, class Rows>
HWY_INLINE void AddWeightedPart(const Rows& rows, const float* const* weight, int d,
                                double* const* total) {
  const FloatTag f;
  Floats sum[R][C];
  for (auto& row : sum) {
    for (Floats& x : row) x = hn::Zero(f);
  }
  for (int j = 0; j < rows.slots(); ++j) {
    if (kPrefetch && d == 0) rows.PrefetchNext(j);
    Floats x[C];
    for (int c = 0; c < C; ++c) {
      x[c] = kIsWhole ? rows.Whole(j, d + c * kLanes) : rows.Last(j, d + c * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      const Floats w = hn::Set(f, weight[r][j]);
      for (int c = 0; c < C; ++c) sum[r][c] = hn::MulAdd(w, x[c], sum[r][c]);
    }
  }
  alignas(64) float lane[C * kLanes];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) hn::Store(sum[r][c], f, lane + c * kLanes);
    for (int i = 0; i < C * kLanes; ++i) total[r][d + i] += static_cast<double>(lane[i]);
  }
}

// The same for all channels; total rows are padded to whole vectors.
template <int R, bool kPrefetch, class Rows>
HWY_INLINE void AddWeighted(const Rows& rows, const float* const* weight, double* const* total) {
  constexpr int kVectors = std::clamp((kLanes == 16 ? 16 : 8) / R, 1, 8);  // Fit the registers.
  int d = 0;
  for (; d + kVectors * kLanes <= rows.dim(); d += kVectors * kLanes) {
    AddWeightedPart<R, kVectors, true, kPrefetch>(rows, weight, d, total);
  }
  if constexpr (kVectors > 4) {
    for (; d + 4 * kLanes <= rows.dim(); d += 4 * kLanes) {
      AddWeightedPart<R, 4, true, kPrefetch>(rows, weight, d, total);
    }
  }
  for (; d + kLanes <= rows.dim(); d += kLanes) {
    AddWeightedPart<R, 1, true, kPrefetch>(rows, weight, d, total);
  }
  if (d < rows.dim()) AddWeightedPart<R, 1, false, kPrefetch>(rows, weight, d, total);
}

// The same for any number of rows of weights. `kPrefetch`: nobody has asked for the next tile yet.
template <bool kPrefetch, class Rows>
HWY_INLINE void AddWeighted(const Rows& rows, const float* const* weight, int count,
                            double* const* total) {
  int r = 0;
  for (; r + 4 <= count; r += 4) AddWeighted<4, kPrefetch>(rows, weight + r, total + r);
  for (; r + 2 <= count; r += 2) AddWeighted<2, kPrefetch>(rows, weight + r, total + r);
  for (; r < count; ++r) AddWeighted<1, kPrefetch>(rows, weight + r, total + r);
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#endif  // EBBTIDE_GPU_CPU_TILE_ROWS_INL_H_
