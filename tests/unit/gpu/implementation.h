// SPDX-License-Identifier: Apache-2.0
//
// Runs one test on every implementation of an operation: the reference loops, the SIMD kernel on
// each target that this build has and this CPU can run, and where asked the CUDA kernel.

#pragma once

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cpu/simd_targets.h"
#include "gpu/shape.h"
#include "tests/unit/gpu/on_cuda.h"

namespace ebbtide::gpu {

// While it lives, `name` is what runs: "reference", "cuda", or a SIMD target.
class Implementation {
 public:
  explicit Implementation(std::string name) : name_(std::move(name)) {
    if (name_ != "reference" && name_ != "cuda") {
      EXPECT_TRUE(ForceSimdTarget(name_).ok()) << name_;
    }
  }
  ~Implementation() { EXPECT_TRUE(ForceSimdTarget("auto").ok()); }
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  template <class Function>
  Function* Choose(Function* reference, Function* cpu) const {
    return name_ == "reference" ? reference : cpu;
  }
  template <class Function>
  Function* Choose(Function* reference, Function* cpu, Function* cuda) const {
    return name_ == "cuda" ? cuda : Choose(reference, cpu);
  }

 private:
  std::string name_;
};

struct ImplementationCase {
  std::string name;
  Dtype dtype = Dtype::kF16;

  friend std::ostream& operator<<(std::ostream& os, const ImplementationCase& c) {
    return os << c.name << "_" << DtypeName(c.dtype);
  }
};

inline std::vector<std::string> ImplementationNames() {
  std::vector<std::string> names = {"reference"};
  for (const std::string_view target : SimdTargets()) names.emplace_back(target);
  return names;
}

inline std::vector<ImplementationCase> EveryImplementation() {
  std::vector<ImplementationCase> cases;
  for (const std::string& name : ImplementationNames()) {
    for (const Dtype dtype : kDtypes) cases.push_back({name, dtype});
  }
  return cases;
}

// Without CUDA's headers there is no such kernel to run (ctest's gpu_cuda_tests says so).
inline std::vector<ImplementationCase> EveryImplementationAndCuda() {
  std::vector<ImplementationCase> cases = EveryImplementation();
  if (!kHasCuda || !WhyNoCuda().empty()) return cases;
  for (const Dtype dtype : kDtypes) cases.push_back({"cuda", dtype});
  return cases;
}

inline std::string ImplementationCaseName(const testing::TestParamInfo<ImplementationCase>& test) {
  return testing::PrintToString(test.param);
}

}  // namespace ebbtide::gpu
