// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/page_runs.h"

#include <algorithm>

#include "base/bytes.h"
#include "storage/block_record.h"

namespace ebbtide::storage {

std::vector<PageRun> PlanPageRuns(std::span<const ByteRange> wanted) {
  std::vector<PageRun> runs;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const uint64_t begin = wanted[i].offset / kRecordAlignment * kRecordAlignment;
    const uint64_t end = RoundUp(wanted[i].end(), kRecordAlignment);
    if (!runs.empty()) {
      PageRun& run = runs.back();
      if (begin <= run.end + kReadThroughBytes && end - run.begin <= kRunBytesMax) {
        run.end = std::max(run.end, end);
        run.last = i + 1;
        continue;
      }
    }
    runs.push_back({.begin = begin, .end = end, .first = i, .last = i + 1});
  }
  return runs;
}

}  // namespace ebbtide::storage
