// SPDX-License-Identifier: Apache-2.0
//
// Pages that come back, against the bytes that went.

#include "client/cli/byte_check.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/client/synthetic_trace.h"

namespace ebbtide::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Pages of one lane of the synthetic trace, 16 tokens each.
class ByteCheckTest : public testing::Test {
 protected:
  ByteCheckTest() : trace_(*ParseTrace(MakeSyntheticFile({}).Bytes(), {})) {
    for (uint64_t first = 0; first < trace_.tokens; first += 16) {
      const uint32_t tokens = static_cast<uint32_t>(std::min<uint64_t>(16, trace_.tokens - first));
      client::Page page{.first_index = first,
                        .tokens = tokens,
                        .tier = client::Tier::kHost,
                        .state = client::PageState::kOk};
      for (uint64_t t = first; t < first + tokens; ++t) {
        AppendRow(trace_.layers[0].k.Row(t, 1), page.k);
        AppendRow(trace_.layers[0].v.Row(t, 1), page.v);
      }
      pages_.push_back(page);
    }
  }

  static void AppendRow(std::span<const std::byte> row, std::string& bytes) {
    bytes.append(reinterpret_cast<const char*>(row.data()), row.size());
  }

  ByteCheck Check() const {
    ByteCheck check;
    CheckPages(trace_, trace_.layers[0], 1, pages_, check);
    return check;
  }

  const Trace trace_;
  std::vector<client::Page> pages_;
};

TEST_F(ByteCheckTest, TheTracesOwnBytesPass) {
  const ByteCheck check = Check();

  EXPECT_EQ(check.checked, 40U * 32);
  EXPECT_EQ(check.mismatches, 0U);
  EXPECT_TRUE(check.complaints.empty());
}

TEST_F(ByteCheckTest, EachChangedByteCounts) {
  pages_[1].v[0] ^= 1;
  pages_[1].v[17] ^= 1;
  pages_[2].k[3] ^= 1;

  const ByteCheck check = Check();

  EXPECT_EQ(check.mismatches, 3U);
  EXPECT_THAT(
      check.complaints,
      ElementsAre(
          "layer 3 of the model, kv head 1: page of tokens 16 to 31 in host differs in 2 bytes",
          HasSubstr("differs in 1 bytes")));
}

TEST_F(ByteCheckTest, APageThatIsNamedAsLostIsLostAndNotWrong) {
  for (const auto& [state, word] : {std::pair{client::PageState::kMissing, "is missing"},
                                    std::pair{client::PageState::kCorrupt, "is corrupt"}}) {
    pages_[0].state = state;
    pages_[0].k.clear();
    pages_[0].v.clear();

    const ByteCheck check = Check();

    EXPECT_EQ(check.mismatches, 0U);
    EXPECT_EQ(check.lost, 16U * 32);
    EXPECT_THAT(check.complaints, ElementsAre(HasSubstr(word)));
  }
}

TEST_F(ByteCheckTest, BytesOfALostPageAreWrong) {
  pages_[0].state = client::PageState::kCorrupt;

  const ByteCheck check = Check();

  EXPECT_EQ(check.mismatches, 16U * 32);
  EXPECT_EQ(check.lost, 0U);
}

TEST_F(ByteCheckTest, AShortPageCountsInFull) {
  pages_[0].k.pop_back();

  EXPECT_EQ(Check().mismatches, 16U * 32);
}

TEST_F(ByteCheckTest, PagesNotAnsweredCount) {
  pages_.pop_back();

  const ByteCheck check = Check();

  EXPECT_EQ(check.mismatches, 8U * 32);
  EXPECT_THAT(check.complaints, ElementsAre(HasSubstr("tokens 32 to 39 were not answered")));
}

TEST_F(ByteCheckTest, PagesOutOfPlaceCount) {
  std::swap(pages_[0], pages_[1]);

  EXPECT_EQ(Check().mismatches, 40U * 32);
}

}  // namespace
}  // namespace ebbtide::cli
