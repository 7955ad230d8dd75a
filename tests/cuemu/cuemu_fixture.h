// SPDX-License-Identifier: Apache-2.0
//
// Runs one kernel on the emulator and waits for it.

#pragma once

#include "gtest/gtest.h"

#include "gpu/cuda/port.h"

namespace ebbtide::gpu {

class CuemuTest : public testing::Test {
 public:
  CuemuTest() {
    // A process of its own: after a fork the thread sanitizer takes fibers for threads that are
    // gone.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~CuemuTest() override {
    cuemu::SetSeed(0);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }
  CuemuTest(const CuemuTest&) = delete;
  CuemuTest& operator=(const CuemuTest&) = delete;

  template <class... Parameters, class... Arguments>
  void Run(void (*kernel)(Parameters...), int blocks, int threads, Arguments... arguments) {
    EXPECT_EQ(Enqueue(kernel, dim3(static_cast<unsigned>(blocks)),
                      dim3(static_cast<unsigned>(threads)), stream_, arguments...),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace ebbtide::gpu
