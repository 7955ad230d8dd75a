// SPDX-License-Identifier: Apache-2.0
//
// Runs one test on every implementation of an operation: the reference loops, and the SIMD kernel
// on each target that this build has and this CPU can run.

#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cpu/simd_targets.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

// While it lives, `name` is what runs: "reference", or a SIMD target.
class Implementation {
 public:
  explicit Implementation(std::string name) : is_reference_(name == "reference") {
    if (!is_reference_) {
      EXPECT_TRUE(ForceSimdTarget(name).ok()) << name;
    }
  }
  ~Implementation() { EXPECT_TRUE(ForceSimdTarget("auto").ok()); }
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  template <class Function>
  Function* Choose(Function* reference, Function* cpu) const {
    return is_reference_ ? reference : cpu;
  }

 private:
  bool is_reference_;
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
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32}) cases.push_back({name, dtype});
  }
  return cases;
}

inline std::string ImplementationCaseName(const testing::TestParamInfo<ImplementationCase>& test) {
  return testing::PrintToString(test.param);
}

}  // namespace ebbtide::gpu
