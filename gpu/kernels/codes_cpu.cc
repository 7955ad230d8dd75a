// SPDX-License-Identifier: Apache-2.0
//
// Codes with channels across the lanes. Bytes of codes and nibbles are turned into each other in
// runs of their own, element by element whatever head_dim is, so that the arithmetic sees whole
// rows.
//
// Products are never fused with sums (the build forbids it, gpu/CMakeLists.txt): every target must
// make the reference's bits.

#include "gpu/kernels/codes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/codes_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "gpu/cpu/simd-inl.h"
#include "gpu/element.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr int kSpillBytes = 64;  // Whole vectors may pass the end of a row by this much.
constexpr size_t kCodesMax = static_cast<size_t>(kPageTokensMax) * kHeadDimMax;

// Codes of all keys or all values of a page, one byte each. Written before it is read: 16 KiB of
// zeros would cost as much as decoding.
struct CodeBytes {
  CodeBytes() {
  }  // NOLINT(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): see above
  alignas(64) uint8_t code[kCodesMax + kSpillBytes];
};

// The box of keys or values; zeros past head_dim.
struct Box {
  alignas(64) uint16_t low[kHeadDimMax] = {};
  alignas(64) uint16_t high[kHeadDimMax] = {};

  Box(const std::byte* box, int head_dim) {
    const size_t bytes = 2 * static_cast<size_t>(head_dim);
    std::memcpy(low, box, bytes);
    std::memcpy(high, box + bytes, bytes);
  }
};

struct Channels {
  Floats low;
  Floats width;
  hn::Mask<FloatTag> is_finite;  // Elsewhere low and width are 0.
};

// Exponents are looked at as bits: widening an infinite f16 is not defined on every target.
HWY_INLINE hn::Mask<FloatTag> IsFinite(const uint16_t* halves) {
  const hn::RebindToUnsigned<FloatTag> word;
  const hn::Rebind<uint16_t, FloatTag> half;
  const auto exponent = hn::Set(word, 0x7C00U);
  const auto bits = hn::And(hn::PromoteTo(word, hn::LoadU(half, halves)), exponent);
  return hn::RebindMask(FloatTag(), hn::Not(hn::Eq(bits, exponent)));
}

HWY_INLINE Channels ChannelsAt(const Box& box, int d) {
  const auto is_finite = hn::And(IsFinite(box.low + d), IsFinite(box.high + d));
  const auto widen = [&](const uint16_t* halves) {
    return hn::IfThenElseZero(is_finite, Widen(reinterpret_cast<const hwy::float16_t*>(halves)));
  };
  const Floats low = widen(box.low + d);
  return {low, hn::Sub(widen(box.high + d), low), is_finite};
}

// An affine map for each channel.
struct Affine {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): so too
  Affine() {}
  alignas(64) float first[kHeadDimMax];
  alignas(64) float step[kHeadDimMax];
};

// x = steps * step + first
HWY_INLINE void DecodingOf(const Box& box, CodeForm form, int head_dim, Affine& affine) {
  const FloatTag tag;
  const Floats steps = hn::Set(tag, static_cast<float>(CodeSteps(form)));
  for (int d = 0; d < head_dim; d += kLanes) {
    const Channels at = ChannelsAt(box, d);
    hn::Store(at.low, tag, affine.first + d);
    hn::Store(hn::Div(at.width, steps), tag, affine.step + d);
  }
}

// How each channel is encoded and decoded. Channels of no width, or infinite, have steps of 0.
struct Coding {
  alignas(64) float low[kHeadDimMax];
  alignas(64) float width[kHeadDimMax];
  alignas(64) float steps[kHeadDimMax];  // Fine ones, for a unit of x.
  alignas(64) float coarse_step[kHeadDimMax];
  alignas(64) float fine_step[kHeadDimMax];
  bool is_finite = true;  // Every channel.

  HWY_INLINE Coding(const std::byte* bounds, int head_dim) {
    const FloatTag tag;
    const Box box(bounds, head_dim);
    for (int d = 0; d < head_dim; d += kLanes) {
      const Channels at = ChannelsAt(box, d);
      const auto has_width = hn::Gt(at.width, hn::Zero(tag));
      const Floats divisor = hn::IfThenElse(has_width, at.width, hn::Set(tag, 1.0F));
      const Floats fine = hn::Set(tag, static_cast<float>(CodeSteps(CodeForm::k8Bit)));
      const Floats coarse = hn::Set(tag, static_cast<float>(CodeSteps(CodeForm::k4Bit)));
      is_finite = is_finite && hn::AllTrue(tag, at.is_finite);
      hn::Store(at.low, tag, low + d);
      hn::Store(at.width, tag, width + d);
      hn::Store(hn::IfThenElseZero(has_width, hn::Div(fine, divisor)), tag, steps + d);
      hn::Store(hn::Div(at.width, coarse), tag, coarse_step + d);
      hn::Store(hn::Div(at.width, fine), tag, fine_step + d);
    }
  }
};

// What keys or values of a page are encoded to, and by how much that is off in either form, in
// units of `factor`. Written before it is read, as CodeBytes is.
struct EncodedHalf {
  EncodedHalf() {
  }  // NOLINT(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default): see above
  CodeBytes codes;
  alignas(64) float coarse_off[kCodesMax + kLanes];
  alignas(64) float fine_off[kCodesMax + kLanes];
};

// code = (x - low) * steps + 8.5, rounded down. Rows are encoded in order: what a tail writes past
// its row is overwritten by the next.
template <class T>
HWY_INLINE void EncodeRows(const PageShape& shape, const std::byte* rows, const Coding& coding,
                           const float* factor, EncodedHalf& half) {
  const FloatTag tag;
  const hn::RebindToSigned<FloatTag> integer;
  const hn::Rebind<uint8_t, FloatTag> byte;
  const auto encode = [&](Floats x, int d, ptrdiff_t at) {
    const Floats low = hn::Load(tag, coding.low + d);
    const Floats unit = hn::Load(tag, factor + d);
    const Floats shifted =
        hn::Add(hn::Mul(hn::Sub(x, low), hn::Load(tag, coding.steps + d)), hn::Set(tag, 8.5F));
    const auto code =
        hn::ConvertTo(integer, hn::Min(hn::Max(shifted, hn::Set(tag, 8.0F)), hn::Set(tag, 248.0F)));
    hn::StoreU(hn::DemoteTo(byte, code), byte, half.codes.code + at);
    const auto off = [&](auto number, const float* step) {
      const Floats product = hn::Mul(hn::ConvertTo(tag, number), hn::Load(tag, step + d));
      return hn::Mul(hn::Sub(x, hn::Add(product, low)), unit);
    };
    hn::StoreU(off(hn::ShiftRight<4>(code), coding.coarse_step), tag, half.coarse_off + at);
    hn::StoreU(off(hn::Sub(code, hn::Set(integer, 8)), coding.fine_step), tag, half.fine_off + at);
  };
  const T* row = reinterpret_cast<const T*>(rows);
  for (ptrdiff_t at = 0; at < static_cast<ptrdiff_t>(shape.tokens) * shape.head_dim;
       at += shape.head_dim, row += shape.head_dim) {
    int d = 0;
    for (; d + kLanes <= shape.head_dim; d += kLanes) encode(Widen(row + d), d, at + d);
    const int rest = shape.head_dim - d;
    if (rest > 0) encode(WidenTail(row + d, rest), d, at + d);
  }
}

using PairTag = hn::ScalableTag<uint16_t>;  // Two codes, or one byte of nibbles.
using NibbleTag = hn::Rebind<uint8_t, PairTag>;

// Upper and lower nibbles of the codes from `code`, two of them in each byte.
struct Nibbles {
  hn::Vec<NibbleTag> upper;
  hn::Vec<NibbleTag> lower;
};

HWY_INLINE Nibbles PackVector(const uint8_t* code) {
  const PairTag pair;
  const auto even = hn::Set(pair, 0x0F);
  const auto odd = hn::Set(pair, 0xF0);
  const auto two = hn::BitCast(pair, hn::LoadU(hn::Repartition<uint8_t, PairTag>(), code));
  const auto narrow = [](auto pairs) {
    return hn::DemoteTo(NibbleTag(), hn::BitCast(hn::RebindToSigned<PairTag>(), pairs));
  };
  return {
      narrow(hn::Or(hn::And(hn::ShiftRight<4>(two), even), hn::And(hn::ShiftRight<8>(two), odd))),
      narrow(hn::Or(hn::And(two, even), hn::And(hn::ShiftRight<4>(two), odd)))};
}

// Splits codes into the two planes. The code after the last, which pads an odd count, must be 0.
HWY_INLINE void PackCodes(const CodeBytes& codes, size_t nibble_bytes, std::byte* coarse,
                          std::byte* fine) {
  const NibbleTag tag;
  const size_t lanes = hn::Lanes(tag);
  auto* const upper = reinterpret_cast<uint8_t*>(coarse);
  auto* const lower = reinterpret_cast<uint8_t*>(fine);
  size_t i = 0;
  for (; i + lanes <= nibble_bytes; i += lanes) {
    const Nibbles nibbles = PackVector(codes.code + 2 * i);
    hn::StoreU(nibbles.upper, tag, upper + i);
    hn::StoreU(nibbles.lower, tag, lower + i);
  }
  if (i == nibble_bytes) return;
  alignas(64) uint8_t part[HWY_MAX_BYTES];
  const Nibbles nibbles = PackVector(codes.code + 2 * i);
  hn::Store(nibbles.upper, tag, part);
  std::memcpy(upper + i, part, nibble_bytes - i);
  hn::Store(nibbles.lower, tag, part);
  std::memcpy(lower + i, part, nibble_bytes - i);
}

// Steps from the lower end of the box, one a byte: the coarse nibbles, or with the fine ones below
// them the codes less 8.
template <bool HasFine, class Load>
HWY_INLINE void UnpackVector(Load load, const std::byte* coarse, const std::byte* fine,
                             uint8_t* steps) {
  const PairTag pair;
  const auto spread = [&](const std::byte* nibbles) {
    const auto two = hn::PromoteTo(pair, load(reinterpret_cast<const uint8_t*>(nibbles)));
    return hn::And(hn::Or(two, hn::ShiftLeft<4>(two)), hn::Set(pair, 0x0F0F));
  };
  const hn::Repartition<uint8_t, PairTag> byte;
  if constexpr (HasFine) {
    const auto two = hn::Or(hn::ShiftLeft<4>(spread(coarse)), spread(fine));
    hn::StoreU(hn::SaturatedSub(hn::BitCast(byte, two), hn::Set(byte, 8)), byte, steps);
  } else {
    hn::StoreU(hn::BitCast(byte, spread(coarse)), byte, steps);
  }
}

template <bool HasFine>
HWY_INLINE void UnpackCodes(const std::byte* coarse, const std::byte* fine, size_t nibble_bytes,
                            CodeBytes& codes) {
  const NibbleTag byte;
  const size_t lanes = hn::Lanes(byte);
  const auto whole = [&](const uint8_t* nibbles) { return hn::LoadU(byte, nibbles); };
  size_t i = 0;
  for (; i + lanes <= nibble_bytes; i += lanes) {
    UnpackVector<HasFine>(whole, coarse + i, fine + i, codes.code + 2 * i);
  }
  if (i == nibble_bytes) return;
  const auto part = [&](const uint8_t* nibbles) {
    uint8_t padded[HWY_MAX_BYTES] = {};
    std::memcpy(padded, nibbles, nibble_bytes - i);
    return hn::LoadU(byte, padded);
  };
  UnpackVector<HasFine>(part, coarse + i, fine + i, codes.code + 2 * i);
}

HWY_INLINE Floats DecodeVector(const uint8_t* bytes, const Affine& affine, int d) {
  const FloatTag tag;
  const hn::RebindToSigned<FloatTag> integer;
  const hn::Rebind<uint8_t, FloatTag> byte;
  const Floats steps = hn::ConvertTo(tag, hn::PromoteTo(integer, hn::LoadU(byte, bytes)));
  return hn::Add(hn::Mul(steps, hn::Load(tag, affine.step + d)), hn::Load(tag, affine.first + d));
}

HWY_INLINE void DecodeRows(const PageShape& shape, const CodeBytes& codes, const Affine& affine,
                           float* rows) {
  const FloatTag tag;
  const uint8_t* code = codes.code;
  for (int token = 0; token < shape.tokens; ++token) {
    int d = 0;
    for (; d + kLanes <= shape.head_dim; d += kLanes) {
      hn::StoreU(DecodeVector(code + d, affine, d), tag, rows + d);
    }
    if (d < shape.head_dim) {
      alignas(64) float tail[kLanes];
      hn::Store(DecodeVector(code + d, affine, d), tag, tail);
      std::memcpy(rows + d, tail, static_cast<size_t>(shape.head_dim - d) * sizeof(float));
    }
    code += shape.head_dim;
    rows += shape.head_dim;
  }
}

// The bounds of kLanes channels from `d` in f16; +0 for either zero, as the reference.
template <class T>
HWY_INLINE void RoundOutward(const float* low, const float* high, int d,
                             uint16_t (*bounds)[kHeadDimMax]) {
  if constexpr (std::is_same_v<T, hwy::float16_t>) {  // They are among the f16 that came in.
    const FloatTag tag;
    const hn::Rebind<hwy::float16_t, FloatTag> half;
    const auto store = [&](const float* from, uint16_t* to) {
      hn::Store(hn::DemoteTo(half, hn::Add(hn::Load(tag, from), hn::Zero(tag))), half,
                reinterpret_cast<hwy::float16_t*>(to));
    };
    store(low + d, bounds[0] + d);
    store(high + d, bounds[1] + d);
  } else {
    for (int i = d; i < d + kLanes; ++i) {
      bounds[0][i] = HalfDown(low[i] + 0.0);
      bounds[1][i] = HalfUp(high[i] + 0.0);
    }
  }
}

// Least and greatest value of each channel, rounded outward.
template <class T>
HWY_INLINE void StoreValueBox(const PageShape& shape, const std::byte* rows, std::byte* box) {
  const FloatTag tag;
  alignas(64) float low[kHeadDimMax];
  alignas(64) float high[kHeadDimMax];
  const T* const values = reinterpret_cast<const T*>(rows);
  const auto scan = [&](int d, auto widen) {
    Floats least = widen(values + d);
    Floats greatest = least;
    for (int token = 1; token < shape.tokens; ++token) {
      const Floats x = widen(values + static_cast<ptrdiff_t>(token) * shape.head_dim + d);
      least = hn::Min(least, x);
      greatest = hn::Max(greatest, x);
    }
    hn::Store(least, tag, low + d);
    hn::Store(greatest, tag, high + d);
  };
  int d = 0;
  for (; d + kLanes <= shape.head_dim; d += kLanes) scan(d, [](const T* x) { return Widen(x); });
  const int rest = shape.head_dim - d;
  if (rest > 0) scan(d, [rest](const T* x) { return WidenTail(x, rest); });
  alignas(64) uint16_t bounds[2][kHeadDimMax];
  for (d = 0; d < shape.head_dim; d += kLanes) RoundOutward<T>(low, high, d, bounds);
  const size_t bytes = 2 * static_cast<size_t>(shape.head_dim);
  std::memcpy(box, bounds[0], bytes);
  std::memcpy(box + bytes, bounds[1], bytes);
}

template <class T>
void EncodeT(const EncodeArgs& args) {
  const int head_dim = args.shape.head_dim;
  const size_t nibble_bytes = NibbleBytes(args.shape);
  const auto elements = static_cast<size_t>(args.shape.tokens) * static_cast<size_t>(head_dim);
  const std::byte* const values = args.page.data() + args.shape.half_bytes();
  StoreValueBox<T>(args.shape, values, args.coarse.data());
  std::byte* coarse = args.coarse.data() + CoarseHeadBytes(args.shape);
  std::byte* fine = args.fine.data();
  EncodedHalf half;
  CodeNorms norms[2];
  const auto encode = [&](const std::byte* bounds, const std::byte* rows, bool are_keys) {
    const Coding coding(bounds, head_dim);
    const ResidualUnits units(std::span(coding.width).first(static_cast<size_t>(head_dim)),
                              coding.is_finite, are_keys);
    EncodeRows<T>(args.shape, rows, coding, units.factor, half);
    half.codes.code[elements] = 0;
    PackCodes(half.codes, nibble_bytes, coarse, fine);
    coarse += nibble_bytes;
    fine += nibble_bytes;
    for (const CodeForm form : {CodeForm::k4Bit, CodeForm::k8Bit}) {
      const bool is_coarse = form == CodeForm::k4Bit;
      const CodeNorm norm = units.NormOf(MatrixNormsCpu(
          {.rows = args.shape.tokens,
           .columns = head_dim,
           .matrix = std::span(is_coarse ? half.coarse_off : half.fine_off).first(elements),
           .joint = JointNormOf(form, are_keys)}));
      CodeNorms& both = norms[is_coarse ? 0 : 1];
      (are_keys ? both.key : both.value) = norm;
    }
  };
  encode(args.digest.data(), args.page.data(), true);
  encode(args.coarse.data(), values, false);
  StoreCodeNorms(norms, args);
}

void EncodePage(const EncodeArgs& args) {
  WithElement(args.shape.dtype, [&](auto element) { EncodeT<decltype(element)>(args); });
}

void DecodePage(const DecodeArgs& args) {
  const int head_dim = args.shape.head_dim;
  const size_t nibble_bytes = NibbleBytes(args.shape);
  const std::byte* coarse = args.coarse.data() + CoarseHeadBytes(args.shape);
  const std::byte* fine = args.fine.data();
  float* rows = args.page.data();
  CodeBytes codes;
  for (const std::byte* box : {args.digest.data(), args.coarse.data()}) {
    Affine affine;
    DecodingOf(Box(box, head_dim), args.form, head_dim, affine);
    if (args.form == CodeForm::k8Bit) {
      UnpackCodes<true>(coarse, fine, nibble_bytes, codes);
      fine += nibble_bytes;
    } else {
      UnpackCodes<false>(coarse, coarse, nibble_bytes, codes);
    }
    DecodeRows(args.shape, codes, affine, rows);
    coarse += nibble_bytes;
    rows += args.page.size() / 2;
  }
}

// What a box says of each channel; 0 past head_dim.
struct ChannelErrors {
  alignas(64) float width[kHeadDimMax];
  alignas(64) float error[kHeadDimMax];  // CodeElementError, but for f32 rounding
  bool is_finite = true;                 // Every channel.

  HWY_INLINE ChannelErrors(const std::byte* bounds, CodeForm form, int head_dim) {
    const FloatTag tag;
    constexpr float kUnit = 0x1p-24F;
    const Box box(bounds, head_dim);
    const Floats per_width = hn::Set(tag, static_cast<float>(CodeStepError(form)) + 8.5F * kUnit);
    const Floats per_size = hn::Set(tag, 1.01F * kUnit);
    for (int d = 0; d < head_dim; d += kLanes) {
      const Channels at = ChannelsAt(box, d);
      is_finite = is_finite && hn::AllTrue(tag, at.is_finite);
      const Floats size = hn::Max(hn::Abs(at.low), hn::Abs(hn::Add(at.low, at.width)));
      const Floats sum = hn::Add(hn::Mul(at.width, per_width), hn::Mul(size, per_size));
      hn::Store(at.width, tag, width + d);
      hn::Store(hn::IfThenElseZero(hn::Gt(at.width, hn::Zero(tag)), sum), tag, error + d);
    }
  }
};

// Sums over channels. A channel of either is six roundings off, and one for each addition in a
// lane.
struct ChannelSums {
  double errors = 0;   // |weight| * error
  double squares = 0;  // (weight * width)^2

  HWY_INLINE ChannelSums(const ChannelErrors& channels, const float* weight, int head_dim) {
    const FloatTag tag;
    Floats sum = hn::Zero(tag);
    Floats square = hn::Zero(tag);
    const auto add = [&](Floats of, int d) {
      const Floats product = hn::Mul(of, hn::Load(tag, channels.width + d));
      sum = hn::MulAdd(hn::Abs(of), hn::Load(tag, channels.error + d), sum);
      square = hn::MulAdd(product, product, square);
    };
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) add(Widen(weight + d), d);
    if (d < head_dim) add(WidenTail(weight + d, head_dim - d), d);
    errors = hn::GetLane(hn::SumOfLanes(tag, sum));
    squares = hn::GetLane(hn::SumOfLanes(tag, square));
  }
};

HWY_INLINE double SumOfSquares(const float* x, int head_dim) {
  const FloatTag tag;
  Floats sum = hn::Zero(tag);
  for (int d = 0; d < head_dim; d += kLanes) {
    const Floats each = hn::Load(tag, x + d);
    sum = hn::MulAdd(each, each, sum);
  }
  return hn::GetLane(hn::SumOfLanes(tag, sum));
}

void ErrorsPage(const CodeErrorArgs& args) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const int head_dim = args.shape.head_dim;
  // What the sums above may lack: a channel's error 5 roundings, its product 1, then additions in a
  // lane (at least 4 of them) and across lanes.
  const double slack = 1 + (16 + head_dim * 0.25) * 0x1p-24;
  const double subnormal = head_dim * 0x1p-148;
  const auto norm = [&](const ChannelErrors& channels) {
    return channels.is_finite ? FloatUp(std::sqrt(SumOfSquares(channels.error, head_dim)) * slack)
                              : std::numeric_limits<float>::infinity();
  };
  const std::byte* const key_box = args.digest.data();
  const std::byte* const value_box = args.coarse.data();
  const ChannelErrors values(value_box, args.form, head_dim);
  if (args.value_error != nullptr) *args.value_error = norm(values);
  TightenValues(args, std::sqrt(SumOfSquares(values.width, head_dim)) * slack);

  const ChannelErrors keys(key_box, args.form, head_dim);
  if (args.key_error != nullptr) *args.key_error = norm(keys);
  const double scale = std::fabs(static_cast<double>(args.scale));
  for (size_t row = 0; row < args.logit_error.size(); ++row) {
    const float* query = &args.query[row * static_cast<size_t>(head_dim)];
    const ChannelSums sums(keys, query, head_dim);
    const double error = keys.is_finite ? sums.errors + subnormal : kInfinity;
    args.logit_error[row] =
        error < kInfinity ? FloatUp(scale * error * slack) : std::numeric_limits<float>::infinity();
    // Squares may leave the range of f32.
    const bool is_tame = sums.squares > 1e-25 && sums.squares < 1e30;
    TightenLogits(args, row,
                  is_tame ? std::sqrt(sums.squares) * slack : WidthNorm(key_box, head_dim, query));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(EncodePage);
HWY_EXPORT(DecodePage);
HWY_EXPORT(ErrorsPage);

}  // namespace

void EncodeCpu(const EncodeArgs& args) {
  CheckEncode(args);
  HWY_DYNAMIC_DISPATCH(EncodePage)(args);
}

void DecodeCpu(const DecodeArgs& args) {
  CheckDecode(args);
  HWY_DYNAMIC_DISPATCH(DecodePage)(args);
}

void CodeErrorsCpu(const CodeErrorArgs& args) {
  CheckCodeErrors(args);
  HWY_DYNAMIC_DISPATCH(ErrorsPage)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
