// SPDX-License-Identifier: Apache-2.0
//
// Pages of several models in one launch: digests, codes and bounds have the same bits alone, in any
// company and in any order of blocks and threads.

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"

#include "tests/cuemu/machine.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/on_cuda.h"
#include "tests/unit/gpu/sample_page.h"

namespace ebbtide::gpu {
namespace {

// A page, and room for everything that is made of it.
struct PageCall {
  PageCall(Dtype dtype, int head_dim, int tokens, std::mt19937_64& random)
      : page({.dtype = dtype, .head_dim = head_dim, .page_tokens = tokens, .tokens = tokens},
             random),
        digest(DigestBytes(head_dim)),
        coarse(CoarseBytes(page.shape())),
        fine(FineBytes(page.shape())),
        decoded(2 * static_cast<size_t>(head_dim * tokens)),
        query(3 * static_cast<size_t>(head_dim)),
        errors(3),
        bounds(3 * 3) {
    std::normal_distribution<float> normal;
    for (float& element : query) element = normal(random);
    digests = {digest.data()};
    absent = {tokens};
  }

  EncodeArgs Encode() {
    return {.shape = page.shape(),
            .page = page.bytes(),
            .digest = digest,
            .coarse = coarse,
            .fine = fine};
  }
  DecodeArgs Decode() {
    return {.shape = page.shape(),
            .form = CodeForm::k8Bit,
            .digest = digest,
            .coarse = coarse,
            .fine = fine,
            .page = decoded};
  }
  CodeErrorArgs Errors() {
    return {.shape = page.shape(),
            .scale = 0.5F,
            .rows = 3,
            .query = query,
            .digest = digest,
            .coarse = coarse,
            .logit_error = errors};
  }
  BoundArgs Bound() {
    return {.head_dim = page.shape().head_dim,
            .rows = 3,
            .pages = 1,
            .scale = 0.5F,
            .query = query,
            .digest = digests,
            .absent = absent,
            .mass_low = std::span(bounds).subspan(0, 3),
            .mass_high = std::span(bounds).subspan(3, 3),
            .mass_estimate = std::span(bounds).subspan(6, 3)};
  }

  struct Answer {
    std::vector<std::byte> digest, coarse, fine;
    std::vector<float> decoded, errors, bounds;
    friend bool operator==(const Answer&, const Answer&) = default;
  };
  Answer answer() const { return {digest, coarse, fine, decoded, errors, bounds}; }
  void Clear() {
    for (auto* bytes : {&digest, &coarse, &fine}) bytes->assign(bytes->size(), std::byte{0xA5});
    for (auto* numbers : {&decoded, &errors, &bounds}) numbers->assign(numbers->size(), -1.0F);
  }

  SamplePage page;
  std::vector<std::byte> digest, coarse, fine;
  std::vector<float> decoded, query, errors, bounds;
  std::vector<const std::byte*> digests;
  std::vector<int32_t> absent;
};

// All operations, each over all of `calls` in one launch.
void RunAll(std::span<PageCall> calls) {
  std::vector<DigestArgs> digests;
  std::vector<EncodeArgs> encodes;
  std::vector<DecodeArgs> decodes;
  std::vector<CodeErrorArgs> errors;
  std::vector<BoundArgs> bounds;
  for (PageCall& call : calls) {
    call.Clear();
    digests.push_back(call.page.Args(call.digest));
    encodes.push_back(call.Encode());
    decodes.push_back(call.Decode());
    errors.push_back(call.Errors());
    bounds.push_back(call.Bound());
  }
  RunOnCuda<DigestArgs>(&DigestCuda, digests);
  RunOnCuda<EncodeArgs>(&EncodeCuda, encodes);
  RunOnCuda<DecodeArgs>(&DecodeCuda, decodes);
  RunOnCuda<CodeErrorArgs>(&CodeErrorsCuda, errors);
  RunOnCuda<BoundArgs>(&BoundCuda, bounds);
}

TEST(CudaPagesTest, PageHasTheSameBitsAloneAndInAnyCompanyAndOrder) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<PageCall> calls;
  for (const auto& [head_dim, tokens] : {std::pair(64, 32), {7, 2}, {77, 17}, {128, 64}}) {
    for (const Dtype dtype : kDtypes) {
      calls.emplace_back(dtype, head_dim, tokens, random);
    }
  }
  for (PageCall& call : calls) call.digests = {call.digest.data()};  // They have moved.
  std::vector<PageCall::Answer> alone;
  for (PageCall& call : calls) {
    RunAll({&call, 1});
    alone.push_back(call.answer());
  }

  for (const uint32_t seed : {0U, 1U, 2U}) {
    cuemu::SetSeed(seed);
    RunAll(calls);
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].answer(), alone[i]) << "page " << i << " seed " << seed;
    }
  }
  cuemu::SetSeed(0);
}

}  // namespace
}  // namespace ebbtide::gpu
