// SPDX-License-Identifier: Apache-2.0
//
// A recorded model: what its layers asked of their KV cache (format ebbtide.trace.v1, a safetensors
// file; tests/data/README.md). Any bytes are read safely: what is not a trace is refused by name.
// Contract: tests/unit/client/trace_test.cc, tests/fuzz/trace_fuzz.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "ebbtide/types.h"

namespace ebbtide::cli {

// [tokens, heads, head_dim], row-major, finite.
struct TraceTensor {
  client::Dtype dtype = client::Dtype::kUnspecified;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  std::vector<std::byte> bytes = {};

  size_t token_bytes() const { return size_t{heads} * head_dim * client::DtypeBytes(dtype); }

  // Tokens first … first + count - 1, as they travel.
  client::TensorView View(uint64_t first, uint64_t count) const;

  // One token's one head, exactly as stored.
  std::span<const std::byte> Row(uint64_t token, uint32_t head) const;

  // Of one token's one head; f16 and bf16 widen without loss.
  void RowToFloats(uint64_t token, uint32_t head, std::span<float> floats) const;
  std::vector<float> ToFloats() const;  // All of them.
};

struct TraceLayer {
  uint32_t layer = 0;  // Its number in the model.
  TraceTensor q = {};
  TraceTensor k = {};
  TraceTensor v = {};
};

struct Trace {
  std::string model = {};
  std::string text = {};  // Source and licence.
  uint64_t tokens = 0;
  uint64_t prompt_length = 0;  // At least 1, at most `tokens`.
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  float scale = 0;
  std::vector<TraceLayer> layers = {};  // Of one dtype for all k and v.

  uint32_t group() const { return query_heads / kv_heads; }
  client::Dtype dtype() const { return layers.front().k.dtype; }
  uint64_t kv_bytes() const;  // Of all layers: 2 * tokens * kv_heads * head_dim * dtype.
  client::Geometry geometry() const;
};

// Reads `path`; only the layers named, in that order, or all where none is.
//   kInvalidArgument  no such file, or none that may be read; not a trace, a dtype the daemon
//                     doesn't keep, a layer that is not recorded
//   kUnavailable      it is there and could not be opened
//   kDataLoss         the file shrank meanwhile, or the disk failed
//   kCancelled        a stop was asked for
absl::StatusOr<Trace> ReadTrace(const std::string& path, std::span<const uint32_t> layers,
                                const std::stop_token& stop = {});

// The same of a file that is open.
absl::StatusOr<Trace> ReadTrace(std::istream& file, std::span<const uint32_t> layers,
                                const std::stop_token& stop = {});

// What its header says, which takes no time: tensors have no bytes.
absl::StatusOr<Trace> ReadTraceHeader(const std::string& path, std::span<const uint32_t> layers);

// The same from memory.
absl::StatusOr<Trace> ParseTrace(std::span<const std::byte> file, std::span<const uint32_t> layers);

}  // namespace ebbtide::cli
