// SPDX-License-Identifier: Apache-2.0
//
// The trace says which bytes must come back; a page that does not come back counts in full.

#include "client/cli/byte_check.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"

#include "base/status_macros.h"

namespace ebbtide::cli {
namespace {

constexpr size_t kComplaintsMax = 10;
constexpr uint64_t kAnswerBytes = 16 << 20;  // Of one ReadPages call, about.

void Complain(ByteCheck& check, const TraceLayer& layer, uint32_t kv_head,
              const std::string& what) {
  if (check.complaints.size() < kComplaintsMax) {
    check.complaints.push_back(
        absl::StrFormat("layer %u of the model, kv head %u: %s", layer.layer, kv_head, what));
  }
}

std::string_view StateName(client::PageState state) {
  switch (state) {
    case client::PageState::kMissing:
      return "missing";
    case client::PageState::kCorrupt:
      return "corrupt";
    default:
      return "in no known state";
  }
}

// Bytes of `answered` that differ from the trace's rows from token `first` on.
uint64_t Differences(const TraceTensor& tensor, uint32_t kv_head, uint64_t first,
                     std::string_view answered) {
  const size_t row_bytes = tensor.head_dim * client::DtypeBytes(tensor.dtype);
  uint64_t differences = 0;
  for (size_t at = 0; at < answered.size(); at += row_bytes) {
    const std::span<const std::byte> row = tensor.Row(first + at / row_bytes, kv_head);
    if (std::memcmp(row.data(), answered.data() + at, row_bytes) == 0) continue;
    for (size_t i = 0; i < row_bytes; ++i) {
      differences += row[i] == static_cast<std::byte>(answered[at + i]) ? 0 : 1;
    }
  }
  return differences;
}

// Of one page whose tokens lie within the trace; its place among the tokens is right.
uint64_t PageMismatches(const TraceLayer& layer, uint32_t kv_head, const client::Page& page,
                        ByteCheck& check) {
  const uint64_t bytes = page.tokens * layer.k.Row(0, 0).size();
  const std::string name =
      absl::StrFormat("page of tokens %u to %u in %s", page.first_index,
                      page.first_index + page.tokens - 1, client::TierName(page.tier));
  if (page.state != client::PageState::kOk) {
    Complain(check, layer, kv_head, absl::StrFormat("%s is %s", name, StateName(page.state)));
    const bool is_named =
        page.state == client::PageState::kMissing || page.state == client::PageState::kCorrupt;
    if (!is_named || !page.k.empty() || !page.v.empty()) return 2 * bytes;
    check.lost += 2 * bytes;
    return 0;
  }
  if (page.k.size() != bytes || page.v.size() != bytes) {
    Complain(check, layer, kv_head,
             absl::StrFormat("%s has %u and %u bytes, not %u each", name, page.k.size(),
                             page.v.size(), bytes));
    return 2 * bytes;
  }
  const uint64_t differences = Differences(layer.k, kv_head, page.first_index, page.k) +
                               Differences(layer.v, kv_head, page.first_index, page.v);
  if (differences > 0) {
    Complain(check, layer, kv_head, absl::StrFormat("%s differs in %u bytes", name, differences));
  }
  return differences;
}

}  // namespace

void CheckPages(const Trace& trace, const TraceLayer& layer, uint32_t kv_head,
                std::span<const client::Page> pages, ByteCheck& check) {
  const uint64_t token_bytes = 2 * layer.k.Row(0, 0).size();
  uint64_t next = 0;
  for (const client::Page& page : pages) {
    if (page.first_index != next || page.tokens == 0 || page.tokens > trace.tokens - next) break;
    check.mismatches += PageMismatches(layer, kv_head, page, check);
    check.checked += page.tokens * token_bytes;
    check.checked_by_tier[std::string(client::TierName(page.tier))] += page.tokens * token_bytes;
    next += page.tokens;
  }
  if (next < trace.tokens) {
    Complain(check, layer, kv_head,
             absl::StrFormat("tokens %u to %u were not answered", next, trace.tokens - 1));
    check.mismatches += (trace.tokens - next) * token_bytes;
  }
}

absl::StatusOr<ByteCheck> CheckEveryByte(const Trace& trace, const client::Sequence& sequence,
                                         uint32_t page_tokens) {
  ByteCheck check;
  const uint64_t page_bytes = uint64_t{2} * page_tokens * trace.layers.front().k.Row(0, 0).size();
  const uint64_t pages_per_call = std::max<uint64_t>(1, kAnswerBytes / page_bytes);
  const uint64_t page_count = (trace.tokens + page_tokens - 1) / page_tokens;
  for (uint32_t i = 0; i < trace.layers.size(); ++i) {
    for (uint32_t kv_head = 0; kv_head < trace.kv_heads; ++kv_head) {
      std::vector<client::Page> pages;
      for (uint64_t first = 0; first < page_count; first += pages_per_call) {
        EBBTIDE_ASSIGN_OR_RETURN(std::vector<client::Page> answered,
                                 sequence.ReadPages({.layer = i, .kv_head = kv_head}, first,
                                                    std::min(pages_per_call, page_count - first)));
        std::move(answered.begin(), answered.end(), std::back_inserter(pages));
      }
      CheckPages(trace, trace.layers[i], kv_head, pages, check);
    }
  }
  return check;
}

}  // namespace ebbtide::cli
