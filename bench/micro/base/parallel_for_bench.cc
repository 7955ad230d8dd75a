// SPDX-License-Identifier: Apache-2.0
//
// Is a parallel loop cheap enough to be called several times per decode step? Yes if it takes less
// than 2 us beyond its tasks when loops follow each other closely, and less than 30 us after a
// pause in which the helpers fell asleep. `beyond_us` is the median of what a loop took beyond
// ceil(count / threads) tasks. A machine with other work to do shows that work.

#include <algorithm>
#include <chrono>
#include <vector>

#include "benchmark/benchmark.h"

#include "base/executor.h"

namespace ebbtide::bench {
namespace {

using BenchClock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

void Spend(int64_t microseconds) {
  const auto end = BenchClock::now() + std::chrono::microseconds(microseconds);
  while (BenchClock::now() < end) {
  }
}

void Loop(benchmark::State& state) {
  const auto count = static_cast<int>(state.range(0));
  const int64_t task_us = state.range(1);
  const int64_t pause_us = state.range(2);
  ParallelFor parallel_for(std::min(AvailableCpus(), 4));
  std::vector<double> beyond_us;
  const int rounds = (count + parallel_for.threads() - 1) / parallel_for.threads();
  for (auto _ : state) {
    Spend(pause_us);
    const auto start = BenchClock::now();
    parallel_for.Run(count, [&](int) { Spend(task_us); });
    const double took_us = Microseconds(BenchClock::now() - start).count();
    state.SetIterationTime(took_us / 1e6);
    beyond_us.push_back(took_us - static_cast<double>(rounds * task_us));
  }
  const auto middle = beyond_us.begin() + static_cast<std::ptrdiff_t>(beyond_us.size() / 2);
  std::nth_element(beyond_us.begin(), middle, beyond_us.end());
  state.counters["beyond_us"] = *middle;
  state.counters["threads"] = parallel_for.threads();
}

BENCHMARK(Loop)
    ->ArgNames({"count", "task_us", "pause_us"})
    ->ArgsProduct({{2, 16}, {0, 20, 200}, {0, 30, 300}})
    ->UseManualTime()
    ->Iterations(500);

}  // namespace
}  // namespace ebbtide::bench

BENCHMARK_MAIN();
