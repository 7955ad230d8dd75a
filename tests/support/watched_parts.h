// SPDX-License-Identifier: Apache-2.0
//
// A device, a tier and an executor that tell of each call before they pass it on: for tests that
// count calls, order them, or let one end in an exception.

#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/executor.h"
#include "gpu/backend.h"
#include "storage/tier.h"

namespace ebbtide::test {

using Watch = std::function<void(std::string_view call)>;

class WatchedBackend final : public gpu::Backend {
 public:
  WatchedBackend(gpu::Backend& backend, Watch watch)
      : backend_(backend), watch_(std::move(watch)) {}

  std::string_view name() const override { return backend_.name(); }
  bool is_simulated() const override { return backend_.is_simulated(); }
  absl::StatusOr<gpu::DeviceBuffer> Allocate(size_t bytes) override {
    return backend_.Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> MakeStream() override {
    watch_("stream");
    return backend_.MakeStream();
  }
  absl::Status Run(gpu::Stream& stream, const gpu::Batch& batch) override {
    watch_("run");
    return backend_.Run(stream, batch);
  }

 private:
  gpu::Backend& backend_;
  const Watch watch_;
};

class WatchedTier final : public storage::Tier {
 public:
  WatchedTier(storage::Tier& tier, Watch watch) : tier_(tier), watch_(std::move(watch)) {}

  std::string_view name() const override { return tier_.name(); }
  absl::Status Write(std::span<const storage::BlockWrite> blocks) override {
    watch_("write");
    return tier_.Write(blocks);
  }
  absl::Status Read(std::span<storage::PageRead> pages, absl::Duration patience) override {
    watch_("read");
    return tier_.Read(pages, patience);
  }
  storage::BlockPin Pin(const storage::BlockKey& key) override {
    watch_("pin");
    return tier_.Pin(key);
  }
  absl::Status Erase(std::span<const storage::BlockKey> keys) override {
    watch_("erase");
    return tier_.Erase(keys);
  }
  absl::Status Probe() override {
    watch_("probe");
    return tier_.Probe();
  }
  storage::TierUsage Usage() const override {
    watch_("usage");
    return tier_.Usage();
  }
  storage::TierRoom Room(std::span<const storage::RecordSize> sizes) const override {
    watch_("room");
    return tier_.Room(sizes);
  }

 private:
  storage::Tier& tier_;
  const Watch watch_;
};

class WatchedExecutor final : public Executor {
 public:
  WatchedExecutor(Executor& executor, Watch watch)
      : executor_(executor), watch_(std::move(watch)) {}

  absl::Status Submit(std::string_view name, std::function<void()> job) override {
    watch_("submit");
    return executor_.Submit(name, std::move(job));
  }

 private:
  Executor& executor_;
  const Watch watch_;
};

}  // namespace ebbtide::test
