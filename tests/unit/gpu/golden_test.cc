// SPDX-License-Identifier: Apache-2.0
//
// Golden vectors of attention, merging, mass and selection, on the reference, every SIMD target and
// CUDA. Those of scores, digests and bounds: golden_scores_test.cc.

#include "tests/unit/gpu/golden.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/merge.h"
#include "gpu/kernels/select.h"
#include "gpu/kernels/window.h"
#include "tests/unit/gpu/each_target.h"

namespace ebbtide::gpu {
namespace {

using golden::Case;
using golden::Cases;
using golden::ExpectClose;
using golden::Floats;
using golden::Ints;
using golden::Json;
using golden::Shape;

TEST(GoldenFolderTest, HoldsEveryOperationAndSaysWhatIsNotRun) {
  for (const std::string_view op : golden::Operations()) {
    EXPECT_FALSE(Cases(op).empty()) << op;
  }
  for (const auto& entry : std::filesystem::directory_iterator(golden::Folder())) {
    const std::string op = entry.path().stem().string();
    const auto known = golden::Operations();
    if (entry.path().extension() != ".json" || std::binary_search(known.begin(), known.end(), op)) {
      continue;
    }
    std::cout << "not run: " << op << ", which no kernel here computes\n";
  }
}

class GoldenTest : public OnReferenceAndTarget {};
INSTANTIATE_TEST_SUITE_P(Every, GoldenTest, ReferenceTargetsAndCuda(), TargetName);

// Attention of a case's Q over its K and V, in extents of 20 slots.
struct Attention {
  Attention(const Json& inputs, const Json& values, std::vector<int32_t> query_index,
            std::vector<int32_t> key_index)
      : key(Floats(inputs.at("K"))),
        value(Floats(values)),
        query(Floats(inputs.at("Q"))),
        seen_up_to(std::move(query_index)),
        index(std::move(key_index)) {
    const std::vector<int> shape = Shape(inputs.at("Q"));
    group = shape[0];
    queries = shape[1];
    head_dim = shape[2];
    const auto slots = static_cast<int>(index.size());
    for (int first = 0; first < slots; first += 20) {
      const auto at = static_cast<size_t>(first * head_dim);
      extents.push_back({.key = reinterpret_cast<const std::byte*>(&key[at]),
                         .value = reinterpret_cast<const std::byte*>(&value[at]),
                         .index = &index[static_cast<size_t>(first)],
                         .slots = std::min(20, slots - first)});
    }
    output.resize(query.size());
    lse.resize(static_cast<size_t>(group * queries));
    logits.resize(lse.size() * index.size());
  }

  AttendArgs Args() {
    return {.dtype = Dtype::kF32,
            .head_dim = head_dim,
            .group = group,
            .queries = queries,
            .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
            .extents = extents,
            .query = query,
            .query_index = seen_up_to,
            .output = output,
            .lse = lse,
            .logits = logits};
  }

  int group = 0;
  int queries = 0;
  int head_dim = 0;
  std::vector<float> key, value, query;
  std::vector<int32_t> seen_up_to, index;
  std::vector<Extent> extents;
  std::vector<float> output, lse, logits;
};

TEST_P(GoldenTest, Attend) {
  for (const Case& golden : Cases("attend")) {
    SCOPED_TRACE(golden.name);
    Attention attention(golden.inputs, golden.inputs.at("V"), Ints(golden.inputs.at("q_pos")),
                        Ints(golden.inputs.at("k_pos")));

    Choose(&AttendReference, &AttendCpu, &AttendOnCuda)(attention.Args());

    ExpectClose(attention.output, golden.expect.at("O"), "O");
    ExpectClose(attention.lse, golden.expect.at("lse"), "lse");
    std::vector<double> weight;
    for (size_t i = 0; i < attention.logits.size(); ++i) {
      const double lse = attention.lse[i / attention.index.size()];
      weight.push_back(std::exp(static_cast<double>(attention.logits[i]) - lse));
    }
    ExpectClose(weight, golden.expect.at("A"), "A");
  }
}

TEST_P(GoldenTest, LseMerge) {
  for (const Case& golden : Cases("lse_merge")) {
    SCOPED_TRACE(golden.name);
    std::vector<float> output = Floats(golden.inputs.at("o1"));
    std::vector<float> lse = Floats(golden.inputs.at("lse1"));
    const std::vector<float> part = Floats(golden.inputs.at("o2"));
    const std::vector<float> part_lse = Floats(golden.inputs.at("lse2"));

    Choose(&MergeReference, &MergeCpu, &MergeOnCuda)({.rows = 1,
                                                      .head_dim = static_cast<int>(output.size()),
                                                      .part_output = part,
                                                      .part_lse = part_lse,
                                                      .output = output,
                                                      .lse = lse});

    ExpectClose(output, golden.expect.at("o"), "o");
    ExpectClose(lse, golden.expect.at("lse"), "lse");
  }
}

TEST_P(GoldenTest, Select) {
  for (const Case& golden : Cases("select")) {
    SCOPED_TRACE(golden.name);
    const std::vector<float> score = Floats(golden.inputs.at("score"));
    std::vector<int32_t> index(score.size());
    std::iota(index.begin(), index.end(), 0);
    std::vector<uint8_t> eligible;
    for (const int32_t is_protected : Ints(golden.inputs.at("protected"))) {
      eligible.push_back(is_protected != 0 ? 0 : 1);
    }
    const size_t budget = golden.inputs.at("budget").get<size_t>();

    const std::vector<int32_t> leaving = Choose(&SelectReference, &SelectCpu, &SelectOnCuda)(
        {score, index, eligible, score.size() - budget});

    std::vector<int32_t> keep;
    for (const int32_t token : index) {
      if (std::find(leaving.begin(), leaving.end(), token) == leaving.end()) keep.push_back(token);
    }
    EXPECT_EQ(keep, Ints(golden.expect.at("keep")));
  }
}

// Mass of softmax rows given as such: their logarithms are logits, of log-sum-exp 0.
std::vector<double> MassOfRows(void (*mass_of)(const MassArgs&), int group, int queries,
                               std::vector<float> rows) {
  for (float& weight : rows) weight = std::log(weight);
  const std::vector<float> lse(static_cast<size_t>(group * queries), 0.0F);
  std::vector<double> mass(rows.size() / lse.size(), 0.0);
  mass_of({.group = group,
           .queries = queries,
           .slots = static_cast<int>(mass.size()),
           .logits = rows,
           .lse = lse,
           .mass = mass});
  return mass;
}

TEST_P(GoldenTest, H2o) {
  for (const Case& golden : Cases("h2o")) {
    SCOPED_TRACE(golden.name);
    const Json& rows = golden.inputs.at("A");
    const std::vector<int> shape = Shape(rows);

    const std::vector<double> mass =
        MassOfRows(Choose(&MassReference, &MassCpu, &MassOnCuda), shape[0], shape[1], Floats(rows));

    ExpectClose(mass, golden.expect.at("score"), "score");
  }
}

TEST_P(GoldenTest, Tova) {
  for (const Case& golden : Cases("tova")) {
    SCOPED_TRACE(golden.name);
    std::vector<float> last_rows;
    for (const Json& head : golden.inputs.at("A")) {
      const std::vector<float> row = Floats(head.back());
      last_rows.insert(last_rows.end(), row.begin(), row.end());
    }
    const int group = Shape(golden.inputs.at("A"))[0];

    const std::vector<double> mass =
        MassOfRows(Choose(&MassReference, &MassCpu, &MassOnCuda), group, 1, last_rows);

    ExpectClose(mass, golden.expect.at("score"), "score");
  }
}

// The last tokens of the lane ask; what those before them draw is pooled.
TEST_P(GoldenTest, SnapKv) {
  for (const Case& golden : Cases("snapkv")) {
    SCOPED_TRACE(golden.name);
    const Json& keys = golden.inputs.at("K");
    std::vector<int32_t> index(keys.size());
    std::iota(index.begin(), index.end(), 0);
    const auto window = static_cast<size_t>(Shape(golden.inputs.at("Q"))[1]);
    const std::vector<int32_t> last(index.end() - static_cast<ptrdiff_t>(window), index.end());
    Attention attention(golden.inputs, keys, last, index);
    std::vector<float> mass(index.size());

    const AttendArgs args = attention.Args();
    Choose(&WindowReference, &WindowCpu, &WindowOnCuda)({.dtype = args.dtype,
                                                         .head_dim = args.head_dim,
                                                         .group = args.group,
                                                         .queries = args.queries,
                                                         .scale = args.scale,
                                                         .extents = args.extents,
                                                         .query = args.query,
                                                         .query_index = args.query_index,
                                                         .mass = mass});
    std::vector<float> prefix;  // The mean over the window, not its sum: the same order.
    for (size_t s = 0; s < mass.size() - window; ++s) {
      prefix.push_back(mass[s] / static_cast<float>(window));
    }
    std::vector<float> pooled(prefix.size());
    const bool is_average = golden.inputs.at("pool") == "avg";
    (is_average ? Choose(&AveragePool, &AveragePool, &AveragePoolOnCuda)
                : Choose(&MaxPool, &MaxPool, &MaxPoolOnCuda))(
        {.kernel = golden.inputs.at("kernel").get<int>(), .mass = prefix, .pooled = pooled});

    ExpectClose(pooled, golden.expect.at("score"), "score");
  }
}

}  // namespace
}  // namespace ebbtide::gpu
