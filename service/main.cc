// SPDX-License-Identifier: Apache-2.0
//
// ebbtided: flags, configuration, the daemon, signals, exit code.

#include <CLI/CLI.hpp>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "base/background_writer.h"
#include "base/clock.h"
#include "base/executor.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/standard_files.h"
#include "service/config/load_config.h"
#include "service/daemon.h"
#include "service/daemon_banner.h"
#include "service/rpc/grpc_log.h"

namespace ebbtide::service {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitBadConfiguration = 2;
constexpr absl::Duration kTick = absl::Seconds(1);
constexpr absl::Duration kTakeDownMax = absl::Seconds(10);
constexpr int kFreedBytesMax = 256 << 20;  // As long as the longest message by default.
constexpr absl::Duration kTrimPause = absl::Seconds(10);
constexpr absl::Duration kStartQuiet = absl::Seconds(5);
constexpr absl::Duration kLogMax = absl::Seconds(1);  // For what is not written at the end.

constexpr char kAbout[] =
    "ebbtided keeps the KV cache of language models inside a memory budget: tokens that matter "
    "least\n"
    "leave the device for host memory and RocksDB, and come back when a query needs them.\n"
    "Without arguments it runs with defaults drawn from this machine and user.";

constexpr char kMore[] = R"(
Files
  The configuration is YAML; every field may be left out: docs/configuration.md.
  unix:$XDG_RUNTIME_DIR/ebbtide.sock    where it listens (else unix:/tmp/ebbtide-UID/ebbtide.sock)
  $XDG_STATE_HOME/ebbtide/rocksdb       the RocksDB tier (else under ~/.local/state)

Signals
  SIGTERM, SIGINT, SIGHUP   refuse new calls, finish those in progress within server.drain_ms, end;
                            before it serves: end at once
  a second one              end within ten seconds: what is not answered and read within five is cut off

Exit codes
  0  ended as asked      1  failed, with the reason on standard error; or its end took too long
  2  wrong usage, or a configuration with mistakes, each listed with its line

Examples
  ebbtided
  ebbtided --print-config > ebbtide.yaml
  ebbtided --config ebbtide.yaml --check-config
)";

// Each large message would otherwise be mapped, faulted in and unmapped anew, which costs 2.5 to 4
// times the copy itself. Freed memory is kept up to the size of the largest message by default, and
// in few arenas: each keeps its own, and there would be eight for every core.
void TuneMalloc() {
  ::mallopt(M_ARENA_MAX, std::max(2, AvailableCpus() / 2));
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, kFreedBytesMax);
  ::mallopt(M_TOP_PAD, 64 << 20);
}

// Gives memory back that was freed and is kept where no message needs it any more, as after many
// clients that read nothing: glibc does so by itself at the heap's end alone.
class HeapTrim {
 public:
  // Called now and then. Never twice in ten seconds: what is given back is faulted in anew.
  void Refresh() {
    const absl::Duration now = SteadyClock().SinceStart();
    const size_t freed = ::mallinfo2().fordblks;
    given_back_ = std::min(given_back_, freed);
    if (now < next_ || freed - given_back_ < kFreedBytesMax) return;
    next_ = now + kTrimPause;
    ::malloc_trim(0);
    given_back_ = ::mallinfo2().fordblks;
  }

 private:
  absl::Duration next_ = -absl::InfiniteDuration();
  size_t given_back_ = 0;  // Of what is free.
};

// A connection, and many a file of the disk tier, each take a descriptor; what most systems allow
// at first is as low as it is for programs that can't count beyond it.
void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  Log(LogLevel::kDebug, "the limit on open descriptors is raised",
      {{"descriptors", limit.rlim_cur}});
}

struct Flags {
  std::string config_file;
  bool has_config_file = false;
  bool is_check = false;
  bool is_print = false;
};

// SIGTERM, SIGINT and SIGHUP (its terminal is gone), taken one by one by whoever waits. Made before
// any thread, which inherits the mask.
class StopSignals {
 public:
  StopSignals() {
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGTERM);
    ::sigaddset(&set_, SIGINT);
    struct sigaction at_hangup = {};
    ::sigaction(SIGHUP, nullptr, &at_hangup);
    if (at_hangup.sa_handler != SIG_IGN) ::sigaddset(&set_, SIGHUP);  // It is under nohup.
    ::pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }

  // The signal that came within `patience`, or 0.
  int Wait(absl::Duration patience) const {
    const timespec timeout = absl::ToTimespec(patience);
    const int signal = ::sigtimedwait(&set_, nullptr, &timeout);
    return signal > 0 ? signal : 0;
  }

  // Whether one has come that nobody has taken.
  bool IsThere() const {
    sigset_t come;
    ::sigpending(&come);
    return ::sigandset(&come, &come, &set_) == 0 && ::sigisemptyset(&come) == 0;
  }

  // From now on they end the process at once.
  void Release() const { ::pthread_sigmask(SIG_UNBLOCK, &set_, nullptr); }

 private:
  sigset_t set_;
};

// Where parts hang that nobody can wait for.
[[noreturn]] void LeaveAtOnce(int exit_code) {
  FlushLog(kLogMax);
  std::_Exit(exit_code);
}

// Ends the process when taking it down hangs: a call that ignores its end, a disk that does not
// answer. Its thread is there from the start; later there may be none to be had.
class TakeDownLimit {
 public:
  TakeDownLimit() : thread_([this] { Watch(); }) {}
  ~TakeDownLimit() {
    {
      const absl::MutexLock lock(&mu_);
      is_over_ = true;
      change_.Signal();
    }
    thread_.join();
  }

  void EndWithin(absl::Duration patience) ABSL_LOCKS_EXCLUDED(mu_) {
    const absl::MutexLock lock(&mu_);
    patience_ = patience;
    end_ = SteadyClock().SinceStart() + patience;
    change_.Signal();
  }

 private:
  void Watch() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::Duration patience;
    {
      const absl::MutexLock lock(&mu_);
      absl::Duration left = absl::InfiniteDuration();
      while (!is_over_ && left > absl::ZeroDuration()) {
        change_.WaitWithTimeout(&mu_, left);
        left = end_ - SteadyClock().SinceStart();
      }
      if (is_over_) return;
      patience = patience_;
    }
    Log(LogLevel::kError, "taking the daemon down hangs; leaving it",
        {{"waited_seconds", absl::ToInt64Seconds(patience)}});
    LeaveAtOnce(kExitFailed);
  }

  absl::Mutex mu_;
  absl::CondVar change_;
  bool is_over_ ABSL_GUARDED_BY(mu_) = false;
  absl::Duration patience_ ABSL_GUARDED_BY(mu_) = absl::InfiniteDuration();
  absl::Duration end_ ABSL_GUARDED_BY(mu_) = absl::InfiniteDuration();
  std::thread thread_;  // Last: it uses everything above.
};

using StartedDaemon = absl::StatusOr<std::unique_ptr<Daemon>>;

// On a thread of its own: a disk or device that hangs keeps nobody from ending the process.
StartedDaemon StartUnlessStopped(const Config& config, const StopSignals& signals) {
  StartedDaemon daemon = absl::UnknownError("not started");
  std::atomic<const char*> waits_for = "";
  absl::Notification is_over;
  std::thread starter([&] {
    try {
      daemon = Daemon::Start(config, waits_for);
    } catch (const std::exception& error) {  // No memory, no thread.
      daemon = absl::ResourceExhaustedError(absl::StrFormat("%s: %s", waits_for, error.what()));
    }
    is_over.Notify();
  });
  const absl::Duration begin = SteadyClock().SinceStart();
  bool is_said = false;
  while (!is_over.WaitForNotificationWithTimeout(absl::Milliseconds(50))) {
    const absl::Duration waited = SteadyClock().SinceStart() - begin;
    if (!is_said && waited >= kStartQuiet) {
      is_said = true;
      Log(LogLevel::kWarn, "the start takes long",
          {{"waits_for", waits_for.load()},
           {"rocksdb.path", config.rocksdb.path},
           {"waited_seconds", absl::ToInt64Seconds(waited)}});
    }
    if (signals.IsThere()) {
      Log(LogLevel::kWarn, "stopped before it served", {{"waits_for", waits_for.load()}});
      LeaveAtOnce(0);
    }
  }
  starter.join();
  return daemon;
}

void Drain(Daemon& daemon, absl::Duration patience, const StopSignals& signals) {
  const absl::Duration end = SteadyClock().SinceStart() + patience;
  daemon.StopAdmitting();
  while (!daemon.WaitIdle(absl::Milliseconds(50))) {
    if (signals.Wait(absl::ZeroDuration()) != 0) {
      Log(LogLevel::kWarn, "a second signal: calls in progress have five seconds more");
      return;
    }
    if (SteadyClock().SinceStart() >= end) {
      Log(LogLevel::kWarn, "server.drain_ms is over: calls in progress have five seconds more");
      return;
    }
  }
}

std::string Banner(Daemon& daemon, const std::string& config_source, bool is_default_target) {
  const Stats stats = daemon.GetStats();
  const BannerFacts facts{.server = daemon.facts(),
                          .stats = stats,
                          .target = daemon.target(),
                          .config_source = config_source,
                          .pid = ::getpid(),
                          .is_default_target = is_default_target};
  return ::isatty(STDOUT_FILENO) == 1 ? BannerForPeople(facts) : BannerForPrograms(facts);
}

int Serve(const LoadedConfig& loaded, const std::string& config_source) {
  ::umask(0077);  // Files hold what users wrote.
  const StopSignals signals;
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // A file at its limit is a full disk: EFBIG.
  SetUpLog(LogOptionsFor(loaded.config.server.log_level, STDERR_FILENO));
  SendGrpcLogToOurs();
  RaiseDescriptorLimit();
  TakeDownLimit limit;
  // Whoever reads it may be stuck.
  BackgroundWriter out(STDOUT_FILENO, [](uint64_t) { return std::string(); });
  StartedDaemon daemon = StartUnlessStopped(loaded.config, signals);
  if (!daemon.ok()) {
    FlushLog(kLogMax);
    signals.Release();
    absl::FPrintF(stderr, "ebbtided: %s\n", PrintableLines(std::string(daemon.status().message())));
    const bool is_configuration = daemon.status().code() == absl::StatusCode::kInvalidArgument;
    return is_configuration ? kExitBadConfiguration : kExitFailed;
  }
  FlushLog(kLogMax);  // What the start logged comes first.
  out.Write(Banner(**daemon, config_source, !loaded.lines.contains("server.listen")));
  int signal = 0;
  HeapTrim heap;
  while ((signal = signals.Wait(kTick)) == 0) {
    (*daemon)->Tick();
    heap.Refresh();
  }
  Log(LogLevel::kInfo, "stopping", {{"signal", absl::StrFormat("SIG%s", ::sigabbrev_np(signal))}});
  limit.EndWithin(loaded.config.server.drain + kTakeDownMax);
  Drain(**daemon, loaded.config.server.drain, signals);
  limit.EndWithin(kTakeDownMax);
  daemon->reset();
  Log(LogLevel::kInfo, "stopped");
  FlushLog(kLogMax);
  return 0;
}

int Run(const Flags& flags) {
  const Surroundings surroundings = ReadSurroundings();
  const std::string source = flags.has_config_file ? Printable(flags.config_file) : "defaults";
  LoadedConfig loaded = flags.has_config_file ? LoadConfigFile(flags.config_file, surroundings)
                                              : LoadConfig("", surroundings);
  CheckWithParts(loaded);
  if (!loaded.ok()) {
    std::fputs(FormatMistakes(source, loaded.mistakes).c_str(), stderr);
    return kExitBadConfiguration;
  }
  if (flags.is_print) {
    absl::PrintF("# ebbtided %s, %s\n%s", EBBTIDE_VERSION, source,
                 PrintConfig(loaded.config, loaded.origins));
  } else if (flags.is_check) {
    absl::PrintF("%s: no mistakes\n", source);
  } else {
    return Serve(loaded, source);
  }
  return std::fflush(stdout) == 0 ? 0 : kExitFailed;
}

}  // namespace
}  // namespace ebbtide::service

int main(int argc, char** argv) {
  ebbtide::OpenStandardFiles();
  ebbtide::service::TuneMalloc();
  CLI::App app(ebbtide::service::kAbout, "ebbtided");
  ebbtide::service::Flags flags;
  CLI::Option* file = app.add_option("--config", flags.config_file, "the configuration file");
  file->option_text("FILE");
  app.add_flag("--check-config", flags.is_check, "list every mistake of the configuration and end");
  app.add_flag("--print-config", flags.is_print,
               "print what the configuration resolves to, each value with its origin, and end");
  app.set_version_flag("--version", "ebbtided " EBBTIDE_VERSION);
  app.footer(ebbtide::service::kMore);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : ebbtide::service::kExitBadConfiguration;
  }
  flags.has_config_file = file->count() > 0;
  try {
    return ebbtide::service::Run(flags);
  } catch (const std::exception& error) {
    absl::FPrintF(stderr, "ebbtided: %s\n", error.what());
    return ebbtide::service::kExitFailed;
  }
}
