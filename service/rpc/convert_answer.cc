// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/convert_answer.h"

#include <string>

#include "service/reason.h"

namespace ebbtide::service {
namespace {

std::string ToString(std::string_view text) {
  return std::string(text);
}

v1::Dtype ToDtype(gpu::Dtype dtype) {
  switch (dtype) {
    case gpu::Dtype::kF32:
      return v1::DTYPE_F32;
    case gpu::Dtype::kF16:
      return v1::DTYPE_F16;
    case gpu::Dtype::kBF16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::Tier ToTier(TierName tier) {
  switch (tier) {
    case TierName::kDevice:
      return v1::TIER_DEVICE;
    case TierName::kHost:
      return v1::TIER_HOST;
    case TierName::kRocksdb:
      return v1::TIER_ROCKSDB;
  }
  return v1::TIER_UNSPECIFIED;
}

v1::PageState ToPageState(PageAnswer state) {
  switch (state) {
    case PageAnswer::kOk:
      return v1::PAGE_STATE_OK;
    case PageAnswer::kMissing:
      return v1::PAGE_STATE_MISSING;
    case PageAnswer::kCorrupt:
      return v1::PAGE_STATE_CORRUPT;
  }
  return v1::PAGE_STATE_UNSPECIFIED;
}

uint64_t ToMilliseconds(absl::Duration duration) {
  return static_cast<uint64_t>(absl::ToInt64Milliseconds(duration));
}

void SetBytes(const std::vector<std::byte>& bytes, std::string& field) {
  field.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

template <typename Value, typename Field>
void Fill(const std::vector<Value>& values, Field& field) {
  field.Add(values.begin(), values.end());
}

template <typename Map>
void FillCounts(const CountByReason& counts, Map& field) {
  for (const auto& [reason, count] : counts) {
    field[reason] += count;
  }
}

void WriteTokens(const TokensByTier& tokens, v1::TokensByTier& message) {
  message.set_device(tokens.device);
  message.set_host(tokens.host);
  message.set_rocksdb(tokens.rocksdb);
  message.set_open(tokens.open);
}

void WriteTier(const TierReport& tier, v1::TierStats& message) {
  message.set_tier(ToTier(tier.tier));
  message.set_budget_bytes(tier.budget_bytes);
  message.set_used_bytes(tier.used_bytes);
  message.set_blocks(tier.blocks);
  message.set_tokens(tier.tokens);
  message.set_corrupt_pages(tier.corrupt_pages);
  message.set_metadata_bytes(tier.metadata_bytes);
  message.set_degraded(tier.degraded);
  message.set_degraded_why(tier.degraded_why);
  message.set_place(tier.place);
}

}  // namespace

void WriteItemStatus(const absl::Status& status, v1::ItemStatus& message) {
  message.set_code(static_cast<int32_t>(status.code()));
  message.set_reason(ReasonOf(status));
  message.set_message(std::string(status.message()));
}

void WriteGeometry(const Geometry& geometry, v1::Geometry& message) {
  message.set_layers(static_cast<uint32_t>(geometry.layers));
  message.set_query_heads(static_cast<uint32_t>(geometry.query_heads));
  message.set_kv_heads(static_cast<uint32_t>(geometry.kv_heads));
  message.set_head_dim(static_cast<uint32_t>(geometry.head_dim));
  message.set_dtype(ToDtype(geometry.dtype));
  message.set_scale(geometry.scale);
  message.set_page_tokens(static_cast<uint32_t>(geometry.page_tokens));
}

void WriteOpen(const OpenAnswer& answer, v1::OpenSequenceResponse& message) {
  message.set_policy(answer.policy);
  message.set_why(answer.why);
  message.set_prefill(answer.prefill);
  message.set_recall(answer.recall);
  message.set_budget_tokens(answer.budget_tokens);
  message.set_protected_tokens(answer.protected_tokens);
  message.set_device_bytes(answer.device_bytes);
  message.set_length(answer.length);
  message.set_idle_timeout_ms(ToMilliseconds(answer.idle_timeout));
  message.set_chunk_tokens(answer.chunk_tokens);
}

void WriteAppend(const StepAnswer& answer, v1::AppendResult& message) {
  WriteItemStatus(answer.status, *message.mutable_status());
  message.set_length(answer.length);
  message.set_committed(answer.committed);
  message.set_replayed(answer.replayed);
}

void WriteAttend(const StepAnswer& answer, const StepItem& item, v1::AttendResult& message) {
  WriteItemStatus(answer.status, *message.mutable_status());
  message.set_length(answer.length);
  message.set_committed(answer.committed);
  message.set_replayed(answer.replayed);
  if (!answer.status.ok()) {
    return;
  }
  v1::Tensor& output = *message.mutable_output();
  output.set_dtype(ToDtype(item.output_dtype));
  output.mutable_shape()->Add(item.q->shape.begin(), item.q->shape.end());
  SetBytes(answer.output, *output.mutable_data());
  Fill(answer.lse, *message.mutable_lse());
  v1::Certificate& certificate = *message.mutable_certificate();
  Fill(answer.certificate.mass_bound, *certificate.mutable_mass_bound());
  Fill(answer.certificate.error_bound, *certificate.mutable_error_bound());
  Fill(answer.certificate.met, *certificate.mutable_met());
  certificate.set_not_met_reason(ToString(answer.certificate.not_met_reason));
  v1::RecallWork& recall = *message.mutable_recall();
  recall.set_absent_pages(answer.absent_pages);
  for (const TouchedRung& touched : answer.touched) {
    v1::TouchedRung& rung = *recall.add_touched();
    rung.set_rung(ToString(touched.rung));
    rung.set_tier(ToTier(touched.tier));
    rung.set_pages(touched.pages);
    rung.set_bytes(touched.bytes);
  }
  for (const LostPage& lost : answer.lost) {
    v1::LostPage& page = *recall.add_lost();
    page.set_kv_head(lost.kv_head);
    page.set_first_index(lost.first_index);
    page.set_tokens(lost.tokens);
    page.set_tier(ToTier(lost.tier));
    page.set_state(ToPageState(lost.is_corrupt ? PageAnswer::kCorrupt : PageAnswer::kMissing));
  }
}

void WritePage(const PageBytes& page, v1::Page& message) {
  message.set_first_index(page.first_index);
  message.set_tokens(page.tokens);
  message.set_tier(ToTier(page.tier));
  message.set_state(ToPageState(page.state));
  SetBytes(page.k, *message.mutable_k());
  SetBytes(page.v, *message.mutable_v());
  Fill(page.positions, *message.mutable_positions());
}

void WriteStats(const Stats& stats, v1::GetStatsResponse& message) {
  for (const TierReport& tier : stats.tiers) {
    WriteTier(tier, *message.add_tiers());
  }
  message.set_sequences(stats.sequences);
  message.set_tokens_appended(stats.tokens_appended);
  message.set_tokens_demoted(stats.tokens_demoted);
  FillCounts(stats.tokens_forgotten, *message.mutable_tokens_forgotten());
  message.set_answers(stats.answers);
  message.set_answers_with_target(stats.answers_with_target);
  FillCounts(stats.answers_not_met, *message.mutable_answers_not_met());
  message.set_pages_recalled(stats.pages_recalled);
  message.set_bytes_recalled(stats.bytes_recalled);
  message.set_blocks_sealed(stats.blocks_sealed);
  message.set_blocks_moved_down(stats.blocks_moved_down);
  FillCounts(stats.refused, *message.mutable_refused());
  FillCounts(stats.pages_lost, *message.mutable_pages_lost());
  FillCounts(stats.carries_failed, *message.mutable_carries_failed());
}

void WriteSummary(const SequenceSummary& summary, v1::SequenceSummary& message) {
  message.set_sequence(summary.sequence);
  message.set_model(summary.model);
  message.set_policy(summary.policy);
  message.set_recall(summary.recall);
  message.set_prefill(summary.prefill);
  message.set_committed(summary.committed);
  message.set_budget_tokens(summary.budget_tokens);
  message.set_device_bytes(summary.device_bytes);
  message.set_idle_ms(ToMilliseconds(summary.idle));
  WriteTokens(summary.tokens, *message.mutable_tokens());
}

void WriteDescription(const SequenceDescription& description,
                      v1::DescribeSequenceResponse& message) {
  WriteSummary(description.summary, *message.mutable_summary());
  Fill(description.layer_lengths, *message.mutable_layer_lengths());
  for (const LaneDescription& lane : description.lanes) {
    v1::LaneDescription& written = *message.add_lanes();
    written.set_layer(lane.layer);
    written.set_kv_head(lane.kv_head);
    written.set_length(lane.length);
    written.set_resident(lane.resident);
    written.set_absent(lane.absent);
    written.set_demoted(lane.demoted);
  }
  for (const TokenDescription& token : description.tokens) {
    v1::TokenDescription& written = *message.add_tokens();
    written.set_index(token.index);
    written.set_position(token.position);
    written.set_resident(token.resident);
    written.set_tier(ToTier(token.tier));
    written.set_score(token.score);
    written.set_why(ToString(token.why));
  }
}

}  // namespace ebbtide::service
