// SPDX-License-Identifier: Apache-2.0
//
// Tiles of queries over blocks of keys, softmax renormalised block by block. The inner loops run
// over contiguous f64 so that the compiler vectorises them without reordering a sum.

#include "client/cli/truth.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "absl/synchronization/mutex.h"

namespace ebbtide::cli {
namespace {

constexpr size_t kKeyBlock = 128;
constexpr uint64_t kTileTokens = 16;
constexpr size_t kLookTokens = 256;  // While a lane is made, asked after each so many.

// One kv head's keys, transposed per block of kKeyBlock ([block][d][kKeyBlock], zero-padded), and
// values [tokens][d].
struct Lane {
  std::vector<double> keys;
  std::vector<double> values;
  std::vector<double> key_norm_max;  // [tokens] over 0 … t
};

// One (token, query head) on its way through the blocks.
struct Row {
  uint64_t token = 0;
  uint32_t head = 0;
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  std::vector<double> query;   // Scaled.
  std::vector<double> output;  // Not yet divided by sum.
};

Lane MakeLane(const Trace& trace, const TraceLayer& layer, uint32_t kv_head,
              const std::function<bool()>& is_stopped) {
  const size_t dim = trace.head_dim;
  const size_t blocks = (trace.tokens + kKeyBlock - 1) / kKeyBlock;
  Lane lane{.keys = std::vector<double>(blocks * dim * kKeyBlock),
            .values = std::vector<double>(trace.tokens * dim),
            .key_norm_max = std::vector<double>(trace.tokens)};
  double norm_max = 0;
  std::vector<float> k(dim), v(dim);
  for (size_t t = 0; t < trace.tokens; ++t) {
    if (t % kLookTokens == 0 && is_stopped()) return lane;
    layer.k.RowToFloats(t, kv_head, k);
    layer.v.RowToFloats(t, kv_head, v);
    double* block = lane.keys.data() + t / kKeyBlock * dim * kKeyBlock;
    double norm2 = 0;
    for (size_t d = 0; d < dim; ++d) {
      const double key = k[d];
      block[d * kKeyBlock + t % kKeyBlock] = key;
      lane.values[t * dim + d] = v[d];
      norm2 += key * key;
    }
    norm_max = std::max(norm_max, std::sqrt(norm2));
    lane.key_norm_max[t] = norm_max;
  }
  return lane;
}

void Logits(const Row& row, const double* block, size_t dim,
            std::array<double, kKeyBlock>& logits) {
  logits.fill(0);
  size_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    const double* k = block + d * kKeyBlock;
    const double q0 = row.query[d], q1 = row.query[d + 1];
    const double q2 = row.query[d + 2], q3 = row.query[d + 3];
    for (size_t j = 0; j < kKeyBlock; ++j) {
      logits[j] +=
          q0 * k[j] + q1 * k[kKeyBlock + j] + q2 * k[2 * kKeyBlock + j] + q3 * k[3 * kKeyBlock + j];
    }
  }
  for (; d < dim; ++d) {
    for (size_t j = 0; j < kKeyBlock; ++j) logits[j] += row.query[d] * block[d * kKeyBlock + j];
  }
}

// Takes the block's first `count` keys into the row's softmax.
void Absorb(Row& row, std::span<double> logits, const double* values) {
  const size_t dim = row.output.size();
  const double max = std::max(row.max, *std::max_element(logits.begin(), logits.end()));
  const double keep = std::exp(row.max - max);  // 0 for the first block.
  row.max = max;
  row.sum *= keep;
  for (double& o : row.output) o *= keep;
  for (size_t j = 0; j < logits.size(); ++j) {
    const double weight = std::exp(logits[j] - max);
    row.sum += weight;
    for (size_t d = 0; d < dim; ++d) row.output[d] += weight * values[j * dim + d];
  }
}

void Finish(const Row& row, const Lane& lane, LayerTruth& truth) {
  const size_t at = row.token * truth.query_heads + row.head;
  for (size_t d = 0; d < row.output.size(); ++d) {
    truth.output[at * truth.head_dim + d] = row.output[d] / row.sum;
  }
  truth.lse[at] = row.max + std::log(row.sum);
  double norm2 = 0;
  for (const double q : row.query) norm2 += q * q;
  truth.logit_slack[at] = std::sqrt(norm2) * lane.key_norm_max[row.token] *
                          (static_cast<double>(truth.head_dim) + 4) * std::ldexp(1.0, -24);
}

// Rows of tokens [begin, end) and of the query heads that read `kv_head`.
std::vector<Row> MakeRows(const Trace& trace, const TraceLayer& layer, uint32_t kv_head,
                          uint64_t begin, uint64_t end) {
  std::vector<Row> rows;
  std::vector<float> query(trace.head_dim);
  for (uint64_t token = begin; token < end; ++token) {
    for (uint32_t g = 0; g < trace.group(); ++g) {
      Row row{.token = token, .head = kv_head * trace.group() + g, .query = {}, .output = {}};
      layer.q.RowToFloats(token, row.head, query);
      for (size_t d = 0; d < trace.head_dim; ++d) {
        row.query.push_back(double{trace.scale} * double{query[d]});
      }
      row.output.resize(trace.head_dim);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

void AttendTile(const Lane& lane, std::vector<Row>& rows, LayerTruth& truth,
                const std::function<bool()>& is_stopped) {
  const size_t dim = truth.head_dim;
  const uint64_t last = rows.back().token;
  std::array<double, kKeyBlock> logits = {};
  for (uint64_t begin = 0; begin <= last; begin += kKeyBlock) {
    if (is_stopped()) return;
    const double* block = lane.keys.data() + begin * dim;
    for (Row& row : rows) {
      if (row.token < begin) continue;
      const size_t count = std::min<uint64_t>(kKeyBlock, row.token + 1 - begin);
      Logits(row, block, dim, logits);
      Absorb(row, std::span(logits).first(count), lane.values.data() + begin * dim);
    }
  }
  for (const Row& row : rows) Finish(row, lane, truth);
}

}  // namespace

absl::StatusOr<LayerTruth> ComputeTruth(const Trace& trace, const TraceLayer& layer,
                                        ParallelFor& parallel,
                                        const std::function<void(uint64_t)>& progress,
                                        const std::function<bool()>& is_stopped) {
  const size_t rows_total = trace.tokens * trace.query_heads;
  LayerTruth truth{.query_heads = trace.query_heads,
                   .head_dim = trace.head_dim,
                   .output = std::vector<double>(rows_total * trace.head_dim),
                   .lse = std::vector<double>(rows_total),
                   .logit_slack = std::vector<double>(rows_total)};
  const auto tiles = static_cast<int>((trace.tokens + kTileTokens - 1) / kTileTokens);
  absl::Mutex mu;
  uint64_t done = 0;
  for (uint32_t kv_head = 0; kv_head < trace.kv_heads; ++kv_head) {
    const Lane lane = MakeLane(trace, layer, kv_head, is_stopped);
    parallel.Run(tiles, [&](int tile) {
      const uint64_t begin = static_cast<uint64_t>(tile) * kTileTokens;
      const uint64_t end = std::min(begin + kTileTokens, trace.tokens);
      if (is_stopped()) return;
      std::vector<Row> rows = MakeRows(trace, layer, kv_head, begin, end);
      AttendTile(lane, rows, truth, is_stopped);
      if (is_stopped()) return;
      const absl::MutexLock lock(&mu);
      done += end - begin;
      progress(done);
    });
    if (is_stopped()) return absl::CancelledError("exact attention was stopped");
  }
  return truth;
}

}  // namespace ebbtide::cli
