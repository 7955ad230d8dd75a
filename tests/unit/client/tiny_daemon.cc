// SPDX-License-Identifier: Apache-2.0
//
// One mutex over one map of sequences; every answer is a plain loop.

#include "tests/unit/client/tiny_daemon.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "client/cli/trace.h"
#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"

namespace ebbtide::cli {
namespace {

struct TinyLayer {
  std::string k;  // [tokens, kv_heads, head_dim] as sent.
  std::string v;
};

struct TinySequence {
  v1::OpenSequenceResponse opened;
  std::vector<TinyLayer> layers;
};

struct HeadAnswer {
  std::vector<double> output;
  double lse = 0;
};

std::vector<float> Floats(v1::Dtype dtype, const std::string& bytes) {
  TraceTensor tensor{.dtype = static_cast<client::Dtype>(dtype), .heads = 1, .head_dim = 1};
  tensor.bytes.resize(bytes.size());
  std::memcpy(tensor.bytes.data(), bytes.data(), bytes.size());
  return tensor.ToFloats();
}

// Keys and values of one layer as numbers, and attention over some of them.
class TinyAttention {
 public:
  TinyAttention(const v1::Geometry& geometry, const TinyLayer& layer)
      : geometry_(geometry),
        k_(Floats(geometry.dtype(), layer.k)),
        v_(Floats(geometry.dtype(), layer.v)) {}

  HeadAnswer Attend(const float* query, uint32_t head, uint64_t begin, uint64_t end) const {
    const size_t dim = geometry_.head_dim();
    const size_t kv_head = head / (geometry_.query_heads() / geometry_.kv_heads());
    HeadAnswer answer{.output = std::vector<double>(dim)};
    double sum = 0;
    for (uint64_t j = begin; j < end; ++j) {
      const size_t row = (j * geometry_.kv_heads() + kv_head) * dim;
      double logit = 0;
      for (size_t d = 0; d < dim; ++d) logit += double{query[d]} * double{k_[row + d]};
      const double weight = std::exp(geometry_.scale() * logit);
      sum += weight;
      for (size_t d = 0; d < dim; ++d) answer.output[d] += weight * v_[row + d];
    }
    for (double& o : answer.output) o /= sum;
    answer.lse = std::log(sum);
    return answer;
  }

 private:
  const v1::Geometry& geometry_;
  const std::vector<float> k_;
  const std::vector<float> v_;
};

}  // namespace

class TinyDaemon::Service : public v1::CacheService::Service {
 public:
  explicit Service(const std::string& socket_path) : target_("unix:" + socket_path), stats_(*this) {
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort(target_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    builder.RegisterService(&stats_);
    server_ = builder.BuildAndStart();
  }
  ~Service() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status RegisterModel(grpc::ServerContext*, const v1::RegisterModelRequest* request,
                             v1::RegisterModelResponse* response) override {
    const absl::MutexLock lock(&mu_);
    geometry_ = request->geometry();
    geometry_.set_page_tokens(kPageTokens);
    *response->mutable_geometry() = geometry_;
    response->set_boot_id("tiny");
    return grpc::Status::OK;
  }

  grpc::Status OpenSequence(grpc::ServerContext*, const v1::OpenSequenceRequest* request,
                            v1::OpenSequenceResponse* response) override {
    const absl::MutexLock lock(&mu_);
    const v1::Budget& budget = request->budget();
    response->set_boot_id("tiny");
    response->set_policy(request->policy() + "+resolved");
    response->set_prefill(request->prefill().empty() ? "exact" : request->prefill());
    response->set_recall(request->recall().empty() ? "bounded(0.02)" : request->recall());
    response->set_budget_tokens(
        budget.has_percent() ? static_cast<uint32_t>(std::ceil(budget.percent().percent() *
                                                               budget.percent().of_tokens() / 100))
                             : budget.tokens());
    response->set_protected_tokens(4);
    sequences_[request->sequence()] = {.opened = *response,
                                       .layers = std::vector<TinyLayer>(geometry_.layers())};
    return grpc::Status::OK;
  }

  grpc::Status Attend(grpc::ServerContext*, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override {
    const absl::MutexLock lock(&mu_);
    response->set_boot_id("tiny");
    for (const v1::AttendItem& item : request->items()) {
      calls_.push_back({.layer = request->layer(),
                        .is_decode = request->phase() == v1::PHASE_DECODE,
                        .prompt_end = request->prompt_end(),
                        .first_index = item.first_index(),
                        .count = static_cast<uint64_t>(item.q().shape(0))});
      if (static_cast<int64_t>(item.first_index()) == faults_.refuse_at) {
        return {grpc::StatusCode::RESOURCE_EXHAUSTED, "full"};
      }
      Answer(sequences_[item.sequence()], *request, item, response->add_results());
    }
    return grpc::Status::OK;
  }

  grpc::Status ReadPages(grpc::ServerContext*, const v1::ReadPagesRequest* request,
                         v1::ReadPagesResponse* response) override {
    const absl::MutexLock lock(&mu_);
    response->set_boot_id("tiny");
    const TinyLayer& layer = sequences_[request->sequence()].layers[request->layer()];
    const size_t row = RowBytes();
    const uint64_t tokens = layer.k.size() / (row * geometry_.kv_heads());
    for (uint64_t p = request->first_page(); p < request->first_page() + request->page_count();
         ++p) {
      v1::Page* page = response->add_pages();
      page->set_first_index(p * kPageTokens);
      page->set_tokens(
          static_cast<uint32_t>(std::min<uint64_t>(kPageTokens, tokens - page->first_index())));
      page->set_tier(p % 2 == 0 ? v1::TIER_HOST : v1::TIER_ROCKSDB);
      page->set_state(v1::PAGE_STATE_OK);
      for (uint64_t t = page->first_index(); t < page->first_index() + page->tokens(); ++t) {
        const size_t at = (t * geometry_.kv_heads() + request->kv_head()) * row;
        page->mutable_k()->append(layer.k, at, row);
        page->mutable_v()->append(layer.v, at, row);
      }
      if (request->layer() == 0 && request->kv_head() == 0) Damage(p, page);
    }
    return grpc::Status::OK;
  }

  grpc::Status CloseSequence(grpc::ServerContext*, const v1::CloseSequenceRequest* request,
                             v1::CloseSequenceResponse* response) override {
    const absl::MutexLock lock(&mu_);
    response->set_boot_id("tiny");
    sequences_.erase(request->sequence());
    return grpc::Status::OK;
  }

  const std::string& target() const { return target_; }

  mutable absl::Mutex mu_;
  TinyFaults faults_ ABSL_GUARDED_BY(mu_);
  std::vector<PlayedCall> calls_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, TinySequence> sequences_ ABSL_GUARDED_BY(mu_);

 private:
  size_t RowBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return geometry_.head_dim() * client::DtypeBytes(static_cast<client::Dtype>(geometry_.dtype()));
  }

  void Damage(uint64_t p, v1::Page* page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int64_t flipped = faults_.flip_key_of;
    if (flipped >= 0 && static_cast<uint64_t>(flipped) / kPageTokens == p) {
      (*page->mutable_k())[static_cast<size_t>(flipped) % kPageTokens * RowBytes()] ^= 1;
    }
    if (static_cast<int64_t>(p) == faults_.corrupt_page) {
      page->set_state(v1::PAGE_STATE_CORRUPT);
      page->clear_k();
      page->clear_v();
    }
  }

  void Answer(TinySequence& sequence, const v1::AttendRequest& request, const v1::AttendItem& item,
              v1::AttendResult* result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    TinyLayer& layer = sequence.layers[request.layer()];
    layer.k += item.k().data();
    layer.v += item.v().data();
    const std::vector<float> q = Floats(item.q().dtype(), item.q().data());
    const TinyAttention attention(geometry_, layer);
    const bool keeps_out = sequence.opened.recall() == "off" && request.phase() == v1::PHASE_DECODE;
    std::vector<float> output;
    for (int64_t i = 0; i < item.q().shape(0); ++i) {
      const uint64_t end = item.first_index() + static_cast<uint64_t>(i) + 1;
      const uint64_t budget = sequence.opened.budget_tokens();
      const uint64_t begin = keeps_out && end > budget ? end - budget : 0;
      for (uint32_t head = 0; head < geometry_.query_heads(); ++head) {
        const float* query = q.data() + (static_cast<size_t>(i) * geometry_.query_heads() + head) *
                                            geometry_.head_dim();
        const HeadAnswer some = attention.Attend(query, head, begin, end);
        const HeadAnswer full = attention.Attend(query, head, 0, end);
        Certify(some, full, result);
        output.insert(output.end(), some.output.begin(), some.output.end());
      }
      result->mutable_certificate()->add_met(begin == 0);
      if (begin > 0) result->mutable_certificate()->set_not_met_reason("RECALL_OFF");
    }
    result->mutable_output()->set_dtype(v1::DTYPE_F32);
    result->mutable_output()->set_data(output.data(), output.size() * sizeof(float));
    result->mutable_recall()->set_absent_pages(6);
    v1::TouchedRung* touched = result->mutable_recall()->add_touched();
    touched->set_rung("pages");
    touched->set_tier(v1::TIER_ROCKSDB);
    touched->set_pages(2);
    touched->set_bytes(100);
  }

  void Certify(const HeadAnswer& some, const HeadAnswer& full, v1::AttendResult* result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    double error2 = 0;
    for (size_t d = 0; d < full.output.size(); ++d) {
      const double difference = some.output[d] - full.output[d];
      error2 += difference * difference;
    }
    v1::Certificate* certificate = result->mutable_certificate();
    const double mass = -std::expm1(some.lse - full.lse);
    certificate->add_error_bound(
        static_cast<float>(faults_.bound_factor * std::sqrt(error2) + kRounding));
    certificate->add_mass_bound(static_cast<float>(faults_.mass_factor * mass));
    result->add_lse(static_cast<float>(some.lse));
  }

  static constexpr double kRounding = 1e-5;  // Of the output to f32, with room.

  class Stats final : public v1::StatsService::Service {
   public:
    explicit Stats(TinyDaemon::Service& daemon) : daemon_(daemon) {}

    grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                               v1::GetServerInfoResponse* response) override {
      response->set_boot_id("tiny");
      response->set_chunk_tokens_max(512);
      return grpc::Status::OK;
    }

    grpc::Status GetStats(grpc::ServerContext*, const v1::GetStatsRequest*,
                          v1::GetStatsResponse* response) override {
      v1::TierStats* host = response->add_tiers();
      host->set_tier(v1::TIER_HOST);
      host->set_budget_bytes(4096);
      return grpc::Status::OK;
    }

    grpc::Status DescribeSequence(grpc::ServerContext*, const v1::DescribeSequenceRequest* request,
                                  v1::DescribeSequenceResponse* response) override {
      const absl::MutexLock lock(&daemon_.mu_);
      const TinyLayer& layer = daemon_.sequences_[request->sequence()].layers.back();
      response->mutable_summary()->set_committed(
          layer.k.size() / (daemon_.RowBytes() * daemon_.geometry_.kv_heads()));
      response->mutable_summary()->mutable_tokens()->set_host(11);
      for (const uint64_t demoted : {3U, 4U}) response->add_lanes()->set_demoted(demoted);
      return grpc::Status::OK;
    }

   private:
    TinyDaemon::Service& daemon_;
  };

  const std::string target_;
  Stats stats_;
  std::unique_ptr<grpc::Server> server_;
  v1::Geometry geometry_ ABSL_GUARDED_BY(mu_);
};

TinyDaemon::TinyDaemon(const std::string& socket_path)
    : service_(std::make_unique<Service>(socket_path)) {}
TinyDaemon::~TinyDaemon() = default;

std::string TinyDaemon::target() const {
  return service_->target();
}

void TinyDaemon::set_faults(const TinyFaults& faults) {
  const absl::MutexLock lock(&service_->mu_);
  service_->faults_ = faults;
}

std::vector<PlayedCall> TinyDaemon::calls() const {
  const absl::MutexLock lock(&service_->mu_);
  return service_->calls_;
}

int TinyDaemon::open_sequences() const {
  const absl::MutexLock lock(&service_->mu_);
  return static_cast<int>(service_->sequences_.size());
}

}  // namespace ebbtide::cli
