// SPDX-License-Identifier: Apache-2.0
//
// Field by field, in the order of the proto files.

#include "client/cpp/src/convert.h"

#include <utility>

#include "client/cpp/src/connection.h"

namespace ebbtide::client {
namespace {

template <typename Message>
std::map<std::string, uint64_t> ToMap(const Message& counts) {
  return {counts.begin(), counts.end()};
}

void TensorToWire(const TensorView& tensor, v1::Tensor* wire) {
  wire->set_dtype(static_cast<v1::Dtype>(tensor.dtype));
  for (const int64_t extent : tensor.shape) wire->add_shape(extent);
}

absl::Status StatusFromWire(const v1::ItemStatus& wire) {
  return WithReason(absl::Status(static_cast<absl::StatusCode>(wire.code()), wire.message()),
                    wire.reason());
}

Geometry GeometryFromWire(const v1::Geometry& wire) {
  return {.layers = wire.layers(),
          .query_heads = wire.query_heads(),
          .kv_heads = wire.kv_heads(),
          .head_dim = wire.head_dim(),
          .dtype = static_cast<Dtype>(wire.dtype()),
          .scale = wire.scale(),
          .page_tokens = wire.page_tokens()};
}

TierStats TierFromWire(const v1::TierStats& wire) {
  return {.tier = static_cast<Tier>(wire.tier()),
          .budget_bytes = wire.budget_bytes(),
          .used_bytes = wire.used_bytes(),
          .blocks = wire.blocks(),
          .tokens = wire.tokens(),
          .corrupt_pages = wire.corrupt_pages(),
          .metadata_bytes = wire.metadata_bytes(),
          .degraded = wire.degraded(),
          .degraded_why = wire.degraded_why(),
          .place = wire.place()};
}

}  // namespace

v1::RegisterModelRequest ToWire(const Model& model) {
  v1::RegisterModelRequest wire;
  wire.set_model(model.name);
  wire.set_weights_fingerprint(model.weights_fingerprint);
  v1::Geometry* geometry = wire.mutable_geometry();
  geometry->set_layers(model.geometry.layers);
  geometry->set_query_heads(model.geometry.query_heads);
  geometry->set_kv_heads(model.geometry.kv_heads);
  geometry->set_head_dim(model.geometry.head_dim);
  geometry->set_dtype(static_cast<v1::Dtype>(model.geometry.dtype));
  geometry->set_scale(model.geometry.scale);
  geometry->set_page_tokens(model.geometry.page_tokens);
  return wire;
}

v1::OpenSequenceRequest ToWire(const SequenceOptions& options) {
  v1::OpenSequenceRequest wire;
  wire.set_sequence(options.name);
  wire.set_model(options.model);
  wire.set_policy(options.policy);
  if (options.budget.percent > 0) {
    v1::Budget::Percent* percent = wire.mutable_budget()->mutable_percent();
    percent->set_percent(options.budget.percent);
    percent->set_of_tokens(options.budget.of_tokens);
  } else {
    wire.mutable_budget()->set_tokens(options.budget.tokens);
  }
  wire.set_prefill(options.prefill);
  wire.set_recall(options.recall);
  wire.set_queries(static_cast<v1::Queries>(options.queries));
  wire.set_chunk_tokens(options.chunk_tokens);
  wire.set_idle_timeout_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(options.idle_timeout)));
  return wire;
}

void ToWire(const AppendItem& item, v1::AppendItem* wire) {
  wire->set_sequence(item.sequence->name());
  wire->set_first_index(item.first_index);
  TensorToWire(item.k, wire->mutable_k());
  TensorToWire(item.v, wire->mutable_v());
  wire->mutable_positions()->Add(item.positions.begin(), item.positions.end());
}

void ToWire(const AttendItem& item, v1::AttendItem* wire) {
  wire->set_sequence(item.sequence->name());
  wire->set_first_index(item.first_index);
  TensorToWire(item.q, wire->mutable_q());
  if (item.k.dtype != Dtype::kUnspecified) TensorToWire(item.k, wire->mutable_k());
  if (item.v.dtype != Dtype::kUnspecified) TensorToWire(item.v, wire->mutable_v());
  wire->mutable_positions()->Add(item.positions.begin(), item.positions.end());
  wire->set_output_dtype(static_cast<v1::Dtype>(item.output_dtype));
  wire->set_require_met(item.require_met);
}

RegisteredModel FromWire(const v1::RegisterModelResponse& wire) {
  return {.geometry = GeometryFromWire(wire.geometry()),
          .page_bytes = wire.page_bytes(),
          .record_bytes = wire.record_bytes()};
}

OpenedSequence FromWire(const v1::OpenSequenceResponse& wire) {
  return {.policy = wire.policy(),
          .why = wire.why(),
          .prefill = wire.prefill(),
          .recall = wire.recall(),
          .budget_tokens = wire.budget_tokens(),
          .protected_tokens = wire.protected_tokens(),
          .chunk_tokens = wire.chunk_tokens(),
          .device_bytes = wire.device_bytes(),
          .length = wire.length(),
          .idle_timeout = absl::Milliseconds(wire.idle_timeout_ms())};
}

AppendResult FromWire(v1::AppendResult&& wire) {
  return {.status = StatusFromWire(wire.status()),
          .length = wire.length(),
          .committed = wire.committed(),
          .replayed = wire.replayed()};
}

AttendResult FromWire(v1::AttendResult&& wire) {
  AttendResult result{.status = StatusFromWire(wire.status()),
                      .lse = {wire.lse().begin(), wire.lse().end()},
                      .absent_pages = wire.recall().absent_pages(),
                      .length = wire.length(),
                      .committed = wire.committed(),
                      .replayed = wire.replayed()};
  result.output.dtype = static_cast<Dtype>(wire.output().dtype());
  result.output.shape.assign(wire.output().shape().begin(), wire.output().shape().end());
  result.output.bytes = std::move(*wire.mutable_output()->mutable_data());
  const v1::Certificate& certificate = wire.certificate();
  result.certificate = {
      .mass_bound = {certificate.mass_bound().begin(), certificate.mass_bound().end()},
      .error_bound = {certificate.error_bound().begin(), certificate.error_bound().end()},
      .met = {certificate.met().begin(), certificate.met().end()},
      .not_met_reason = certificate.not_met_reason()};
  for (const v1::TouchedRung& rung : wire.recall().touched()) {
    result.touched.push_back({.rung = rung.rung(),
                              .tier = static_cast<Tier>(rung.tier()),
                              .pages = rung.pages(),
                              .bytes = rung.bytes()});
  }
  for (const v1::LostPage& page : wire.recall().lost()) {
    result.lost.push_back({.kv_head = page.kv_head(),
                           .first_index = page.first_index(),
                           .tokens = page.tokens(),
                           .tier = static_cast<Tier>(page.tier()),
                           .state = static_cast<PageState>(page.state())});
  }
  return result;
}

Page FromWire(v1::Page&& wire) {
  return {.first_index = wire.first_index(),
          .tokens = wire.tokens(),
          .tier = static_cast<Tier>(wire.tier()),
          .state = static_cast<PageState>(wire.state()),
          .k = std::move(*wire.mutable_k()),
          .v = std::move(*wire.mutable_v()),
          .positions = {wire.positions().begin(), wire.positions().end()}};
}

ServerInfo FromWire(const v1::GetServerInfoResponse& wire) {
  return {.version = wire.version(),
          .boot_id = wire.boot_id(),
          .backend = wire.backend(),
          .simulated_device = wire.simulated_device(),
          .transports = {wire.transports().begin(), wire.transports().end()},
          .message_bytes_max = wire.message_bytes_max(),
          .chunk_tokens_max = wire.chunk_tokens_max(),
          .default_recall = wire.default_recall(),
          .default_idle_timeout = absl::Milliseconds(wire.default_idle_timeout_ms()),
          .uptime = absl::Milliseconds(wire.uptime_ms()),
          .notes = {wire.notes().begin(), wire.notes().end()}};
}

Stats FromWire(const v1::GetStatsResponse& wire) {
  Stats stats{.sequences = wire.sequences(),
              .tokens_appended = wire.tokens_appended(),
              .tokens_demoted = wire.tokens_demoted(),
              .tokens_forgotten = ToMap(wire.tokens_forgotten()),
              .answers = wire.answers(),
              .answers_with_target = wire.answers_with_target(),
              .answers_not_met = ToMap(wire.answers_not_met()),
              .pages_recalled = wire.pages_recalled(),
              .bytes_recalled = wire.bytes_recalled(),
              .blocks_sealed = wire.blocks_sealed(),
              .blocks_moved_down = wire.blocks_moved_down(),
              .refused = ToMap(wire.refused()),
              .pages_lost = ToMap(wire.pages_lost()),
              .carries_failed = ToMap(wire.carries_failed())};
  for (const v1::TierStats& tier : wire.tiers()) stats.tiers.push_back(TierFromWire(tier));
  return stats;
}

SequenceSummary FromWire(const v1::SequenceSummary& wire) {
  return {.name = wire.sequence(),
          .model = wire.model(),
          .policy = wire.policy(),
          .recall = wire.recall(),
          .prefill = wire.prefill(),
          .committed = wire.committed(),
          .budget_tokens = wire.budget_tokens(),
          .device_bytes = wire.device_bytes(),
          .idle = absl::Milliseconds(wire.idle_ms()),
          .tokens = {.device = wire.tokens().device(),
                     .host = wire.tokens().host(),
                     .rocksdb = wire.tokens().rocksdb(),
                     .open = wire.tokens().open()}};
}

SequenceDescription FromWire(const v1::DescribeSequenceResponse& wire) {
  SequenceDescription description{
      .summary = FromWire(wire.summary()),
      .layer_lengths = {wire.layer_lengths().begin(), wire.layer_lengths().end()}};
  for (const v1::LaneDescription& lane : wire.lanes()) {
    description.lanes.push_back({.layer = lane.layer(),
                                 .kv_head = lane.kv_head(),
                                 .length = lane.length(),
                                 .resident = lane.resident(),
                                 .absent = lane.absent(),
                                 .demoted = lane.demoted()});
  }
  for (const v1::TokenDescription& token : wire.tokens()) {
    description.tokens.push_back({.index = token.index(),
                                  .position = token.position(),
                                  .resident = token.resident(),
                                  .tier = static_cast<Tier>(token.tier()),
                                  .score = token.score(),
                                  .why = token.why()});
  }
  return description;
}

}  // namespace ebbtide::client
