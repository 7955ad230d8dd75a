// SPDX-License-Identifier: Apache-2.0

#include "service/model/geometry.h"

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/kernels/codes.h"
#include "service/reason.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Geometry Valid() {
  return {.layers = 3,
          .query_heads = 8,
          .kv_heads = 2,
          .head_dim = 64,
          .dtype = gpu::Dtype::kF16,
          .scale = 0.125F,
          .page_tokens = 32};
}

Geometry With(int Geometry::*field, int value) {
  Geometry geometry = Valid();
  geometry.*field = value;
  return geometry;
}

TEST(GeometryTest, LanesAreOnePerLayerAndKvHead) {
  EXPECT_EQ(Valid().lanes(), 6);
  EXPECT_EQ(Valid().group(), 4);
}

TEST(GeometryTest, PageHoldsAKeyAndAValueForEachToken) {
  EXPECT_EQ(Valid().page_shape(),
            (gpu::PageShape{.tokens = 32, .head_dim = 64, .dtype = gpu::Dtype::kF16}));
  EXPECT_EQ(Valid().page_shape().page_bytes(), 2U * 32 * 64 * 2);
}

TEST(GeometryTest, RecordHasAPageAndItsCodesForEachLane) {
  const storage::RecordGeometry record = Valid().record(77);

  EXPECT_EQ(record, (storage::RecordGeometry{
                        .layers = 3,
                        .kv_heads = 2,
                        .head_dim = 64,
                        .page_tokens = 32,
                        .dtype = 2,
                        .page_bytes = 8192,
                        .coarse_bytes = static_cast<uint32_t>(gpu::CoarseBytes({32, 64})),
                        .fine_bytes = static_cast<uint32_t>(gpu::FineBytes({32, 64})),
                        .model_fingerprint = 77}));
  EXPECT_OK(record.Validate());
}

TEST(GeometryTest, FieldsAtTheirLimitsAreValid) {
  for (const Geometry& geometry :
       {Valid(), With(&Geometry::layers, 1), With(&Geometry::layers, kLayersMax),
        With(&Geometry::head_dim, 1), With(&Geometry::head_dim, gpu::kHeadDimMax),
        With(&Geometry::page_tokens, 16), With(&Geometry::page_tokens, 64),
        With(&Geometry::query_heads, 2), With(&Geometry::query_heads, 2 * gpu::kGroupMax)}) {
    EXPECT_OK(geometry.Validate());
  }
  for (const float scale : {0x1p-20F, kScaleMax}) {
    Geometry geometry = Valid();
    geometry.scale = scale;
    EXPECT_OK(geometry.Validate());
  }
  Geometry widest = With(&Geometry::kv_heads, kKvHeadsMax);
  widest.query_heads = kKvHeadsMax;
  EXPECT_OK(widest.Validate());
}

TEST(GeometryTest, FieldBeyondItsLimitIsNamedWithValueAndLimit) {
  struct Case {
    Geometry geometry;
    std::string field;
    std::string value;
    std::string limit;
  };
  Geometry wide = With(&Geometry::kv_heads, kKvHeadsMax + 1);
  wide.query_heads = kKvHeadsMax + 1;
  for (const Case& wrong : {
           Case{With(&Geometry::layers, 0), "layers", "0", "1 to 1024"},
           Case{With(&Geometry::layers, 1025), "layers", "1025", "1 to 1024"},
           Case{With(&Geometry::layers, 1234567), "layers", "1234567", "1 to 1024"},
           Case{With(&Geometry::layers, std::numeric_limits<int>::max()), "layers",
                "2147483647 or more", "1 to 1024"},
           Case{With(&Geometry::kv_heads, 0), "kv_heads", "0", "1 to 1024"},
           Case{wide, "kv_heads", "1025", "1 to 1024"},
           Case{With(&Geometry::query_heads, 1), "query_heads", "1", "a multiple of kv_heads (2)"},
           Case{With(&Geometry::query_heads, 7), "query_heads", "7", "a multiple of kv_heads (2)"},
           Case{With(&Geometry::query_heads, 34), "query_heads", "34", "at most 16 times"},
           Case{With(&Geometry::head_dim, 0), "head_dim", "0", "1 to 256"},
           Case{With(&Geometry::head_dim, 257), "head_dim", "257", "1 to 256"},
           Case{With(&Geometry::page_tokens, 0), "page_tokens", "0", "16, 32 or 64"},
           Case{With(&Geometry::page_tokens, 48), "page_tokens", "48", "16, 32 or 64"},
           Case{With(&Geometry::page_tokens, 128), "page_tokens", "128", "16, 32 or 64"},
       }) {
    const absl::Status status = wrong.geometry.Validate();

    EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kInvalidArgument,
                                       AllOf(HasSubstr(wrong.field + " is " + wrong.value + ";"),
                                             HasSubstr(wrong.limit))));
    EXPECT_EQ(ReasonOf(status), "GEOMETRY_INVALID");
  }
}

TEST(GeometryTest, NoKvHeadsAtAllIsRefusedWithoutADivision) {
  Geometry none = Valid();
  none.kv_heads = 0;
  none.query_heads = 0;

  EXPECT_THAT(none.Validate(),
              test::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("kv_heads is 0")));
}

TEST(GeometryTest, ScaleIsWithinItsLimits) {
  for (const float scale :
       {0.0F, -1.0F, std::nextafter(0x1p-20F, 0.0F), std::nextafter(0x1p20F, 1e9F),
        std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Geometry geometry = Valid();
    geometry.scale = scale;

    EXPECT_THAT(geometry.Validate(),
                test::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("scale is ")));
  }
}

TEST(GeometryTest, FingerprintTellsApartWhateverMustAgree) {
  const std::vector<std::function<void(Geometry&)>> changes = {
      [](Geometry&) {},
      [](Geometry& g) { g.layers = 4; },
      [](Geometry& g) { g.query_heads = 4; },
      [](Geometry& g) { g.kv_heads = 4; },
      [](Geometry& g) { g.head_dim = 128; },
      [](Geometry& g) { g.dtype = gpu::Dtype::kF32; },
      [](Geometry& g) { g.scale = std::nextafter(g.scale, 1.0F); },
      [](Geometry& g) { g.page_tokens = 16; },
  };
  std::set<uint64_t> fingerprints;
  for (const auto& change : changes) {
    Geometry geometry = Valid();
    change(geometry);
    fingerprints.insert(ModelFingerprint("m", "w", geometry));
  }
  fingerprints.insert(ModelFingerprint("n", "w", Valid()));
  fingerprints.insert(ModelFingerprint("m", "x", Valid()));

  EXPECT_EQ(fingerprints.size(), changes.size() + 2);
  EXPECT_TRUE(fingerprints.contains(ModelFingerprint("m", "w", Valid())));
}

TEST(GeometryTest, FingerprintKnowsWhereTheNameEnds) {
  EXPECT_NE(ModelFingerprint("ab", "c", Valid()), ModelFingerprint("a", "bc", Valid()));
  EXPECT_NE(ModelFingerprint("a", "", Valid()), ModelFingerprint("", "a", Valid()));
}

}  // namespace
}  // namespace ebbtide::service
