// SPDX-License-Identifier: Apache-2.0
//
// Decoding: two blocks for each page, one for its keys and one for its values, a thread for each
// byte of nibbles, which is two elements. The errors of a form: one block for each page, a warp for
// each row; sums are f64. Encoding is in encode_cuda.cu.

#include "gpu/kernels/codes.h"

#include <cmath>
#include <vector>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/code_box.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr double kSlack = 1 + 1e-12;  // Far more than a sum of 256 terms is off in f64.

struct Decoding {
  const std::byte* box;  // Of keys or of values.
  const std::byte* coarse;
  const std::byte* fine;  // Null for 4 bits.
  float* elements;
  int32_t count;
  int32_t head_dim;
};

__global__ void __launch_bounds__(kThreads) DecodeHalves(const Decoding* halves) {
  __shared__ CodeChannel channels[kHeadDimMax];
  const Decoding half = halves[blockIdx.x];
  for (int d = static_cast<int>(threadIdx.x); d < half.head_dim; d += kThreads) {
    channels[d] = ChannelAt(half.box, half.head_dim, d);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < half.count; i += kThreads) {
    const CodeChannel& channel = channels[i % half.head_dim];
    const auto at = static_cast<size_t>(i);
    const uint32_t coarse = NibbleAt(half.coarse, at);
    half.elements[i] =
        half.fine == nullptr
            ? StepsToFloat(channel, kCoarseSteps, coarse)
            : StepsToFloat(channel, kFineSteps, FineSteps(16 * coarse + NibbleAt(half.fine, at)));
  }
}

struct Errors {
  const float* query;
  const std::byte* key_box;
  const std::byte* value_box;
  const std::byte* norms;  // Of this form.
  float* logit_error;
  float* logit_error_joint;  // These may be null: not wanted.
  float* logit_deviation;
  float* key_error;
  float* value_error;
  float* value_error_joint;
  float* value_deviation;
  int32_t rows;
  int32_t head_dim;
  float scale;
  double step_error;
  double step_deviation;
};

// As CodeElementError (codes.cc), where its proof is; infinite where the channel is.
__device__ double ElementError(const Errors& args, const CodeChannel& channel) {
  if (!channel.is_finite()) return static_cast<double>(INFINITY);
  constexpr double kUnit = 0x1p-24;
  const double width = static_cast<double>(channel.high) - static_cast<double>(channel.low);
  if (width == 0) return 0;
  const auto largest = static_cast<double>(fmaxf(fabsf(channel.low), fabsf(channel.high)));
  return width * args.step_error + kUnit * (8.5 * width + 1.01 * largest);
}

// Sums over the channels of a box, joined over the warp.
struct BoxSums {
  double errors = 0;  // |weight| error
  double squared_errors = 0;
  double squared_widths = 0;  // (weight width)^2
};
__device__ BoxSums SumBox(const Errors& args, const std::byte* box, const float* weight) {
  BoxSums sums;
  for (int d = static_cast<int>(threadIdx.x) % kWarpThreads; d < args.head_dim; d += kWarpThreads) {
    const CodeChannel channel = ChannelAt(box, args.head_dim, d);
    const double w = weight == nullptr ? 1 : static_cast<double>(weight[d]);
    const double error = ElementError(args, channel);
    const double width =
        channel.is_finite()
            ? (static_cast<double>(channel.high) - static_cast<double>(channel.low)) * w
            : 0;
    sums.errors += std::isinf(error) ? error : fabs(w) * error;
    sums.squared_errors += error * error;
    sums.squared_widths += width * width;
  }
  return {WarpJoin(sums.errors, Plus{}), WarpJoin(sums.squared_errors, Plus{}),
          WarpJoin(sums.squared_widths, Plus{})};
}

// x * norm, rounded up; infinite with an infinite norm even where x is 0.
__device__ __forceinline__ float TimesNorm(double x, float norm) {
  return std::isinf(norm) ? norm : RoundUp32(x * static_cast<double>(norm) * kSlack);
}

__device__ void StoreRow(const Errors& args, const CodeNorm& norm, int row) {
  const BoxSums sums =
      SumBox(args, args.key_box,
             args.query + static_cast<size_t>(row) * static_cast<size_t>(args.head_dim));
  if (threadIdx.x % kWarpThreads != 0) return;
  const double scale = fabs(static_cast<double>(args.scale));
  const double reach = scale * (sqrt(sums.squared_widths) * kSlack);
  const float by_channel =
      std::isinf(sums.errors) ? INFINITY : RoundUp32(scale * sums.errors * kSlack);
  args.logit_error[row] = fminf(by_channel, TimesNorm(reach, norm.each));
  if (args.logit_error_joint != nullptr) args.logit_error_joint[row] = TimesNorm(reach, norm.joint);
  if (args.logit_deviation != nullptr) {
    args.logit_deviation[row] = static_cast<float>(reach * args.step_deviation);
  }
}

__global__ void __launch_bounds__(kThreads) FormErrors(const Errors* pages) {
  const Errors args = pages[blockIdx.x];
  const auto norms = ReadAt<CodeNorms>(args.norms);
  const auto warp = static_cast<int>(threadIdx.x / kWarpThreads);
  for (int row = warp; row < args.rows; row += kWarps) StoreRow(args, norms.key, row);
  if (warp != 0) return;
  const BoxSums keys = SumBox(args, args.key_box, nullptr);
  const BoxSums values = SumBox(args, args.value_box, nullptr);
  if (threadIdx.x != 0) return;
  if (args.key_error != nullptr) *args.key_error = RoundUp32(sqrt(keys.squared_errors) * kSlack);
  if (args.value_error != nullptr) {
    *args.value_error = fminf(RoundUp32(sqrt(values.squared_errors) * kSlack), norms.value.each);
  }
  if (args.value_error_joint != nullptr) *args.value_error_joint = norms.value.joint;
  if (args.value_deviation != nullptr) {
    *args.value_deviation =
        static_cast<float>(sqrt(values.squared_widths) * kSlack * args.step_deviation);
  }
}

}  // namespace

absl::Status DecodeCuda(std::span<const DecodeArgs> lanes, CudaStream& stream) {
  std::vector<Decoding> halves;
  for (const DecodeArgs& args : lanes) {
    CheckDecode(args);
    const bool is_coarse = args.form == CodeForm::k4Bit;
    const std::byte* const nibbles = args.coarse.data() + CoarseHeadBytes(args.shape);
    for (const size_t half : {0, 1}) {
      const size_t offset = half * NibbleBytes(args.shape);
      halves.push_back({.box = half == 0 ? args.digest.data() : args.coarse.data(),
                        .coarse = nibbles + offset,
                        .fine = is_coarse ? nullptr : args.fine.data() + offset,
                        .elements = args.page.data() + half * (args.page.size() / 2),
                        .count = static_cast<int32_t>(args.page.size() / 2),
                        .head_dim = args.shape.head_dim});
    }
  }
  if (halves.empty()) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Decoding* there, stream.Upload(std::span<const Decoding>(halves)));
  return Launch(stream,
                {.operation = "decode", .grid = GridOf(halves.size(), 1), .threads = kThreads},
                &DecodeHalves, there);
}

absl::Status CodeErrorsCuda(std::span<const CodeErrorArgs> lanes, CudaStream& stream) {
  const auto wanted = [](std::span<float> rows) { return rows.empty() ? nullptr : rows.data(); };
  std::vector<Errors> pages;
  for (const CodeErrorArgs& args : lanes) {
    CheckCodeErrors(args);
    const size_t norms =
        CodeBoxBytes(args.shape) + (args.form == CodeForm::k4Bit ? 0 : sizeof(CodeNorms));
    pages.push_back({.query = args.query.data(),
                     .key_box = args.digest.data(),
                     .value_box = args.coarse.data(),
                     .norms = args.coarse.data() + norms,
                     .logit_error = args.logit_error.data(),
                     .logit_error_joint = wanted(args.logit_error_joint),
                     .logit_deviation = wanted(args.logit_deviation),
                     .key_error = args.key_error,
                     .value_error = args.value_error,
                     .value_error_joint = args.value_error_joint,
                     .value_deviation = args.value_deviation,
                     .rows = args.rows,
                     .head_dim = args.shape.head_dim,
                     .scale = args.scale,
                     .step_error = CodeStepError(args.form),
                     .step_deviation = 1 / (CodeSteps(args.form) * std::sqrt(12.0))});
  }
  if (pages.empty()) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Errors* there, stream.Upload(std::span<const Errors>(pages)));
  return Launch(stream,
                {.operation = "code errors", .grid = GridOf(pages.size(), 1), .threads = kThreads},
                &FormErrors, there);
}

}  // namespace ebbtide::gpu
