// SPDX-License-Identifier: Apache-2.0
//
// A worker that asks of an engine what a recorded model asked of its cache, and holds each answer
// against full attention over all tokens, in f64.

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "gpu/shape.h"
#include "service/engine.h"
#include "tests/support/recorded_trace.h"

namespace ebbtide::test {

struct RecordedLayer {
  RecordedTensor q;
  RecordedTensor k;
  RecordedTensor v;
};

// Layers of a trace in their order. Fails the test where there is none.
std::vector<RecordedLayer> ReadRecordedLayers(const std::filesystem::path& path);

// How far answers were from full attention.
struct Played {
  std::vector<double> error = {};  // |answer - truth| / |truth| over the heads, by answer
  int violations = 0;              // Of the certificate, by head.
  int not_met = 0;
  std::string reason = {};                  // Of the last that was not met.
  std::map<std::string, double> read = {};  // Share of KV bytes by rung, the mean over answers.

  double Quantile(double q) const;
  double AllRead() const;
};

class TraceWorker {
 public:
  // `layers` outlive it.
  TraceWorker(service::Engine& engine, const std::vector<RecordedLayer>& layers)
      : engine_(engine), layers_(layers) {}

  // `args` but for sequence and model. Fails the test where it is refused.
  void Open(service::OpenArgs args);

  // Tokens from `first` on, in every layer. Answers of decoding are judged. Fails the test where
  // one is refused.
  struct Call {
    int first = 0;
    int count = 1;
    service::Phase phase = service::Phase::kDecode;
    gpu::Dtype output = gpu::Dtype::kF32;
  };
  void Step(const Call& call);

  // The prompt in calls of `chunk` tokens, all but the last `steps`; then those, one by one.
  void PlayAll(int steps, int chunk, gpu::Dtype output);

  const service::Geometry& geometry() const { return geometry_; }
  int tokens() const { return layers_.front().k.tokens; }
  const Played& played() const { return played_; }

 private:
  void Judge(const service::StepAnswer& answer, int layer, const Call& call);

  service::Engine& engine_;
  const std::vector<RecordedLayer>& layers_;
  service::Geometry geometry_;
  std::string sequence_;
  Played played_;
};

}  // namespace ebbtide::test
