// SPDX-License-Identifier: Apache-2.0
//
// A recorded model played over the wire, as `ebbctl replay` does, against a server in this process:
// gRPC on a unix socket, the engine on tiers under the test's hand.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/cli/player.h"
#include "ebbtide/client.h"
#include "service/rpc/server.h"
#include "tests/support/engine_stand.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::test {

// The smallest recorded trace, with the truth of its layers: read and computed once.
struct SmallTrace {
  cli::Trace trace;
  std::vector<cli::LayerTruth> truths;
};
const SmallTrace& TheSmallTrace();

class ReplayStand {
 public:
  explicit ReplayStand(const EngineSetup& setup);

  EngineStand& engine() { return engine_; }
  const client::Client& client() const { return *client_; }

  // Plays the small trace; `at` hears the tokens played so far.
  absl::StatusOr<cli::RunReport> Play(
      const cli::RunSpec& spec, const std::function<void(uint64_t)>& at = [](uint64_t) {}) const;

 private:
  const TempFolder folder_;
  EngineStand engine_;
  std::unique_ptr<service::RpcServer> server_;
  std::unique_ptr<client::Client> client_;
};

}  // namespace ebbtide::test
