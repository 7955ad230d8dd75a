// SPDX-License-Identifier: Apache-2.0
//
// Attention over one part, a tile of 64 visible slots at a time: logits, running maximum, weights,
// weighted values (online softmax). A tile stays in the first-level cache while all rows of the
// block pass over it, up to eight at once, so memory is read once; what comes next is prefetched by
// table, for extents lie anywhere.
//
// Sums are short on purpose: at most 64 terms within a tile, 16 tiles within a run, then runs are
// merged in f64 (gpu/cpu/attend_part.h). The error bounds in attend.cc count on it.

#include "gpu/kernels/attend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/attend_cpu.cc"
#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "gpu/cpu/attend_part.h"
#include "gpu/cpu/simd-inl.h"
#include "gpu/cpu/slot_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int kTileSlots = SlotTile::kSlotsMax;

// The rows of a part: their queries, and what the tiles so far add up to.
struct RowBlock {
  int head_dim = 0;
  int padded_dim = 0;  // A multiple of kLanes.
  float scale = 0;
  hwy::AlignedFreeUniquePtr<float[]> query;   // [rows, padded_dim], zeros past head_dim
  hwy::AlignedFreeUniquePtr<float[]> output;  // [rows, padded_dim] sum of e^(z - top) * value
  std::array<int32_t, kAttendBlockRows> index = {};  // The last token that each row sees.
  std::array<float, kAttendBlockRows> top = {};      // Largest logit so far.
  std::array<double, kAttendBlockRows> mass = {};    // Sum of e^(z - top).
};

constexpr size_t At(int i) {
  return static_cast<size_t>(i);
}

template <class T>
struct WholeVector {
  HWY_INLINE Floats operator()(const T* elements) const { return Widen(elements); }
};

template <class T>
struct PartOfVector {
  int count;
  HWY_INLINE Floats operator()(const T* elements) const { return WidenTail(elements, count); }
};

// Into the second-level cache: more lines can be on their way there than to the first level, and
// the next tile is wanted only after this one (docs/benchmarks.md, attend).
HWY_INLINE void PrefetchRow(const std::byte* row, int row_bytes) {
  for (int byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

// lane[r] = the lanes of row r taken together, where lane l is of row l % R.
template <int R, class Join>
HWY_INLINE void FoldLanes(float* lane, Join join) {
  for (int width = kLanes / 2; width >= R; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] = join(lane[l], lane[l + width]);
  }
}

// One tile for R rows of a block.
template <class T, int R>
class TileKernel {
 public:
  // `prefetched`: of the next tile, slots to bring nearer meanwhile; 0 where another row did.
  HWY_INLINE TileKernel(const SlotTiles& tiles, RowBlock& block, int row, int prefetched)
      : tile_(tiles.tile()),
        next_(tiles.next()),
        block_(block),
        slots_(tile_.slots),
        prefetched_(prefetched),
        row_bytes_(block.head_dim * static_cast<int>(sizeof(T))),
        row_(static_cast<size_t>(row)),
        query_(&block.query[row_ * static_cast<size_t>(block.padded_dim)]),
        output_(&block.output[row_ * static_cast<size_t>(block.padded_dim)]) {}

  // z = scale * query . key of every slot. The lanes of a vector hold kSlots slots times R rows: as
  // many sums as there are lanes are reduced together.
  HWY_INLINE void Logits() {
    const FloatTag d;
    const Floats scale = hn::Set(d, block_.scale);
    for (int s = 0; s < slots_; s += kSlots) {
      const T* key[kSlots];
      for (int i = 0; i < kSlots; ++i) {
        key[i] = reinterpret_cast<const T*>(tile_.key[At(std::min(s + i, slots_ - 1))]);
      }
      for (int i = s; i < std::min(s + kSlots, prefetched_); ++i) {
        PrefetchRow(next_.key[At(i)], row_bytes_);
      }
      Floats sum[kLanes];
      for (Floats& lane : sum) lane = hn::Zero(d);
      int e = 0;
      for (; e + kLanes <= block_.head_dim; e += kLanes) AddProducts(key, e, WholeVector<T>(), sum);
      if (e < block_.head_dim) AddProducts(key, e, PartOfVector<T>{block_.head_dim - e}, sum);
      hn::Store(hn::Mul(Sums(sum), scale), d, weight_ + s * R);
    }
  }

  // Hides from each row the slots that lie after its query.
  HWY_INLINE void HideFuture() {
    for (int s = 0; s < slots_; ++s) {
      for (int r = 0; r < R; ++r) {
        const int32_t sees = block_.index[row_ + static_cast<size_t>(r)];
        if (tile_.index[At(s)] > sees) weight_[s * R + r] = kHidden;
      }
    }
  }

  float logit(int s, int r) const { return weight_[s * R + r]; }

  // Logits to weights; brings the rows' maxima and masses up to date.
  HWY_INLINE void Softmax() {
    const FloatTag d;
    const int count = (slots_ * R + kLanes - 1) / kLanes * kLanes;
    std::fill(weight_ + slots_ * R, weight_ + count, kHidden);
    Floats peak = hn::Load(d, weight_);
    for (int i = kLanes; i < count; i += kLanes) peak = hn::Max(peak, hn::Load(d, weight_ + i));
    const Floats shift = RaiseTop(peak);
    Floats total = hn::Zero(d);
    for (int i = 0; i < count; i += kLanes) {
      const Floats w = Exp(hn::Sub(hn::Load(d, weight_ + i), shift));
      hn::Store(w, d, weight_ + i);
      total = hn::Add(total, w);
    }
    alignas(64) float lane[kLanes];
    hn::Store(total, d, lane);
    FoldLanes<R>(lane, [](float a, float b) { return a + b; });
    double* const mass = &block_.mass[row_];
    for (int r = 0; r < R; ++r) {
      mass[r] = mass[r] * static_cast<double>(rescale_[r]) + static_cast<double>(lane[r]);
    }
  }

  // output = rescale * output + sum over the tile of weight * value. Of `HasHidden` slots some rows
  // see what others do not: there a weight of 0 keeps the value out, whatever it is.
  template <bool HasHidden>
  HWY_INLINE void Values() {
    constexpr int kVectors = std::clamp((kLanes == 16 ? 16 : 8) / R, 1, 8);  // Fit the registers.
    const WholeVector<T> whole;
    int e = 0;
    for (; e + kVectors * kLanes <= block_.head_dim; e += kVectors * kLanes) {
      AddValues<kVectors, HasHidden>(e, whole);
    }
    if constexpr (kVectors > 4) {
      if (e + 4 * kLanes <= block_.head_dim) {
        AddValues<4, HasHidden>(e, whole);
        e += 4 * kLanes;
      }
    }
    for (; e + kLanes <= block_.head_dim; e += kLanes) AddValues<1, HasHidden>(e, whole);
    if (e < block_.head_dim) AddValues<1, HasHidden>(e, PartOfVector<T>{block_.head_dim - e});
  }

 private:
  static constexpr int kSlots = kLanes / R;

  template <class WidenKey>
  HWY_INLINE void AddProducts(const T* const* key, int e, WidenKey widen, Floats* sum) const {
    const FloatTag d;
    Floats q[R];
    for (int r = 0; r < R; ++r) q[r] = hn::Load(d, query_ + r * block_.padded_dim + e);
    for (int i = 0; i < kSlots; ++i) {
      const Floats k = widen(key[i] + e);
      for (int r = 0; r < R; ++r) sum[i * R + r] = hn::MulAdd(k, q[r], sum[i * R + r]);
    }
  }

  // Lane l of `peak` is of row l % R. Returns what to subtract from logits: the new maximum, or 0
  // for a row that has seen nothing yet.
  HWY_INLINE Floats RaiseTop(Floats peak) {
    const FloatTag d;
    alignas(64) float lane[kLanes];
    alignas(64) float drop[kLanes] = {};
    hn::Store(peak, d, lane);
    FoldLanes<R>(lane, [](float a, float b) { return std::max(a, b); });
    float* const top = &block_.top[row_];
    for (int r = 0; r < R; ++r) {
      const float old_top = top[r];
      top[r] = std::max(old_top, lane[r]);
      lane[r] = top[r] == kHidden ? 0 : top[r];
      drop[r] = old_top - lane[r];
    }
    hn::Store(Exp(hn::Load(d, drop)), d, drop);
    std::copy(drop, drop + R, rescale_);
    for (int l = R; l < kLanes; ++l) lane[l] = lane[l - R];
    return hn::Load(d, lane);
  }

  // `C` vectors of channels from e.
  template <int C, bool HasHidden, class WidenValue>
  HWY_INLINE void AddValues(int e, WidenValue widen) {
    const FloatTag d;
    Floats sum[R][C];
    for (auto& of_row : sum) {
      for (Floats& lane : of_row) lane = hn::Zero(d);
    }
    for (int s = 0; s < slots_; ++s) {
      if (e == 0 && s < prefetched_) PrefetchRow(next_.value[At(s)], row_bytes_);
      const T* value = reinterpret_cast<const T*>(tile_.value[At(s)]) + e;
      Floats v[C];
      for (int c = 0; c < C; ++c) v[c] = widen(value + c * kLanes);
      for (int r = 0; r < R; ++r) {
        if (HasHidden && weight_[s * R + r] == 0) continue;
        const Floats w = hn::Set(d, weight_[s * R + r]);
        for (int c = 0; c < C; ++c) sum[r][c] = hn::MulAdd(w, v[c], sum[r][c]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        float* const o = output_ + r * block_.padded_dim + e + c * kLanes;
        hn::Store(hn::MulAdd(hn::Load(d, o), hn::Set(d, rescale_[r]), sum[r][c]), d, o);
      }
    }
  }

  const SlotTile& tile_;
  const SlotTile& next_;
  RowBlock& block_;
  const int slots_;
  const int prefetched_;
  const int row_bytes_;
  const size_t row_;
  const float* const query_;                  // [R, padded_dim]
  float* const output_;                       // [R, padded_dim]
  alignas(64) float weight_[kTileSlots * R];  // [slot][row] first logits, then e^(z - top)
  float rescale_[R];                          // e^(old top - top)
};

// A part on its way through its tiles.
template <class T>
class PartKernel {
 public:
  PartKernel(const AttendArgs& args, const AttendPart& part)
      : args_(args), part_(part), columns_(args.logits.empty() ? 0 : AttendSlots(args)) {
    block_.head_dim = args.head_dim;
    block_.padded_dim = (args.head_dim + kLanes - 1) / kLanes * kLanes;
    block_.scale = args.scale;
    const size_t padded_dim = static_cast<size_t>(block_.padded_dim);
    const size_t head_dim = static_cast<size_t>(args.head_dim);
    block_.query = hwy::AllocateAligned<float>(part.rows * padded_dim);
    block_.output = hwy::AllocateAligned<float>(part.rows * padded_dim);
    std::fill_n(block_.query.get(), part.rows * padded_dim, 0.0F);
    std::fill_n(block_.output.get(), part.rows * padded_dim, 0.0F);
    std::fill_n(block_.top.begin(), part.rows, kHidden);
    for (size_t row = 0; row < part.rows; ++row) {
      const float* query = &args.query[(part.first_row + row) * head_dim];
      std::copy(query, query + head_dim, &block_.query[row * padded_dim]);
      block_.index[row] =
          args.query_index[(part.first_row + row) % static_cast<size_t>(args.queries)];
    }
  }

  void Run() {
    HideAllLogits();
    SlotTiles tiles({.extents = args_.extents.subspan(part_.first_extent),
                     .count = part_.extents,
                     .row_bytes = static_cast<size_t>(args_.head_dim) * sizeof(T),
                     .index_limit = *std::max_element(block_.index.begin(),
                                                      block_.index.begin() + part_.rows)});
    while (tiles.Advance()) {
      if (args_.queries > 1) NoteIndices(tiles.tile());
      const int rows = static_cast<int>(part_.rows);
      int row = 0;
      if constexpr (kLanes >= 8) {
        for (; row + 8 <= rows; row += 8) Attend<8>(tiles, row);
      }
      for (; row + 4 <= rows; row += 4) Attend<4>(tiles, row);
      if (row + 2 <= rows) {
        Attend<2>(tiles, row);
        row += 2;
      }
      if (row < rows) Attend<1>(tiles, row);
    }
  }

  void Finish(AttendPartial& partial) const {
    const size_t head_dim = static_cast<size_t>(args_.head_dim);
    partial.output.resize(part_.rows * head_dim);
    partial.lse.resize(part_.rows);
    for (size_t row = 0; row < part_.rows; ++row) {
      const bool sees_nothing = block_.top[row] == kHidden;
      const float share = sees_nothing ? 0.0F : static_cast<float>(1.0 / block_.mass[row]);
      partial.lse[row] = sees_nothing ? static_cast<double>(kHidden)
                                      : block_.top[row] + std::log(block_.mass[row]);
      const float* output = &block_.output[row * static_cast<size_t>(block_.padded_dim)];
      std::transform(output, output + head_dim, &partial.output[row * head_dim],
                     [share](float sum) { return sum * share; });
    }
  }

 private:
  // The first and last token of a tile. One query alone sees every slot of the window.
  void NoteIndices(const SlotTile& tile) {
    const auto [first, last] =
        std::minmax_element(tile.index.begin(), tile.index.begin() + tile.slots);
    tile_first_ = *first;
    tile_last_ = *last;
  }

  template <int R>
  void Attend(const SlotTiles& tiles, int row) {
    const auto sees = block_.index.begin() + row;
    const auto [least, most] = std::minmax_element(sees, sees + R);
    if (args_.queries > 1 && *most < tile_first_) return;
    const bool has_hidden = args_.queries > 1 && *least < tile_last_;
    TileKernel<T, R> tile(tiles, block_, row, row == 0 ? tiles.next().slots : 0);
    tile.Logits();
    if (has_hidden) tile.HideFuture();
    if (columns_ != 0) StoreLogits(tiles.tile(), row, tile);
    tile.Softmax();
    if (has_hidden) {
      tile.template Values<true>();
    } else {
      tile.template Values<false>();
    }
  }

  float* LogitsOf(size_t row) const {
    return &args_.logits[(part_.first_row + row) * columns_ + part_.first_slot];
  }

  void HideAllLogits() const {
    if (columns_ == 0 || part_.slots == 0) return;
    for (size_t row = 0; row < part_.rows; ++row) std::fill_n(LogitsOf(row), part_.slots, kHidden);
  }

  template <int R>
  void StoreLogits(const SlotTile& tile, int row, const TileKernel<T, R>& kernel) const {
    for (int r = 0; r < R; ++r) {
      float* const logits = LogitsOf(static_cast<size_t>(row + r));
      for (int s = 0; s < tile.slots; ++s) logits[At(tile.column[At(s)])] = kernel.logit(s, r);
    }
  }

  const AttendArgs& args_;
  const AttendPart& part_;
  const size_t columns_;  // In a row of logits; 0: not wanted.
  RowBlock block_;
  int32_t tile_first_ = 0;
  int32_t tile_last_ = 0;
};

template <class T>
void RunPart(const AttendArgs& args, const AttendPart& part, AttendPartial& partial) {
  PartKernel<T> kernel(args, part);
  kernel.Run();
  kernel.Finish(partial);
}

void AttendPartF32(const AttendArgs& args, const AttendPart& part, AttendPartial& partial) {
  RunPart<float>(args, part, partial);
}

void AttendPartF16(const AttendArgs& args, const AttendPart& part, AttendPartial& partial) {
  RunPart<hwy::float16_t>(args, part, partial);
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(AttendPartF32);
HWY_EXPORT(AttendPartF16);

}  // namespace

void AttendPartCpu(const AttendArgs& args, const AttendPart& part, AttendPartial& partial) {
  if (args.dtype == Dtype::kF32) {
    HWY_DYNAMIC_DISPATCH(AttendPartF32)(args, part, partial);
  } else {
    HWY_DYNAMIC_DISPATCH(AttendPartF16)(args, part, partial);
  }
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
