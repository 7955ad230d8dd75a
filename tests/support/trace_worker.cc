// SPDX-License-Identifier: Apache-2.0

#include "tests/support/trace_worker.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

#include "absl/time/time.h"
#include "gtest/gtest.h"

#include "base/clock.h"
#include "gpu/element.h"

namespace ebbtide::test {
namespace {

constexpr char kModel[] = "recorded";

service::TensorView View(const RecordedTensor& tensor, int first, std::vector<int64_t>& shape) {
  const size_t row = static_cast<size_t>(tensor.heads) * static_cast<size_t>(tensor.head_dim);
  return {.dtype = gpu::Dtype::kF16,
          .shape = shape,
          .bytes = std::as_bytes(
              std::span(tensor.elements)
                  .subspan(static_cast<size_t>(first) * row, static_cast<size_t>(shape[0]) * row))};
}

// Full attention of every query head at `index`.
std::vector<double> Truth(const RecordedLayer& layer, int index, double scale) {
  const int group = layer.q.heads / layer.k.heads;
  const auto dim = static_cast<size_t>(layer.q.head_dim);
  std::vector<double> output;
  std::vector<double> weight(static_cast<size_t>(index) + 1);
  for (int head = 0; head < layer.q.heads; ++head) {
    std::vector<double> query;
    for (const uint16_t half : layer.q.Row(index, head)) query.push_back(gpu::HalfToFloat(half));
    double peak = -1e300;
    for (int j = 0; j <= index; ++j) {
      const auto key = layer.k.Row(j, head / group);
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) dot += query[d] * gpu::HalfToFloat(key[d]);
      weight[static_cast<size_t>(j)] = dot * scale;
      peak = std::max(peak, dot * scale);
    }
    std::vector<double> sum(dim);
    double total = 0;
    for (int j = 0; j <= index; ++j) {
      const double w = std::exp(weight[static_cast<size_t>(j)] - peak);
      total += w;
      const auto value = layer.v.Row(j, head / group);
      for (size_t d = 0; d < dim; ++d) sum[d] += w * gpu::HalfToFloat(value[d]);
    }
    for (const double x : sum) output.push_back(x / total);
  }
  return output;
}

}  // namespace

std::vector<RecordedLayer> ReadRecordedLayers(const std::filesystem::path& path) {
  constexpr int kLayersMax = 64;
  const auto recorded = ReadRecorded(path);
  std::vector<RecordedLayer> layers;
  for (int layer = 0; layer < kLayersMax; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    if (!recorded.contains(name + ".q")) continue;
    layers.push_back(
        {recorded.at(name + ".q"), recorded.at(name + ".k"), recorded.at(name + ".v")});
  }
  EXPECT_FALSE(layers.empty()) << "no layers in " << path;
  return layers;
}

double Played::Quantile(double q) const {
  std::vector<double> sorted = error;
  std::ranges::sort(sorted);
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))];
}

double Played::AllRead() const {
  return std::accumulate(read.begin(), read.end(), 0.0,
                         [](double sum, const auto& each) { return sum + each.second; });
}

void TraceWorker::Open(service::OpenArgs args) {
  const RecordedTensor& q = layers_.front().q;
  const RecordedTensor& k = layers_.front().k;
  geometry_ = {.layers = static_cast<int>(layers_.size()),
               .query_heads = q.heads,
               .kv_heads = k.heads,
               .head_dim = k.head_dim,
               .dtype = gpu::Dtype::kF16,
               .scale = 1 / std::sqrt(static_cast<float>(k.head_dim)),
               .page_tokens = 32};
  EXPECT_TRUE(engine_.RegisterModel(kModel, geometry_, "weights").ok());
  sequence_ = "a";
  args.sequence = sequence_;
  args.model = kModel;
  const auto opened = engine_.OpenSequence(args);
  ASSERT_TRUE(opened.ok()) << opened.status();
}

void TraceWorker::Step(const Call& call) {
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    const RecordedLayer& recorded = layers_[static_cast<size_t>(layer)];
    std::vector<int64_t> q_shape = {call.count, recorded.q.heads, recorded.q.head_dim};
    std::vector<int64_t> kv_shape = {call.count, recorded.k.heads, recorded.k.head_dim};
    const service::StepItem item{.sequence = sequence_,
                                 .first_index = static_cast<uint64_t>(call.first),
                                 .q = View(recorded.q, call.first, q_shape),
                                 .k = View(recorded.k, call.first, kv_shape),
                                 .v = View(recorded.v, call.first, kv_shape),
                                 .output_dtype = call.output};
    const service::StepAnswer answer =
        engine_
            .Step({.layer = static_cast<uint32_t>(layer),
                   .phase = call.phase,
                   .deadline = SteadyClock().SinceStart() + absl::Seconds(60)},
                  {&item, 1})
            .front();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    if (call.phase == service::Phase::kDecode) Judge(answer, layer, call);
  }
}

void TraceWorker::PlayAll(int steps, int chunk, gpu::Dtype output) {
  const int prompt = tokens() - steps;
  for (int first = 0; first < prompt; first += chunk) {
    Step({.first = first,
          .count = std::min(chunk, prompt - first),
          .phase = service::Phase::kPrefill,
          .output = output});
  }
  for (int first = prompt; first < tokens(); ++first) Step({.first = first, .output = output});
}

void TraceWorker::Judge(const service::StepAnswer& answer, int layer, const Call& call) {
  const std::vector<double> truth =
      Truth(layers_[static_cast<size_t>(layer)], call.first, geometry_.scale);
  std::vector<double> output;
  for (size_t i = 0; i < truth.size(); ++i)
    output.push_back(gpu::ElementAt(call.output, answer.output.data(), static_cast<int>(i)));
  const auto dim = static_cast<size_t>(geometry_.head_dim);
  double off = 0;
  double all = 0;
  for (size_t head = 0; head * dim < truth.size(); ++head) {
    double square = 0;
    for (size_t i = head * dim; i < (head + 1) * dim; ++i) {
      square += (output[i] - truth[i]) * (output[i] - truth[i]);
      all += truth[i] * truth[i];
    }
    off += square;
    if (std::sqrt(square) > answer.certificate.error_bound[head]) ++played_.violations;
  }
  // Means over the answers so far.
  const auto answers = static_cast<double>(played_.error.size());
  for (auto& [rung, share] : played_.read) share *= answers / (answers + 1);
  const double kv_bytes = 2.0 * (call.first + 1) * geometry_.kv_heads * geometry_.head_dim * 2;
  for (const service::TouchedRung& touched : answer.touched) {
    played_.read[std::string(touched.rung)] +=
        static_cast<double>(touched.bytes) / kv_bytes / (answers + 1);
  }
  played_.error.push_back(std::sqrt(off / all));
  if (answer.certificate.met[0] == 0) {
    ++played_.not_met;
    played_.reason = answer.certificate.not_met_reason;
  }
}

}  // namespace ebbtide::test
