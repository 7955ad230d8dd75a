// SPDX-License-Identifier: Apache-2.0
//
// Where a test's randomness comes from: a fresh seed each run, printed, and accepted back through
// the environment, so that a seed is a bug report.
//
//   EBBTIDE_SEED=N         run with this seed alone
//   EBBTIDE_SEED_FACTOR=N  run N times as many seeds (scripts/check seeds)

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace ebbtide::test {

// One seed for this test, printed at once: a test that crashes has told it.
uint64_t RandomSeed();

// `count` seeds (times EBBTIDE_SEED_FACTOR), or EBBTIDE_SEED alone.
std::vector<uint64_t> RandomSeeds(int count);

// Runs `body` once for each of RandomSeeds(count) with the seed in the trace of every failure;
// stops at the first seed that fails.
void ForEachSeed(int count, const std::function<void(uint64_t)>& body);

}  // namespace ebbtide::test
