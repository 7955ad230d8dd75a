// SPDX-License-Identifier: Apache-2.0
//
// A tier held against what the machine could do: both are timed in turn within one run, so that a
// busy machine slows both.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "benchmark/benchmark.h"

namespace ebbtide::bench {

double ThreadSeconds();      // CPU time of this thread: for work on memory.
double WallSeconds();        // For work that waits for the disk.
double ProcessCpuSeconds();  // User and system, all threads.

double Median(std::vector<double> values);

// Reports `ratio`, the limit's time over the subject's, with the rates of both.
class Comparison {
 public:
  Comparison(benchmark::State& state, double (*seconds)()) : state_(state), seconds_(seconds) {}

  void Limit(const std::function<void()>& work) { limit_.push_back(Time(work)); }
  void Subject(const std::function<void()>& work);  // Also the iteration's time.

  // Each piece of work moved `bytes`. By the mean where a slow piece in a hundred is part of the
  // price, by the median where it is the machine's noise.
  void ReportMedian(uint64_t bytes) { Report(bytes, Median(limit_), Median(subject_)); }
  void ReportMean(uint64_t bytes);

 private:
  double Time(const std::function<void()>& work) const;
  void Report(uint64_t bytes, double limit_seconds, double subject_seconds);

  benchmark::State& state_;
  double (*const seconds_)();
  std::vector<double> limit_;
  std::vector<double> subject_;
};

}  // namespace ebbtide::bench
