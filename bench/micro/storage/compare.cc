// SPDX-License-Identifier: Apache-2.0

#include "bench/micro/storage/compare.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <numeric>

namespace ebbtide::bench {
namespace {

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

double ThreadSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double WallSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double ProcessCpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void Comparison::Subject(const std::function<void()>& work) {
  subject_.push_back(Time(work));
  state_.SetIterationTime(subject_.back());
}

void Comparison::ReportMean(uint64_t bytes) {
  Report(bytes, Mean(limit_), Mean(subject_));
}

double Comparison::Time(const std::function<void()>& work) const {
  const double begin = seconds_();
  work();
  return seconds_() - begin;
}

void Comparison::Report(uint64_t bytes, double limit_seconds, double subject_seconds) {
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  state_.counters["ratio"] = limit_seconds / subject_seconds;
  state_.counters["GBps"] = gigabytes / subject_seconds;
  state_.counters["limit_GBps"] = gigabytes / limit_seconds;
}

}  // namespace ebbtide::bench
