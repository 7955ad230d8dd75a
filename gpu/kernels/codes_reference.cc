// SPDX-License-Identifier: Apache-2.0
//
// Codes by plain loops. Every product is made exactly in f64 and rounded to f32 once, so that no
// compiler can fuse it with the addition after it: encoding and decoding are defined to the bit.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gpu/element.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"

namespace ebbtide::gpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One channel of the box that keys or values are quantised in.
struct Channel {
  float low = 0;
  float high = 0;

  bool is_finite() const { return std::isfinite(low) && std::isfinite(high); }
  float width() const { return high - low; }
};

// Of the box a digest or a coarse part opens with: [low f16 x d][high f16 x d], of any alignment.
Channel ChannelAt(std::span<const std::byte> box, int head_dim, int d) {
  return {.low = ElementAt(Dtype::kF16, box.data(), d),
          .high = ElementAt(Dtype::kF16, box.data(), head_dim + d)};
}

float RoundedProduct(float a, float b) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
}

uint32_t Encode(const Channel& channel, float x) {
  if (!channel.is_finite() || channel.width() == 0) return 8;
  const float steps = RoundedProduct(x - channel.low, 240 / channel.width());
  return static_cast<uint32_t>(std::clamp(steps + 8.5F, 8.0F, 248.0F));
}

float Decode(const Channel& channel, CodeForm form, uint32_t steps) {
  if (!channel.is_finite()) return 0;
  const float step = channel.width() / static_cast<float>(CodeSteps(form));
  return RoundedProduct(static_cast<float>(steps), step) + channel.low;
}

void PutNibble(std::byte* nibbles, size_t i, uint32_t nibble) {
  nibbles[i / 2] |= static_cast<std::byte>(i % 2 == 0 ? nibble : nibble << 4);
}

uint32_t NibbleAt(const std::byte* nibbles, size_t i) {
  const auto byte = static_cast<uint32_t>(nibbles[i / 2]);
  return i % 2 == 0 ? byte & 15U : byte >> 4;
}

// +0 for either zero: which of them is the least depends on who compares.
void StoreValueBox(const EncodeArgs& args) {
  const std::byte* values = args.page.data() + args.shape.half_bytes();
  for (int d = 0; d < args.shape.head_dim; ++d) {
    double low = kInfinity;
    double high = -kInfinity;
    for (int token = 0; token < args.shape.tokens; ++token) {
      const std::byte* row = values + static_cast<size_t>(token) * args.shape.row_bytes();
      low = std::min<double>(low, ElementAt(args.shape.dtype, row, d));
      high = std::max<double>(high, ElementAt(args.shape.dtype, row, d));
    }
    const uint16_t box[2] = {HalfDown(low + 0.0), HalfUp(high + 0.0)};
    const auto low_at = 2 * static_cast<size_t>(d);
    const auto high_at = 2 * static_cast<size_t>(args.shape.head_dim + d);
    std::memcpy(&args.coarse[low_at], &box[0], 2);
    std::memcpy(&args.coarse[high_at], &box[1], 2);
  }
}

// R and l2 errors are sums over channels; one that is not finite makes them infinite, whatever the
// query says.
double SquaredError(CodeForm form, const Channel& channel) {
  if (!channel.is_finite()) return kInfinity;
  const double error = CodeElementError(form, channel.low, channel.high);
  return error * error;
}

constexpr double kF64Slack = 1 + 1e-12;  // Far more than a sum of 256 terms is off in f64.

// Norms of one half's differences between a page and what its form decodes to.
CodeNorm HalfNorm(const EncodeArgs& args, CodeForm form, const std::vector<float>& decoded,
                  bool are_keys) {
  const int head_dim = args.shape.head_dim;
  std::vector<float> width;
  bool is_finite = true;
  for (int d = 0; d < head_dim; ++d) {
    const Channel channel = ChannelAt(are_keys ? args.digest : args.coarse, head_dim, d);
    width.push_back(channel.is_finite() ? channel.width() : 0);
    is_finite = is_finite && channel.is_finite();
  }
  const ResidualUnits units(width, is_finite, are_keys);
  const size_t elements = decoded.size() / 2;
  const size_t first = are_keys ? 0 : elements;
  std::vector<float> residual;
  for (size_t i = first; i < first + elements; ++i) {
    const float x = ElementAt(args.shape.dtype, args.page.data(), static_cast<int>(i));
    const float factor = units.factor[i % static_cast<size_t>(head_dim)];
    residual.push_back(RoundedProduct(x - decoded[i], factor));
  }
  return units.NormOf(MatrixNormsReference({.rows = args.shape.tokens,
                                            .columns = head_dim,
                                            .matrix = residual,
                                            .joint = JointNormOf(form, are_keys)}));
}

void StoreNorms(const EncodeArgs& args) {
  CodeNorms norms[2];
  for (const CodeForm form : {CodeForm::k4Bit, CodeForm::k8Bit}) {
    std::vector<float> decoded(args.page.size() / DtypeBytes(args.shape.dtype));
    DecodeReference({.shape = args.shape,
                     .form = form,
                     .digest = args.digest,
                     .coarse = args.coarse,
                     .fine = args.fine,
                     .page = decoded});
    norms[form == CodeForm::k4Bit ? 0 : 1] = {.key = HalfNorm(args, form, decoded, true),
                                              .value = HalfNorm(args, form, decoded, false)};
  }
  StoreCodeNorms(norms, args);
}

}  // namespace

void EncodeReference(const EncodeArgs& args) {
  CheckEncode(args);
  std::fill(args.coarse.begin(), args.coarse.end(), std::byte{0});
  std::fill(args.fine.begin(), args.fine.end(), std::byte{0});
  StoreValueBox(args);
  const int head_dim = args.shape.head_dim;
  std::byte* const coarse_keys = args.coarse.data() + CoarseHeadBytes(args.shape);
  const auto encode = [&](size_t i, float x, const Channel& channel, size_t offset) {
    const uint32_t code = Encode(channel, x);
    PutNibble(coarse_keys + offset, i, code >> 4);
    PutNibble(args.fine.data() + offset, i, code & 15U);
  };
  for (int token = 0; token < args.shape.tokens; ++token) {
    const std::byte* key = args.page.data() + static_cast<size_t>(token) * args.shape.row_bytes();
    const std::byte* value = key + args.shape.half_bytes();
    for (int d = 0; d < head_dim; ++d) {
      const size_t i =
          static_cast<size_t>(token) * static_cast<size_t>(head_dim) + static_cast<size_t>(d);
      encode(i, ElementAt(args.shape.dtype, key, d), ChannelAt(args.digest, head_dim, d), 0);
      encode(i, ElementAt(args.shape.dtype, value, d), ChannelAt(args.coarse, head_dim, d),
             NibbleBytes(args.shape));
    }
  }
  StoreNorms(args);
}

void DecodeReference(const DecodeArgs& args) {
  CheckDecode(args);
  const int head_dim = args.shape.head_dim;
  const size_t elements = args.page.size() / 2;
  const std::byte* const coarse_keys = args.coarse.data() + CoarseHeadBytes(args.shape);
  const auto decode = [&](size_t i, const Channel& channel, size_t offset) {
    const uint32_t coarse = NibbleAt(coarse_keys + offset, i);
    if (args.form == CodeForm::k4Bit) return Decode(channel, args.form, coarse);
    const uint32_t code = 16 * coarse + NibbleAt(args.fine.data() + offset, i);
    return Decode(channel, args.form, std::max(code, 8U) - 8);
  };
  for (size_t i = 0; i < elements; ++i) {
    const int d = static_cast<int>(i % static_cast<size_t>(head_dim));
    args.page[i] = decode(i, ChannelAt(args.digest, head_dim, d), 0);
    args.page[elements + i] =
        decode(i, ChannelAt(args.coarse, head_dim, d), NibbleBytes(args.shape));
  }
}

void CodeErrorsReference(const CodeErrorArgs& args) {
  CheckCodeErrors(args);
  const int head_dim = args.shape.head_dim;
  double key = 0;
  double value = 0;
  for (int d = 0; d < head_dim; ++d) {
    key += SquaredError(args.form, ChannelAt(args.digest, head_dim, d));
    value += SquaredError(args.form, ChannelAt(args.coarse, head_dim, d));
  }
  if (args.key_error != nullptr) *args.key_error = FloatUp(std::sqrt(key) * kF64Slack);
  if (args.value_error != nullptr) *args.value_error = FloatUp(std::sqrt(value) * kF64Slack);
  for (size_t row = 0; row < args.logit_error.size(); ++row) {
    double sum = key == kInfinity ? kInfinity : 0;
    for (int d = 0; d < head_dim && sum < kInfinity; ++d) {
      const Channel channel = ChannelAt(args.digest, head_dim, d);
      const double q = args.query[row * static_cast<size_t>(head_dim) + static_cast<size_t>(d)];
      sum += std::fabs(q) * CodeElementError(args.form, channel.low, channel.high);
    }
    const double scale = std::fabs(static_cast<double>(args.scale));
    args.logit_error[row] = sum == kInfinity ? std::numeric_limits<float>::infinity()
                                             : FloatUp(scale * sum * kF64Slack);
    const float* query = &args.query[row * static_cast<size_t>(head_dim)];
    TightenLogits(args, row, WidthNorm(args.digest.data(), head_dim, query));
  }
  TightenValues(args, WidthNorm(args.coarse.data(), head_dim, nullptr));
}

}  // namespace ebbtide::gpu
