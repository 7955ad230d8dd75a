// SPDX-License-Identifier: Apache-2.0

#include "tests/integration/replay_stand.h"

#include "gtest/gtest.h"

#include "base/executor.h"
#include "base/status_macros.h"
#include "client/cli/truth.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::test {

const SmallTrace& TheSmallTrace() {
  static const SmallTrace* const kSmallTrace = [] {
    absl::StatusOr<cli::Trace> trace =
        cli::ReadTrace(EBBTIDE_TRACES "/smollm2-opticks-256.safetensors", {});
    EBBTIDE_CHECK(trace.ok(), "the small trace is read");
    auto* small = new SmallTrace{.trace = *std::move(trace), .truths = {}};
    ParallelFor parallel(2);
    for (const cli::TraceLayer& layer : small->trace.layers) {
      small->truths.push_back(*cli::ComputeTruth(small->trace, layer, parallel, [](uint64_t) {}));
    }
    return small;
  }();
  return *kSmallTrace;
}

ReplayStand::ReplayStand(const EngineSetup& setup) : engine_(setup) {
  service::ServerConfig config;
  config.listen.socket_path = folder_.path() / "e.sock";
  config.message_bytes_max = 64 << 20;
  config.calls_in_flight_max = 4;
  config.call_deadline = absl::Seconds(30);
  service::ServerFacts facts;
  facts.boot_id = "boot";
  auto server = service::RpcServer::Listen(config, facts, engine_.engine(), engine_.clock());
  EBBTIDE_CHECK(server.ok(), "the server listens");
  server_ = *std::move(server);
  auto client = client::Client::Connect(server_->target(), {.control_timeout = absl::Seconds(60)});
  EBBTIDE_CHECK(client.ok(), "the client connects");
  client_ = std::make_unique<client::Client>(*std::move(client));
}

absl::StatusOr<cli::RunReport> ReplayStand::Play(const cli::RunSpec& spec,
                                                 const std::function<void(uint64_t)>& at) const {
  const SmallTrace& small = TheSmallTrace();
  return cli::Play(*client_, {.trace = small.trace, .truths = small.truths}, spec,
                   [&](uint64_t tokens) {
                     at(tokens);
                     return absl::OkStatus();
                   });
}

}  // namespace ebbtide::test
