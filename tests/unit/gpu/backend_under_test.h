// SPDX-License-Identifier: Apache-2.0
//
// Every backend of this build, for tests of what backend.h promises.

#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "gpu/backend.h"
#include "gpu/cpu/cpu_backend.h"

namespace ebbtide::gpu {

struct BackendUnderTest {
  std::string name;
  std::unique_ptr<Backend> (*make)();

  friend std::ostream& operator<<(std::ostream& os, const BackendUnderTest& backend) {
    return os << backend.name;
  }
};

template <int kThreads>
std::unique_ptr<Backend> MakeCpuBackend() {
  return std::make_unique<CpuBackend>(kThreads);
}

inline std::vector<BackendUnderTest> EveryBackend() {
  return {{"cpu_on_one_thread", &MakeCpuBackend<1>}, {"cpu_on_three_threads", &MakeCpuBackend<3>}};
}

}  // namespace ebbtide::gpu
