// SPDX-License-Identifier: Apache-2.0
//
// Can the bytes of a trace from outside hurt its reader? Reads them as they are, then as the header
// of a file that a length and some data complete, so that what lies behind both is reached too.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "client/cli/trace.h"

namespace {

constexpr size_t kDataBytes = 4096;

// Whatever is accepted is whole, and may be read to its end.
void Read(std::span<const std::byte> file) {
  const auto trace = ebbtide::cli::ParseTrace(file, {});
  if (!trace.ok()) return;
  for (const ebbtide::cli::TraceLayer& layer : trace->layers) {
    for (const auto* tensor : {&layer.q, &layer.k, &layer.v}) {
      if (tensor->bytes.size() != trace->tokens * tensor->token_bytes()) std::abort();
      if (tensor->Row(trace->tokens - 1, tensor->heads - 1).empty()) std::abort();
    }
  }
  if (trace->prompt_length == 0 || trace->prompt_length > trace->tokens) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  Read(bytes);
  std::vector<std::byte> file(8);
  for (size_t i = 0; i < file.size(); ++i) file[i] = static_cast<std::byte>(size >> (8 * i));
  file.insert(file.end(), bytes.begin(), bytes.end());
  file.resize(file.size() + kDataBytes);
  Read(file);
  return 0;
}
