// SPDX-License-Identifier: Apache-2.0
//
// Kernels of attention and of pages at every head_dim, dtype and group that models come in, CUDA
// against the reference. What they promise beyond that is held by each contract's own test; scores
// and who leaves by them: score_grid_test.cc.

#include "tests/unit/gpu/kernel_grid.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"

#include "gpu/kernels/append.h"
#include "gpu/kernels/attend_page.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/gather.h"
#include "gpu/kernels/merge.h"
#include "tests/unit/gpu/coded_page.h"
#include "tests/unit/gpu/sample_page.h"

namespace ebbtide::gpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

TEST(ExpectNearTest, HoldsOnlyWhatIsCloseOrTheSame) {
  ExpectNear<float>({1.5F, -kInfinity, kNotANumber}, {1, -kInfinity, kNotANumber}, 0.5, 0);
  ExpectNear<float>({0.5F}, {0}, 0, 0.5);
  EXPECT_FATAL_FAILURE(ExpectNear<float>({1.5F}, {1}, 0.25, 0.125), "[0] 1.5 of 1");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({1}, {}, 1, 1), "size");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({1}, {-kInfinity}, 1e-6, 1), "1 of -inf");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({kInfinity}, {-kInfinity}, 1e-6, 1), "inf of -inf");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({kInfinity}, {1}, 1e-6, 1), "inf of 1");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({kNotANumber}, {1}, 1, 1), "nan of 1");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({kNotANumber}, {kInfinity}, 1, 1), "nan of inf");
  EXPECT_FATAL_FAILURE(ExpectNear<float>({1}, {kNotANumber}, 1, 1), "1 of nan");
}

using CudaGridTest = KernelGrid;
INSTANTIATE_TEST_SUITE_P(Every, CudaGridTest, testing::ValuesIn(kDtypes), GridDtypeName);

std::vector<float> Normals(size_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(random);
  return numbers;
}

float Scale(int head_dim) {
  return 1 / std::sqrt(static_cast<float>(head_dim));
}

// --- Attention ---

TEST_P(CudaGridTest, Attend) {
  ForEachGroup([&](int head_dim, int group) {
    for (const int queries : {1, 3}) {
      const GridLane lane(GridLane::Size(GetParam(), head_dim), group, queries, random_);
      GridLane::Answer answer = lane.NoAnswer();

      AttendOnCuda(lane.Args(answer));

      ExpectNear(answer.output, lane.answer().output, 1e-6, 1e-6);
      ExpectNear(answer.lse, lane.answer().lse, 2e-6, 2e-6);
      ExpectNear(answer.logits, lane.answer().logits, 1e-6, 2e-6);
    }
  });
}

TEST_P(CudaGridTest, AttendParts) {
  ForEachGroup([&](int head_dim, int group) {
    for (const int queries : {1, 3}) {
      const GridLane lane(GridLane::Size(GetParam(), head_dim), group, queries, random_);
      GridLane::Answer answer = lane.NoAnswer();
      const size_t parts = lane.lane().extents().size() * lane.rows();
      std::vector<float> output(parts * lane.lane().dim()), lse(parts);
      std::vector<float> expected_output = output, expected_lse = lse;
      AttendArgs args = lane.Args(answer);
      args.part_output = expected_output;
      args.part_lse = expected_lse;
      AttendReference(args);
      args.part_output = output;
      args.part_lse = lse;

      AttendOnCuda(args);

      ExpectNear(output, expected_output, 1e-6, 1e-6);
      ExpectNear(lse, expected_lse, 2e-6, 2e-6);
      ExpectNear(answer.output, lane.answer().output, 1e-6, 1e-6);
      ExpectNear(answer.lse, lane.answer().lse, 2e-6, 2e-6);
      ExpectNear(answer.logits, lane.answer().logits, 1e-6, 2e-6);
    }
  });
}

TEST_P(CudaGridTest, Merge) {
  ForEachGroup([&](int head_dim, int group) {
    const SampleLane::Options size = GridLane::Size(GetParam(), head_dim);
    const GridLane::Answer part = GridLane(size, group, 2, random_).answer();
    GridLane::Answer expected = GridLane(size, group, 2, random_).answer();
    GridLane::Answer whole = expected;
    const auto with_part = [&](GridLane::Answer& answer) {
      return MergeArgs{.rows = 2 * group,
                       .head_dim = head_dim,
                       .part_output = part.output,
                       .part_lse = part.lse,
                       .output = answer.output,
                       .lse = answer.lse};
    };

    MergeReference(with_part(expected));
    MergeOnCuda(with_part(whole));

    ExpectNear(whole.output, expected.output, 1e-6, 1e-7);
    ExpectNear(whole.lse, expected.lse, 1e-6, 1e-7);
  });
}

// A page as decoding leaves it, in f32, and the longest of its values.
struct PlainPage {
  explicit PlainPage(const SamplePage& page) {
    for (const bool is_value : {false, true}) {
      for (int j = 0; j < page.tokens(); ++j) {
        double squares = 0;
        for (int d = 0; d < page.shape().head_dim; ++d) {
          const double x = is_value ? page.value(j, d) : page.key(j, d);
          elements.push_back(static_cast<float>(x));
          squares += x * x;
        }
        if (is_value) longest = std::max(longest, std::sqrt(squares));
      }
    }
  }

  std::vector<float> elements;
  double longest = 0;
};

struct PageAnswer {
  PageAnswer(size_t rows, size_t head_dim, size_t tokens)
      : output(rows * head_dim), lse(rows), focal(output), logits(rows * tokens), spread(rows) {}

  // Of all rows, each, focus and focal by turns.
  std::vector<float> Spreads() const {
    std::vector<float> numbers;
    for (const Spread& s : spread) numbers.insert(numbers.end(), {s.each, s.focus, s.focal});
    return numbers;
  }

  std::vector<float> output, lse, focal, logits;
  std::vector<Spread> spread;
};

TEST_P(CudaGridTest, AttendPage) {
  constexpr int kTokens = 32;
  ForEachGroup([&](int head_dim, int group) {
    const PlainPage page(SamplePage({.dtype = GetParam(), .head_dim = head_dim}, random_));
    const auto rows = static_cast<size_t>(group);
    const std::vector<float> query = Normals(rows * static_cast<size_t>(head_dim), random_);
    std::vector<uint64_t> visible(rows, 0xFFFF'FFFF);
    visible[0] = 0x1234'5678;
    PageAnswer expected(rows, static_cast<size_t>(head_dim), kTokens);
    PageAnswer answer = expected;
    const auto args = [&](PageAnswer& into) {
      return AttendPageArgs{.rows = group,
                            .tokens = kTokens,
                            .head_dim = head_dim,
                            .scale = Scale(head_dim),
                            .query = query,
                            .page = page.elements,
                            .visible = visible,
                            .output = into.output,
                            .lse = into.lse,
                            .focal_output = into.focal,
                            .spread = into.spread,
                            .logits = into.logits};
    };

    AttendPageReference(args(expected));
    AttendPageOnCuda(args(answer));

    ExpectNear(answer.output, expected.output, 1e-6, 1e-6);
    ExpectNear(answer.lse, expected.lse, 2e-6, 2e-6);
    ExpectNear(answer.logits, expected.logits, 1e-6, 2e-6);
    ExpectNear(answer.focal, expected.focal, 0, kFocalOutputError * page.longest);
    ExpectNear(answer.Spreads(), expected.Spreads(), 1.5e-4, 1e-20);
  });
}

// --- Digests, and what is known from them ---

TEST_P(CudaGridTest, Digest) {
  ForEachHeadDim([&](int head_dim) {
    for (const int tokens : {32, 13}) {
      const SamplePage page({.dtype = GetParam(), .head_dim = head_dim, .tokens = tokens}, random_);
      std::vector<std::byte> expected(DigestBytes(head_dim));
      std::vector<std::byte> digest = expected;

      DigestReference(page.Args(expected));
      DigestOnCuda(page.Args(digest));

      const size_t halves = expected.size() - sizeof(DigestTail);
      EXPECT_EQ(std::memcmp(digest.data(), expected.data(), halves), 0);
      const auto norms = [&](const std::vector<std::byte>& of) {
        const DigestTail& tail = DigestView(of.data(), head_dim).tail;
        return std::vector<float>{tail.value_radius, tail.value_norm_max, tail.key_norm_max,
                                  tail.key_mean_error, static_cast<float>(tail.tokens)};
      };
      ExpectNear(norms(digest), norms(expected), 1e-6, 0);
    }
  });
}

// Digests of pages, some of whose tokens are absent; more pages than a block takes.
struct DigestedPages {
  static constexpr int kPages = 5;

  DigestedPages(Dtype dtype, int head_dim, std::mt19937_64& random) {
    for (int p = 0; p < kPages; ++p) {
      pages.emplace_back(
          SamplePage::Options{
              .dtype = dtype, .head_dim = head_dim, .page_tokens = 16, .tokens = 16 - p},
          random);
      digests.emplace_back(DigestBytes(head_dim));
      DigestReference(pages.back().Args(digests.back()));
      absent.push_back(p % 2 == 0 ? 16 - p : p);
    }
    for (const auto& digest : digests) pointers.push_back(digest.data());
  }

  // Of the first tokens, those that are resident.
  std::vector<float> ResidentSums(const std::vector<float>& query, float scale) const {
    const auto head_dim = static_cast<size_t>(pages[0].shape().head_dim);
    std::vector<float> sums;
    for (size_t first = 0; first < query.size(); first += head_dim) {
      for (size_t p = 0; p < pages.size(); ++p) {
        double sum = 0;
        for (int j = 0; j < pages[p].tokens() - absent[p]; ++j) {
          for (size_t d = 0; d < head_dim; ++d) {
            sum += static_cast<double>(query[first + d]) * pages[p].key(j, static_cast<int>(d));
          }
        }
        sums.push_back(static_cast<float>(scale * sum));
      }
    }
    return sums;
  }

  std::vector<SamplePage> pages;
  std::vector<std::vector<std::byte>> digests;
  std::vector<const std::byte*> pointers;
  std::vector<int32_t> absent;
};

TEST_P(CudaGridTest, Bound) {
  ForEachGroup([&](int head_dim, int group) {
    const DigestedPages pages(GetParam(), head_dim, random_);
    const std::vector<float> query = Normals(static_cast<size_t>(group * head_dim), random_);
    const std::vector<float> sums = pages.ResidentSums(query, Scale(head_dim));
    const std::vector<float> errors(static_cast<size_t>(group), 1e-5F);
    const auto bounds_by = [&](void (*bound)(const BoundArgs&)) {
      std::vector<std::vector<float>> bounds(3, std::vector<float>(sums.size()));
      bound({.head_dim = head_dim,
             .rows = group,
             .pages = DigestedPages::kPages,
             .scale = Scale(head_dim),
             .query = query,
             .digest = pages.pointers,
             .absent = pages.absent,
             .resident_logit_sum = sums,
             .resident_logit_error = errors,
             .mass_low = bounds[0],
             .mass_high = bounds[1],
             .mass_estimate = bounds[2]});
      return bounds;
    };

    const auto expected = bounds_by(&BoundReference);
    const auto bounds = bounds_by(&BoundOnCuda);

    for (size_t i = 0; i < bounds.size(); ++i) ExpectNear(bounds[i], expected[i], 1e-6, 1e-6);
  });
}

TEST_P(CudaGridTest, ValueDistance) {
  ForEachGroup([&](int head_dim, int group) {
    const DigestedPages pages(GetParam(), head_dim, random_);
    const std::vector<float> output = Normals(static_cast<size_t>(group * head_dim), random_);
    const auto distances_by = [&](void (*distance_of)(const ValueDistanceArgs&)) {
      std::vector<float> distance(static_cast<size_t>(group * DigestedPages::kPages));
      distance_of({.head_dim = head_dim,
                   .rows = group,
                   .pages = DigestedPages::kPages,
                   .output = output,
                   .digest = pages.pointers,
                   .distance = distance});
      return distance;
    };

    ExpectNear(distances_by(&ValueDistanceOnCuda), distances_by(&ValueDistanceReference), 1e-6, 0);
  });
}

// --- Codes ---

constexpr CodeForm kForms[] = {CodeForm::k4Bit, CodeForm::k8Bit};

Coded EncodedBy(void (*encode)(const EncodeArgs&), const CodedPage& page) {
  Coded coded{std::vector<std::byte>(CoarseBytes(page.shape())),
              std::vector<std::byte>(FineBytes(page.shape()))};
  encode(page.Encoding(coded.coarse, coded.fine));
  return coded;
}

TEST_P(CudaGridTest, EncodeAndDecode) {
  ForEachHeadDim([&](int head_dim) {
    const CodedPage page({.dtype = GetParam(), .head_dim = head_dim}, random_);
    const Coded expected = EncodedBy(&EncodeReference, page);

    const Coded coded = EncodedBy(&EncodeOnCuda, page);

    EXPECT_EQ(coded.coarse, expected.coarse);
    EXPECT_EQ(coded.fine, expected.fine);
    for (const CodeForm form : kForms) {
      const auto decoded_by = [&](void (*decode)(const DecodeArgs&)) {
        std::vector<float> decoded(static_cast<size_t>(page.rows() * head_dim));
        decode({.shape = page.shape(),
                .form = form,
                .digest = page.digest(),
                .coarse = expected.coarse,
                .fine = expected.FineOf(form),
                .page = decoded});
        return decoded;
      };
      EXPECT_EQ(decoded_by(&DecodeOnCuda), decoded_by(&DecodeReference));
    }
  });
}

TEST_P(CudaGridTest, CodeErrors) {
  ForEachGroup([&](int head_dim, int group) {
    const CodedPage page({.dtype = GetParam(), .head_dim = head_dim, .tokens = 8}, random_);
    const Coded coded = EncodedBy(&EncodeReference, page);
    const std::vector<float> query = Normals(static_cast<size_t>(group * head_dim), random_);
    for (const CodeForm form : kForms) {
      const auto errors_by = [&](void (*errors_of)(const CodeErrorArgs&)) {
        std::vector<float> logit(static_cast<size_t>(group)), joint(logit), deviation(logit);
        std::vector<float> page_errors(4);
        errors_of({.shape = page.shape(),
                   .form = form,
                   .scale = Scale(head_dim),
                   .rows = group,
                   .query = query,
                   .digest = page.digest(),
                   .coarse = coded.coarse,
                   .logit_error = logit,
                   .logit_error_joint = joint,
                   .logit_deviation = deviation,
                   .key_error = &page_errors[0],
                   .value_error = &page_errors[1],
                   .value_error_joint = &page_errors[2],
                   .value_deviation = &page_errors[3]});
        for (const auto& rows : {logit, joint, deviation}) {
          page_errors.insert(page_errors.end(), rows.begin(), rows.end());
        }
        return page_errors;
      };

      ExpectNear(errors_by(&CodeErrorsOnCuda), errors_by(&CodeErrorsReference), 1e-6, 0);
    }
  });
}

// --- Rows of tokens on the move ---

TEST_P(CudaGridTest, Append) {
  constexpr int kTokens = 5;
  ForEachHeadDim([&](int head_dim) {
    for (const size_t shift : {0, 1}) {  // A worker's rows start at any address.
      const PageShape shape{kTokens, head_dim, GetParam()};
      const SamplePage page(
          {.dtype = GetParam(), .head_dim = head_dim, .page_tokens = kTokens, .tokens = kTokens},
          random_);
      std::vector<std::byte> rows(shift);
      rows.insert(rows.end(), page.bytes().begin(), page.bytes().end());
      std::vector<std::byte> slots(shape.page_bytes());
      std::vector<std::byte*> key_slot, value_slot;
      for (size_t token = kTokens; token-- > 0;) {
        key_slot.push_back(slots.data() + token * shape.row_bytes());
        value_slot.push_back(key_slot.back() + shape.half_bytes());
      }
      std::vector<float> key_norm(kTokens), value_norm(kTokens);
      const AppendArgs args = {.dtype = GetParam(),
                               .head_dim = head_dim,
                               .tokens = kTokens,
                               .key = rows.data() + shift,
                               .value = rows.data() + shift + shape.half_bytes(),
                               .stride = shape.row_bytes(),
                               .key_slot = key_slot,
                               .value_slot = value_slot,
                               .key_norm = key_norm,
                               .value_norm = value_norm};

      AppendOnCuda(args);

      const std::vector<std::byte> appended = slots;
      const std::vector<float> key_norms = key_norm;
      const std::vector<float> value_norms = value_norm;
      std::ranges::fill(slots, std::byte{0});
      AppendReference(args);
      EXPECT_EQ(appended, slots);
      ExpectNear(key_norms, key_norm, 1e-6, 0);
      ExpectNear(value_norms, value_norm, 1e-6, 0);
    }
  });
}

TEST_P(CudaGridTest, Gather) {
  ForEachHeadDim([&](int head_dim) {
    const PageShape shape{.tokens = 32, .head_dim = head_dim, .dtype = GetParam()};
    const SampleLane lane(GridLane::Size(GetParam(), head_dim), random_);
    std::vector<const std::byte*> key_slot, value_slot;
    for (const Extent& extent : lane.extents()) {  // Every second, then a run.
      for (int s = 0; s < extent.slots; s += extent.slots == GridLane::kPairs ? 2 : 1) {
        const size_t offset = static_cast<size_t>(s) * shape.row_bytes();
        key_slot.push_back(extent.key + offset);
        value_slot.push_back(extent.value + offset);
      }
    }
    std::vector<std::byte> expected(shape.page_bytes(), std::byte{0xA5});
    std::vector<std::byte> page = expected;

    GatherReference({shape, key_slot, value_slot, expected});
    GatherOnCuda({shape, key_slot, value_slot, page});

    EXPECT_EQ(page, expected);
  });
}

}  // namespace
}  // namespace ebbtide::gpu
