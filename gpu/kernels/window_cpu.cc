// SPDX-License-Identifier: Apache-2.0
//
// A window over tiles of 64 visible slots. A tile's keys are turned round to [channel, slot], so
// that a vector holds one channel of many slots and logits of four rows need no sums across lanes:
// two windows' worth of rows pay for the turning. Weights e^(z - top so far) of 64 rows over all
// slots are kept, and the top with each tile; once a row's sum is known, each slot adds its weights
// up, by one product each instead of a second exponential.

#include "gpu/kernels/window.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/window_cpu.cc"
#include <hwy/aligned_allocator.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "gpu/cpu/simd-inl.h"
#include "gpu/cpu/slot_tiles.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr size_t kTileSlots = SlotTile::kSlotsMax;
constexpr size_t kVector = static_cast<size_t>(kLanes);
constexpr size_t kTileVectors = kTileSlots / kVector;

constexpr size_t kBlockRows = 64;  // Whose weights are kept at once.
constexpr size_t kRowsTogether = 4;
constexpr size_t kVectorsTogether = kLanes == 16 ? 4 : 2;  // Times four rows: fit the registers.
constexpr size_t kRowsInF32 = 8;                           // Rows that a slot adds up in f32.

using Aligned = hwy::AlignedFreeUniquePtr<float[]>;

// Vector c of the result holds element c of kLanes vectors; in 128-bit blocks first, then the
// blocks.
HWY_INLINE void TransposeInBlocks(const Floats* row, Floats* column) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> pair;
  for (size_t first = 0; first < kVector; first += 4) {
    const Floats* r = row + first;
    const auto low01 = hn::BitCast(pair, hn::InterleaveLower(d, r[0], r[1]));
    const auto low23 = hn::BitCast(pair, hn::InterleaveLower(d, r[2], r[3]));
    const auto high01 = hn::BitCast(pair, hn::InterleaveUpper(d, r[0], r[1]));
    const auto high23 = hn::BitCast(pair, hn::InterleaveUpper(d, r[2], r[3]));
    column[first + 0] = hn::BitCast(d, hn::InterleaveLower(pair, low01, low23));
    column[first + 1] = hn::BitCast(d, hn::InterleaveUpper(pair, low01, low23));
    column[first + 2] = hn::BitCast(d, hn::InterleaveLower(pair, high01, high23));
    column[first + 3] = hn::BitCast(d, hn::InterleaveUpper(pair, high01, high23));
  }
}

// From what TransposeInBlocks leaves: x[4 * b + i] holds, block by block, channels i, i + 4, … of
// the slots from 4 * b on. Stores channel c of all slots to to[c * kTileSlots].
HWY_INLINE void StoreColumns(const Floats* x, float* to) {
  const FloatTag d;
  for (size_t i = 0; i < 4; ++i) {
    const auto store = [&](size_t block, Floats slots)
                           HWY_ATTR { hn::Store(slots, d, to + (4 * block + i) * kTileSlots); };
#if HWY_CAP_GE512
    const Floats low_even = hn::ConcatLowerLower(d, x[8 + i], x[i]);
    const Floats low_odd = hn::ConcatLowerLower(d, x[12 + i], x[4 + i]);
    const Floats high_even = hn::ConcatUpperUpper(d, x[8 + i], x[i]);
    const Floats high_odd = hn::ConcatUpperUpper(d, x[12 + i], x[4 + i]);
    store(0, hn::OddEvenBlocks(hn::SwapAdjacentBlocks(low_odd), low_even));
    store(1, hn::OddEvenBlocks(low_odd, hn::SwapAdjacentBlocks(low_even)));
    store(2, hn::OddEvenBlocks(hn::SwapAdjacentBlocks(high_odd), high_even));
    store(3, hn::OddEvenBlocks(high_odd, hn::SwapAdjacentBlocks(high_even)));
#elif HWY_CAP_GE256
    store(0, hn::ConcatLowerLower(d, x[4 + i], x[i]));
    store(1, hn::ConcatUpperUpper(d, x[4 + i], x[i]));
#else
    store(0, x[i]);
#endif
  }
}

// One lane on its way through its blocks of rows.
template <class T>
class WindowKernel {
 public:
  explicit WindowKernel(const WindowArgs& args)
      : args_(args),
        head_dim_(static_cast<size_t>(args.head_dim)),
        padded_dim_((head_dim_ + kVector - 1) / kVector * kVector),
        tiles_((args.mass.size() + kTileSlots - 1) / kTileSlots),
        index_limit_(*std::ranges::max_element(args.query_index)),
        key_(hwy::AllocateAligned<float>(padded_dim_ * kTileSlots)),
        query_(hwy::AllocateAligned<float>(kBlockRows * head_dim_)),
        weight_(hwy::AllocateAligned<float>(tiles_ * std::min(kBlockRows, Padded(rows())) *
                                            kTileSlots)),
        factor_(hwy::AllocateAligned<float>(kBlockRows * PaddedTiles())),
        column_(tiles_ * kTileSlots),
        sum_(tiles_ * kTileSlots, 0.0) {}

  void Run() {
    for (size_t row = 0; row < rows(); row += kBlockRows) {
      TakeRows(row, std::min(kBlockRows, rows() - row));
      WeighTiles();
      AddWeights();
    }
    std::ranges::fill(args_.mass, 0.0F);
    for (size_t i = 0; i < slots_; ++i) {
      args_.mass[static_cast<size_t>(column_[i])] = static_cast<float>(sum_[i] / args_.group);
    }
  }

 private:
  static size_t Padded(size_t rows) {
    return (rows + kRowsTogether - 1) / kRowsTogether * kRowsTogether;
  }
  size_t PaddedTiles() const { return (tiles_ + kVector - 1) / kVector * kVector; }
  size_t rows() const {
    return static_cast<size_t>(args_.group) * static_cast<size_t>(args_.queries);
  }
  float* WeightsOf(size_t tile, size_t row) const {
    return weight_.get() + (tile * padded_rows_ + row) * kTileSlots;
  }

  // Of the block: rows of zeros that see nothing fill it up to whole steps.
  void TakeRows(size_t first, size_t count) {
    block_rows_ = count;
    padded_rows_ = Padded(count);
    std::copy_n(&args_.query[first * head_dim_], count * head_dim_, query_.get());
    std::fill(query_.get() + count * head_dim_, query_.get() + padded_rows_ * head_dim_, 0.0F);
    for (size_t row = 0; row < count; ++row) {
      seen_up_to_[row] = args_.query_index[(first + row) % static_cast<size_t>(args_.queries)];
    }
    top_.fill(kHidden);
    total_.fill(0);
  }

  // The weights of the block's rows in every tile.
  HWY_INLINE void WeighTiles() {
    SlotTiles tiles({.extents = args_.extents,
                     .count = args_.extents.size(),
                     .row_bytes = head_dim_ * sizeof(T),
                     .index_limit = index_limit_});
    slots_ = 0;
    block_tiles_ = 0;
    for (; tiles.Advance(); ++block_tiles_) {
      const SlotTile& tile = tiles.tile();
      std::copy_n(tile.column.begin(), tile.slots,
                  column_.begin() + static_cast<ptrdiff_t>(slots_));
      slots_ += static_cast<size_t>(tile.slots);
      TurnKeys(tile);
      const int32_t newest = *std::max_element(tile.index.begin(), tile.index.begin() + tile.slots);
      for (size_t row = 0; row < padded_rows_; row += kRowsTogether) {
        PrefetchNext(tiles.next(), row);
        for (size_t v = 0; v < kTileVectors; v += kVectorsTogether) Logits(row, v);
        const size_t end = std::min(row + kRowsTogether, block_rows_);
        for (size_t r = row; r < end; ++r) {
          float* const weight = WeightsOf(block_tiles_, r);
          if (tile.slots < static_cast<int>(kTileSlots) || newest > seen_up_to_[r]) {
            Hide(tile, seen_up_to_[r], weight);
          }
          Softmax(r, weight);
        }
      }
    }
  }

  // key_ := the tile's keys as [channel, slot]; past its last slot that one again.
  HWY_INLINE void TurnKeys(const SlotTile& tile) {
    for (size_t first = 0; first < kTileSlots; first += kVector) {
      const T* key[kVector];
      for (size_t i = 0; i < kVector; ++i) {
        const size_t slot = std::min(first + i, static_cast<size_t>(tile.slots) - 1);
        key[i] = reinterpret_cast<const T*>(tile.key[slot]);
      }
      Floats row[kVector];
      Floats column[kVector];
      for (size_t d = 0; d < head_dim_; d += kVector) {
        const bool is_whole = d + kVector <= head_dim_;
        for (size_t i = 0; i < kVector; ++i) {
          row[i] =
              is_whole ? Widen(key[i] + d) : WidenTail(key[i] + d, static_cast<int>(head_dim_ - d));
        }
        TransposeInBlocks(row, column);
        StoreColumns(column, key_.get() + d * kTileSlots + first);
      }
    }
  }

  // A share of the next tile's keys, asked for while this one's are worked on.
  HWY_INLINE void PrefetchNext(const SlotTile& next, size_t row) const {
    const size_t steps = padded_rows_ / kRowsTogether;
    const size_t step = row / kRowsTogether;
    const auto count = static_cast<size_t>(next.slots);
    for (size_t s = count * step / steps; s < count * (step + 1) / steps; ++s) {
      for (size_t byte = 0; byte < head_dim_ * sizeof(T); byte += 64) {
        __builtin_prefetch(next.key[s] + byte, 0, 2);
      }
    }
  }

  // scale * query . key of four rows from `row` and a few vectors of slots.
  HWY_INLINE void Logits(size_t row, size_t vector) {
    const FloatTag d;
    const float* const query = query_.get() + row * head_dim_;
    const float* const key = key_.get() + vector * kVector;
    Floats sum[kRowsTogether][kVectorsTogether];
    for (auto& of_row : sum) {
      for (Floats& lane : of_row) lane = hn::Zero(d);
    }
    for (size_t e = 0; e < head_dim_; ++e) {
      Floats k[kVectorsTogether];
      for (size_t v = 0; v < kVectorsTogether; ++v) {
        k[v] = hn::Load(d, key + e * kTileSlots + v * kVector);
      }
      for (size_t r = 0; r < kRowsTogether; ++r) {
        const Floats q = hn::Set(d, query[r * head_dim_ + e]);
        for (size_t v = 0; v < kVectorsTogether; ++v) sum[r][v] = hn::MulAdd(q, k[v], sum[r][v]);
      }
    }
    const Floats scale = hn::Set(d, args_.scale);
    for (size_t r = 0; r < kRowsTogether; ++r) {
      float* const to = WeightsOf(block_tiles_, row + r) + vector * kVector;
      for (size_t v = 0; v < kVectorsTogether; ++v) {
        hn::Store(hn::Mul(sum[r][v], scale), d, to + v * kVector);
      }
    }
  }

  static void Hide(const SlotTile& tile, int32_t seen_up_to, float* logit) {
    const auto slots = static_cast<size_t>(tile.slots);
    for (size_t s = 0; s < slots; ++s) {
      if (tile.index[s] > seen_up_to) logit[s] = kHidden;
    }
    std::fill(logit + slots, logit + kTileSlots, kHidden);
  }

  // Logits of a row to weights; brings its top and total up to date.
  HWY_INLINE void Softmax(size_t row, float* weight) {
    const FloatTag d;
    Floats peak = hn::Load(d, weight);
    for (size_t v = 1; v < kTileVectors; ++v) {
      peak = hn::Max(peak, hn::Load(d, weight + v * kVector));
    }
    const float top = std::max(top_[row], hn::GetLane(hn::MaxOfLanes(d, peak)));
    if (top > top_[row]) {
      total_[row] *= std::exp(static_cast<double>(top_[row]) - static_cast<double>(top));
      top_[row] = top;
    }
    factor_[row * PaddedTiles() + block_tiles_] = top;
    const Floats shift = hn::Set(d, top == kHidden ? 0.0F : top);
    Floats sum = hn::Zero(d);
    for (size_t v = 0; v < kTileVectors; ++v) {
      const Floats w = Exp(hn::Sub(hn::Load(d, weight + v * kVector), shift));
      hn::Store(w, d, weight + v * kVector);
      sum = hn::Add(sum, w);
    }
    total_[row] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
  }

  // sum_ += the weights of the block's rows, each divided by its row's total.
  HWY_INLINE void AddWeights() {
    const FloatTag d;
    for (size_t row = 0; row < block_rows_; ++row) {
      float* const factor = &factor_[row * PaddedTiles()];
      if (total_[row] == 0) {  // It has seen nothing.
        std::fill_n(factor, block_tiles_, 0.0F);
        continue;
      }
      std::fill(factor + block_tiles_, factor + PaddedTiles(), kHidden);
      const Floats top = hn::Set(d, top_[row]);
      const Floats share = hn::Set(d, static_cast<float>(1 / total_[row]));
      for (size_t t = 0; t < block_tiles_; t += kVector) {
        const Floats tile_top = hn::Load(d, factor + t);
        hn::Store(hn::Mul(Exp(hn::Sub(tile_top, top)), share), d, factor + t);
      }
    }
    for (size_t tile = 0; tile < block_tiles_; ++tile) {
      for (size_t row = 0; row < block_rows_; row += kRowsInF32) {
        AddRows(tile, row, std::min(row + kRowsInF32, block_rows_));
      }
    }
  }

  HWY_INLINE void AddRows(size_t tile, size_t row, size_t end) {
    const FloatTag d;
    Floats sum[kTileVectors];
    for (Floats& lane : sum) lane = hn::Zero(d);
    for (; row < end; ++row) {
      const Floats factor = hn::Set(d, factor_[row * PaddedTiles() + tile]);
      const float* const weight = WeightsOf(tile, row);
      for (size_t v = 0; v < kTileVectors; ++v) {
        sum[v] = hn::MulAdd(hn::Load(d, weight + v * kVector), factor, sum[v]);
      }
    }
    const hn::Half<FloatTag> half;
    const hn::Rebind<double, decltype(half)> wide;
    double* const to = &sum_[tile * kTileSlots];
    for (size_t v = 0; v < kTileVectors; ++v) {
      double* const low = to + v * kVector;
      double* const high = low + kVector / 2;
      const auto low_sum = hn::PromoteTo(wide, hn::LowerHalf(half, sum[v]));
      const auto high_sum = hn::PromoteTo(wide, hn::UpperHalf(half, sum[v]));
      hn::StoreU(hn::Add(hn::LoadU(wide, low), low_sum), wide, low);
      hn::StoreU(hn::Add(hn::LoadU(wide, high), high_sum), wide, high);
    }
  }

  const WindowArgs& args_;
  const size_t head_dim_;
  const size_t padded_dim_;  // A multiple of kLanes.
  const size_t tiles_;       // At most.
  const int32_t index_limit_;
  Aligned key_;                  // [padded_dim, kTileSlots] of one tile
  Aligned query_;                // [kBlockRows, head_dim]
  Aligned weight_;               // [tiles, padded rows, kTileSlots] e^(z - top so far)
  Aligned factor_;               // [kBlockRows, tiles] the top so far, then e^(it - top) / total
  std::vector<int32_t> column_;  // Of each slot that a tile lists.
  std::vector<double> sum_;      // [tiles, kTileSlots] over all rows
  size_t slots_ = 0;             // That tiles list.
  size_t block_tiles_ = 0;       // Done, of the block.
  size_t block_rows_ = 0;
  size_t padded_rows_ = 0;
  std::array<int32_t, kBlockRows> seen_up_to_ = {};
  std::array<float, kBlockRows> top_ = {};     // Largest logit so far.
  std::array<double, kBlockRows> total_ = {};  // Sum of e^(z - top).
};

void WindowTarget(const WindowArgs& args) {
  WithElement(args.dtype, [&](auto element) { WindowKernel<decltype(element)>(args).Run(); });
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(WindowTarget);

void WindowCpu(const WindowArgs& args) {
  CheckWindow(args);
  if (args.queries == 0 || args.mass.empty()) {
    std::ranges::fill(args.mass, 0.0F);
  } else {
    HWY_DYNAMIC_DISPATCH(WindowTarget)(args);
  }
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
