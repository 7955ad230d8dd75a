// SPDX-License-Identifier: Apache-2.0
//
// Both services over one table of lengths. An answer is lost by carrying the call out and failing
// it, as a connection cut between the two would.

#include "tests/unit/client/fake_daemon.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"

namespace ebbtide::client {
namespace {

struct LayerState {
  uint64_t first_index = 0;  // Of the last call that added tokens.
  uint64_t length = 0;
};

std::string CallName(const google::protobuf::Message& request) {
  const std::string& name = request.GetDescriptor()->name();
  return name.substr(0, name.size() - std::string_view("Request").size());
}

uint64_t TokensOf(const v1::Tensor& tensor) {
  return tensor.shape_size() == 0 ? 0 : static_cast<uint64_t>(tensor.shape(0));
}

}  // namespace

class FakeDaemon::Service {
 public:
  Service(std::string socket_path, std::string boot_id)
      : socket_path_(std::move(socket_path)), cache_(*this), stats_(*this) {
    Start(std::move(boot_id));
  }
  ~Service() { Stop(); }

  void Start(std::string boot_id) {
    {
      const absl::MutexLock lock(&mu_);
      boot_id_ = std::move(boot_id);
      lengths_.clear();
      open_.clear();
    }
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("unix:" + socket_path_, grpc::InsecureServerCredentials());
    builder.RegisterService(&cache_);
    builder.RegisterService(&stats_);
    server_ = builder.BuildAndStart();
  }

  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }

  const std::string& socket_path() const { return socket_path_; }

  absl::Mutex mu_;
  int lose_ ABSL_GUARDED_BY(mu_) = 0;
  int held_item_ ABSL_GUARDED_BY(mu_) = 0;
  int hold_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_silent_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t message_bytes_max_ ABSL_GUARDED_BY(mu_) = 1 << 20;
  uint64_t appended_ ABSL_GUARDED_BY(mu_) = 0;
  int refuse_ ABSL_GUARDED_BY(mu_) = 0;
  int refuse_code_ ABSL_GUARDED_BY(mu_) = 0;
  std::string refuse_reason_ ABSL_GUARDED_BY(mu_);
  std::string refuse_message_ ABSL_GUARDED_BY(mu_);
  std::vector<SeenCall> calls_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> open_ ABSL_GUARDED_BY(mu_);

 private:
  // Notes the call, carries it out by `answer`, then loses, delays or refuses as told.
  template <typename Request, typename Response, typename Answer>
  grpc::Status Carry(grpc::ServerContext* context, const Request& request, Response* response,
                     int items, Answer answer) {
    {
      const absl::MutexLock lock(&mu_);
      calls_.push_back({.name = CallName(request), .items = items});
      if (refuse_ > 0) {
        --refuse_;
        context->AddTrailingMetadata("ebbtide-reason", refuse_reason_);
        return {static_cast<grpc::StatusCode>(refuse_code_), refuse_message_};
      }
      const grpc::Status status = answer();
      if (!status.ok()) return status;
      if (lose_ > 0) {
        --lose_;
        response->Clear();
        return {grpc::StatusCode::UNAVAILABLE, "Socket closed"};
      }
      if (!is_silent_) return status;
    }
    // Whether its caller has given the call up is not told, only found.
    const auto speaks = [this] {
      mu_.AssertHeld();
      return !is_silent_;
    };
    const absl::MutexLock lock(&mu_);
    while (!mu_.AwaitWithTimeout(absl::Condition(&speaks), absl::Milliseconds(5))) {
      if (context->IsCancelled()) return grpc::Status::CANCELLED;
    }
    return grpc::Status::OK;
  }

  // One item of Append or Attend, by the rules of CacheService.
  template <typename Result>
  void Take(const std::string& sequence, uint32_t layer, uint64_t first_index, uint64_t tokens,
            Result* result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (open_.count(sequence) == 0) {
      result->mutable_status()->set_code(grpc::StatusCode::NOT_FOUND);
      result->mutable_status()->set_reason("SEQUENCE_UNKNOWN");
      return;
    }
    LayerState& state = lengths_[{sequence, layer}];
    if (tokens > 0 && first_index == state.length) {
      state = {.first_index = first_index, .length = first_index + tokens};
      appended_ += tokens;
    } else if (tokens > 0 && first_index == state.first_index &&
               first_index + tokens == state.length) {
      result->set_replayed(true);
    } else if (tokens > 0) {
      result->mutable_status()->set_code(grpc::StatusCode::ABORTED);
      result->mutable_status()->set_reason("INDEX_GAP");
    }
    result->set_length(state.length);
    result->set_committed(state.length);
  }

  template <typename Response>
  void HoldIfTold(Response* response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (lose_ > 0 || hold_ == 0 || held_item_ >= response->results_size()) return;
    --hold_;
    v1::ItemStatus* status = response->mutable_results(held_item_)->mutable_status();
    status->set_code(grpc::StatusCode::UNAVAILABLE);
    status->set_reason("CALL_IN_FLIGHT");
    held_item_ = 0;  // Asked for again, it comes alone.
  }

  class Cache final : public v1::CacheService::Service {
   public:
    explicit Cache(FakeDaemon::Service& daemon) : daemon_(daemon) {}

    grpc::Status RegisterModel(grpc::ServerContext* context,
                               const v1::RegisterModelRequest* request,
                               v1::RegisterModelResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        daemon_.mu_.AssertHeld();
        response->set_boot_id(daemon_.boot_id_);
        *response->mutable_geometry() = request->geometry();
        return grpc::Status::OK;
      });
    }

    grpc::Status OpenSequence(grpc::ServerContext* context, const v1::OpenSequenceRequest* request,
                              v1::OpenSequenceResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        daemon_.mu_.AssertHeld();
        daemon_.open_.insert(request->sequence());
        response->set_boot_id(daemon_.boot_id_);
        response->set_policy(request->policy());
        response->set_budget_tokens(request->budget().tokens());
        return grpc::Status::OK;
      });
    }

    grpc::Status Append(grpc::ServerContext* context, const v1::AppendRequest* request,
                        v1::AppendResponse* response) override {
      return daemon_.Carry(context, *request, response, request->items_size(), [&] {
        daemon_.mu_.AssertHeld();
        response->set_boot_id(daemon_.boot_id_);
        for (const v1::AppendItem& item : request->items()) {
          daemon_.Take(item.sequence(), request->layer(), item.first_index(), TokensOf(item.k()),
                       response->add_results());
        }
        daemon_.HoldIfTold(response);
        return grpc::Status::OK;
      });
    }

    grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                        v1::AttendResponse* response) override {
      return daemon_.Carry(context, *request, response, request->items_size(), [&] {
        daemon_.mu_.AssertHeld();
        response->set_boot_id(daemon_.boot_id_);
        for (const v1::AttendItem& item : request->items()) {
          v1::AttendResult* result = response->add_results();
          daemon_.Take(item.sequence(), request->layer(), item.first_index(), TokensOf(item.k()),
                       result);
          *result->mutable_output() = item.q();  // Any answer that tells items apart.
        }
        daemon_.HoldIfTold(response);
        return grpc::Status::OK;
      });
    }

    grpc::Status Truncate(grpc::ServerContext* context, const v1::TruncateRequest* request,
                          v1::TruncateResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        daemon_.mu_.AssertHeld();
        if (daemon_.open_.count(request->sequence()) == 0) {
          return grpc::Status(grpc::StatusCode::NOT_FOUND, "no such sequence");
        }
        response->set_boot_id(daemon_.boot_id_);
        response->set_length(request->length());
        return grpc::Status::OK;
      });
    }

    grpc::Status CloseSequence(grpc::ServerContext* context,
                               const v1::CloseSequenceRequest* request,
                               v1::CloseSequenceResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        daemon_.mu_.AssertHeld();
        daemon_.open_.erase(request->sequence());
        response->set_boot_id(daemon_.boot_id_);
        return grpc::Status::OK;
      });
    }

   private:
    FakeDaemon::Service& daemon_;
  };

  class Stats final : public v1::StatsService::Service {
   public:
    explicit Stats(FakeDaemon::Service& daemon) : daemon_(daemon) {}

    grpc::Status GetServerInfo(grpc::ServerContext* context,
                               const v1::GetServerInfoRequest* request,
                               v1::GetServerInfoResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        daemon_.mu_.AssertHeld();
        response->set_boot_id(daemon_.boot_id_);
        response->set_message_bytes_max(daemon_.message_bytes_max_);
        return grpc::Status::OK;
      });
    }

    // Two sequences, one per page.
    grpc::Status ListSequences(grpc::ServerContext* context,
                               const v1::ListSequencesRequest* request,
                               v1::ListSequencesResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        const bool is_first = request->page_token().empty();
        response->add_sequences()->set_sequence(is_first ? "a" : "b");
        if (is_first) response->set_next_page_token("next");
        return grpc::Status::OK;
      });
    }

    grpc::Status DescribeSequence(grpc::ServerContext* context,
                                  const v1::DescribeSequenceRequest* request,
                                  v1::DescribeSequenceResponse* response) override {
      return daemon_.Carry(context, *request, response, 0, [&] {
        response->mutable_summary()->set_sequence(request->sequence());
        return grpc::Status::OK;
      });
    }

   private:
    FakeDaemon::Service& daemon_;
  };

  const std::string socket_path_;
  Cache cache_;
  Stats stats_;
  std::unique_ptr<grpc::Server> server_;
  std::string boot_id_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, uint32_t>, LayerState> lengths_ ABSL_GUARDED_BY(mu_);
};

FakeDaemon::FakeDaemon(std::string socket_path, std::string boot_id)
    : service_(std::make_unique<Service>(std::move(socket_path), std::move(boot_id))) {}
FakeDaemon::~FakeDaemon() = default;

std::string FakeDaemon::target() const {
  return "unix:" + service_->socket_path();
}

void FakeDaemon::LoseAnswers(int count) {
  const absl::MutexLock lock(&service_->mu_);
  service_->lose_ = count;
}

void FakeDaemon::HoldItem(int item, int count) {
  const absl::MutexLock lock(&service_->mu_);
  service_->held_item_ = item;
  service_->hold_ = count;
}

void FakeDaemon::FallSilent() {
  const absl::MutexLock lock(&service_->mu_);
  service_->is_silent_ = true;
}

void FakeDaemon::Speak() {
  const absl::MutexLock lock(&service_->mu_);
  service_->is_silent_ = false;
}

void FakeDaemon::Restart(std::string boot_id) {
  service_->Stop();
  service_->Start(std::move(boot_id));
}

void FakeDaemon::Stop() {
  service_->Stop();
}

void FakeDaemon::RefuseNext(int code, std::string reason, std::string message, int count) {
  const absl::MutexLock lock(&service_->mu_);
  service_->refuse_ = count;
  service_->refuse_code_ = code;
  service_->refuse_reason_ = std::move(reason);
  service_->refuse_message_ = std::move(message);
}

void FakeDaemon::set_message_bytes_max(uint64_t bytes) {
  const absl::MutexLock lock(&service_->mu_);
  service_->message_bytes_max_ = bytes;
}

void FakeDaemon::AwaitCalls(const std::string& name, int count) const {
  const absl::MutexLock lock(&service_->mu_);
  const auto have_come = [&] {
    service_->mu_.AssertHeld();
    const auto& calls = service_->calls_;
    return std::ranges::count(calls, name, &SeenCall::name) >= count;
  };
  EXPECT_TRUE(service_->mu_.AwaitWithTimeout(absl::Condition(&have_come), absl::Seconds(30)))
      << count << " calls of " << name << " have not come";
}

std::vector<SeenCall> FakeDaemon::calls() const {
  const absl::MutexLock lock(&service_->mu_);
  return service_->calls_;
}

int FakeDaemon::open_sequences() const {
  const absl::MutexLock lock(&service_->mu_);
  return static_cast<int>(service_->open_.size());
}

uint64_t FakeDaemon::appended() const {
  const absl::MutexLock lock(&service_->mu_);
  return service_->appended_;
}

}  // namespace ebbtide::client
