// SPDX-License-Identifier: Apache-2.0
//
// A CUDA stream's lists and scratch, over a device (tests/cuemu) that does nothing before it is
// waited for.

#include "gpu/cuda/cuda_stream.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cuda/launch.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::HasSubstr;

__global__ void Copy(int* to, const int* from, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    to[i] = from[i];
  }
}

class CudaStreamTest : public testing::Test {
 public:
  CudaStreamTest() : stream_(CudaStream::Make().value()) {}
  ~CudaStreamTest() override { cuemu::HealDevice(); }
  CudaStreamTest(const CudaStreamTest&) = delete;
  CudaStreamTest& operator=(const CudaStreamTest&) = delete;

  absl::Status LaunchCopy(int* to, const int* from, size_t count) {
    return Launch(*stream_, {.operation = "copy", .grid = dim3(1), .threads = 32}, &Copy, to, from,
                  static_cast<int>(count));
  }

  std::unique_ptr<CudaStream> stream_;
};

TEST_F(CudaStreamTest, ListsAreReadWhenGivenAndThereWhenLaunched) {
  std::vector<int> first = {1, 2, 3};
  std::vector<int> second(1000, 7);
  std::vector<int> out(1003);
  const int* const first_there = *stream_->Upload(std::span<const int>(first));
  const int* const second_there = *stream_->Upload(std::span<const int>(second));
  first.assign(3, 0);
  second.assign(1000, 0);

  ASSERT_TRUE(LaunchCopy(out.data(), first_there, 3).ok());
  ASSERT_TRUE(LaunchCopy(out.data() + 3, second_there, 1000).ok());
  EXPECT_EQ(out[0], 0) << "a stream did its work before anybody waited";
  ASSERT_TRUE(stream_->Wait().ok());

  std::vector<int> expected(1003, 7);
  std::iota(expected.begin(), expected.begin() + 3, 1);
  EXPECT_EQ(out, expected);
}

TEST_F(CudaStreamTest, ListsOfAnySizeStayUntilWait) {
  std::vector<std::vector<int>> outs;
  for (const int size : {1, 100, 300'000, 2'000'000, 5}) {
    const std::vector<int> list(static_cast<size_t>(size), size);
    outs.emplace_back(list.size(), 0);
    const int* const there = *stream_->Upload(std::span<const int>(list));
    ASSERT_TRUE(LaunchCopy(outs.back().data(), there, list.size()).ok());
  }

  ASSERT_TRUE(stream_->Wait().ok());

  for (const std::vector<int>& out : outs) {
    EXPECT_EQ(out, std::vector<int>(out.size(), static_cast<int>(out.size())));
  }
  // And once more in the memory that the wait gave back.
  std::vector<int> out(3);
  const std::vector<int> list = {4, 5, 6};
  ASSERT_TRUE(LaunchCopy(out.data(), *stream_->Upload(std::span<const int>(list)), 3).ok());
  ASSERT_TRUE(stream_->Wait().ok());
  EXPECT_EQ(out, list);
}

TEST_F(CudaStreamTest, ScratchOfOneLaunchDoesNotOverlapAndIsReusedByTheNext) {
  int* const a = *stream_->Scratch<int>(100);
  int* const b = *stream_->Scratch<int>(100);
  EXPECT_GE(std::max(a, b) - std::min(a, b), 100);
  const int value = 1;
  ASSERT_TRUE(LaunchCopy(a, &value, 1).ok());

  EXPECT_EQ(*stream_->Scratch<int>(50), a);
}

TEST_F(CudaStreamTest, ScratchThatIsOutgrownStaysForTheLaunchThatUsesIt) {
  int* const before = *stream_->Scratch<int>(10);
  int* const large = *stream_->Scratch<int>(10'000'000);
  const std::vector<int> list = {8, 9};
  std::vector<int> out(2);
  ASSERT_TRUE(LaunchCopy(before, list.data(), 2).ok());
  ASSERT_TRUE(LaunchCopy(large, list.data(), 2).ok());
  ASSERT_TRUE(LaunchCopy(out.data(), before, 2).ok());

  ASSERT_TRUE(stream_->Wait().ok());

  EXPECT_EQ(out, list);
}

TEST_F(CudaStreamTest, FailedDeviceIsUnavailableWhereverItShows) {
  cuemu::BreakDevice();

  EXPECT_THAT(stream_->Wait(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("wait")));
  EXPECT_THAT(LaunchCopy(nullptr, nullptr, 0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("copy: cudaErrorLaunchFailure")));
  EXPECT_THAT(CudaStream::Make().status(), StatusIs(absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace ebbtide::gpu
