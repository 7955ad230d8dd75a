// SPDX-License-Identifier: Apache-2.0
//
// Attention over one part, a tile of 64 visible slots at a time: logits, running maximum, weights,
// weighted values (online softmax). A tile stays in the first-level cache while all rows of the
// block pass over it, up to eight at once, so memory is read once; what comes next is prefetched by
// table, for extents lie anywhere.
//
// Sums are short on purpose: at most 64 terms within a tile, 16 tiles within a run, then runs are
// merged in f64 (gpu/cpu/attend_part.h). The error bounds in attend.cc count on it. Where each
// extent is wanted alone, it is a tile, which begins with sums of nothing and is added to the run
// in f64.

#include "gpu/kernels/attend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/attend_cpu.cc"
#include <hwy/aligned_allocator.h>
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "gpu/cpu/attend_part.h"
#include "gpu/cpu/simd-inl.h"
#include "gpu/cpu/slot_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int kTileSlots = SlotTile::kSlotsMax;

// So many rows pass over a tile at once, of those that are left.
constexpr size_t kRowsMax = kLanes >= 8 ? 8 : 4;
constexpr size_t RowsTogether(size_t left) {
  return std::min(std::bit_floor(left), kRowsMax);
}

// The rows of a part: their queries, and what the tiles so far add up to.
struct RowBlock {
  int head_dim = 0;
  int padded_dim = 0;  // A multiple of kLanes.
  float scale = 0;
  // Of rows together [padded_dim / kLanes, rows, kLanes], zeros past head_dim.
  hwy::AlignedFreeUniquePtr<float[]> query;
  hwy::AlignedFreeUniquePtr<float[]> output;  // [rows, padded_dim] sum of e^(z - top) * value
  std::array<int32_t, kAttendBlockRows> index = {};  // The last token that each row sees.
  std::array<float, kAttendBlockRows> top = {};      // Largest logit so far.
  hwy::AlignedFreeUniquePtr<float[]> top_lanes;    // [rows, kLanes] of rows together, as FoldLanes.
  std::array<double, kAttendBlockRows> mass = {};  // Sum of e^(z - top).
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

// The lines that begin within kBytes of a row from `first` on, a multiple of kBytes. Into the
// second-level cache: more of them can be on their way there than to the first level, and the next
// tile is wanted only after this one. Asked for a few at a time, between the sums: a burst would
// keep this tile's own loads waiting (docs/benchmarks.md, kernels).
template <int kBytes>
HWY_INLINE void PrefetchLines(const std::byte* row, int first) {
  constexpr int kLine = 64;
  if constexpr (kBytes >= kLine) {
    for (int byte = 0; byte < kBytes; byte += kLine) __builtin_prefetch(row + first + byte, 0, 2);
  } else {
    if (first % kLine == 0) __builtin_prefetch(row + first, 0, 2);
  }
}

// In every lane l, the lanes of row l % R taken together, where lane l is of row l % R.
template <int R, class Join>
HWY_INLINE Floats FoldLanes(Floats x, Join join) {
  [[maybe_unused]] const FloatTag d;
  if constexpr (kLanes > 4 && R <= kLanes / 2) x = join(x, hn::ConcatLowerUpper(d, x, x));
  if constexpr (kLanes > 8 && R <= 4) x = join(x, hn::SwapAdjacentBlocks(x));
  if constexpr (R <= 2) x = join(x, hn::Shuffle1032(x));
  if constexpr (R <= 1) x = join(x, hn::Shuffle2301(x));
  return x;
}

// One tile for R rows of a block.
template <class T, int R>
class TileKernel {
 public:
  // `prefetched`: of the next tile, slots to bring nearer meanwhile; 0 where another row did.
  HWY_INLINE TileKernel(const SlotTiles& tiles, RowBlock& block, size_t row, int prefetched)
      : tile_(tiles.tile()),
        next_(tiles.next()),
        block_(block),
        slots_(tile_.slots),
        prefetched_(prefetched),
        row_(row),
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
      Floats sum[kLanes];
      for (Floats& lane : sum) lane = hn::Zero(d);
      AllProducts(key, s, sum);
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
    hn::Store(FoldLanes<R>(total, [](Floats a, Floats b) { return hn::Add(a, b); }), d, lane);
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
  static constexpr int kVectorBytes = kLanes * static_cast<int>(sizeof(T));

  // Of the keys of kSlots slots from `s`.
  HWY_INLINE void AllProducts(const T* const* key, int s, Floats* sum) const {
    if constexpr (kLanes == 16 && R * 4 <= 8) {
      if (block_.head_dim == 4 * kLanes) return AddRowProducts<4>(key, s, sum);
    }
    if constexpr (kLanes == 16 && R * 8 <= 8) {
      if (block_.head_dim == 8 * kLanes) return AddRowProducts<8>(key, s, sum);
    }
    int e = 0;
    for (; e + 4 * kLanes <= block_.head_dim; e += 4 * kLanes) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        PrefetchKeys(s, e + v * kLanes);
        AddProducts(key, e + v * kLanes, WholeVector<T>(), sum);
      }
    }
    for (; e + kLanes <= block_.head_dim; e += kLanes) {
      PrefetchKeys(s, e);
      AddProducts(key, e, WholeVector<T>(), sum);
    }
    if (e < block_.head_dim) {
      PrefetchKeys(s, e);
      AddProducts(key, e, PartOfVector<T>{block_.head_dim - e}, sum);
    }
  }

  // One vector from e of kSlots keys of the next tile.
  HWY_INLINE void PrefetchKeys(int s, int e) const {
    const int first_byte = e * static_cast<int>(sizeof(T));
    if (kVectorBytes < 64 && first_byte % 64 != 0) return;
    for (int i = 0; i < std::min(kSlots, prefetched_ - s); ++i) {
      PrefetchLines<kVectorBytes>(next_.key[At(s + i)], first_byte);
    }
  }

  // The same sums for few rows of V vectors, key by key: queries stay in registers.
  template <int V>
  HWY_INLINE void AddRowProducts(const T* const* key, int s, Floats* sum) const {
    const FloatTag d;
    Floats q[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) q[r][v] = hn::Load(d, query_ + (v * R + r) * kLanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSlots; ++i) {
      if (s + i < prefetched_) PrefetchLines<V * kVectorBytes>(next_.key[At(s + i)], 0);
      for (int v = 0; v < V; ++v) {
        const Floats k = Widen(key[i] + v * kLanes);
        for (int r = 0; r < R; ++r) sum[i * R + r] = hn::MulAdd(k, q[r][v], sum[i * R + r]);
      }
    }
  }

  // Of one vector of channels.
  template <class WidenKey>
  HWY_INLINE void AddProducts(const T* const* key, int e, WidenKey widen, Floats* sum) const {
    const FloatTag d;
    if constexpr (R >= 4) {
      Floats k[kSlots];
      for (int i = 0; i < kSlots; ++i) k[i] = widen(key[i] + e);
      for (int r = 0; r < R; ++r) {
        const Floats q = hn::Load(d, query_ + e * R + r * kLanes);
        for (int i = 0; i < kSlots; ++i) sum[i * R + r] = hn::MulAdd(k[i], q, sum[i * R + r]);
      }
    } else {
      Floats q[R];
      for (int r = 0; r < R; ++r) q[r] = hn::Load(d, query_ + e * R + r * kLanes);
      for (int i = 0; i < kSlots; ++i) {
        const Floats k = widen(key[i] + e);
        for (int r = 0; r < R; ++r) sum[i * R + r] = hn::MulAdd(k, q[r], sum[i * R + r]);
      }
    }
  }

  // Lane l of `peak` is of row l % R. Returns what to subtract from logits: the new maximum, or 0
  // for a row that has seen nothing yet.
  HWY_INLINE Floats RaiseTop(Floats peak) {
    const FloatTag d;
    float* const lanes = &block_.top_lanes[row_ * At(kLanes)];
    const Floats old_top = hn::Load(d, lanes);
    const Floats top =
        hn::Max(old_top, FoldLanes<R>(peak, [](Floats a, Floats b) { return hn::Max(a, b); }));
    const Floats shift = hn::IfThenZeroElse(hn::Eq(top, hn::Set(d, kHidden)), top);
    hn::Store(top, d, lanes);
    hn::Store(Exp(hn::Sub(old_top, shift)), d, rescale_);
    std::copy(lanes, lanes + R, &block_.top[row_]);
    return shift;
  }

  // `C` vectors of channels from e. Sums of few channels are kept in several chains, each for every
  // so many slots, since additions wait for each other.
  template <int C, bool HasHidden, class WidenValue>
  HWY_INLINE void AddValues(int e, WidenValue widen) {
    constexpr int kChains = std::clamp(8 / (R * C), 1, 4);
    const FloatTag d;
    Floats sum[kChains][R][C];
    for (auto& chain : sum) {
      for (auto& of_row : chain) {
        for (Floats& lane : of_row) lane = hn::Zero(d);
      }
    }
    int s = 0;
    for (; s + kChains <= slots_; s += kChains) {
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) AddValue<C, HasHidden>(s + i, e, widen, sum[i]);
    }
    for (; s < slots_; ++s) AddValue<C, HasHidden>(s, e, widen, sum[0]);
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        for (int i = 1; i < kChains; ++i) sum[0][r][c] = hn::Add(sum[0][r][c], sum[i][r][c]);
        float* const o = output_ + r * block_.padded_dim + e + c * kLanes;
        hn::Store(hn::MulAdd(hn::Load(d, o), hn::Set(d, rescale_[r]), sum[0][r][c]), d, o);
      }
    }
  }

  template <int C, bool HasHidden, class WidenValue>
  HWY_INLINE void AddValue(int s, int e, WidenValue widen, Floats (&sum)[R][C]) {
    const FloatTag d;
    const int first_byte = e * static_cast<int>(sizeof(T));
    if (s < prefetched_) PrefetchLines<C * kVectorBytes>(next_.value[At(s)], first_byte);
    const T* value = reinterpret_cast<const T*>(tile_.value[At(s)]) + e;
    Floats v[C];
    for (int c = 0; c < C; ++c) v[c] = widen(value + c * kLanes);
    for (int r = 0; r < R; ++r) {
      if (HasHidden && weight_[s * R + r] == 0) continue;
      const Floats w = hn::Set(d, weight_[s * R + r]);
      for (int c = 0; c < C; ++c) sum[r][c] = hn::MulAdd(w, v[c], sum[r][c]);
    }
  }

  const SlotTile& tile_;
  const SlotTile& next_;
  RowBlock& block_;
  const int slots_;
  const int prefetched_;
  const size_t row_;
  const float* const query_;                  // [padded_dim / kLanes, R, kLanes]
  float* const output_;                       // [R, padded_dim]
  alignas(64) float weight_[kTileSlots * R];  // [slot][row] first logits, then e^(z - top)
  alignas(64) float rescale_[kLanes];         // [row] e^(old top - top), repeated
};

// What rows of several extents add up to, in f64: there is no bound on how many they are.
class RunTotal {
 public:
  RunTotal(size_t rows, size_t padded_dim)
      : padded_dim_(padded_dim),
        output_(hwy::AllocateAligned<double>(rows * padded_dim)),
        mass_(rows, 0.0),
        top_(rows, static_cast<double>(kHidden)) {
    std::fill_n(output_.get(), rows * padded_dim, 0.0);
  }

  // An extent's largest logit of a row, and sums relative to it.
  void Add(size_t row, float top, double mass, const float* sums) {
    if (top == kHidden) return;
    const double shift = static_cast<double>(top) - top_[row];
    const double keep = shift > 0 ? std::exp(-shift) : 1;
    const double weight = shift < 0 ? std::exp(shift) : 1;
    top_[row] = std::max<double>(top_[row], top);
    mass_[row] = mass_[row] * keep + mass * weight;
    const hn::CappedTag<double, kLanes> d;
    const hn::Rebind<float, decltype(d)> f32;
    const auto kept = hn::Set(d, keep);
    const auto added = hn::Set(d, weight);
    double* const output = &output_[row * padded_dim_];
    for (size_t i = 0; i < padded_dim_; i += hn::Lanes(d)) {
      const auto sum = hn::PromoteTo(d, hn::Load(f32, sums + i));
      hn::Store(hn::MulAdd(sum, added, hn::Mul(hn::Load(d, output + i), kept)), d, output + i);
    }
  }

  // The row's output from its sums; returns its log-sum-exp.
  double Divide(size_t row, std::span<float> output) const {
    if (mass_[row] == 0) {
      std::ranges::fill(output, 0.0F);
      return kHidden;
    }
    const double* const sums = &output_[row * padded_dim_];
    std::transform(sums, sums + output.size(), output.begin(),
                   [mass = mass_[row]](double sum) { return static_cast<float>(sum / mass); });
    return top_[row] + std::log(mass_[row]);
  }

 private:
  size_t padded_dim_;
  hwy::AlignedFreeUniquePtr<double[]> output_;  // [rows, padded_dim]
  std::vector<double> mass_, top_;              // [rows]
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
    const size_t padded_dim = At(block_.padded_dim);
    block_.query = hwy::AllocateAligned<float>(part.rows * padded_dim);
    block_.output = hwy::AllocateAligned<float>(part.rows * padded_dim);
    std::fill_n(block_.query.get(), part.rows * padded_dim, 0.0F);
    std::fill_n(block_.output.get(), part.rows * padded_dim, 0.0F);
    std::fill_n(block_.top.begin(), part.rows, kHidden);
    block_.top_lanes = hwy::AllocateAligned<float>(part.rows * At(kLanes));
    std::fill_n(block_.top_lanes.get(), part.rows * At(kLanes), kHidden);
    for (size_t row = 0; row < part.rows; ++row) {
      block_.index[row] =
          args.query_index[(part.first_row + row) % static_cast<size_t>(args.queries)];
    }
    for (size_t row = 0; row < part.rows; row += RowsTogether(part.rows - row)) CopyQueries(row);
  }

  void Run(AttendPartial& partial) {
    partial.output.resize(part_.rows * dim());
    partial.lse.resize(part_.rows);
    HideAllLogits();
    const bool each_alone = !args_.part_lse.empty();
    SlotTiles tiles(
        {.extents = args_.extents.subspan(part_.first_extent),
         .count = part_.extents,
         .row_bytes = dim() * sizeof(T),
         .index_limit = *std::max_element(block_.index.begin(), block_.index.begin() + part_.rows),
         .ends_with_extents = each_alone});
    if (each_alone) return AttendEach(tiles, partial);
    while (tiles.Advance()) AttendTile(tiles);
    for (size_t row = 0; row < part_.rows; ++row) {
      partial.lse[row] = Divide(row, &partial.output[row * dim()]);
    }
  }

 private:
  size_t dim() const { return static_cast<size_t>(args_.head_dim); }
  float* SumsOf(size_t row) { return &block_.output[row * At(block_.padded_dim)]; }

  void AttendTile(const SlotTiles& tiles) {
    if (args_.queries > 1) NoteIndices(tiles.tile());
    for (size_t row = 0; row < part_.rows;) {
      const size_t together = RowsTogether(part_.rows - row);
      if constexpr (kRowsMax == 8) {
        if (together == 8) Attend<8>(tiles, row);
      }
      if (together == 4) Attend<4>(tiles, row);
      if (together == 2) Attend<2>(tiles, row);
      if (together == 1) Attend<1>(tiles, row);
      row += together;
    }
  }

  // Each extent's own answer, and what they are together.
  void AttendEach(SlotTiles& tiles, AttendPartial& partial) {
    RunTotal total(part_.rows, At(block_.padded_dim));
    size_t next = 0;  // Of the run's extents, the first whose answer is not written.
    while (tiles.Advance()) {
      std::fill_n(block_.output.get(), part_.rows * At(block_.padded_dim), 0.0F);
      std::fill_n(block_.top.begin(), part_.rows, kHidden);
      std::fill_n(block_.top_lanes.get(), part_.rows * At(kLanes), kHidden);
      std::fill_n(block_.mass.begin(), part_.rows, 0.0);
      AttendTile(tiles);
      while (next < tiles.tile().extent) SeeNothing(next++);
      for (size_t row = 0; row < part_.rows; ++row) {
        const size_t place = PlaceOf(next, row);
        args_.part_lse[place] = static_cast<float>(Divide(row, &args_.part_output[place * dim()]));
        total.Add(row, block_.top[row], block_.mass[row], SumsOf(row));
      }
      ++next;
    }
    while (next < part_.extents) SeeNothing(next++);
    for (size_t row = 0; row < part_.rows; ++row) {
      partial.lse[row] = total.Divide(row, {&partial.output[row * dim()], dim()});
    }
  }

  // Where the answer of a row for the run's extent stands.
  size_t PlaceOf(size_t extent, size_t row) const {
    return (part_.first_extent + extent) * args_.lse.size() + part_.first_row + row;
  }
  void SeeNothing(size_t extent) const {
    std::fill_n(&args_.part_output[PlaceOf(extent, 0) * dim()], part_.rows * dim(), 0.0F);
    std::fill_n(&args_.part_lse[PlaceOf(extent, 0)], part_.rows, kHidden);
  }

  // The row's output from its sums; returns its log-sum-exp.
  double Divide(size_t row, float* output) {
    const bool sees_nothing = block_.top[row] == kHidden;
    const float share = sees_nothing ? 0.0F : static_cast<float>(1.0 / block_.mass[row]);
    const float* const sums = SumsOf(row);
    std::transform(sums, sums + dim(), output, [share](float sum) { return sum * share; });
    return sees_nothing ? static_cast<double>(kHidden)
                        : block_.top[row] + std::log(block_.mass[row]);
  }

  // Of the rows together from `row` on.
  void CopyQueries(size_t row) {
    const size_t together = RowsTogether(part_.rows - row);
    const auto head_dim = static_cast<size_t>(args_.head_dim);
    float* const to = &block_.query[row * static_cast<size_t>(block_.padded_dim)];
    for (size_t r = 0; r < together; ++r) {
      const float* const query = &args_.query[(part_.first_row + row + r) * head_dim];
      for (size_t e = 0; e < head_dim; ++e) {
        to[(e / kLanes * together + r) * kLanes + e % kLanes] = query[e];
      }
    }
  }

  // The first and last token of a tile. One query alone sees every slot of the window.
  void NoteIndices(const SlotTile& tile) {
    const auto [first, last] =
        std::minmax_element(tile.index.begin(), tile.index.begin() + tile.slots);
    tile_first_ = *first;
    tile_last_ = *last;
  }

  template <int R>
  void Attend(const SlotTiles& tiles, size_t row) {
    const auto sees = &block_.index[row];
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
  void StoreLogits(const SlotTile& tile, size_t row, const TileKernel<T, R>& kernel) const {
    for (int r = 0; r < R; ++r) {
      float* const logits = LogitsOf(row + At(r));
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

void AttendPartTarget(const AttendArgs& args, const AttendPart& part, AttendPartial& partial) {
  WithElement(args.dtype, [&](auto element) {
    PartKernel<decltype(element)> kernel(args, part);
    kernel.Run(partial);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(AttendPartTarget);

void AttendPartCpu(const AttendArgs& args, const AttendPart& part, AttendPartial& partial) {
  HWY_DYNAMIC_DISPATCH(AttendPartTarget)(args, part, partial);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
