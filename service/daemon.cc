// SPDX-License-Identifier: Apache-2.0

#include "service/daemon.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

#include "base/clock.h"
#include "base/executor.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "gpu/cpu/cpu_backend.h"
#include "gpu/make_cuda_backend.h"
#include "service/engine.h"
#include "service/policy/policy.h"
#include "service/rpc/server.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "storage/patient_tier.h"
#include "storage/rocksdb/rocksdb_tier.h"

namespace ebbtide::service {
namespace {

constexpr size_t kCarrierQueue = 64;
// Threads that wait for the disk rather than compute: a virtual disk answers several small reads at
// once about as fast as one.
constexpr int kDiskReaders = 8;

// A failure says which part of the configuration it comes from.
absl::Status Of(std::string_view field, const absl::Status& status) {
  return {status.code(), absl::StrFormat("%s: %s", field, status.message())};
}

absl::StatusOr<std::string> DrawBootId() {
  std::array<char, 16> bytes;
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return absl::ErrnoToStatus(errno, "can't draw a random boot id");
  }
  return absl::BytesToHexString(absl::string_view(bytes.data(), bytes.size()));
}

absl::StatusOr<std::unique_ptr<storage::Tier>> OpenRocksdb(const RocksdbConfig& config,
                                                           ParallelFor& parallel) {
  absl::StatusOr<std::unique_ptr<storage::RocksdbTier>> tier = storage::RocksdbTier::Create(
      {.folder = config.path, .budget_bytes = config.budget_bytes, .io = &parallel});
  if (!tier.ok()) {
    return Of("rocksdb.path", tier.status());
  }
  // The deadlines of calls hold though the disk hangs.
  return std::make_unique<storage::PatientTier>(*std::move(tier), storage::Patience{});
}

// CUDA where it is asked for, or can be had; `notes` say why where it can't.
absl::StatusOr<std::unique_ptr<gpu::Backend>> ChooseBackend(const Config& config,
                                                            std::vector<std::string>& notes) {
  std::string why = "device.backend is cpu";
  if (config.device.backend != BackendChoice::kCpu) {
    absl::StatusOr<std::unique_ptr<gpu::Backend>> cuda = gpu::MakeCudaBackend();
    if (cuda.ok()) return cuda;
    if (config.device.backend == BackendChoice::kCuda) return Of("device.backend", cuda.status());
    why = std::string(cuda.status().message());
    Log(LogLevel::kInfo, "the device tier is simulated", {{"why", why}});
  }
  notes.push_back("the device tier is simulated, it lies in host memory: " + why);
  return std::make_unique<gpu::CpuBackend>(static_cast<int>(config.server.threads));
}

// Has the device read recalled pages where the host tier holds them; `notes` say where it can't.
void ReadInPlace(gpu::Backend& backend, storage::HostTier& host, std::vector<std::string>& notes) {
  if (backend.is_simulated()) return;  // It reads all memory in place.
  absl::StatusOr<std::shared_ptr<gpu::HostReach>> reach = backend.ReachHost(host.reachable());
  if (!reach.ok()) {
    notes.push_back("recalled pages are copied for the device: " +
                    std::string(reach.status().message()));
    return;
  }
  host.RegisterWith(
      [reach = *std::move(reach)](std::span<std::byte> memory) { return reach->Register(memory); });
}

}  // namespace

void CheckWithParts(LoadedConfig& loaded) {
  if (loaded.config.sequences.recall.empty()) return;  // Nothing was read, or it is listed already.
  const absl::Status recall = ParseRecall(loaded.config.sequences.recall).status();
  if (!recall.ok()) {
    loaded.AddMistake("sequences.recall", std::string(recall.message()));
  }
}

// In order of construction: each may use those above it.
struct Daemon::Parts {
  explicit Parts(const Config& config)
      : parallel(static_cast<int>(config.server.threads)), host_budget(config.host.budget_bytes) {}

  // Nothing calls the engine once server and sweeper are gone; what it had carried ends before it.
  ~Parts() {
    server.reset();
    sweeper.reset();
    carriers.reset();
    engine.reset();
  }

  absl::Status Open(const Config& config, std::atomic<const char*>& waits_for);

  Clock& clock = SteadyClock();
  ParallelFor parallel;
  ParallelFor disk_readers{kDiskReaders};
  std::unique_ptr<gpu::Backend> backend;
  storage::ByteBudget host_budget;
  std::unique_ptr<storage::HostTier> host;
  std::unique_ptr<storage::Tier> rocksdb;
  std::unique_ptr<Executor> carriers;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Executor> sweeper;
  std::unique_ptr<RpcServer> server;
};

absl::Status Daemon::Parts::Open(const Config& config, std::atomic<const char*>& waits_for) {
  EBBTIDE_ASSIGN_OR_RETURN(std::string boot_id, DrawBootId());
  ServerFacts facts;
  waits_for = "device.backend";
  EBBTIDE_ASSIGN_OR_RETURN(backend, ChooseBackend(config, facts.notes));
  waits_for = "host.budget";
  absl::StatusOr<std::unique_ptr<storage::HostTier>> opened =
      storage::HostTier::Create(host_budget);
  if (!opened.ok()) {
    return Of("host.budget", opened.status());
  }
  host = *std::move(opened);
  ReadInPlace(*backend, *host, facts.notes);
  if (!config.rocksdb.disabled) {
    waits_for = "rocksdb.path";
    EBBTIDE_ASSIGN_OR_RETURN(rocksdb, OpenRocksdb(config.rocksdb, disk_readers));
  }
  carriers = MakeThreadExecutor("carry", 1, kCarrierQueue);
  EBBTIDE_ASSIGN_OR_RETURN(engine,
                           Engine::Create({.device_budget_bytes = config.device.budget_bytes,
                                           .default_recall = config.sequences.recall,
                                           .idle_timeout = config.sequences.idle_timeout},
                                          {.clock = clock,
                                           .carriers = *carriers,
                                           .parallel = parallel,
                                           .backend = *backend,
                                           .host = *host,
                                           .host_budget = host_budget,
                                           .rocksdb = rocksdb.get(),
                                           .rocksdb_place = config.rocksdb.path}));
  sweeper = MakeThreadExecutor("sweep", 1, 1);
  facts.version = EBBTIDE_VERSION;
  facts.boot_id = std::move(boot_id);
  facts.backend = backend->name();
  facts.simulated_device = backend->is_simulated();
  facts.default_recall = config.sequences.recall;
  facts.default_idle_timeout = config.sequences.idle_timeout;
  facts.started = clock.SinceStart();
  facts.notes.push_back(config.rocksdb.disabled ? "no tier below host: rocksdb.disabled is set"
                                                : "the rocksdb tier starts empty");
  waits_for = "server.listen";
  absl::StatusOr<std::unique_ptr<RpcServer>> listening =
      RpcServer::Listen(config.server, std::move(facts), *engine, clock);
  if (!listening.ok()) {
    return Of("server.listen", listening.status());
  }
  server = *std::move(listening);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Config& config,
                                                      std::atomic<const char*>& waits_for) {
  auto parts = std::make_unique<Parts>(config);
  EBBTIDE_RETURN_IF_ERROR(parts->Open(config, waits_for));
  // No make_unique: the constructor is private.
  return std::unique_ptr<Daemon>(new Daemon(std::move(parts)));
}

Daemon::Daemon(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Daemon::~Daemon() = default;

const ServerFacts& Daemon::facts() const {
  return parts_->server->facts();
}
std::string Daemon::target() const {
  return parts_->server->target();
}
Stats Daemon::GetStats() {
  return parts_->engine->GetStats();
}

void Daemon::Tick() {
  try {
    parts_->server->RefreshHealth();
    parts_->server->CutOffUnread();
    // A full queue means that the sweep before is still at work.
    parts_->sweeper->Submit("idle", [engine = parts_->engine.get()] { engine->CloseIdle(); })
        .IgnoreError();
  } catch (const std::bad_alloc&) {
    // Calls are served as far as there is memory for them, and the next tick does it all.
  }
}

void Daemon::StopAdmitting() {
  parts_->server->StopAdmitting();
}
bool Daemon::WaitIdle(absl::Duration patience) {
  return parts_->server->WaitIdle(patience);
}

}  // namespace ebbtide::service
