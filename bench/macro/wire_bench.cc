// SPDX-License-Identifier: Apache-2.0
//
// What the wire costs: calls on a running daemon beside the least that gRPC asks for, and appended
// bytes beside memcpy, all from one thread in the same run.
//
//   wire_bench TARGET    unix:PATH or HOST:PORT of a daemon that does nothing else; give it budgets
//                        of 1 GiB for the device and 2 GiB for the host, and no RocksDB tier

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

#include "base/status_macros.h"
#include "ebbtide/client.h"
#include "ebbtide/v1/stats.grpc.pb.h"

namespace ebbtide::bench {
namespace {

using client::Client;
using client::Sequence;

double Seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Answers at once, on a socket of its own.
class EmptyService final : public v1::StatsService::Service {
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse*) override {
    return grpc::Status::OK;
  }
};

// The least that gRPC asks for: an empty call to a process of its own, as a daemon is one. Within
// one process gRPC's client reads for the server too, and saves a switch between threads.
class EmptyServer {
 public:
  // Before anything of gRPC runs in this process.
  EmptyServer() : process_(fork()) {
    EBBTIDE_CHECK(process_ >= 0, "the empty server's process starts");
    if (process_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    EmptyService service;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(target_, grpc::InsecureServerCredentials());
    builder.RegisterService(&service);
    const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    EBBTIDE_CHECK(server != nullptr, "the empty server starts");
    server->Wait();
  }
  ~EmptyServer() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    unlink(target_.substr(std::string_view("unix:").size()).c_str());
  }
  EmptyServer(const EmptyServer&) = delete;
  EmptyServer& operator=(const EmptyServer&) = delete;

  void Call() {
    if (stub_ == nullptr) {
      stub_ = v1::StatsService::NewStub(
          grpc::CreateChannel(target_, grpc::InsecureChannelCredentials()));
    }
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    context.set_wait_for_ready(true);
    v1::GetServerInfoResponse response;
    EBBTIDE_CHECK(stub_->GetServerInfo(&context, {}, &response).ok(), "an empty call is answered");
  }

 private:
  const std::string target_ = absl::StrCat("unix:/tmp/ebbtide-wire-bench-", getpid());
  const pid_t process_;
  std::unique_ptr<v1::StatsService::Stub> stub_;
};

template <typename T>
T Checked(absl::StatusOr<T> result) {
  EBBTIDE_CHECK(result.ok(), result.status().ToString().c_str());
  return *std::move(result);
}

// With room on the device for all that is sent: nothing waits for a seal.
Sequence Open(const Client& client, const std::string& name, const client::Geometry& geometry) {
  const std::string model = absl::StrCat("wire-bench-", geometry.kv_heads);
  Checked(client.RegisterModel({.name = model, .geometry = geometry, .weights_fingerprint = "1"}));
  return Checked(client.OpenSequence({.name = name,
                                      .model = model,
                                      .policy = "streaming",
                                      .budget = {.tokens = 8192},
                                      .recall = "off"}));
}

void Calls(const Client& client, EmptyServer& empty) {
  const client::Geometry geometry{.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  const Sequence sequence = Open(client, "calls", geometry);
  const std::vector<std::byte> row(128);
  const client::TensorView one{client::Dtype::kF16, {1, 1, 64}, row};
  const Sequence single = Open(client, "single", geometry);
  Checked(single.Append({.layer = 0, .phase = client::Phase::kPrefill}, {.k = one, .v = one}));
  uint64_t index = 0;
  const std::pair<const char*, std::function<void()>> kinds[] = {
      {"an empty call", [&] { empty.Call(); }},
      {"GetServerInfo", [&] { Checked(client.GetServerInfo()); }},
      {"Attend over 1 token",
       [&] { Checked(single.Attend({.layer = 0, .phase = client::Phase::kDecode}, {.q = one})); }},
      {"Attend, a step", [&] {
         Checked(sequence.Attend({.layer = 0, .phase = client::Phase::kDecode},
                                 {.first_index = index, .q = one, .k = one, .v = one}));
         ++index;
       }}};
  std::vector<double> seconds[std::size(kinds)];
  for (int round = 0; round < 2000; ++round) {
    for (size_t kind = 0; kind < std::size(kinds); ++kind) {
      seconds[kind].push_back(Seconds(kinds[kind].second));
    }
  }
  for (size_t kind = 0; kind < std::size(kinds); ++kind) {
    const double p50 = Median(seconds[kind]);
    std::printf("%-20s p50 %6.1f us  + %6.1f us\n", kinds[kind].first, p50 * 1e6,
                (p50 - Median(seconds[0])) * 1e6);
  }
  EBBTIDE_CHECK(single.Close().ok(), "the sequence closes");
  EBBTIDE_CHECK(sequence.Close().ok(), "the sequence closes");
}

void Appends(const Client& client) {
  const client::Geometry geometry{.layers = 1, .query_heads = 32, .kv_heads = 32, .head_dim = 128};
  for (const int64_t tokens : {16, 64, 256, 512}) {
    const auto half = static_cast<size_t>(tokens) * 32 * 128 * 2;
    const std::vector<std::byte> bytes(half);
    std::vector<std::byte> copy(2 * half);
    const client::TensorView rows{client::Dtype::kF16, {tokens, 32, 128}, bytes};
    std::vector<double> append, limit;
    const Sequence sequence = Open(client, "appends", geometry);
    for (uint64_t round = 0; round < 15; ++round) {
      limit.push_back(Seconds([&] {
        std::memcpy(copy.data(), bytes.data(), half);
        std::memcpy(copy.data() + half, bytes.data(), half);
      }));
      append.push_back(Seconds([&] {
        Checked(sequence.Append(
            {.layer = 0, .phase = client::Phase::kPrefill},
            {.first_index = round * static_cast<uint64_t>(tokens), .k = rows, .v = rows}));
      }));
      usleep(50000);  // Until what was appended is sealed.
    }
    EBBTIDE_CHECK(sequence.Close().ok(), "the sequence closes");
    const double p50 = Median(append);
    std::printf("append of %5zu KiB    p50 %6.2f ms  %5.2f GB/s  ratio %.3f\n", 2 * half / 1024,
                p50 * 1e3, 2 * static_cast<double>(half) / p50 * 1e-9, Median(limit) / p50);
  }
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    std::fprintf(stderr, "usage: wire_bench TARGET    (unix:PATH or HOST:PORT)\n");
    return 2;
  }
  ebbtide::bench::EmptyServer empty;
  const auto client = ebbtide::client::Client::Connect(argv[1]);
  if (!client.ok()) {
    std::fprintf(stderr, "%s\n", client.status().ToString().c_str());
    return 1;
  }
  ebbtide::bench::Calls(*client, empty);
  ebbtide::bench::Appends(*client);
  return 0;
}
