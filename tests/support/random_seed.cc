// SPDX-License-Identifier: Apache-2.0

#include "tests/support/random_seed.h"

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

#include "base/status_macros.h"

namespace ebbtide::test {
namespace {

std::optional<uint64_t> ReadVariable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return std::nullopt;
  }
  uint64_t value = 0;
  EBBTIDE_CHECK(absl::SimpleAtoi(text, &value), name);
  return value;
}

uint64_t FreshSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

void Announce(uint64_t seed) {
  absl::PrintF("[   SEED   ] EBBTIDE_SEED=%d\n", seed);
  std::fflush(stdout);
}

}  // namespace

uint64_t RandomSeed() {
  const uint64_t seed = ReadVariable("EBBTIDE_SEED").value_or(FreshSeed());
  Announce(seed);
  return seed;
}

std::vector<uint64_t> RandomSeeds(int count) {
  if (const auto given = ReadVariable("EBBTIDE_SEED")) {
    return {*given};
  }
  const uint64_t factor = ReadVariable("EBBTIDE_SEED_FACTOR").value_or(1);
  std::vector<uint64_t> seeds;
  for (uint64_t i = 0; i < static_cast<uint64_t>(count) * factor; ++i) {
    seeds.push_back(FreshSeed());
  }
  return seeds;
}

void ForEachSeed(int count, const std::function<void(uint64_t)>& body) {
  for (const uint64_t seed : RandomSeeds(count)) {
    Announce(seed);
    testing::ScopedTrace trace(__FILE__, __LINE__, absl::StrFormat("EBBTIDE_SEED=%d", seed));
    body(seed);
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

}  // namespace ebbtide::test
