// SPDX-License-Identifier: Apache-2.0
//
// Sizes are parsed by table: each row is a text and what it means, or why it is refused.

#include "base/bytes.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"

namespace ebbtide {
namespace {

using test::IsOkAndHolds;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

TEST(ParseBytesTest, UnitsAreAsWritten) {
  EXPECT_THAT(ParseBytes("0"), IsOkAndHolds(0u));
  EXPECT_THAT(ParseBytes("4096"), IsOkAndHolds(4096u));
  EXPECT_THAT(ParseBytes("4096B"), IsOkAndHolds(4096u));
  EXPECT_THAT(ParseBytes("1KiB"), IsOkAndHolds(1024u));
  EXPECT_THAT(ParseBytes("512MiB"), IsOkAndHolds(536870912u));
  EXPECT_THAT(ParseBytes("16 GiB"), IsOkAndHolds(17179869184u));
  EXPECT_THAT(ParseBytes("2TiB"), IsOkAndHolds(2199023255552u));
  EXPECT_THAT(ParseBytes("3kB"), IsOkAndHolds(3000u));
  EXPECT_THAT(ParseBytes("3MB"), IsOkAndHolds(3000000u));
  EXPECT_THAT(ParseBytes("3GB"), IsOkAndHolds(3000000000u));
  EXPECT_THAT(ParseBytes("3TB"), IsOkAndHolds(3000000000000u));
}

TEST(ParseBytesTest, FractionsAreCutToWholeBytes) {
  EXPECT_THAT(ParseBytes("1.5GiB"), IsOkAndHolds(1610612736u));
  EXPECT_THAT(ParseBytes("0.25 MiB"), IsOkAndHolds(262144u));
  EXPECT_THAT(ParseBytes("0.001KiB"), IsOkAndHolds(1u));
  EXPECT_THAT(ParseBytes("1.999B"), IsOkAndHolds(1u));
}

TEST(ParseBytesTest, TheLargestNumberIsAccepted) {
  EXPECT_THAT(ParseBytes("18446744073709551615"),
              IsOkAndHolds(std::numeric_limits<uint64_t>::max()));
}

TEST(ParseBytesTest, WhatPassesSixtyFourBitsIsRefused) {
  const auto is_refused = StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("above 16 EiB"));
  EXPECT_THAT(ParseBytes("18446744073709551616"), is_refused);
  EXPECT_THAT(ParseBytes("99999999999999999999999"), is_refused);
  EXPECT_THAT(ParseBytes("16777216TiB"), is_refused);
  EXPECT_THAT(ParseBytes("16777215.999999TiB"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("one to three digits")));
}

TEST(ParseBytesTest, EveryOtherTextIsRefusedAndQuoted) {
  for (const std::string text : {"", "MiB", "-1", "+1", " 1", "1 ", "1  MiB", "1.MiB", "1.2345MiB",
                                 ".5GiB", "1mib", "1M", "1Mi", "1e9", "0x10", "1MiB1", "1,5GiB"}) {
    EXPECT_THAT(ParseBytes(text),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("'" + text + "' is not a size"), HasSubstr("512MiB"))));
  }
}

TEST(FormatBytesTest, SmallSizesAreExact) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(196608), "196608 B");
  EXPECT_EQ(FormatBytes(1048575), "1048575 B");
}

TEST(FormatBytesTest, LargeSizesAreShort) {
  EXPECT_EQ(FormatBytes(uint64_t{4} << 20), "4 MiB");
  EXPECT_EQ(FormatBytes(uint64_t{1536} << 20), "1.5 GiB");
  EXPECT_EQ(FormatBytes(uint64_t{100} << 30), "100 GiB");
  EXPECT_EQ(FormatBytes(uint64_t{3} << 40), "3 TiB");
  EXPECT_EQ(FormatBytes(uint64_t{2048} << 40), "2048 TiB");
}

TEST(FormatBytesTest, WhatIsFormattedParsesBackWithinItsDigits) {
  test::ForEachSeed(200, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const uint64_t bytes = random() >> (random() % 40 + 12);

    ASSERT_OK_AND_ASSIGN(const uint64_t parsed, ParseBytes(FormatBytes(bytes)));

    EXPECT_NEAR(static_cast<double>(parsed), static_cast<double>(bytes),
                0.0051 * static_cast<double>(bytes));
  });
}

TEST(RoundUpTest, MultiplesStayAndOthersGrow) {
  EXPECT_EQ(RoundUp(0, 4096), 0u);
  EXPECT_EQ(RoundUp(1, 4096), 4096u);
  EXPECT_EQ(RoundUp(4096, 4096), 4096u);
  EXPECT_EQ(RoundUp(4097, 4096), 8192u);
  EXPECT_EQ(RoundUp(10, 3), 12u);
  static_assert(RoundUp(33, 32) == 64);
}

}  // namespace
}  // namespace ebbtide
