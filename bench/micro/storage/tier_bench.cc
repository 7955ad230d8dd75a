// SPDX-License-Identifier: Apache-2.0
//
// What do tiers cost over what the machine can do? Sealing to host against memcpy (aim: ratio 0.6),
// writing to disk against one raw O_DIRECT file (0.8), pages from disk against as many O_DIRECT
// reads (0.7), pages in place against reading their bytes (0.7). `disk_per_live` is bytes on disk
// over bytes held (at most 1.05). Where an aim is missed, docs/decisions/0003-slot-files.md
// reopens.
//
//   EBBTIDE_BENCH_FOLDER  where on disk; default: the temporary folder

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"

#include "base/executor.h"
#include "base/status_macros.h"
#include "bench/micro/gpu/streaming_read.h"
#include "bench/micro/storage/compare.h"
#include "bench/micro/storage/raw_file.h"
#include "bench/micro/storage/values_in_rocksdb.h"
#include "storage/block_record.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "storage/rocksdb/rocksdb_tier.h"
#include "tests/support/disk_use.h"
#include "tests/support/record_pattern.h"

namespace ebbtide::bench {
namespace {

namespace fs = std::filesystem;

using storage::BlockKey;
using storage::BlockPin;
using storage::BlockWrite;
using storage::HostTier;
using storage::PagePart;
using storage::PageRead;
using storage::PageState;
using storage::RecordGeometry;
using storage::RocksdbTier;
using storage::Tier;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kPoolBytes = 512 * kMiB;   // Far larger than the caches.
constexpr uint64_t kDiskBytes = 1024 * kMiB;  // Held on disk while records come and go.
constexpr uint64_t kSeed = 20261130;
constexpr int kDiskThreads = 8;

// `layers` of 8 heads with pages of 16 KiB, as Llama-3-8B has: 32 make 4 MiB, 8 make 1 MiB. Other
// counts of pages: one head.
RecordGeometry GeometryOf(int64_t pages) {
  return pages % 8 == 0 ? test::MakeGeometry(static_cast<uint32_t>(pages / 8), 8, 16384)
                        : test::MakeGeometry(static_cast<uint32_t>(pages), 1, 16384);
}

constexpr int64_t kPagesOf0p7MiB = 43;
constexpr int64_t kPagesOf1MiB = 64;
constexpr int64_t kPagesOf4MiB = 256;

// Records side by side in memory that no cache holds, each on 4 KiB.
class Records {
 public:
  explicit Records(const RecordGeometry& geometry)
      : geometry_(geometry),
        count_(kPoolBytes / geometry.record_bytes()),
        memory_(static_cast<std::byte*>(std::aligned_alloc(4096, kPoolBytes)), &std::free) {
    const std::vector<std::byte> first = test::MakeRecord({0, 0, 0}, geometry);
    for (uint64_t i = 0; i < count_; ++i) std::copy(first.begin(), first.end(), At(i).begin());
  }

  uint64_t count() const { return count_; }
  std::span<std::byte> At(uint64_t i) const {
    return {memory_.get() + i % count_ * geometry_.record_bytes(), geometry_.record_bytes()};
  }

  // Record `i` framed as `key`: what sealing does once it has gathered the pages.
  BlockWrite Frame(uint64_t i, const BlockKey& key) const {
    storage::FrameRecord(key, geometry_, positions_, At(i));
    return {.key = key, .record = At(i)};
  }

 private:
  const RecordGeometry geometry_;
  const uint64_t count_;
  const std::unique_ptr<std::byte, void (*)(void*)> memory_;
  const std::vector<int64_t> positions_ = std::vector<int64_t>(geometry_.page_tokens);
};

BlockKey KeyOf(uint64_t i) {
  return {.sequence = 1, .block = static_cast<uint32_t>(i), .generation = 0};
}

void CheckedWrite(Tier& tier, const BlockWrite& write) {
  const absl::Status status = tier.Write({&write, 1});
  EBBTIDE_CHECK(status.ok(), status.ToString().c_str());
}

void CheckedErase(Tier& tier, uint64_t i) {
  const BlockKey key = KeyOf(i);
  EBBTIDE_CHECK(tier.Erase({&key, 1}).ok(), "a block is erased");
}

// A host tier with room for twice what Records hold.
struct Host {
  Host() : tier(*HostTier::Create(budget)) {}
  storage::ByteBudget budget{2 * kPoolBytes};
  std::unique_ptr<HostTier> tier;
};

class BenchFolder {
 public:
  BenchFolder() {
    const char* given = std::getenv("EBBTIDE_BENCH_FOLDER");
    path_ = (given != nullptr ? fs::path(given) : fs::temp_directory_path()) /
            ("ebbtide-bench-" + std::to_string(getpid()));
    fs::create_directories(path_);
  }
  ~BenchFolder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Checksums, copy and bookkeeping of a record in memory. `fresh`: into memory that the tier has to
// take from the kernel first; else each record takes the place of an erased one.
void SealToHost(benchmark::State& state, bool fresh) {
  const RecordGeometry geometry = GeometryOf(state.range(0));
  const Records records(geometry);
  const uint64_t held = records.count();
  Host host;
  std::vector<std::byte> target(kPoolBytes, std::byte{1});
  uint64_t next = 0;
  if (!fresh) {
    for (; next < held; ++next) CheckedWrite(*host.tier, records.Frame(next, KeyOf(next)));
  }
  Comparison times(state, &ThreadSeconds);
  for (auto _ : state) {
    if (!fresh) CheckedErase(*host.tier, next - held);
    // Half the pool away, so that the record about to be sealed is in no cache.
    const std::span<const std::byte> source = records.At(next + held / 2);
    std::byte* const copy = target.data() + next % held * source.size();
    times.Limit([&] { std::memcpy(copy, source.data(), source.size()); });
    benchmark::DoNotOptimize(*copy);
    times.Subject([&] { CheckedWrite(*host.tier, records.Frame(next, KeyOf(next))); });
    ++next;
  }
  times.ReportMedian(geometry.record_bytes());
}

void RecordSizes(benchmark::internal::Benchmark* bench) {
  bench->ArgName("pages")->Arg(kPagesOf0p7MiB)->Arg(kPagesOf1MiB)->Arg(kPagesOf4MiB);
  bench->UseManualTime();
}
BENCHMARK_CAPTURE(SealToHost, reused_memory, false)->Apply(&RecordSizes);
BENCHMARK_CAPTURE(SealToHost, fresh_memory, true)->Apply(&RecordSizes)->Iterations(100);

// `pages` pages of one layer of a pinned record, checked where they lie, against reading their
// bytes. Recall pins a block and parses its header once for all heads of a layer.
void PagesInPlace(benchmark::State& state) {
  const RecordGeometry geometry = GeometryOf(kPagesOf4MiB);
  const auto pages = static_cast<uint32_t>(state.range(0));
  const Records records(geometry);
  Host host;
  for (uint64_t i = 0; i < records.count(); ++i) {
    CheckedWrite(*host.tier, records.Frame(i, KeyOf(i)));
  }
  std::mt19937_64 random(kSeed);
  struct Place {
    uint64_t block;
    uint32_t page;
  };
  const auto draw = [&] {
    return Place{random() % records.count(), static_cast<uint32_t>(random() % geometry.layers) * 8};
  };
  constexpr int kDraws = 256;
  Comparison times(state, &ThreadSeconds);
  uint64_t sum = 0;
  for (auto _ : state) {
    times.Limit([&] {
      for (int i = 0; i < kDraws; ++i) {
        const Place place = draw();
        const uint64_t offset = geometry.part_offset(place.page, PagePart::kExact);
        sum += StreamingRead(
            records.At(place.block).subspan(offset, uint64_t{pages} * geometry.page_bytes));
      }
    });
    times.Subject([&] {
      for (int i = 0; i < kDraws; ++i) {
        const Place place = draw();
        const BlockPin pin = host.tier->Pin(KeyOf(place.block));
        const auto header = storage::ParseHeader(*pin);
        EBBTIDE_CHECK(header.ok(), "the header is intact");
        for (uint32_t page = place.page; page < place.page + pages; ++page) {
          const auto bytes =
              pin->subspan(geometry.part_offset(page, PagePart::kExact), geometry.page_bytes);
          EBBTIDE_CHECK(storage::PartIsIntact(*header, page, PagePart::kExact, bytes),
                        "the page is intact");
        }
      }
    });
  }
  benchmark::DoNotOptimize(sum);
  times.ReportMedian(uint64_t{kDraws} * pages * geometry.page_bytes);
}
BENCHMARK(PagesInPlace)->ArgName("pages")->Arg(1)->Arg(8)->UseManualTime();

// The RocksDB tier with room for four times kDiskBytes, beside a raw file of kDiskBytes.
struct Disk {
  explicit Disk(int64_t pages) : geometry(GeometryOf(pages)) {
    auto created = RocksdbTier::Create({.folder = folder.path() / "tier",
                                        .budget_bytes = 4 * kDiskBytes,
                                        .io = &io,
                                        .calls = nullptr,
                                        .env = nullptr});
    EBBTIDE_CHECK(created.ok(), created.status().ToString().c_str());
    tier = *std::move(created);
  }

  uint64_t raw_offset(uint64_t i) const { return i % held * geometry.record_bytes(); }
  double disk_per_live() const {
    return static_cast<double>(test::DiskUseBytes(tier->folder().path())) /
           static_cast<double>(held * geometry.record_bytes());
  }

  BenchFolder folder;
  RecordGeometry geometry;
  Records records{geometry};
  uint64_t held = kDiskBytes / geometry.record_bytes();
  RawFile raw{folder.path() / "raw", held* geometry.record_bytes()};
  ParallelFor io{kDiskThreads};
  std::unique_ptr<RocksdbTier> tier;
};

// Runs `work(i)` for record after record with a raw write of as many bytes in turn, first into
// empty files, then over what is there; reports both, and what it took of the CPU.
template <typename Work>
void CompareWrites(benchmark::State& state, const RecordGeometry& geometry, uint64_t held,
                   RawFile& raw, const Records& records, const Work& work) {
  Comparison fresh(state, &WallSeconds);
  Comparison reused(state, &WallSeconds);
  double cpu_seconds = 0;
  uint64_t next = 0;
  for (auto _ : state) {
    Comparison& times = next < held ? fresh : reused;
    times.Limit([&] { raw.Write(next % held * geometry.record_bytes(), records.At(next)); });
    const double cpu_begin = ProcessCpuSeconds();
    times.Subject([&] { work(next); });
    cpu_seconds += ProcessCpuSeconds() - cpu_begin;
    ++next;
  }
  fresh.ReportMean(geometry.record_bytes());
  const auto fresh_ratio = state.counters["ratio"];
  reused.ReportMean(geometry.record_bytes());
  state.counters["fresh_ratio"] = fresh_ratio;
  state.counters["cpu_s_per_GB"] =
      cpu_seconds / (static_cast<double>(next * geometry.record_bytes()) * 1e-9);
}

// Two disks' worth of records: new ones, then as many that each take the place of any older one,
// since sequences close in no order.
class Replacement {
 public:
  explicit Replacement(uint64_t held) : held_(held) {}

  // The record that goes to make room for `i`; none while there is room.
  std::optional<uint64_t> Add(uint64_t i) {
    std::optional<uint64_t> gone;
    if (live_.size() == held_) {
      std::swap(live_[random_() % held_], live_.back());
      gone = live_.back();
      live_.pop_back();
    }
    live_.push_back(i);
    return gone;
  }

 private:
  const uint64_t held_;
  std::mt19937_64 random_{kSeed};
  std::vector<uint64_t> live_;
};

void WriteToDisk(benchmark::State& state) {
  Disk disk(state.range(0));
  Replacement replacement(disk.held);
  CompareWrites(state, disk.geometry, disk.held, disk.raw, disk.records, [&](uint64_t i) {
    if (const auto gone = replacement.Add(i)) CheckedErase(*disk.tier, *gone);
    CheckedWrite(*disk.tier, disk.records.Frame(i, KeyOf(i)));
  });
  state.counters["disk_per_live"] = disk.disk_per_live();
}

void ValuesInRocksdbInstead(benchmark::State& state) {
  const BenchFolder folder;
  const RecordGeometry geometry = GeometryOf(state.range(0));
  const Records records(geometry);
  const uint64_t held = kDiskBytes / geometry.record_bytes();
  RawFile raw(folder.path() / "raw", held * geometry.record_bytes());
  ValuesInRocksdb values(folder.path() / "values");
  Replacement replacement(held);
  std::vector<double> disk_per_live;
  CompareWrites(state, geometry, held, raw, records, [&](uint64_t i) {
    if (const auto gone = replacement.Add(i)) values.Delete(KeyOf(*gone));
    values.Put(KeyOf(i), records.At(i));
    if (i % (held / 8) != 0) return;
    values.Flush();  // So that what lies in memory does not count as written.
    if (i < held) return;
    disk_per_live.push_back(static_cast<double>(test::DiskUseBytes(folder.path() / "values")) /
                            static_cast<double>(held * geometry.record_bytes()));
  });
  state.counters["disk_per_live"] = Median(disk_per_live);
}

// `batch` pages of 16 KiB at random places, against as many raw reads on as many threads.
void PagesFromDisk(benchmark::State& state) {
  const auto batch = static_cast<size_t>(state.range(0));
  Disk disk(kPagesOf1MiB);
  for (uint64_t i = 0; i < disk.held; ++i) {
    CheckedWrite(*disk.tier, disk.records.Frame(i, KeyOf(i)));
    disk.raw.Write(disk.raw_offset(i), disk.records.At(i));
  }
  const uint32_t page_bytes = disk.geometry.page_bytes;
  const std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, batch * page_bytes)), &std::free);
  const auto into = [&](size_t i) {
    return std::span(memory.get() + i * page_bytes, size_t{page_bytes});
  };
  std::mt19937_64 random(kSeed);
  std::vector<uint64_t> places(batch);
  std::vector<PageRead> reads(batch);
  Comparison times(state, &WallSeconds);
  for (auto _ : state) {
    for (size_t i = 0; i < batch; ++i) {
      places[i] = random() % (disk.raw.bytes() / page_bytes) * page_bytes;
      reads[i] = {.key = KeyOf(random() % disk.held),
                  .page = static_cast<uint32_t>(random() % disk.geometry.pages()),
                  .into = into(i)};
    }
    times.Limit([&] {
      disk.io.Run(static_cast<int>(batch), [&](int job) {
        const auto i = static_cast<size_t>(job);
        disk.raw.Read(places[i], into(i));
      });
    });
    times.Subject([&] {
      EBBTIDE_CHECK(disk.tier->Read(reads, absl::InfiniteDuration()).ok(), "pages are read");
    });
    for (const PageRead& read : reads) {
      EBBTIDE_CHECK(read.state == PageState::kOk, "each page is intact");
    }
  }
  times.ReportMedian(batch * page_bytes);
}
BENCHMARK(PagesFromDisk)->ArgName("batch")->Arg(1)->Arg(64)->UseManualTime();

// As many iterations as fill the disk twice.
void RegisterTwoDisksFull(const char* name, void (*body)(benchmark::State&)) {
  for (const int64_t pages : {kPagesOf0p7MiB, kPagesOf1MiB, kPagesOf4MiB}) {
    const uint64_t held = kDiskBytes / GeometryOf(pages).record_bytes();
    benchmark::RegisterBenchmark(name, body)
        ->ArgName("pages")
        ->Arg(pages)
        ->Iterations(static_cast<int64_t>(2 * held))
        ->UseManualTime();
  }
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  ebbtide::bench::RegisterTwoDisksFull("WriteToDisk", &ebbtide::bench::WriteToDisk);
  ebbtide::bench::RegisterTwoDisksFull("ValuesInRocksdbInstead",
                                       &ebbtide::bench::ValuesInRocksdbInstead);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
