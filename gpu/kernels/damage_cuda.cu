// SPDX-License-Identifier: Apache-2.0
//
// CAOTE and FastCAOTE, and sums of weighted values: a block for each 256 slots of a lane and all
// its rows, four at a time; rows of V are shared by 8 to 32 threads as in attend_cuda.cu.
//
// A weight above 1/2 needs attention without its slot. A row has one such slot at most (of two
// halves, the usual form serves both), found in a launch of its own that reads logits alone.
// What the other slots add up to is a second pass over the split's values, in f64, and the lane's
// last block joins splits in their order.

#include "gpu/kernels/damage.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda/lanes.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/splits.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kInFlight = 4;
constexpr int kTileRows = 4;  // One for each warp.
constexpr int kNoSlot = -1;
constexpr float kLargest = std::numeric_limits<float>::max();
static_assert(kTileRows == kWarps);

struct Lane {
  const float* logits;  // Weights, where values are summed.
  const float* lse;
  const float* centre;
  const float* rest_output;
  const float* rest_lse;  // Null: the rows attended to nothing else.
  float* out;             // damage, or weighted values
  uint32_t slots;
  int32_t rows;
  int32_t head_dim;
  uint32_t first_row;      // In lists of a row each.
  uint32_t first_partial;  // In lists of a [split, row] each.
};

// A row's slot of a weight above 1/2.
struct Heavy {
  int32_t slot;  // Or kNoSlot.
  const std::byte* value;
  double light;  // What other rows add to its damage, squared.
  double own;    // What this row does.
};

// The weights of a split without a row's heavy slot.
struct Mass {
  float peak;
  double mass;  // Relative to it.
};

struct View {
  const Lane* lanes;
  const PlacedExtent* extents;
  const Split* splits;
  unsigned* tickets;  // [lane]
  Heavy* heavy;       // [row]
  Mass* masses;       // [split, row]
  double* values;     // [split, row, head_dim] weighted and summed
};

template <class Shape>
struct Shared {
  const std::byte* value[kSplitSlots];     // Null where a slot holds nothing.
  double of_row[kSplitSlots * kTileRows];  // [slot, row] squared damages, or weights
  double across[kWarps * kTileRows * Shape::kHeadDimMax];
  bool is_last;
};

__device__ __forceinline__ double LogWeight(const Lane& lane, int r, int s) {
  return static_cast<double>(
             lane.logits[static_cast<size_t>(r) * lane.slots + static_cast<size_t>(s)]) -
         static_cast<double>(lane.lse[r]);
}

// One warp for each row, one block for each lane.
__global__ void __launch_bounds__(kThreads, 8) FindHeavy(const View view) {
  const Lane lane = view.lanes[blockIdx.x];
  const auto slots = static_cast<int>(lane.slots);
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int r = static_cast<int>(threadIdx.x) / kWarpThreads; r < lane.rows; r += kWarps) {
    const float* const logits = lane.logits + static_cast<size_t>(r) * lane.slots;
    float largest = -INFINITY;
    int at = slots;
    int count = 0;  // Slots of that logit.
    for (int s = thread; s < slots; s += kWarpThreads) {
      if (logits[s] > largest) {
        largest = logits[s];
        at = s;
        count = 1;
      } else if (logits[s] == largest) {
        ++count;
      }
    }
    const float all = WarpJoin(largest, Larger{});
    at = WarpJoin(largest == all ? at : slots, Lesser{});
    count = WarpJoin(largest == all ? count : 0, Plus{});
    if (thread != 0) continue;
    const bool is_heavy =
        at < slots && count == 1 && lane.lse[r] != -INFINITY && exp(LogWeight(lane, r, at)) > 0.5;
    view.heavy[lane.first_row + static_cast<uint32_t>(r)] = {is_heavy ? at : kNoSlot, nullptr, 0,
                                                             0};
  }
}

template <class Shape>
__device__ void FindValues(const View& view, const Split& split, int head_dim,
                           Shared<Shape>& shared) {
  for (int s = static_cast<int>(threadIdx.x); s < kSplitSlots; s += kThreads) {
    shared.value[s] = nullptr;
  }
  __syncthreads();
  const size_t row_bytes = static_cast<size_t>(head_dim) * sizeof(typename Shape::Type);
  ForEachSlot(view.extents, split, [&](int s, const Extent& extent, int i) {
    if (extent.index[i] == kNoToken) return;
    shared.value[s] = extent.value + static_cast<size_t>(i) * row_bytes;
  });
  __syncthreads();
}

// (a / (1 - a))^2 * squares, of a row that is not heavy there: what is above 1/2 is rounding.
template <bool kIsFast>
__device__ __forceinline__ double SquaredDamage(double log_weight, float squares) {
  const double rest = fmax(-expm1(log_weight), 0x1p-24);
  const double odds = exp(log_weight) / rest;
  const double factor = kIsFast ? odds : fmin(odds, 1.0);
  return factor * factor * static_cast<double>(squares);
}

// shared.of_row := squared damages of the tile's rows at each slot.
template <class Shape, bool kIsFast>
__device__ void TileDamage(const View& view, const Lane& lane, const Split& split, int first_row,
                           Shared<Shape>& shared) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kThreads / kWidth;
  constexpr int kSums = kInFlight * kTileRows;
  constexpr int kOwned = kSums >= kWidth ? kSums / kWidth : 1;
  constexpr int kOwners = kSums >= kWidth ? 1 : kWidth / kSums;
  const int t = static_cast<int>(threadIdx.x);
  const int part = t % kWidth;
  const int slots = SlotsOf(split, lane.slots);
  float centre[kTileRows][Shape::kElements];
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    const bool is_row = first_row + r < lane.rows;
    Shape::LoadFloats(lane.centre + static_cast<ptrdiff_t>(first_row + r) * lane.head_dim,
                      is_row ? lane.head_dim : 0, part, centre[r]);
  }
  for (int base = 0; base < slots; base += kGroups * kInFlight) {
    typename Shape::Raw raw[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      raw[u] = Shape::Load(shared.value[base + u * kGroups + t / kWidth], lane.head_dim, part);
    }
    float squares[kSums];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      float value[Shape::kElements];
      Shape::Widen(raw[u], value);
#pragma unroll
      for (int r = 0; r < kTileRows; ++r) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < Shape::kElements; ++e) {
          const float difference = centre[r][e] - value[e];
          sum = fmaf(difference, difference, sum);
        }
        squares[u * kTileRows + r] = sum;
      }
    }
    TransposeSum<kSums, kWidth>(squares, part);
    if (part % kOwners != 0) continue;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int owned = part / kOwners * kOwned + i;
      const int s = base + owned / kTileRows * kGroups + t / kWidth;
      const int r = first_row + owned % kTileRows;
      const int slot = static_cast<int>(split.number) * kSplitSlots + s;
      double damage = 0;
      if (shared.value[s] != nullptr && r < lane.rows && lane.lse[r] != -INFINITY &&
          (kIsFast || view.heavy[lane.first_row + static_cast<uint32_t>(r)].slot != slot)) {
        damage = SquaredDamage<kIsFast>(LogWeight(lane, r, slot), squares[i]);
      }
      shared.of_row[s * kTileRows + owned % kTileRows] = damage;
    }
  }
  __syncthreads();
}

// view.values := sum_s of_row[s, r] * value[s] over the split, for the tile's rows that `wants`.
template <class Shape, class Wants>
__device__ void SumValues(const View& view, const Lane& lane, const Split& split, int first_row,
                          Shared<Shape>& shared, Wants wants) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kThreads / kWidth;
  constexpr int kDim = Shape::kHeadDimMax;
  const int t = static_cast<int>(threadIdx.x);
  const int part = t % kWidth;
  const int slots = SlotsOf(split, lane.slots);
  double sum[kTileRows][Shape::kElements] = {};
  for (int s = t / kWidth; s < slots; s += kGroups) {
    if (shared.value[s] == nullptr) continue;
    float value[Shape::kElements];
    Shape::Widen(Shape::Load(shared.value[s], lane.head_dim, part), value);
#pragma unroll
    for (int e = 0; e < Shape::kElements; ++e) {
      const auto wide = static_cast<double>(value[e]);
#pragma unroll
      for (int r = 0; r < kTileRows; ++r) {
        sum[r][e] = fma(shared.of_row[s * kTileRows + r], wide, sum[r][e]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
#pragma unroll
    for (int e = 0; e < Shape::kElements; ++e) {
#pragma unroll
      for (int distance = kWidth; distance < kWarpThreads; distance *= 2) {
        sum[r][e] += __shfl_xor_sync(kWholeWarp, sum[r][e], distance);
      }
      if (t % kWarpThreads < kWidth) {
        shared.across[(t / kWarpThreads * kTileRows + r) * kDim + Shape::DimOf(part, e)] =
            sum[r][e];
      }
    }
  }
  __syncthreads();
  const size_t first = lane.first_partial +
                       static_cast<size_t>(split.number) * static_cast<size_t>(lane.rows) +
                       static_cast<size_t>(first_row);
  for (int i = t; i < kTileRows * lane.head_dim; i += kThreads) {
    const int r = i / lane.head_dim;
    const int d = i % lane.head_dim;
    if (first_row + r >= lane.rows || !wants(first_row + r)) continue;
    double joined = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) joined += shared.across[(w * kTileRows + r) * kDim + d];
    view.values[(first + static_cast<size_t>(r)) * static_cast<size_t>(lane.head_dim) +
                static_cast<size_t>(d)] = joined;
  }
  __syncthreads();
}

// shared.of_row := weights of the split's slots in a heavy row without its heavy slot; a warp a
// row.
template <class Shape>
__device__ void WeighOthers(const View& view, const Lane& lane, const Split& split, int first_row,
                            Shared<Shape>& shared) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int tile_row = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int r = first_row + tile_row;
  const int slots = SlotsOf(split, lane.slots);
  const int split_first = static_cast<int>(split.number) * kSplitSlots;
  const int heavy =
      r < lane.rows ? view.heavy[lane.first_row + static_cast<uint32_t>(r)].slot : kNoSlot;
  const float* const logits =
      lane.logits + static_cast<size_t>(min(r, lane.rows - 1)) * lane.slots + split_first;
  float peak = -INFINITY;
  for (int s = thread; s < slots; s += kWarpThreads) {
    if (heavy != kNoSlot && split_first + s != heavy) peak = fmaxf(peak, logits[s]);
  }
  peak = WarpJoin(peak, Larger{});
  double mass = 0;
  for (int s = thread; s < slots; s += kWarpThreads) {
    const bool counts = peak != -INFINITY && split_first + s != heavy;
    const double weight =
        counts ? exp(static_cast<double>(logits[s]) - static_cast<double>(peak)) : 0.0;
    shared.of_row[s * kTileRows + tile_row] = weight;
    mass += weight;
  }
  mass = WarpJoin(mass, Plus{});
  if (thread == 0 && heavy != kNoSlot) {
    view.masses[lane.first_partial +
                static_cast<size_t>(split.number) * static_cast<size_t>(lane.rows) +
                static_cast<size_t>(r)] = {peak, mass};
  }
  __syncthreads();
}

// What a part of the others weighs beside their largest logit.
__device__ __forceinline__ double PartWeight(float peak, float largest) {
  return peak == -INFINITY ? 0.0 : exp(static_cast<double>(peak) - static_cast<double>(largest));
}

// (a * |output without the heavy slot - its value|)^2 of one row, by a warp.
template <class Shape>
__device__ double HeavyDamage(const View& view, const Lane& lane, const Split& split, int r,
                              const Heavy& heavy) {
  constexpr int kMine = kHeadDimMax / kWarpThreads;
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto rows = static_cast<size_t>(lane.rows);
  const size_t first = lane.first_partial + static_cast<size_t>(r);
  const float rest = lane.rest_lse == nullptr ? -INFINITY : lane.rest_lse[r];
  float peak = rest;
  for (size_t x = 0; x < split.count; ++x) {
    peak = fmaxf(peak, __ldcg(&view.masses[first + x * rows].peak));
  }
  double mass = 0;
  double output[kMine] = {};
  const auto add = [&](double weight, const auto* values) {
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      const int d = thread + mine * kWarpThreads;
      if (d < lane.head_dim)
        output[mine] = fma(weight, static_cast<double>(values[d]), output[mine]);
    }
  };
  for (size_t x = 0; x < split.count; ++x) {
    const double weight = PartWeight(__ldcg(&view.masses[first + x * rows].peak), peak);
    if (weight == 0) continue;
    mass += weight * __ldcg(&view.masses[first + x * rows].mass);
    add(weight, view.values + (first + x * rows) * static_cast<size_t>(lane.head_dim));
  }
  if (rest != -INFINITY) {
    const double weight = PartWeight(rest, peak);
    mass += weight;
    add(weight, lane.rest_output + static_cast<ptrdiff_t>(r) * lane.head_dim);
  }
  double squares = 0;
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    const int d = thread + mine * kWarpThreads;
    if (d >= lane.head_dim) continue;
    const auto value = static_cast<double>(Element<typename Shape::Type>::Widen(
        reinterpret_cast<const typename Shape::Type*>(heavy.value)[d]));
    const double difference = (mass == 0 ? 0.0 : output[mine] / mass) - value;
    squares += difference * difference;
  }
  const double weight = fmin(1.0, exp(LogWeight(lane, r, heavy.slot)));
  return weight * weight * WarpJoin(squares, Plus{});
}

// The lane's last block: damages of slots that are heavy in some row.
template <class Shape>
__device__ void JoinHeavy(const View& view, const Lane& lane, const Split& split) {
  const int t = static_cast<int>(threadIdx.x);
  Heavy* const heavy = view.heavy + lane.first_row;
  for (int r = t / kWarpThreads; r < lane.rows; r += kWarps) {
    const Heavy mine = heavy[r];
    if (mine.slot == kNoSlot) continue;
    const double own = HeavyDamage<Shape>(view, lane, split, r, mine);
    if (t % kWarpThreads == 0) heavy[r].own = own;
  }
  __syncthreads();
  for (int r = t; r < lane.rows; r += kThreads) {
    const int32_t slot = heavy[r].slot;
    if (slot == kNoSlot) continue;
    bool is_first = true;
    for (int other = 0; other < r; ++other) is_first = is_first && heavy[other].slot != slot;
    if (!is_first) continue;
    double sum = heavy[r].light;
    for (int other = r; other < lane.rows; ++other) {
      if (heavy[other].slot == slot) sum += heavy[other].own;
    }
    lane.out[slot] = static_cast<float>(fmin(sqrt(sum), static_cast<double>(kLargest)));
  }
}

template <class Shape, bool kIsFast>
__global__ void __launch_bounds__(kThreads, 3) Damage(const View view) {
  constexpr int kMine = kSplitSlots / kThreads;
  __shared__ Shared<Shape> shared;
  const Split split = view.splits[blockIdx.x];
  const Lane lane = view.lanes[split.lane];
  const int t = static_cast<int>(threadIdx.x);
  const int slots = SlotsOf(split, lane.slots);
  const int split_first = static_cast<int>(split.number) * kSplitSlots;
  FindValues<Shape>(view, split, lane.head_dim, shared);
  double squares[kMine] = {};  // Of slots t, t + kThreads, …
  for (int row = 0; row < lane.rows; row += kTileRows) {
    TileDamage<Shape, kIsFast>(view, lane, split, row, shared);
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      const int s = t + mine * kThreads;
      for (int r = 0; s < slots && r < kTileRows; ++r) {
        squares[mine] += shared.of_row[s * kTileRows + r];
      }
    }
    __syncthreads();
    if constexpr (!kIsFast) {
      const auto is_heavy = [&](int r) {
        return r < lane.rows &&
               view.heavy[lane.first_row + static_cast<uint32_t>(r)].slot != kNoSlot;
      };
      if (!is_heavy(row) && !is_heavy(row + 1) && !is_heavy(row + 2) && !is_heavy(row + 3))
        continue;
      WeighOthers<Shape>(view, lane, split, row, shared);
      SumValues<Shape>(view, lane, split, row, shared, is_heavy);
    }
  }
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    const int s = t + mine * kThreads;
    if (s >= slots) continue;
    lane.out[split_first + s] =
        static_cast<float>(fmin(sqrt(squares[mine]), static_cast<double>(kLargest)));
    shared.of_row[s] = squares[mine];
  }
  if constexpr (!kIsFast) {
    __syncthreads();
    for (int r = t; r < lane.rows; r += kThreads) {
      Heavy& heavy = view.heavy[lane.first_row + static_cast<uint32_t>(r)];
      const int s = heavy.slot - split_first;
      if (heavy.slot == kNoSlot || s < 0 || s >= slots) continue;
      heavy.value = shared.value[s];
      heavy.light = shared.of_row[s];
    }
    if (IsLastBlock(view.tickets + split.lane, split.count, &shared.is_last)) {
      JoinHeavy<Shape>(view, lane, split);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, 3) WeightValues(const View view) {
  __shared__ Shared<Shape> shared;
  const Split split = view.splits[blockIdx.x];
  const Lane lane = view.lanes[split.lane];
  const int t = static_cast<int>(threadIdx.x);
  const int slots = SlotsOf(split, lane.slots);
  FindValues<Shape>(view, split, lane.head_dim, shared);
  for (int row = 0; row < lane.rows; row += kTileRows) {
    for (int i = t; i < slots * kTileRows; i += kThreads) {
      const int s = i / kTileRows;
      const int r = row + i % kTileRows;
      const size_t at = static_cast<size_t>(r) * lane.slots +
                        static_cast<size_t>(split.number) * kSplitSlots + static_cast<size_t>(s);
      shared.of_row[i] = r < lane.rows ? static_cast<double>(lane.logits[at]) : 0.0;
    }
    __syncthreads();
    SumValues<Shape>(view, lane, split, row, shared, [](int) { return true; });
  }
  if (!IsLastBlock(view.tickets + split.lane, split.count, &shared.is_last)) return;
  const int elements = lane.rows * lane.head_dim;
  const double* const values =
      view.values + static_cast<size_t>(lane.first_partial) * static_cast<size_t>(lane.head_dim);
  for (int i = t; i < elements; i += kThreads) {
    double sum = 0;
    for (size_t x = 0; x < split.count; ++x) {
      sum += __ldcg(&values[x * static_cast<size_t>(elements) + static_cast<size_t>(i)]);
    }
    lane.out[i] = static_cast<float>(sum);
  }
}

// The lists of one launch.
class Lists {
 public:
  void Add(Lane lane, size_t row_bytes, std::span<const Extent> extents) {
    const LaneSplits placed = PlaceExtents(extents, row_bytes, extents_);
    lane.slots = placed.slots;
    lane.first_row = rows_;
    lane.first_partial = partials_;
    rows_ += static_cast<uint32_t>(lane.rows);
    partials_ +=
        static_cast<uint32_t>(placed.first_extents.size()) * static_cast<uint32_t>(lane.rows);
    AddSplits(static_cast<uint32_t>(lanes_.size()), placed, splits_);
    lanes_.push_back(lane);
  }

  // With scratch for sums of values where those are wanted.
  absl::StatusOr<View> Carry(CudaStream& stream, bool with_values) const {
    const auto dim = static_cast<size_t>(lanes_[0].head_dim);
    View view = {};
    EBBTIDE_ASSIGN_OR_RETURN(view.lanes, stream.Upload(std::span<const Lane>(lanes_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.extents, stream.Upload(std::span<const PlacedExtent>(extents_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.splits, stream.Upload(std::span<const Split>(splits_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.tickets, stream.UploadZeros<unsigned>(lanes_.size()));
    if (!with_values) return view;
    EBBTIDE_ASSIGN_OR_RETURN(view.heavy, stream.Scratch<Heavy>(rows_));
    EBBTIDE_ASSIGN_OR_RETURN(view.masses, stream.Scratch<Mass>(partials_));
    EBBTIDE_ASSIGN_OR_RETURN(view.values, stream.Scratch<double>(partials_ * dim));
    return view;
  }

  LaunchShape lane_grid() const { return {"damage", GridOf(lanes_.size(), 1), kThreads}; }
  LaunchShape split_grid() const { return {"damage", GridOf(splits_.size(), 1), kThreads}; }

 private:
  std::vector<Lane> lanes_;
  std::vector<PlacedExtent> extents_;
  std::vector<Split> splits_;
  uint32_t rows_ = 0;
  uint32_t partials_ = 0;
};

template <bool kIsFast>
absl::Status RunDamage(std::span<const DamageArgs> lanes, CudaStream& stream) {
  for (const DamageArgs& args : lanes) CheckDamage(args);
  return ForEachShape(lanes, [&](std::span<const DamageArgs* const> group) {
    Lists lists;
    for (const DamageArgs* args : group) {
      lists.Add({.logits = args->logits.data(),
                 .lse = args->lse.data(),
                 .centre = args->centre.data(),
                 .rest_output = args->rest_output.data(),
                 .rest_lse = args->rest_lse.empty() ? nullptr : args->rest_lse.data(),
                 .out = args->damage.data(),
                 .slots = 0,
                 .rows = args->rows,
                 .head_dim = args->head_dim,
                 .first_row = 0,
                 .first_partial = 0},
                RowBytes(args->dtype, args->head_dim), args->extents);
    }
    EBBTIDE_ASSIGN_OR_RETURN(const View view, lists.Carry(stream, !kIsFast));
    if (!kIsFast) {
      EBBTIDE_RETURN_IF_ERROR(Launch(stream, lists.lane_grid(), &FindHeavy, view));
    }
    return WithRowShape(group[0]->dtype, group[0]->head_dim, [&](auto shape) {
      return Launch(stream, lists.split_grid(), &Damage<decltype(shape), kIsFast>, view);
    });
  });
}

}  // namespace

absl::Status DamageCuda(std::span<const DamageArgs> lanes, CudaStream& stream) {
  return RunDamage<false>(lanes, stream);
}
absl::Status FastDamageCuda(std::span<const DamageArgs> lanes, CudaStream& stream) {
  return RunDamage<true>(lanes, stream);
}

absl::Status WeightedValueCuda(std::span<const WeightedValueArgs> lanes, CudaStream& stream) {
  for (const WeightedValueArgs& args : lanes) CheckWeightedValue(args);
  return ForEachShape(lanes, [&](std::span<const WeightedValueArgs* const> group) {
    Lists lists;
    for (const WeightedValueArgs* args : group) {
      lists.Add({.logits = args->weight.data(),
                 .lse = nullptr,
                 .centre = nullptr,
                 .rest_output = nullptr,
                 .rest_lse = nullptr,
                 .out = args->output.data(),
                 .slots = 0,
                 .rows = args->rows,
                 .head_dim = args->head_dim,
                 .first_row = 0,
                 .first_partial = 0},
                RowBytes(args->dtype, args->head_dim), args->extents);
    }
    EBBTIDE_ASSIGN_OR_RETURN(const View view, lists.Carry(stream, true));
    return WithRowShape(group[0]->dtype, group[0]->head_dim, [&](auto shape) {
      return Launch(stream, lists.split_grid(), &WeightValues<decltype(shape)>, view);
    });
  });
}

}  // namespace ebbtide::gpu
