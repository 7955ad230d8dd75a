// SPDX-License-Identifier: Apache-2.0
//
// A worker in its shortest form (docs/worker.md), with waves where a real one has its model's q, k
// and v: prints what each answer vouches for. Tested by tests/integration/attend_example_test.cc.

#include <array>
#include <cmath>
#include <iostream>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "ebbtide/client.h"

namespace client = ebbtide::client;
constexpr client::Geometry kModel = {
    .layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64, .dtype = client::Dtype::kF32};
constexpr uint64_t kPrompt = 1024, kChunk = 128, kEnd = kPrompt + 4;

struct Wave {  // [tokens, heads, head_dim] from token `first` on.
  Wave(double pace, uint64_t first, uint64_t tokens, uint32_t heads)
      : shape({static_cast<int64_t>(tokens), heads, kModel.head_dim}) {
    const uint64_t row = uint64_t{heads} * kModel.head_dim;
    for (uint64_t i = first * row; i < (first + tokens) * row; ++i) {
      data.push_back(static_cast<float>(2 * std::sin(pace * std::pow(i, 2))));
    }
  }
  client::TensorView view() const { return {kModel.dtype, shape, std::as_bytes(std::span(data))}; }
  std::array<int64_t, 3> shape;
  std::vector<float> data;
};

double Norm(std::span<const float> x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

absl::Status Generate(const client::Sequence& sequence) {
  for (uint64_t first = 0, tokens = 0; first < kEnd; first += tokens) {
    const client::Phase phase = first < kPrompt ? client::Phase::kPrefill : client::Phase::kDecode;
    tokens = phase == client::Phase::kPrefill ? kChunk : 1;
    for (uint32_t layer = 0; layer < kModel.layers; ++layer) {
      const Wave q(0.7 + layer, first, tokens, kModel.query_heads);
      const Wave k(1.1 + layer, first, tokens, kModel.kv_heads);
      const Wave v(1.7 + layer, first, tokens, kModel.kv_heads);
      const auto answer = sequence.Attend(
          {layer, phase}, {.first_index = first, .q = q.view(), .k = k.view(), .v = v.view()});
      if (!answer.ok()) return answer.status();
      if (phase == client::Phase::kPrefill) continue;  // A model goes on from answer->output.
      const client::Certificate& proof = answer->certificate;
      std::cout << "token " << first << " layer " << layer << ": off by at most "
                << Norm(proof.error_bound) / Norm(answer->output.f32()) << " of its length, "
                << (proof.met[0] ? "met" : proof.not_met_reason) << "; " << answer->absent_pages
                << " pages absent\n";
    }
  }
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  const auto fail = [](const absl::Status& why) {
    std::cerr << "attend_example: " << why.message() << "\n";
    return 1;
  };
  const auto client = client::Client::Connect(argc > 1 ? argv[1] : "");
  if (!client.ok()) return fail(client.status());
  const auto model = client->RegisterModel({.name = "waves", .geometry = kModel});
  if (!model.ok()) return fail(model.status());
  const auto sequence =
      client->OpenSequence({.name = "waves-" + std::to_string(std::random_device()()),
                            .model = "waves",
                            .budget = {256},
                            .recall = "bounded(0.02)",
                            .chunk_tokens = kChunk});
  if (!sequence.ok()) return fail(sequence.status());
  absl::Status status = Generate(*sequence);
  status.Update(sequence->Close());  // Otherwise it stays until its idle time-out.
  return status.ok() ? 0 : fail(status);
}
