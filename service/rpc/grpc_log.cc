// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/grpc_log.h"

#include <grpc/support/log.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "google/protobuf/stubs/logging.h"

#include "base/clock.h"
#include "base/log.h"

namespace ebbtide::service {
namespace {

constexpr absl::Duration kQuiet = absl::Seconds(10);

// Thread-safe.
class Lines {
 public:
  void Write(const char* library, const gpr_log_func_args& args) ABSL_LOCKS_EXCLUDED(mu_) {
    uint64_t repeats = 0;
    {
      absl::MutexLock lock(&mu_);
      // File names are string literals of the library's: as many places as its code has.
      Place& place = places_[{args.file, args.line}];
      const absl::Duration now = SteadyClock().SinceStart();
      if (now < place.quiet_until) {
        ++place.repeats;
        return;
      }
      place.quiet_until = now + kQuiet;
      repeats = std::exchange(place.repeats, 0);
    }
    const LogLevel level =
        args.severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarn : LogLevel::kDebug;
    Log(level, library,
        {{"place", absl::StrFormat("%s:%d", args.file, args.line)},
         {"message", args.message},
         {"repeats_unlogged", repeats}});
  }

 private:
  struct Place {
    absl::Duration quiet_until = -absl::InfiniteDuration();
    uint64_t repeats = 0;
  };

  absl::Mutex mu_;
  absl::flat_hash_map<std::pair<const char*, int>, Place> places_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

void SendGrpcLogToOurs() {
  // Never destroyed: gRPC's threads may log until the process ends.
  static Lines* const lines = new Lines();
  gpr_set_log_function([](gpr_log_func_args* args) { lines->Write("grpc", *args); });
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel level, const char* file, int line,
                                     const std::string& message) {
    const bool is_error = level >= google::protobuf::LOGLEVEL_ERROR;
    lines->Write("protobuf", {.file = file,
                              .line = line,
                              .severity = is_error ? GPR_LOG_SEVERITY_ERROR : GPR_LOG_SEVERITY_INFO,
                              .message = message.c_str()});
  });
}

}  // namespace ebbtide::service
