// SPDX-License-Identifier: Apache-2.0
//
// An engine that runs on the test's thread, its carriers when they are told. An exception can be
// made to come out of any call that it makes of its device, its tiers or its carriers.

#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <string_view>

#include "tests/support/engine_stand.h"
#include "tests/support/stepped_executor.h"
#include "tests/support/watched_parts.h"

namespace ebbtide::test {

// Lets one call of the parts that it watches end in an exception, as where memory runs out.
class Breaker {
 public:
  // The nth from now on, from 0.
  void BreakAt(int64_t n) { left_ = n; }
  void Heal() { left_ = INT64_MAX; }
  bool has_broken() const { return left_ < 0; }
  Watch watch() {
    return [this](std::string_view) {
      if (left_-- == 0) throw std::bad_alloc();
    };
  }

 private:
  int64_t left_ = INT64_MAX;
};

class BreakableEngine {
 public:
  explicit BreakableEngine(const Tokens& tokens, EngineSetup setup = {})
      : stand(Watched(std::move(setup))), worker(stand.engine(), tokens, "a") {}

  service::Engine& engine() { return stand.engine(); }

  Breaker breaker;
  SteppedExecutor carriers;
  WatchedExecutor watched_carriers{carriers, breaker.watch()};
  EngineStand stand;
  Worker worker;

 private:
  EngineSetup Watched(EngineSetup setup) {
    setup.threads = 1;
    setup.carriers = &watched_carriers;
    setup.wrap_host = setup.wrap_rocksdb = [this](storage::Tier& tier) {
      return std::make_unique<WatchedTier>(tier, breaker.watch());
    };
    setup.wrap_backend = [this](gpu::Backend& backend) {
      return std::make_unique<WatchedBackend>(backend, breaker.watch());
    };
    return setup;
  }
};

}  // namespace ebbtide::test
