// SPDX-License-Identifier: Apache-2.0

#include "tests/support/engine_stand.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "base/status_macros.h"
#include "gpu/element.h"
#include "storage/rocksdb/rocksdb_tier.h"

namespace ebbtide::test {
namespace {

using service::Geometry;

// A number in [-1, 1) from its place.
double Noise(uint64_t seed, uint64_t place) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ULL + place * 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBULL;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-52 - 1.0;
}

struct Row {
  uint64_t kind = 0;  // 1: keys, 2: values, 3: queries
  int layer = 0;
  int head = 0;
  int32_t index = 0;
};

double Element(uint64_t seed, const Row& row, int d) {
  const auto place =
      (((row.kind * 64 + static_cast<uint64_t>(row.layer)) * 64 + static_cast<uint64_t>(row.head)) *
           (1 << 24) +
       static_cast<uint64_t>(row.index)) *
          512 +
      static_cast<uint64_t>(d);
  const double noise = Noise(seed, place);
  if (row.kind == 2) return noise;
  const double loud = d % 8 == 3 ? 3.0 : 1.0;
  const double drift = std::sin(0.02 * row.index + d);
  return loud * (0.8 * drift + 0.7 * noise);
}

std::vector<std::byte> Rows(const Tokens& tokens, Row row, int heads, int32_t count) {
  const Geometry& geometry = tokens.geometry;
  const size_t element = gpu::DtypeBytes(geometry.dtype);
  const auto head_dim = static_cast<size_t>(geometry.head_dim);
  std::vector<std::byte> bytes(static_cast<size_t>(count) * static_cast<size_t>(heads) * head_dim *
                               element);
  std::byte* out = bytes.data();
  const int32_t first = row.index;
  for (int32_t t = 0; t < count; ++t) {
    for (row.head = 0; row.head < heads; ++row.head) {
      row.index = first + t;
      for (int d = 0; d < geometry.head_dim; ++d, out += element) {
        gpu::StoreElement(geometry.dtype, out, 0, static_cast<float>(Element(tokens.seed, row, d)));
      }
    }
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> Tokens::Keys(int layer, int32_t first, int32_t count) const {
  return Rows(*this, {.kind = 1, .layer = layer, .index = first}, geometry.kv_heads, count);
}

std::vector<std::byte> Tokens::Values(int layer, int32_t first, int32_t count) const {
  return Rows(*this, {.kind = 2, .layer = layer, .index = first}, geometry.kv_heads, count);
}

std::vector<float> Tokens::Queries(int layer, int32_t first, int32_t count) const {
  std::vector<float> rows;
  for (int32_t index = first; index < first + count; ++index) {
    for (int head = 0; head < geometry.query_heads; ++head) {
      for (int d = 0; d < geometry.head_dim; ++d) {
        rows.push_back(static_cast<float>(
            Element(seed, {.kind = 3, .layer = layer, .head = head, .index = index}, d)));
      }
    }
  }
  return rows;
}

std::vector<double> FullAttention(const Tokens& tokens, int layer, int32_t index) {
  const Geometry& geometry = tokens.geometry;
  const auto head_dim = static_cast<size_t>(geometry.head_dim);
  const size_t row_bytes = geometry.page_shape().row_bytes();
  const std::vector<std::byte> keys = tokens.Keys(layer, 0, index + 1);
  const std::vector<std::byte> values = tokens.Values(layer, 0, index + 1);
  const std::vector<float> queries = tokens.Queries(layer, index, 1);
  std::vector<double> output(static_cast<size_t>(geometry.query_heads) * head_dim);
  for (int head = 0; head < geometry.query_heads; ++head) {
    const auto kv_head = static_cast<size_t>(head / geometry.group());
    std::vector<double> logits;
    double peak = -1e300;
    for (int32_t j = 0; j <= index; ++j) {
      const std::byte* key =
          keys.data() +
          (static_cast<size_t>(j) * static_cast<size_t>(geometry.kv_heads) + kv_head) * row_bytes;
      double dot = 0;
      for (size_t d = 0; d < head_dim; ++d) {
        dot += static_cast<double>(queries[static_cast<size_t>(head) * head_dim + d]) *
               gpu::ElementAt(geometry.dtype, key, static_cast<int>(d));
      }
      logits.push_back(dot * geometry.scale);
      peak = std::max(peak, logits.back());
    }
    double total = 0;
    for (const double z : logits) total += std::exp(z - peak);
    for (int32_t j = 0; j <= index; ++j) {
      const double weight = std::exp(logits[static_cast<size_t>(j)] - peak) / total;
      const std::byte* value =
          values.data() +
          (static_cast<size_t>(j) * static_cast<size_t>(geometry.kv_heads) + kv_head) * row_bytes;
      for (size_t d = 0; d < head_dim; ++d) {
        output[static_cast<size_t>(head) * head_dim + d] +=
            weight * gpu::ElementAt(geometry.dtype, value, static_cast<int>(d));
      }
    }
  }
  return output;
}

std::vector<double> OutputOf(const service::StepAnswer& answer, const Tokens& tokens,
                             size_t token) {
  const Geometry& geometry = tokens.geometry;
  const auto elements =
      static_cast<size_t>(geometry.query_heads) * static_cast<size_t>(geometry.head_dim);
  const size_t row_bytes = elements * gpu::DtypeBytes(tokens.output_dtype);
  EBBTIDE_CHECK(answer.output.size() >= (token + 1) * row_bytes, "the answer holds the token");
  std::vector<double> output;
  for (size_t i = 0; i < elements; ++i) {
    output.push_back(gpu::ElementAt(tokens.output_dtype, answer.output.data() + token * row_bytes,
                                    static_cast<int>(i)));
  }
  return output;
}

Errors ErrorsOf(const service::StepAnswer& answer, const Tokens& tokens, int layer, int32_t index,
                int32_t count) {
  const std::vector<double> truth = FullAttention(tokens, layer, index);
  const size_t token = static_cast<size_t>(count - 1);
  const std::vector<double> output = OutputOf(answer, tokens, token);
  const auto heads = static_cast<size_t>(tokens.geometry.query_heads);
  const auto head_dim = static_cast<size_t>(tokens.geometry.head_dim);
  Errors errors;
  double off = 0;
  double all = 0;
  for (size_t head = 0; head < heads; ++head) {
    double square = 0;
    for (size_t d = 0; d < head_dim; ++d) {
      const double x = output[head * head_dim + d] - truth[head * head_dim + d];
      square += x * x;
      all += truth[head * head_dim + d] * truth[head * head_dim + d];
    }
    off += square;
    // What is no number is within no bound.
    if (!(std::sqrt(square) <= answer.certificate.error_bound[token * heads + head]))
      ++errors.violations;
  }
  errors.relative = std::sqrt(off / all);
  return errors;
}

Geometry SmallGeometry() {
  return {.layers = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .dtype = gpu::Dtype::kF32,
          .scale = 0.25F,
          .page_tokens = 16};
}

EngineStand::EngineStand(const EngineSetup& setup)
    : clock_(setup.clock != nullptr ? *setup.clock : SteadyClock()),
      backend_(setup.threads),
      carriers_(MakeThreadExecutor("carry", 1, 64)),
      parallel_(setup.threads),
      host_budget_(setup.host_bytes) {
  auto host = storage::HostTier::Create(host_budget_);
  EBBTIDE_CHECK(host.ok(), "the host tier opens");
  host_ = *std::move(host);
  if (setup.wrap_backend) wrapped_backend_ = setup.wrap_backend(backend_);
  if (wrapped_backend_ != nullptr) {  // As the daemon does.
    absl::StatusOr<std::shared_ptr<gpu::HostReach>> reach =
        wrapped_backend_->ReachHost(host_->reachable());
    if (reach.ok()) {
      host_->RegisterWith([reach = *std::move(reach)](std::span<std::byte> memory) {
        return reach->Register(memory);
      });
    }
  }
  if (setup.rocksdb_bytes > 0) {
    auto rocksdb = storage::RocksdbTier::Create({.folder = folder_.path() / "rocksdb",
                                                 .budget_bytes = setup.rocksdb_bytes,
                                                 .calls = setup.file_calls});
    EBBTIDE_CHECK(rocksdb.ok(), "the RocksDB tier opens");
    rocksdb_ = *std::move(rocksdb);
  }
  if (setup.wrap_host) wrapped_host_ = setup.wrap_host(*host_);
  if (setup.wrap_rocksdb && rocksdb_ != nullptr) wrapped_rocksdb_ = setup.wrap_rocksdb(*rocksdb_);
  auto engine = service::Engine::Create(
      {.device_budget_bytes = setup.device_bytes,
       .idle_timeout = setup.idle_timeout,
       .recall_bytes = setup.recall_bytes},
      {.clock = clock_,
       .carriers = setup.carriers != nullptr ? *setup.carriers : *carriers_,
       .parallel = parallel_,
       .backend = wrapped_backend_ != nullptr ? *wrapped_backend_ : backend_,
       .host = wrapped_host_ != nullptr ? *wrapped_host_ : *host_,
       .host_budget = host_budget_,
       .rocksdb = wrapped_rocksdb_ != nullptr ? wrapped_rocksdb_.get() : rocksdb_.get(),
       .rocksdb_place = folder_.path().string()});
  EBBTIDE_CHECK(engine.ok(), "the engine starts");
  engine_ = *std::move(engine);
}

EngineStand::~EngineStand() {
  carriers_.reset();  // Carriers use the engine: they end first.
  engine_.reset();
}

void EngineStand::Settle() {
  ASSERT_TRUE(engine_->Settle(clock_.SinceStart() + absl::Seconds(10)))
      << "blocks are still unsealed";
}

absl::StatusOr<service::OpenAnswer> Worker::Open() {
  open.sequence = sequence_;
  open.model = absl::StrCat("test-", std::string(gpu::DtypeName(tokens_.geometry.dtype)), "-",
                            tokens_.geometry.layers);
  EBBTIDE_RETURN_IF_ERROR(engine_.RegisterModel(open.model, tokens_.geometry, "weights").status());
  return engine_.OpenSequence(open);
}

service::StepAnswer Worker::Step(const Call& call) {
  const Geometry& geometry = tokens_.geometry;
  const std::vector<std::byte> keys = tokens_.Keys(call.layer, call.first, call.count);
  const std::vector<std::byte> values = tokens_.Values(call.layer, call.first, call.count);
  const std::vector<float> queries = tokens_.Queries(call.layer, call.first, call.count);
  const std::vector<int64_t> kv_shape = {call.count, geometry.kv_heads, geometry.head_dim};
  const std::vector<int64_t> q_shape = {call.count, geometry.query_heads, geometry.head_dim};
  service::StepItem item{.sequence = sequence_, .first_index = static_cast<uint64_t>(call.first)};
  item.output_dtype = tokens_.output_dtype;
  item.require_met = call.require_met;
  if (call.sends_queries) {
    item.q = service::TensorView{
        .dtype = gpu::Dtype::kF32, .shape = q_shape, .bytes = std::as_bytes(std::span(queries))};
  }
  if (call.appends) {
    item.k = service::TensorView{.dtype = geometry.dtype, .shape = kv_shape, .bytes = keys};
    item.v = service::TensorView{.dtype = geometry.dtype, .shape = kv_shape, .bytes = values};
  }
  return engine_
      .Step({.layer = static_cast<uint32_t>(call.layer),
             .phase = call.phase,
             .deadline = clock_.SinceStart() + call.patience},
            {&item, 1})
      .front();
}

service::StepAnswer Worker::StepAllLayers(Call call) {
  service::StepAnswer answer;
  for (call.layer = 0; call.layer < tokens_.geometry.layers; ++call.layer) {
    answer = Step(call);
    if (!answer.status.ok()) return answer;
  }
  return answer;
}

}  // namespace ebbtide::test
