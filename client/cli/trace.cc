// SPDX-License-Identifier: Apache-2.0
//
// safetensors, of which a trace needs little: 8 bytes of header length, a JSON header that names
// each tensor's dtype, shape and place, then the bytes. Every number is checked before it is used.

#include "client/cli/trace.h"

#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "base/status_macros.h"

namespace ebbtide::cli {
namespace {

using client::Dtype;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kHeaderBytesMax = 16 << 20;
constexpr uint64_t kPartBytes = 4 << 20;  // Read and checked at once; takes some 10 ms.
constexpr uint64_t kTokensMax = 1 << 24;
constexpr uint32_t kHeadsMax = 16384;  // The daemon's 1024 kv heads, 16 query heads on each.
constexpr uint32_t kHeadDimMax = 256;  // As the daemon's.
constexpr char kFormat[] = "ebbtide.trace.v1";

// Copies the file's bytes from an offset on; the range lies within the file.
using ReadAt = std::function<absl::Status(uint64_t offset, std::span<std::byte> into)>;

struct Source {
  uint64_t bytes = 0;
  ReadAt read;
  bool with_values = true;  // Else tensors stay without bytes.
};

struct Header {
  nlohmann::json json;
  uint64_t data_begin = 0;  // In the file.
  uint64_t data_bytes = 0;
};

template <typename... Args>
absl::Status NotATrace(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return absl::InvalidArgumentError("trace: " + absl::StrFormat(format, args...));
}

// A repeated key would let two readers see two files.
absl::StatusOr<nlohmann::json> ParseJson(const std::string& text) {
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::object_start) keys.emplace_back();
    if (event == nlohmann::json::parse_event_t::object_end) keys.pop_back();
    if (event == nlohmann::json::parse_event_t::key &&
        !keys.back().insert(value.get<std::string>()).second) {
      repeated = value.get<std::string>();
    }
    return true;
  };
  nlohmann::json json = nlohmann::json::parse(text, watch, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return NotATrace("the header is not a JSON object: not a safetensors file?");
  }
  if (!repeated.empty()) return NotATrace("the header names \"%s\" twice", repeated);
  return json;
}

absl::StatusOr<Header> ReadHeader(const Source& source) {
  if (source.bytes < kLengthBytes) {
    return NotATrace("%u bytes are too few for a safetensors file", source.bytes);
  }
  std::array<std::byte, kLengthBytes> length_bytes = {};
  EBBTIDE_RETURN_IF_ERROR(source.read(0, length_bytes));
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<uint64_t>(length_bytes[i]) << (8 * i);
  }
  const uint64_t limit = std::min(kHeaderBytesMax, source.bytes - kLengthBytes);
  if (length > limit) {
    return NotATrace("the header claims %u bytes, %u at most can be: not a safetensors file?",
                     length, limit);
  }
  std::string text(length, '\0');
  EBBTIDE_RETURN_IF_ERROR(source.read(kLengthBytes, std::as_writable_bytes(std::span(text))));
  EBBTIDE_ASSIGN_OR_RETURN(nlohmann::json json, ParseJson(text));
  return Header{.json = std::move(json),
                .data_begin = kLengthBytes + length,
                .data_bytes = source.bytes - kLengthBytes - length};
}

absl::StatusOr<std::string> MetaText(const nlohmann::json& header, const char* key) {
  const auto meta = header.find("__metadata__");
  if (meta == header.end() || !meta->is_object()) {
    return NotATrace("the header has no __metadata__");
  }
  const auto found = meta->find(key);
  if (found == meta->end() || !found->is_string()) {
    return NotATrace("__metadata__ has no text \"%s\"", key);
  }
  return found->get<std::string>();
}

absl::StatusOr<uint64_t> MetaNumber(const nlohmann::json& header, const char* key, uint64_t max) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::string text, MetaText(header, key));
  uint64_t number = 0;
  if (!absl::SimpleAtoi(text, &number) || number < 1 || number > max) {
    return NotATrace("__metadata__ \"%s\" is \"%s\", not a number of 1 to %u", key, text, max);
  }
  return number;
}

// The layers recorded: `layers` is a JSON list in a string.
absl::StatusOr<std::vector<uint32_t>> RecordedLayers(const nlohmann::json& header) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::string text, MetaText(header, "layers"));
  const auto list = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  std::vector<uint32_t> layers;
  if (list.is_array()) {
    for (const auto& layer : list) {
      if (!layer.is_number_unsigned() || layer.get<uint64_t>() > UINT32_MAX) break;
      layers.push_back(layer.get<uint32_t>());
    }
    const std::set<uint32_t> distinct(layers.begin(), layers.end());
    if (!layers.empty() && distinct.size() == list.size()) return layers;
  }
  return NotATrace("__metadata__ \"layers\" is \"%s\", not a JSON list of layer numbers, each once",
                   text);
}

absl::StatusOr<std::vector<uint32_t>> ChosenLayers(const std::vector<uint32_t>& recorded,
                                                   std::span<const uint32_t> wanted) {
  if (wanted.empty()) return recorded;
  for (const uint32_t layer : wanted) {
    if (std::find(recorded.begin(), recorded.end(), layer) == recorded.end()) {
      return NotATrace("layer %u is not recorded; it has %s", layer, absl::StrJoin(recorded, ", "));
    }
  }
  return std::vector<uint32_t>(wanted.begin(), wanted.end());
}

absl::StatusOr<Dtype> ParseDtype(const std::string& tensor, const nlohmann::json& entry) {
  const auto dtype = entry.find("dtype");
  const std::string name =
      dtype != entry.end() && dtype->is_string() ? dtype->get<std::string>() : "none";
  if (name == "F16") return Dtype::kF16;
  if (name == "F32") return Dtype::kF32;
  if (name == "BF16") return Dtype::kBF16;
  return NotATrace("%s has dtype %s; f32, f16 and bf16 are understood", tensor, name);
}

// [tokens, heads, head_dim]; each extent within its limit, so that no product overflows.
absl::StatusOr<std::array<uint64_t, 3>> ParseShape(const std::string& tensor,
                                                   const nlohmann::json& entry) {
  constexpr std::array<uint64_t, 3> kMax = {kTokensMax, kHeadsMax, kHeadDimMax};
  const auto shape = entry.find("shape");
  if (shape == entry.end() || !shape->is_array() || shape->size() != kMax.size()) {
    return NotATrace("%s has no shape [tokens, heads, head_dim]", tensor);
  }
  std::array<uint64_t, 3> extents = {};
  for (size_t i = 0; i < kMax.size(); ++i) {
    const auto& extent = (*shape)[i];
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() < 1 ||
        extent.get<uint64_t>() > kMax[i]) {
      return NotATrace("%s has shape %s; extent %u must be 1 to %u", tensor, shape->dump(), i,
                       kMax[i]);
    }
    extents[i] = extent.get<uint64_t>();
  }
  return extents;
}

// Where the tensor's `bytes` begin, in the data.
absl::StatusOr<uint64_t> ParsePlace(const std::string& tensor, const nlohmann::json& entry,
                                    uint64_t bytes, uint64_t data_bytes) {
  const auto place = entry.find("data_offsets");
  if (place == entry.end() || !place->is_array() || place->size() != 2 ||
      !(*place)[0].is_number_unsigned() || !(*place)[1].is_number_unsigned()) {
    return NotATrace("%s has no data_offsets [begin, end]", tensor);
  }
  const auto begin = (*place)[0].get<uint64_t>();
  const auto end = (*place)[1].get<uint64_t>();
  if (begin > end || end > data_bytes || end - begin != bytes) {
    return NotATrace("%s lies at %u to %u; its shape takes %u bytes and the file holds %u", tensor,
                     begin, end, bytes, data_bytes);
  }
  return begin;
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000U} << 16;
  const uint32_t exponent = (half >> 10) & 0x1FU;
  const uint32_t fraction = half & 0x3FFU;
  if (exponent == 0) {  // Zero or subnormal: fraction * 2^-24, exact in f32.
    const float size = std::ldexp(static_cast<float>(fraction), -24);
    return sign != 0 ? -size : size;
  }
  const uint32_t widened = exponent == 0x1FU ? 0xFFU : exponent + 112;  // Bias 15 to bias 127.
  return std::bit_cast<float>(sign | (widened << 23) | (fraction << 13));
}

void Widen(Dtype dtype, std::span<const std::byte> bytes, std::span<float> floats) {
  if (dtype == Dtype::kF32) {
    std::memcpy(floats.data(), bytes.data(), bytes.size());
    return;
  }
  for (size_t i = 0; i < floats.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    floats[i] = dtype == Dtype::kF16
                    ? HalfToFloat(bits)
                    : std::bit_cast<float>(uint32_t{bits} << 16);  // Its upper half.
  }
}

absl::Status CheckFinite(const std::string& name, const TraceTensor& tensor, uint64_t first,
                         uint64_t count) {
  std::vector<float> row(tensor.head_dim);
  for (uint64_t token = first; token < first + count; ++token) {
    for (uint32_t head = 0; head < tensor.heads; ++head) {
      tensor.RowToFloats(token, head, row);
      const auto found =
          std::ranges::find_if(row, [](float value) { return !std::isfinite(value); });
      if (found == row.end()) continue;
      return NotATrace("%s holds %g at token %u, head %u, channel %u", name, *found, token, head,
                       found - row.begin());
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TraceTensor> ReadTensor(const Header& header, const std::string& name,
                                       const Source& source, uint64_t& tokens) {
  const auto entry = header.json.find(name);
  if (entry == header.json.end() || !entry->is_object()) {
    return NotATrace("there is no tensor %s", name);
  }
  TraceTensor tensor;
  EBBTIDE_ASSIGN_OR_RETURN(tensor.dtype, ParseDtype(name, *entry));
  EBBTIDE_ASSIGN_OR_RETURN(const auto shape, ParseShape(name, *entry));
  tokens = shape[0];
  tensor.heads = static_cast<uint32_t>(shape[1]);
  tensor.head_dim = static_cast<uint32_t>(shape[2]);
  const uint64_t bytes = tokens * tensor.token_bytes();
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t begin,
                           ParsePlace(name, *entry, bytes, header.data_bytes));
  if (!source.with_values) return tensor;
  tensor.bytes.resize(bytes);
  const uint64_t part = std::max<uint64_t>(1, kPartBytes / tensor.token_bytes());
  for (uint64_t first = 0; first < tokens; first += part) {
    const uint64_t count = std::min(part, tokens - first);
    const uint64_t at = first * tensor.token_bytes();
    EBBTIDE_RETURN_IF_ERROR(
        source.read(header.data_begin + begin + at,
                    std::span(tensor.bytes).subspan(at, count * tensor.token_bytes())));
    EBBTIDE_RETURN_IF_ERROR(CheckFinite(name, tensor, first, count));
  }
  return tensor;
}

absl::Status CheckShape(const Trace& trace, const std::string& name, const TraceTensor& tensor,
                        uint64_t tokens, uint32_t heads) {
  if (tokens == trace.tokens && tensor.heads == heads && tensor.head_dim == trace.head_dim) {
    return absl::OkStatus();
  }
  return NotATrace("%s has shape [%u, %u, %u], not [%u, %u, %u]", name, tokens, tensor.heads,
                   tensor.head_dim, trace.tokens, heads, trace.head_dim);
}

absl::StatusOr<TraceLayer> ReadLayer(const Header& header, uint32_t number, const Source& source,
                                     Trace& trace) {
  TraceLayer layer{.layer = number};
  const std::string prefix = absl::StrFormat("layer%u.", number);
  for (const auto& [suffix, tensor, heads] :
       {std::tuple{"q", &layer.q, trace.query_heads}, std::tuple{"k", &layer.k, trace.kv_heads},
        std::tuple{"v", &layer.v, trace.kv_heads}}) {
    uint64_t tokens = 0;
    EBBTIDE_ASSIGN_OR_RETURN(*tensor, ReadTensor(header, prefix + suffix, source, tokens));
    if (trace.tokens == 0) trace.tokens = tokens;
    EBBTIDE_RETURN_IF_ERROR(CheckShape(trace, prefix + suffix, *tensor, tokens, heads));
  }
  const Dtype dtype = trace.layers.empty() ? layer.k.dtype : trace.dtype();
  if (layer.k.dtype != dtype || layer.v.dtype != dtype) {
    return NotATrace("%sk is %s and %sv is %s; all keys and values must share one dtype", prefix,
                     client::DtypeName(layer.k.dtype), prefix, client::DtypeName(layer.v.dtype));
  }
  return layer;
}

absl::Status ReadGeometry(const nlohmann::json& header, Trace& trace) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::string format, MetaText(header, "format"));
  if (format != kFormat) return NotATrace("its format is \"%s\", not %s", format, kFormat);
  EBBTIDE_ASSIGN_OR_RETURN(trace.model, MetaText(header, "model"));
  EBBTIDE_ASSIGN_OR_RETURN(trace.text, MetaText(header, "text"));
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t query_heads,
                           MetaNumber(header, "query_heads", kHeadsMax));
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t kv_heads, MetaNumber(header, "kv_heads", kHeadsMax));
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t head_dim, MetaNumber(header, "head_dim", kHeadDimMax));
  EBBTIDE_ASSIGN_OR_RETURN(trace.prompt_length, MetaNumber(header, "prompt_length", kTokensMax));
  trace.query_heads = static_cast<uint32_t>(query_heads);
  trace.kv_heads = static_cast<uint32_t>(kv_heads);
  trace.head_dim = static_cast<uint32_t>(head_dim);
  if (query_heads % kv_heads != 0) {
    return NotATrace("%u query heads are not a multiple of %u kv heads", query_heads, kv_heads);
  }
  EBBTIDE_ASSIGN_OR_RETURN(const std::string scale, MetaText(header, "scale"));
  if (!absl::SimpleAtof(scale, &trace.scale) || !std::isfinite(trace.scale) || trace.scale <= 0) {
    return NotATrace("__metadata__ \"scale\" is \"%s\", not a number over 0", scale);
  }
  return absl::OkStatus();
}

absl::StatusOr<Trace> ReadFrom(const Source& source, std::span<const uint32_t> wanted) {
  EBBTIDE_ASSIGN_OR_RETURN(const Header header, ReadHeader(source));
  Trace trace;
  EBBTIDE_RETURN_IF_ERROR(ReadGeometry(header.json, trace));
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<uint32_t> recorded, RecordedLayers(header.json));
  EBBTIDE_ASSIGN_OR_RETURN(const std::vector<uint32_t> chosen, ChosenLayers(recorded, wanted));
  for (const uint32_t number : chosen) {
    EBBTIDE_ASSIGN_OR_RETURN(TraceLayer layer, ReadLayer(header, number, source, trace));
    trace.layers.push_back(std::move(layer));
  }
  if (trace.prompt_length > trace.tokens) {
    return NotATrace("prompt_length %u is beyond its %u tokens", trace.prompt_length, trace.tokens);
  }
  return trace;
}

struct Reading {
  std::stop_token stop = {};
  bool with_values = true;
};

absl::StatusOr<Trace> ReadStream(std::istream& file, std::span<const uint32_t> layers,
                                 const Reading& reading) {
  const ReadAt read = [&](uint64_t offset, std::span<std::byte> into) -> absl::Status {
    if (reading.stop.stop_requested()) return absl::CancelledError("reading was stopped");
    file.seekg(static_cast<std::streamoff>(offset));
    file.read(reinterpret_cast<char*>(into.data()), static_cast<std::streamsize>(into.size()));
    if (file.good()) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrFormat("trace: reading %u bytes at %u failed: the file shrank or the disk failed",
                        into.size(), offset));
  };
  file.seekg(0, std::ios::end);
  const std::streamoff size = file.tellg();
  if (size < 0) return absl::DataLossError("trace: its size can't be read");
  return ReadFrom(
      {.bytes = static_cast<uint64_t>(size), .read = read, .with_values = reading.with_values},
      layers);
}

// A path that leads nowhere is a mistake of who named it, as is one that is closed to them.
absl::Status NotOpened(const std::string& path, int error) {
  constexpr std::array kMistakes = {ENOENT, ENOTDIR, EACCES, ELOOP, ENAMETOOLONG};
  const bool is_mistake = std::ranges::find(kMistakes, error) != kMistakes.end();
  return absl::Status(
      is_mistake ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kUnavailable,
      absl::StrFormat("trace %s: can't be read: %s", path, std::generic_category().message(error)));
}

absl::StatusOr<Trace> ReadFile(const std::string& path, std::span<const uint32_t> layers,
                               const Reading& reading) {
  struct stat facts = {};
  std::ifstream file;
  const bool is_there = stat(path.c_str(), &facts) == 0;
  if (is_there && !S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "trace %s: %s", path, S_ISDIR(facts.st_mode) ? "is a folder" : "is no regular file"));
  }
  if (is_there) file.open(path, std::ios::binary);
  if (!file.is_open()) return NotOpened(path, errno);
  absl::StatusOr<Trace> trace = ReadStream(file, layers, reading);
  if (trace.ok()) return trace;
  return absl::Status(trace.status().code(),
                      absl::StrFormat("%s: %s", path, std::string(trace.status().message())));
}

}  // namespace

client::TensorView TraceTensor::View(uint64_t first, uint64_t count) const {
  return {.dtype = dtype,
          .shape = {static_cast<int64_t>(count), heads, head_dim},
          .bytes = std::span(bytes).subspan(first * token_bytes(), count * token_bytes())};
}

std::span<const std::byte> TraceTensor::Row(uint64_t token, uint32_t head) const {
  const size_t row_bytes = head_dim * client::DtypeBytes(dtype);
  return std::span(bytes).subspan(token * token_bytes() + head * row_bytes, row_bytes);
}

void TraceTensor::RowToFloats(uint64_t token, uint32_t head, std::span<float> floats) const {
  Widen(dtype, Row(token, head), floats);
}

std::vector<float> TraceTensor::ToFloats() const {
  std::vector<float> values(bytes.size() / client::DtypeBytes(dtype));
  Widen(dtype, bytes, values);
  return values;
}

uint64_t Trace::kv_bytes() const {
  return 2 * tokens * kv_heads * head_dim * client::DtypeBytes(dtype()) * layers.size();
}

client::Geometry Trace::geometry() const {
  return {.layers = static_cast<uint32_t>(layers.size()),
          .query_heads = query_heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .dtype = dtype(),
          .scale = scale};
}

absl::StatusOr<Trace> ParseTrace(std::span<const std::byte> file,
                                 std::span<const uint32_t> layers) {
  const ReadAt read = [file](uint64_t offset, std::span<std::byte> into) {
    std::copy_n(file.begin() + static_cast<ptrdiff_t>(offset), into.size(), into.begin());
    return absl::OkStatus();
  };
  return ReadFrom({.bytes = file.size(), .read = read}, layers);
}

absl::StatusOr<Trace> ReadTrace(std::istream& file, std::span<const uint32_t> layers,
                                const std::stop_token& stop) {
  return ReadStream(file, layers, {.stop = stop});
}

absl::StatusOr<Trace> ReadTrace(const std::string& path, std::span<const uint32_t> layers,
                                const std::stop_token& stop) {
  return ReadFile(path, layers, {.stop = stop});
}

absl::StatusOr<Trace> ReadTraceHeader(const std::string& path, std::span<const uint32_t> layers) {
  return ReadFile(path, layers, {.with_values = false});
}

}  // namespace ebbtide::cli
