// SPDX-License-Identifier: Apache-2.0
//
// Runs batches on each backend and holds what they write against the references.

#pragma once

#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/backend.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/gpu/backend_under_test.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {

class BackendStand : public testing::TestWithParam<BackendUnderTest> {
 protected:
  void Run(const Batch& batch) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, backend_->MakeStream());
    ASSERT_OK(backend_->Run(*stream, batch));
    ASSERT_OK(stream->Wait());
  }

  // What `batch` of `lanes` writes to `results` is what `reference` does, relative to 1.
  template <class Args, class T>
  void ExpectReference(const Batch& batch, const std::vector<Args>& lanes,
                       void (*reference)(const Args&),
                       std::initializer_list<std::span<T> Args::*> results, double tolerance) {
    std::vector<std::vector<T>> expected;
    for (Args args : lanes) {
      for (const auto result : results) {
        expected.emplace_back((args.*result).begin(), (args.*result).end());
        args.*result = expected.back();
      }
      if constexpr (requires { args.extents; }) args.extents = AtHome(args.extents);
      reference(args);
    }
    Run(batch);
    auto answer = expected.begin();
    for (const Args& args : lanes) {
      for (const auto result : results) {
        ASSERT_FALSE(answer->empty());
        for (size_t i = 0; i < answer->size(); ++i) {
          if (!ElementsAgree((args.*result)[i], (*answer)[i], tolerance)) {
            FAIL() << "lane " << &args - lanes.data() << " element " << i;
          }
        }
        ++answer;
      }
    }
  }
  // The caller's own copy of extents that may lie in device memory.
  std::span<const Extent> AtHome(std::span<const Extent> extents) const {
    return at_home_.at(extents.data())->extents();
  }
  static bool ElementsAgree(std::byte got, std::byte expected, double /*tolerance*/) {
    return got == expected;
  }
  template <class T>
  static bool ElementsAgree(T got, T expected, double tolerance) {
    return got == expected ||
           std::abs(got - expected) <= tolerance * (1 + std::abs(static_cast<double>(expected)));
  }

  const std::unique_ptr<Backend> backend_{GetParam().make()};
  std::map<const Extent*, const SampleLane*> at_home_;
  std::mt19937_64 random_{test::RandomSeed()};
};

}  // namespace ebbtide::gpu
