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
#include <vector>

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

// code = (x - first) * step + 8.5. Channels of no width, or infinite, have step 0.
HWY_INLINE void EncodingOf(const Box& box, int head_dim, Affine& affine) {
  const FloatTag tag;
  for (int d = 0; d < head_dim; d += kLanes) {
    const Channels at = ChannelsAt(box, d);
    const auto has_width = hn::Gt(at.width, hn::Zero(tag));
    const Floats divisor = hn::IfThenElse(has_width, at.width, hn::Set(tag, 1.0F));
    const Floats step = hn::Div(hn::Set(tag, 240.0F), divisor);
    hn::Store(at.low, tag, affine.first + d);
    hn::Store(hn::IfThenElseZero(has_width, step), tag, affine.step + d);
  }
}

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

HWY_INLINE void EncodeVector(Floats x, const Affine& affine, int d, uint8_t* code) {
  const FloatTag tag;
  const hn::RebindToSigned<FloatTag> integer;
  const hn::Rebind<uint8_t, FloatTag> byte;
  const Floats steps =
      hn::Mul(hn::Sub(x, hn::Load(tag, affine.first + d)), hn::Load(tag, affine.step + d));
  const Floats shifted = hn::Add(steps, hn::Set(tag, 8.5F));
  const Floats bounded = hn::Min(hn::Max(shifted, hn::Set(tag, 8.0F)), hn::Set(tag, 248.0F));
  hn::StoreU(hn::DemoteTo(byte, hn::ConvertTo(integer, bounded)), byte, code);
}

// Rows in order: what a tail writes past its row is overwritten by the next.
template <class T>
HWY_INLINE void EncodeRows(const PageShape& shape, const std::byte* rows, const Affine& affine,
                           CodeBytes& codes) {
  uint8_t* code = codes.code;
  for (int token = 0; token < shape.tokens; ++token) {
    const T* row =
        reinterpret_cast<const T*>(rows) + static_cast<ptrdiff_t>(token) * shape.head_dim;
    int d = 0;
    for (; d + kLanes <= shape.head_dim; d += kLanes) {
      EncodeVector(Widen(row + d), affine, d, code + d);
    }
    if (d < shape.head_dim) {
      EncodeVector(WidenTail(row + d, shape.head_dim - d), affine, d, code + d);
    }
    code += shape.head_dim;
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

// Least and greatest value of each channel, rounded outward; +0 for either zero, as the reference.
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
  for (d = 0; d < shape.head_dim; ++d) {
    const bool is_half = sizeof(T) == sizeof(uint16_t);  // Then there is nothing to round.
    const uint16_t bounds[2] = {is_half ? FloatToHalf(low[d] + 0.0F) : HalfDown(low[d] + 0.0),
                                is_half ? FloatToHalf(high[d] + 0.0F) : HalfUp(high[d] + 0.0)};
    const auto low_at = 2 * static_cast<size_t>(d);
    const auto high_at = 2 * static_cast<size_t>(shape.head_dim + d);
    std::memcpy(box + low_at, &bounds[0], 2);
    std::memcpy(box + high_at, &bounds[1], 2);
  }
}

// One half's differences between a page and what a form of it decodes to, in units of `factor`.
template <class T>
HWY_INLINE void ResidualRows(const PageShape& shape, const std::byte* rows, const CodeBytes& codes,
                             CodeForm form, const Affine& decoding, const float* factor,
                             float* residual) {
  const FloatTag tag;
  const hn::RebindToSigned<FloatTag> integer;
  const hn::Rebind<uint8_t, FloatTag> byte;
  const int head_dim = shape.head_dim;
  const auto vector = [&](Floats x, int d, const uint8_t* code) {
    const auto bytes = hn::PromoteTo(integer, hn::LoadU(byte, code));
    const auto steps =
        form == CodeForm::k4Bit ? hn::ShiftRight<4>(bytes) : hn::Sub(bytes, hn::Set(integer, 8));
    const Floats decoded =
        hn::Add(hn::Mul(hn::ConvertTo(tag, steps), hn::Load(tag, decoding.step + d)),
                hn::Load(tag, decoding.first + d));
    return hn::Mul(hn::Sub(x, decoded), hn::Load(tag, factor + d));
  };
  const uint8_t* code = codes.code;
  for (int token = 0; token < shape.tokens; ++token) {
    const T* row = reinterpret_cast<const T*>(rows) + static_cast<ptrdiff_t>(token) * head_dim;
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) {
      hn::StoreU(vector(Widen(row + d), d, code + d), tag, residual + d);
    }
    if (d < head_dim) {
      alignas(64) float tail[kLanes];
      hn::Store(vector(WidenTail(row + d, head_dim - d), d, code + d), tag, tail);
      std::memcpy(residual + d, tail, static_cast<size_t>(head_dim - d) * sizeof(float));
    }
    code += head_dim;
    residual += head_dim;
  }
}

template <class T>
void EncodeT(const EncodeArgs& args) {
  const int head_dim = args.shape.head_dim;
  const size_t nibble_bytes = NibbleBytes(args.shape);
  const std::byte* const values = args.page.data() + args.shape.half_bytes();
  StoreValueBox<T>(args.shape, values, args.coarse.data());
  std::byte* coarse = args.coarse.data() + CoarseHeadBytes(args.shape);
  std::byte* fine = args.fine.data();
  CodeBytes codes;
  const auto elements = static_cast<size_t>(args.shape.tokens) * static_cast<size_t>(head_dim);
  std::vector<float> residual(elements);
  CodeNorms norms[2];
  const auto encode = [&](const std::byte* bounds, const std::byte* rows, bool are_keys) {
    const Box box(bounds, head_dim);
    Affine affine;
    EncodingOf(box, head_dim, affine);
    EncodeRows<T>(args.shape, rows, affine, codes);
    codes.code[elements] = 0;
    PackCodes(codes, nibble_bytes, coarse, fine);
    coarse += nibble_bytes;
    fine += nibble_bytes;
    const ResidualUnits units(bounds, head_dim, are_keys);
    for (const CodeForm form : {CodeForm::k4Bit, CodeForm::k8Bit}) {
      DecodingOf(box, form, head_dim, affine);
      ResidualRows<T>(args.shape, rows, codes, form, affine, units.factor, residual.data());
      const CodeNorm norm = units.NormOf(
          MatrixNormsCpu({.rows = args.shape.tokens, .columns = head_dim, .matrix = residual}));
      CodeNorms& both = norms[form == CodeForm::k4Bit ? 0 : 1];
      (are_keys ? both.key : both.value) = norm;
    }
  };
  encode(args.digest.data(), args.page.data(), true);
  encode(args.coarse.data(), values, false);
  StoreCodeNorms(norms, args);
}

void EncodeF32(const EncodeArgs& args) {
  EncodeT<float>(args);
}
void EncodeF16(const EncodeArgs& args) {
  EncodeT<hwy::float16_t>(args);
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

// Errors of every channel (CodeElementError, but for f32 rounding); 0 past head_dim. False where
// one is infinite.
HWY_INLINE bool ErrorsOf(const Box& box, CodeForm form, int head_dim, float* error) {
  const FloatTag tag;
  constexpr float kUnit = 0x1p-24F;
  const Floats per_width = hn::Set(tag, static_cast<float>(CodeStepError(form)) + 8.5F * kUnit);
  const Floats per_size = hn::Set(tag, 1.01F * kUnit);
  bool is_finite = true;
  for (int d = 0; d < head_dim; d += kLanes) {
    const Channels at = ChannelsAt(box, d);
    is_finite = is_finite && hn::AllTrue(tag, at.is_finite);
    const Floats size = hn::Max(hn::Abs(at.low), hn::Abs(hn::Add(at.low, at.width)));
    const Floats sum = hn::Add(hn::Mul(at.width, per_width), hn::Mul(size, per_size));
    hn::Store(hn::IfThenElseZero(hn::Gt(at.width, hn::Zero(tag)), sum), tag, error + d);
  }
  return is_finite;
}

// Adds up |weight_d| * error_d, six roundings and one for each addition in a lane off.
HWY_INLINE double SumOfProducts(const float* weight, const float* error, int head_dim) {
  const FloatTag tag;
  Floats sum = hn::Zero(tag);
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    sum = hn::MulAdd(hn::Abs(Widen(weight + d)), hn::Load(tag, error + d), sum);
  }
  if (d < head_dim) {
    sum = hn::MulAdd(hn::Abs(WidenTail(weight + d, head_dim - d)), hn::Load(tag, error + d), sum);
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
  alignas(64) float error[kHeadDimMax];
  const auto norm = [&](bool is_finite) {
    return is_finite ? FloatUp(std::sqrt(SumOfProducts(error, error, head_dim)) * slack)
                     : std::numeric_limits<float>::infinity();
  };
  if (args.value_error != nullptr) {
    *args.value_error =
        norm(ErrorsOf(Box(args.coarse.data(), head_dim), args.form, head_dim, error));
  }
  const bool is_finite = ErrorsOf(Box(args.digest.data(), head_dim), args.form, head_dim, error);
  if (args.key_error != nullptr) *args.key_error = norm(is_finite);
  const double scale = std::fabs(static_cast<double>(args.scale));
  for (size_t row = 0; row < args.logit_error.size(); ++row) {
    const float* query = &args.query[row * static_cast<size_t>(head_dim)];
    const double sum = is_finite ? SumOfProducts(query, error, head_dim) + subnormal : kInfinity;
    args.logit_error[row] =
        sum < kInfinity ? FloatUp(scale * sum * slack) : std::numeric_limits<float>::infinity();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(EncodeF32);
HWY_EXPORT(EncodeF16);
HWY_EXPORT(DecodePage);
HWY_EXPORT(ErrorsPage);

}  // namespace

void EncodeCpu(const EncodeArgs& args) {
  CheckEncode(args);
  if (args.shape.dtype == Dtype::kF32) {
    HWY_DYNAMIC_DISPATCH(EncodeF32)(args);
  } else {
    HWY_DYNAMIC_DISPATCH(EncodeF16)(args);
  }
}

void DecodeCpu(const DecodeArgs& args) {
  CheckDecode(args);
  HWY_DYNAMIC_DISPATCH(DecodePage)(args);
}

void CodeErrorsCpu(const CodeErrorArgs& args) {
  CheckCodeErrors(args);
  HWY_DYNAMIC_DISPATCH(ErrorsPage)(args);
  TightenByNorms(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
