// SPDX-License-Identifier: Apache-2.0
//
// What share of the card's copy rate does each kernel reach? Lanes of 4,096 slots (a decode step of
// every lane at once), arrays in device memory, launches behind each other with one wait at the
// end. Bytes are those that docs/benchmarks.md counts. Prints a table, and with `--json FILE` the
// same as JSON. `--lanes N --slots N` make it small: `cuda_bench_emulated` runs it on the emulator,
// where times mean nothing and only that it runs counts. Exit code 3: there is no device, or no
// driver for it.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gpu/cuda/cuda_device.h"
#include "gpu/cuda/cuda_memory.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/kernels.h"
#include "gpu/element.h"
#include "gpu/shape.h"

namespace ebbtide::bench {
namespace {

using namespace gpu;  // NOLINT(google-build-using-namespace): it measures nothing else.

constexpr int kFrameSlots = 32;

constexpr int kNoDevice = 3;  // The exit code, which scripts/gpu tells from a failure.

[[noreturn]] void Die(const absl::Status& status, int code = 1) {
  std::fprintf(stderr, "cuda_bench: %s\n", std::string(status.message()).c_str());
  std::exit(code);
}
void Check(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

// Device memory of `count` T, which the host fills.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : count_(count) {
    absl::StatusOr<DeviceMemory> memory = AllocateDevice(std::max<size_t>(count, 1) * sizeof(T));
    Check(memory.status());
    memory_ = *std::move(memory);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.get()); }
  size_t size() const { return count_; }
  std::span<T> part(size_t first, size_t count) const { return {data() + first, count}; }

  // With `pattern`, repeated.
  void Fill(CudaStream& stream, const std::vector<T>& pattern) {
    for (size_t at = 0; at < count_; at += pattern.size()) {
      const size_t bytes = std::min(pattern.size(), count_ - at) * sizeof(T);
      Check(CudaStatus("fill", cudaMemcpyAsync(data() + at, pattern.data(), bytes,
                                               cudaMemcpyHostToDevice, stream.handle())));
    }
    Check(stream.Wait());
  }

 private:
  size_t count_;
  DeviceMemory memory_;
};

struct Options {
  int lanes = 2048;
  int slots = 4096;
  std::string json;
};

struct Row {
  std::string kernel;
  int head_dim = 0;
  int rows = 0;
  double seconds = 0;  // Of one launch.
  double bytes = 0;
};

struct Step;

class Bench {
 public:
  Bench(const Options& options, CudaStream& stream) : options_(options), stream_(stream) {}

  // Bytes a second of a copy from device to device, both ways counted.
  double MeasureCopy() {
    const size_t bytes = std::max<size_t>(size_t{1} << 20, size_t(options_.lanes) << 20);
    Array<std::byte> from(bytes);
    Array<std::byte> to(bytes);
    const double seconds = Time([&] {
      Check(CudaStatus("copy", cudaMemcpyAsync(to.data(), from.data(), bytes,
                                               cudaMemcpyDeviceToDevice, stream_.handle())));
    });
    return 2 * static_cast<double>(bytes) / seconds;
  }

  void Run(Dtype dtype, int head_dim, int group);
  void RunWindow(const Step& step);
  const std::vector<Row>& rows() const { return rows_; }

 private:
  // Median of five times a few launches.
  double Time(const std::function<void()>& launch) {
    launch();
    Check(stream_.Wait());
    std::vector<double> seconds;
    for (int repeat = 0; repeat < 5; ++repeat) {
      constexpr int kLaunches = 4;
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kLaunches; ++i) launch();
      Check(stream_.Wait());
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      seconds.push_back(took.count() / kLaunches);
    }
    std::nth_element(seconds.begin(), seconds.begin() + 2, seconds.end());
    return seconds[2];
  }
  void Add(const std::string& kernel, int head_dim, int rows, double bytes,
           const std::function<void()>& launch) {
    rows_.push_back({kernel, head_dim, rows, Time(launch), bytes});
  }

  const Options options_;
  CudaStream& stream_;
  std::vector<Row> rows_;
};

template <class T>
std::vector<T> Random(size_t count, double scale) {
  std::mt19937_64 random(20261130);
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(scale * normal(random));
  return values;
}

// A step's lanes and what kernels make of them; keys and values in frames of 32 slots, side by
// side.
struct Step {
  Step(const Options& options, Dtype dtype_in, int head_dim_in, int group_in, CudaStream& stream)
      : dtype(dtype_in),
        head_dim(head_dim_in),
        group(group_in),
        lanes(static_cast<size_t>(options.lanes)),
        slots(static_cast<size_t>(options.slots)),
        pool(2 * lanes * slots * RowBytes(dtype, head_dim)),
        index(slots),
        query(lanes * rows() * dim()),
        query_index(1),
        output(lanes * rows() * dim()),
        lse(lanes * rows()),
        logits(lanes * rows() * slots),
        mass(lanes * slots),
        score(lanes * slots),
        part_output(pages() * lanes * rows() * dim()),
        part_lse(pages() * lanes * rows()),
        extents(lanes) {
    std::vector<std::byte> pattern(size_t{1} << 20);
    const std::vector<float> elements = Random<float>(pattern.size() / DtypeBytes(dtype), 1);
    for (size_t i = 0; i < elements.size(); ++i)
      StoreElement(dtype, pattern.data(), static_cast<int>(i), elements[i]);
    pool.Fill(stream, pattern);
    std::vector<int32_t> numbers(slots);
    std::iota(numbers.begin(), numbers.end(), 0);
    index.Fill(stream, numbers);
    query.Fill(stream, Random<float>(std::min<size_t>(query.size(), size_t{1} << 18), 0.3));
    query_index.Fill(stream, {options.slots});
    for (size_t l = 0; l < lanes; ++l) AddLane(l);
  }

  size_t rows() const { return static_cast<size_t>(group); }
  size_t dim() const { return static_cast<size_t>(head_dim); }
  size_t pages() const { return slots / kFrameSlots; }  // Of a lane.

  void AddLane(size_t l) {
    const size_t row_bytes = RowBytes(dtype, head_dim);
    for (size_t s = 0; s < slots; s += kFrameSlots) {
      const std::byte* const frame = pool.data() + 2 * (l * slots + s) * row_bytes;
      extents[l].push_back({.key = frame,
                            .value = frame + kFrameSlots * row_bytes,
                            .index = index.data() + s,
                            .slots = kFrameSlots});
    }
    AttendArgs attend{.dtype = dtype,
                      .head_dim = head_dim,
                      .group = group,
                      .scale = 0.1F,
                      .extents = extents[l],
                      .query = query.part(l * rows() * dim(), rows() * dim()),
                      .query_index = query_index.part(0, 1),
                      .output = output.part(l * rows() * dim(), rows() * dim()),
                      .lse = lse.part(l * rows(), rows()),
                      .logits = {}};
    attends.push_back(attend);
    AttendArgs parted = attend;
    parted.part_output = part_output.part(l * pages() * rows() * dim(), pages() * rows() * dim());
    parted.part_lse = part_lse.part(l * pages() * rows(), pages() * rows());
    parts.push_back(parted);
    page_damages.push_back({.head_dim = head_dim,
                            .rows = group,
                            .pages = static_cast<int>(pages()),
                            .part_output = parted.part_output,
                            .part_lse = parted.part_lse,
                            .output = parted.output,
                            .lse = parted.lse,
                            .damage = score.part(l * slots, pages())});
    attend.logits = logits.part(l * rows() * slots, rows() * slots);
    spills.push_back(attend);
    const std::span<float> scores = score.part(l * slots, slots);
    masses.push_back({.group = group,
                      .slots = static_cast<int>(slots),
                      .logits = attend.logits,
                      .lse = attend.lse,
                      .mass = mass.part(l * slots, slots)});
    damages.push_back({.dtype = dtype,
                       .head_dim = head_dim,
                       .rows = group,
                       .extents = extents[l],
                       .logits = attend.logits,
                       .lse = attend.lse,
                       .centre = attend.output,
                       .damage = scores});
    centres.push_back({.dtype = dtype,
                       .head_dim = head_dim,
                       .rows = 1,
                       .extents = extents[l],
                       .weight = scores,
                       .output = output.part(l * rows() * dim(), dim())});
    keys.push_back({.dtype = dtype, .head_dim = head_dim, .extents = extents[l], .score = scores});
  }

  Dtype dtype;
  int head_dim;
  int group;
  size_t lanes;
  size_t slots;
  Array<std::byte> pool;
  Array<int32_t> index;
  Array<float> query;
  Array<int32_t> query_index;
  Array<float> output, lse, logits;
  Array<double> mass;
  Array<float> score;
  Array<float> part_output, part_lse;
  std::vector<std::vector<Extent>> extents;
  std::vector<AttendArgs> attends;
  std::vector<AttendArgs> spills;  // The same with logits,
  std::vector<AttendArgs> parts;   // and with each page alone.
  std::vector<PageDamageArgs> page_damages;
  std::vector<MassArgs> masses;
  std::vector<DamageArgs> damages;
  std::vector<WeightedValueArgs> centres;
  std::vector<GeometryArgs> keys;
};

void Bench::Run(Dtype dtype, int head_dim, int group) {
  const Step step(options_, dtype, head_dim, group, stream_);
  const std::string name(DtypeName(dtype));
  const auto all = static_cast<double>(step.lanes * step.slots);
  const auto row = static_cast<double>(RowBytes(dtype, head_dim));
  Add("attend " + name, head_dim, group, 2 * all * row,
      [&] { Check(AttendCuda(step.attends, stream_)); });
  Add("attend, logits " + name, head_dim, group, all * (2 * row + 4.0 * group),
      [&] { Check(AttendCuda(step.spills, stream_)); });
  const double parts = all / kFrameSlots * 4.0 * group * (head_dim + 1);
  Add("attend, pages " + name, head_dim, group, 2 * all * row + parts,
      [&] { Check(AttendCuda(step.parts, stream_)); });
  Add("page damage", head_dim, group, parts,
      [&] { Check(PageDamageCuda(step.page_damages, stream_)); });
  Add("mass", head_dim, group, all * (4.0 * group + 16),
      [&] { Check(MassCuda(step.masses, stream_)); });
  Add("damage " + name, head_dim, group, all * (row + 4.0 * group + 4),
      [&] { Check(DamageCuda(step.damages, stream_)); });
  Add("damage, fast " + name, head_dim, group, all * (row + 4.0 * group + 4),
      [&] { Check(FastDamageCuda(step.damages, stream_)); });
  if (group != 4) return;  // What follows has one row of scores, or none.
  Add("keydiff " + name, head_dim, 1, all * (2 * row + 4),
      [&] { Check(KeyDiffCuda(step.keys, stream_)); });
  Add("weighted value " + name, head_dim, 1, all * (row + 4),
      [&] { Check(WeightedValueCuda(step.centres, stream_)); });
  RunWindow(step);
}

// A window of 32 queries of each of the group's heads.
void Bench::RunWindow(const Step& step) {
  constexpr size_t kWindow = 32;
  const size_t elements = step.rows() * kWindow * step.dim();
  Array<float> query(step.lanes * elements);
  query.Fill(stream_, Random<float>(size_t{1} << 16, 0.3));
  Array<int32_t> index(kWindow);
  index.Fill(stream_, std::vector<int32_t>(kWindow, options_.slots));
  std::vector<WindowArgs> windows;
  for (size_t l = 0; l < step.lanes; ++l) {
    windows.push_back({.dtype = step.dtype,
                       .head_dim = step.head_dim,
                       .group = step.group,
                       .queries = kWindow,
                       .scale = 0.1F,
                       .extents = step.extents[l],
                       .query = query.part(l * elements, elements),
                       .query_index = index.part(0, kWindow),
                       .mass = step.score.part(l * step.slots, step.slots)});
  }
  Add("window of 32 " + std::string(DtypeName(step.dtype)), step.head_dim,
      step.group * static_cast<int>(kWindow),
      2 * static_cast<double>(step.lanes * step.slots * RowBytes(step.dtype, step.head_dim)),
      [&] { Check(WindowCuda(windows, stream_)); });
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--lanes") options.lanes = std::atoi(argv[i + 1]);
    if (flag == "--slots") options.slots = std::atoi(argv[i + 1]) / kFrameSlots * kFrameSlots;
    if (flag == "--json") options.json = argv[i + 1];
  }
  if (options.lanes < 1 || options.slots < kFrameSlots) {
    std::fprintf(stderr, "usage: cuda_bench [--lanes N] [--slots N (32 and more)] [--json FILE]\n");
    return 2;
  }
  const absl::StatusOr<CudaDevice> device = FindCudaDevice();
  if (absl::IsFailedPrecondition(device.status())) Die(device.status(), kNoDevice);
  Check(device.status());
  auto stream = CudaStream::Make();
  Check(stream.status());
  Bench bench(options, **stream);
  const double copy = bench.MeasureCopy();
  std::printf("%s, copy %.0f GB/s; %d lanes of %d slots\n", device->name.c_str(), copy / 1e9,
              options.lanes, options.slots);
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16}) {
    for (const int head_dim : {64, 128}) {
      for (const int group : {1, 4, 8}) bench.Run(dtype, head_dim, group);
    }
  }
  std::string json = "{\"device\": \"" + device->name +
                     "\", \"copy_bytes_per_second\": " + std::to_string(copy) +
                     ", \"lanes\": " + std::to_string(options.lanes) +
                     ", \"slots\": " + std::to_string(options.slots) + ", \"kernels\": [";
  std::printf("%-22s %4s %5s %10s %8s %6s\n", "kernel", "d", "rows", "us", "GB/s", "ratio");
  for (size_t i = 0; i < bench.rows().size(); ++i) {
    const Row& row = bench.rows()[i];
    const double rate = row.bytes / row.seconds;
    std::printf("%-22s %4d %5d %10.1f %8.0f %6.2f\n", row.kernel.c_str(), row.head_dim, row.rows,
                row.seconds * 1e6, rate / 1e9, rate / copy);
    json += std::string(i == 0 ? "" : ", ") + "{\"kernel\": \"" + row.kernel +
            "\", \"head_dim\": " + std::to_string(row.head_dim) +
            ", \"rows\": " + std::to_string(row.rows) +
            ", \"seconds\": " + std::to_string(row.seconds * 1e6) + "e-6" +
            ", \"bytes\": " + std::to_string(row.bytes) +
            ", \"ratio_to_copy\": " + std::to_string(rate / copy) + "}";
  }
  if (!options.json.empty()) std::ofstream(options.json) << json << "]}\n";
  return 0;
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  return ebbtide::bench::Main(argc, argv);
}
