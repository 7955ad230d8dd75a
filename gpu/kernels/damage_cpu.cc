// SPDX-License-Identifier: Apache-2.0
//
// Damage a tile of 64 slots at a time: values are widened once for up to eight rows, squared
// distances of kLanes slots summed together, and the rows' terms added up as squares. A row with a
// weight above 1/2 sums the others' values from the same tile, so values are read once whatever the
// rows look like.

#include "gpu/kernels/damage.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/damage_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "gpu/cpu/padded_rows.h"
#include "gpu/cpu/simd-inl.h"
#include "gpu/cpu/slot_tiles.h"
#include "gpu/cpu/tile_rows-inl.h"
#include "gpu/element.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr int kTileSlots = SlotTile::kSlotsMax;
constexpr int kRowsMax = 8;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Terms are squared 2^40 times larger, so that damages down to 1e-30 survive in f32.
constexpr float kLift = 0x1p40F;

enum class Formula { kExact, kFast };

// A slot that holds more than half of a row's weight. It is kept out of the vectors: its term is
// worked out in f64, and where the formula asks for it, from the other tokens alone.
struct Dominant {
  size_t row = 0;
  size_t slot = 0;
  double logit = 0;
  // Attention of the row without the slot: weights are exp(z - peak).
  double peak = -std::numeric_limits<double>::infinity();
  double mass = 0;
  std::vector<double> value = {};  // [padded_dim]
};

HWY_INLINE double Peak(const float* logits, size_t slots) {
  const FloatTag f;
  Floats most = hn::Set(f, -kInfinity);
  size_t s = 0;
  for (; s + kLanes <= slots; s += kLanes) most = hn::Max(most, hn::LoadU(f, logits + s));
  alignas(64) float lane[kLanes];
  hn::Store(most, f, lane);
  float peak = *std::max_element(lane, lane + kLanes);
  for (; s < slots; ++s) peak = std::max(peak, logits[s]);
  return peak;
}

template <class T, Formula kFormula>
class DamageKernel {
 public:
  explicit DamageKernel(const DamageArgs& args)
      : args_(args), slots_(args.damage.size()), centre_(args.centre, args.head_dim) {}

  void Run() {
    for (size_t r = 0; r < static_cast<size_t>(args_.rows); ++r) {
      dominant_of_row_.push_back(dominant_.size());
      FindDominant(r);
    }
    dominant_of_row_.push_back(dominant_.size());
    std::fill(args_.damage.begin(), args_.damage.end(), 0.0F);
    SlotTiles tiles({.extents = args_.extents,
                     .count = args_.extents.size(),
                     .row_bytes = static_cast<size_t>(args_.head_dim) * sizeof(T),
                     .index_limit = std::numeric_limits<int32_t>::max()});
    while (tiles.Advance()) AddTile(tiles);
    Finish();
  }

 private:
  void FindDominant(size_t r) {
    const float* const logits = &args_.logits[r * slots_];
    const double peak = Peak(logits, slots_);
    const auto holds_half = [&](double z) { return std::exp(z - args_.lse[r]) > 0.5; };
    if (!holds_half(peak)) return;
    if (kFormula == Formula::kFast) {
      for (size_t s = 0; s < slots_; ++s) {
        if (holds_half(logits[s])) dominant_.push_back({.row = r, .slot = s, .logit = logits[s]});
      }
      return;
    }
    const auto slot =
        static_cast<size_t>(std::find(logits, logits + slots_, static_cast<float>(peak)) - logits);
    // Rounding can make two of two equal weights pass 1/2: the usual form serves both.
    if (std::find(logits + slot + 1, logits + slots_, logits[slot]) != logits + slots_) return;
    Dominant dominant{.row = r, .slot = slot, .logit = peak};
    dominant.peak = std::max(Peak(logits, slot), Peak(logits + slot + 1, slots_ - slot - 1));
    if (!args_.rest_lse.empty()) {
      dominant.peak = std::max<double>(dominant.peak, args_.rest_lse[r]);
    }
    dominant.value.resize(centre_.padded_dim());
    dominant_.push_back(std::move(dominant));
  }

  HWY_INLINE void AddTile(const SlotTiles& tiles) {
    const SlotTile& tile = tiles.tile();
    const TileRows<T, Part::kValue> values(tiles, args_.head_dim);
    alignas(64) float square[kTileSlots + kLanes] = {};
    for (int row = 0; row < args_.rows; row += kRowsMax) {
      const int count = std::min(kRowsMax, args_.rows - row);
      for (int r = 0; r < count; ++r) SetWeights(tile, static_cast<size_t>(row + r), weight_[r]);
      int r = 0;
      for (; r + 8 <= count; r += 8) AddDistances<8>(values, row, r, square);
      for (; r + 4 <= count; r += 4) AddDistances<4>(values, row, r, square);
      for (; r + 2 <= count; r += 2) AddDistances<2>(values, row, r, square);
      for (; r < count; ++r) AddDistances<1>(values, row, r, square);
    }
    for (int j = 0; j < tile.slots; ++j) args_.damage[Column(tile, j)] = square[j];
    if (kFormula == Formula::kExact) AddOthers(tile, values);
  }

  // The tile's logits of a row, and -inf up to a whole vector.
  HWY_INLINE void CopyLogits(const SlotTile& tile, size_t row, float* logit) const {
    CopyColumns(tile, &args_.logits[row * slots_], logit);
    std::fill(logit + tile.slots, logit + kTileSlots, -kInfinity);
  }

  // kLift * a / (1 - a) of a tile, 0 where a slot is dominant.
  HWY_INLINE void SetWeights(const SlotTile& tile, size_t row, float* weight) const {
    const FloatTag f;
    CopyLogits(tile, row, weight);
    const Floats lse = hn::Set(f, args_.lse[row]);
    for (int j = 0; j < tile.slots; j += kLanes) {
      Floats a = Exp(hn::Sub(hn::Load(f, weight + j), lse));
      // No cancellation: a passes 1/2 in dominant slots only, or by a rounding.
      if (kFormula == Formula::kExact) a = hn::Min(a, hn::Set(f, 0.5F));
      const Floats others = hn::Max(hn::Sub(hn::Set(f, 1.0F), a), hn::Set(f, 0x1p-24F));
      hn::Store(hn::Mul(hn::Div(a, others), hn::Set(f, kLift)), f, weight + j);
    }
    for (size_t i = dominant_of_row_[row]; i < dominant_of_row_[row + 1]; ++i) {
      ZeroSlot(tile, dominant_[i].slot, weight);
    }
  }

  HWY_INLINE static void ZeroSlot(const SlotTile& tile, size_t slot, float* weight) {
    if (slot < Column(tile, 0) || slot > Column(tile, tile.slots - 1)) return;
    for (int j = 0; j < tile.slots; ++j) {
      if (Column(tile, j) == slot) weight[j] = 0;
    }
  }

  // square[j] += sum over R rows of (weight * |centre - value[j]|)^2.
  template <int R>
  HWY_INLINE void AddDistances(const TileRows<T, Part::kValue>& values, int row, int r_first,
                               float* square) const {
    const FloatTag f;
    const float* centre[R];
    for (int r = 0; r < R; ++r) centre[r] = centre_[static_cast<size_t>(row + r_first + r)];
    for (int first = 0; first < values.slots(); first += kLanes) {
      Floats sums[R][kLanes];
      for (int l = 0; l < kLanes; ++l) {
        const int j = std::min(first + l, values.slots() - 1);
        if (row + r_first == 0) values.PrefetchNext(first + l);
        Floats sum[R];
        for (Floats& x : sum) x = hn::Zero(f);
        for (int d = 0; d < values.dim(); d += kLanes) {
          const Floats value = values.At(j, d);
          for (int r = 0; r < R; ++r) {
            const Floats off = hn::Sub(value, hn::Load(f, centre[r] + d));
            sum[r] = hn::MulAdd(off, off, sum[r]);
          }
        }
        for (int r = 0; r < R; ++r) sums[r][l] = sum[r];
      }
      Floats total = hn::Load(f, square + first);
      for (int r = 0; r < R; ++r) {
        const Floats term =
            hn::Mul(hn::Sqrt(Sums(sums[r])), hn::Load(f, weight_[r_first + r] + first));
        total = hn::MulAdd(term, term, total);
      }
      hn::Store(total, f, square + first);
    }
  }

  // Adds the tile to what each dominated row would attend to without its dominant slot.
  HWY_INLINE void AddOthers(const SlotTile& tile, const TileRows<T, Part::kValue>& values) {
    for (size_t first = 0; first < dominant_.size(); first += kRowsMax) {
      const int count = static_cast<int>(std::min<size_t>(kRowsMax, dominant_.size() - first));
      const float* weight[kRowsMax];
      double* total[kRowsMax];
      for (int i = 0; i < count; ++i) {
        Dominant& dominant = dominant_[first + static_cast<size_t>(i)];
        CopyLogits(tile, dominant.row, weight_[i]);
        SetOthers(tile, dominant, weight_[i]);
        weight[i] = weight_[i];
        total[i] = dominant.value.data();
      }
      AddWeighted</*kPrefetch=*/false>(values, weight, count, total);
    }
  }

  // exp(z - peak) of all but the dominant slot; counts their mass.
  HWY_INLINE static void SetOthers(const SlotTile& tile, Dominant& dominant, float* weight) {
    const FloatTag f;
    const Floats peak = hn::Set(f, static_cast<float>(dominant.peak));
    for (int j = 0; j < tile.slots; j += kLanes) {
      hn::Store(Exp(hn::Sub(hn::Load(f, weight + j), peak)), f, weight + j);
    }
    ZeroSlot(tile, dominant.slot, weight);
    Floats mass = hn::Zero(f);
    for (int j = 0; j < tile.slots; j += kLanes) mass = hn::Add(mass, hn::Load(f, weight + j));
    dominant.mass += static_cast<double>(hn::GetLane(hn::SumOfLanes(f, mass)));
  }

  void Finish() {
    std::map<size_t, double> total;  // Of slots that are dominant somewhere: the square, in f64.
    for (Dominant& dominant : dominant_) {
      const double term = kFormula == Formula::kFast ? FastTerm(dominant) : ExactTerm(dominant);
      const double square = static_cast<double>(args_.damage[dominant.slot]) * 0x1p-80;
      total.try_emplace(dominant.slot, square).first->second += term * term;
    }
    const FloatTag f;
    const Floats unlift = hn::Set(f, 1 / kLift);
    size_t s = 0;
    for (; s + kLanes <= slots_; s += kLanes) {
      const Floats root = hn::Sqrt(hn::LoadU(f, &args_.damage[s]));
      hn::StoreU(hn::Mul(hn::Min(root, hn::Set(f, kMost)), unlift), f, &args_.damage[s]);
    }
    for (; s < slots_; ++s) {
      args_.damage[s] = std::min(std::sqrt(args_.damage[s]), kMost) * (1 / kLift);
    }
    for (const auto& [slot, square] : total) {
      args_.damage[slot] = static_cast<float>(std::min<double>(std::sqrt(square), kMost));
    }
  }

  const T* ValueAt(size_t slot) const {
    for (const Extent& extent : args_.extents) {
      const auto here = static_cast<size_t>(extent.slots);
      if (slot < here) {
        return reinterpret_cast<const T*>(extent.value) +
               slot * static_cast<size_t>(args_.head_dim);
      }
      slot -= here;
    }
    return nullptr;
  }

  double DistanceTo(const Dominant& dominant, const double* point) const {
    const auto* value = reinterpret_cast<const std::byte*>(ValueAt(dominant.slot));
    double squares = 0;
    for (int d = 0; d < args_.head_dim; ++d) {
      const double off = point[d] - static_cast<double>(ElementAt(args_.dtype, value, d));
      squares += off * off;
    }
    return std::sqrt(squares);
  }

  double ExactTerm(Dominant& dominant) const {
    if (!args_.rest_lse.empty()) {
      const double weight = std::exp(args_.rest_lse[dominant.row] - dominant.peak);
      const auto dim = static_cast<size_t>(args_.head_dim);
      dominant.mass += weight;
      for (size_t d = 0; d < dim; ++d) {
        dominant.value[d] += weight * args_.rest_output[dominant.row * dim + d];
      }
    }
    if (dominant.mass > 0) {
      for (double& x : dominant.value) x /= dominant.mass;
    }
    const double a = std::min(1.0, std::exp(dominant.logit - args_.lse[dominant.row]));
    return a * DistanceTo(dominant, dominant.value.data());
  }

  double FastTerm(const Dominant& dominant) const {
    const double x = dominant.logit - args_.lse[dominant.row];
    const float* const row = centre_[dominant.row];
    const std::vector<double> centre(row, row + args_.head_dim);
    return std::exp(x) / std::max(-std::expm1(x), 0x1p-24) * DistanceTo(dominant, centre.data());
  }

  static constexpr float kMost = std::numeric_limits<float>::max();

  const DamageArgs& args_;
  const size_t slots_;
  const PaddedRows centre_;
  std::vector<Dominant> dominant_;
  std::vector<size_t> dominant_of_row_;  // Where each row's begin; one more than rows.
  alignas(64) float weight_[kRowsMax][kTileSlots];
};

template <Formula kFormula>
HWY_INLINE void RunDamage(const DamageArgs& args) {
  WithElement(args.dtype,
              [&](auto element) { DamageKernel<decltype(element), kFormula>(args).Run(); });
}

void DamageTarget(const DamageArgs& args) {
  RunDamage<Formula::kExact>(args);
}
void FastDamageTarget(const DamageArgs& args) {
  RunDamage<Formula::kFast>(args);
}

template <class T>
HWY_INLINE void SumValues(const WeightedValueArgs& args) {
  const auto dim = static_cast<size_t>(args.head_dim);
  const auto rows = static_cast<size_t>(args.rows);
  const size_t padded = (dim + PaddedRows::kAlign - 1) / PaddedRows::kAlign * PaddedRows::kAlign;
  std::vector<double> sum(rows * padded);
  std::vector<float> weight(rows * kTileSlots);
  std::vector<const float*> weight_row;
  std::vector<double*> sum_row;
  for (size_t r = 0; r < rows; ++r) {
    weight_row.push_back(&weight[r * kTileSlots]);
    sum_row.push_back(&sum[r * padded]);
  }
  const size_t slots = args.weight.size() / rows;
  SlotTiles tiles({.extents = args.extents,
                   .count = args.extents.size(),
                   .row_bytes = dim * sizeof(T),
                   .index_limit = std::numeric_limits<int32_t>::max()});
  while (tiles.Advance()) {
    const TileRows<T, Part::kValue> values(tiles, args.head_dim);
    for (size_t r = 0; r < rows; ++r) {
      CopyColumns(tiles.tile(), &args.weight[r * slots], &weight[r * kTileSlots]);
    }
    AddWeighted</*kPrefetch=*/true>(values, weight_row.data(), args.rows, sum_row.data());
  }
  for (size_t r = 0; r < rows; ++r) {
    for (size_t d = 0; d < dim; ++d) {
      args.output[r * dim + d] = static_cast<float>(sum[r * padded + d]);
    }
  }
}

void WeightedValueTarget(const WeightedValueArgs& args) {
  WithElement(args.dtype, [&](auto element) { SumValues<decltype(element)>(args); });
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(DamageTarget);
HWY_EXPORT(FastDamageTarget);
HWY_EXPORT(WeightedValueTarget);

void DamageCpu(const DamageArgs& args) {
  CheckDamage(args);
  HWY_DYNAMIC_DISPATCH(DamageTarget)(args);
}

void FastDamageCpu(const DamageArgs& args) {
  CheckDamage(args);
  HWY_DYNAMIC_DISPATCH(FastDamageTarget)(args);
}

void WeightedValueCpu(const WeightedValueArgs& args) {
  CheckWeightedValue(args);
  HWY_DYNAMIC_DISPATCH(WeightedValueTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
