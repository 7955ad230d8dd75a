// SPDX-License-Identifier: Apache-2.0

#include "service/config/load_config.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"

#include "base/bytes.h"
#include "base/printable.h"
#include "base/status_macros.h"
#include "ebbtide/v1/config.pb.h"
#include "service/config/listen.h"
#include "service/config/read_yaml.h"

namespace ebbtide::service {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kTiB = uint64_t{1} << 40;

// A number's limits, its default, and where the default comes from.
struct NumberRule {
  uint64_t least = 0;
  uint64_t most = 0;
  uint64_t otherwise = 0;
  std::string why;
  std::string most_in_words = {};  // Where `most` itself is only more than any machine has.
};

// Turns what a file says into a Config, field by field.
class Resolver {
 public:
  Resolver(const v1::Config& said, const YamlRead& read, const Surroundings& surroundings,
           LoadedConfig& loaded)
      : said_(said), read_(read), surroundings_(surroundings), loaded_(loaded) {}

  void Resolve() {
    ResolveListen();
    ResolveServer();
    ResolveBackend();
    ResolveMemoryTiers();
    ResolveRocksdb();
    ResolveSequences();
    for (const auto& [field, text] : read_.no_numbers) {
      EBBTIDE_CHECK(mistaken_.contains(field), "every number of the schema has its limits");
    }
  }

 private:
  // Notes where a field's value comes from; true where that is the file.
  bool IsSaid(const std::string& field, const std::string& why) {
    const auto line = read_.lines.find(field);
    loaded_.origins[field] =
        line == read_.lines.end() ? "default: " + why : absl::StrFormat("line %d", line->second);
    return line != read_.lines.end();
  }

  void Mistake(const std::string& field, std::string_view what) {
    loaded_.AddMistake(field, what);
    mistaken_.insert(field);
  }

  // Whether the file may mean another value than we have: limits drawn from it would be wrong ones.
  bool IsInDoubt(const std::string& field) const {
    return mistaken_.contains(field) || read_.unread_sections.contains("") ||
           read_.unread_sections.contains(field.substr(0, field.find('.')));
  }

  uint64_t Number(const std::string& field, uint64_t said, const NumberRule& rule) {
    if (!IsSaid(field, rule.why)) {
      return rule.otherwise;
    }
    if (const auto none = read_.no_numbers.find(field); none != read_.no_numbers.end()) {
      Mistake(field,
              absl::StrFormat("%s is not a whole number from %d to %d in plain digits; leave the "
                              "line out for the default %d",
                              none->second, rule.least, rule.most, rule.otherwise));
      return rule.otherwise;
    }
    if (said < rule.least || said > rule.most) {
      Mistake(field,
              absl::StrFormat("%d is outside %d to %d; leave the line out for the default %d", said,
                              rule.least, rule.most, rule.otherwise));
    }
    return said;
  }

  uint64_t Size(const std::string& field, const std::string& said, const NumberRule& rule) {
    if (!IsSaid(field, rule.why)) {
      return rule.otherwise;
    }
    const absl::StatusOr<uint64_t> bytes = ParseBytes(said);
    if (!bytes.ok()) {
      Mistake(field, std::string(bytes.status().message()));
      return rule.otherwise;
    }
    if (*bytes < rule.least || *bytes > rule.most) {
      Mistake(field, absl::StrFormat(
                         "%s is outside %s to %s", said, FormatBytes(rule.least),
                         rule.most_in_words.empty() ? FormatBytes(rule.most) : rule.most_in_words));
    }
    return *bytes;
  }

  // Text that ends up in paths, logs, terminals and protobuf, which carries UTF-8 alone.
  bool IsPlain(const std::string& field, const std::string& text) {
    const std::string shown = Printable(text);
    if (text.empty()) {
      Mistake(field, "is empty; leave the line out for the default");
    } else if (shown != text) {
      Mistake(field, absl::StrFormat("'%s' holds a control character, or what is no UTF-8", shown));
    }
    return !text.empty() && shown == text;
  }

  std::string UsersFolderInTmp() const {
    return absl::StrFormat("/tmp/ebbtide-%d", surroundings_.uid);
  }

  void ResolveListen() {
    ListenConfig& listen = loaded_.config.server.listen;
    const bool has_runtime_folder = !surroundings_.runtime_folder.empty();
    const bool is_said =
        IsSaid("server.listen", has_runtime_folder ? "in $XDG_RUNTIME_DIR" : "no $XDG_RUNTIME_DIR");
    std::string text = said_.server().listen();
    if (!is_said) {
      text =
          absl::StrFormat("unix:%s/ebbtide.sock",
                          has_runtime_folder ? surroundings_.runtime_folder : UsersFolderInTmp());
    }
    if (IsPlain("server.listen", text)) {
      absl::StatusOr<ListenConfig> parsed = ParseListen(text);
      if (parsed.ok()) {
        listen = *std::move(parsed);
      } else {
        Mistake("server.listen", std::string(parsed.status().message()));
      }
    }
    if (IsSaid("server.socket_mode", "for this user alone")) {
      const std::string& mode = said_.server().socket_mode();
      if (mode != "0600" && mode != "0660") {
        Mistake("server.socket_mode", "must be \"0600\" (this user) or \"0660\" (and its group)");
      }
      listen.socket_mode = mode == "0660" ? 0660 : 0600;
    }
  }

  void ResolveServer() {
    const v1::Config::Server& said = said_.server();
    ServerConfig& server = loaded_.config.server;
    server.threads = static_cast<uint32_t>(
        Number("server.threads", said.threads(),
               {1, 1024, surroundings_.cpus, "the CPUs this process may use"}));
    if (IsSaid("server.log_level", "info")) {
      const absl::StatusOr<LogLevel> level = ParseLogLevel(said.log_level());
      if (level.ok()) {
        server.log_level = *level;
      } else {
        Mistake("server.log_level", std::string(level.status().message()));
      }
    }
    // gRPC and protobuf count a message's bytes in 31 bits.
    server.message_bytes_max =
        Number("server.message_bytes_max", said.message_bytes_max(),
               {kMiB, 2 * kGiB - 1, 256 * kMiB, "holds 512 tokens of a large model"});
    server.calls_in_flight_max = static_cast<uint32_t>(
        Number("server.calls_in_flight_max", said.calls_in_flight_max(), {1, 4096, 64, "64"}));
    server.call_deadline = absl::Milliseconds(static_cast<int64_t>(Number(
        "server.call_deadline_ms", said.call_deadline_ms(), {1, 86'400'000, 30'000, "30 s"})));
    server.drain = absl::Milliseconds(static_cast<int64_t>(
        Number("server.drain_ms", said.drain_ms(),
               {0, 3'600'000, 20'000, "within the 30 s that Kubernetes grants"})));
  }

  void ResolveBackend() {
    BackendChoice& backend = loaded_.config.device.backend;
    if (!IsSaid("device.backend", "CUDA has not been measured on a device yet")) {
      return;
    }
    const std::string& said = said_.device().backend();
    if (said == "auto") {
      backend = BackendChoice::kAuto;
    } else if (said == "cuda") {
      backend = BackendChoice::kCuda;
    } else if (said != "cpu") {
      Mistake("device.backend", absl::StrFormat("'%s' must be auto, cpu or cuda", said));
    }
  }

  void ResolveMemoryTiers() {
    const uint64_t memory = surroundings_.memory_bytes;
    // What a device has is known to the device alone, which refuses more.
    const bool is_elsewhere =
        loaded_.config.device.backend == BackendChoice::kCuda || IsInDoubt("device.backend");
    const std::string of_memory = absl::StrFormat("of %s of memory", FormatBytes(memory));
    const auto part = [&](uint64_t divisor, uint64_t most) {
      return std::max(kMiB, std::min(memory / divisor / kMiB * kMiB, most));
    };
    const uint64_t device = loaded_.config.device.budget_bytes =
        Size("device.budget", said_.device().budget(),
             {kMiB, is_elsewhere ? kTiB : memory, part(20, kGiB),
              absl::StrFormat("min(5 %% %s, 1 GiB)", of_memory),
              is_elsewhere ? "the device's memory" : ""});
    const uint64_t host = loaded_.config.host.budget_bytes =
        Size("host.budget", said_.host().budget(),
             {kMiB, memory, part(4, 4 * kGiB), absl::StrFormat("min(25 %% %s, 4 GiB)", of_memory)});
    const bool is_in_doubt = IsInDoubt("device.budget") || IsInDoubt("host.budget");
    if (!is_elsewhere && !is_in_doubt && device + host > memory) {
      Mistake(read_.lines.contains("host.budget") ? "host.budget" : "device.budget",
              absl::StrFormat("the device's %s (in host memory here) and the host tier's %s exceed "
                              "the %s this process may use",
                              FormatBytes(device), FormatBytes(host), FormatBytes(memory)));
    }
  }

  std::string DefaultRocksdbPath() const {
    if (!surroundings_.state_folder.empty()) {
      return surroundings_.state_folder + "/ebbtide/rocksdb";
    }
    return (surroundings_.home.empty() ? UsersFolderInTmp()
                                       : surroundings_.home + "/.local/state/ebbtide") +
           "/rocksdb";
  }

  void ResolveRocksdb() {
    RocksdbConfig& rocksdb = loaded_.config.rocksdb;
    IsSaid("rocksdb.disabled", "false");
    rocksdb.disabled = said_.rocksdb().disabled();
    rocksdb.path = DefaultRocksdbPath();
    if (IsSaid("rocksdb.path", "the user's state folder")) {
      rocksdb.path = said_.rocksdb().path();
    }
    if (IsPlain("rocksdb.path", rocksdb.path) && rocksdb.path.front() != '/') {
      Mistake("rocksdb.path", absl::StrFormat("'%s' must be absolute", rocksdb.path));
    }
    rocksdb.budget_bytes = Size("rocksdb.budget", said_.rocksdb().budget(), RocksdbBudgetRule());
  }

  NumberRule RocksdbBudgetRule() const {
    const std::string& path = loaded_.config.rocksdb.path;
    const DiskSpace disk = IsInDoubt("rocksdb.path") ? DiskSpace{} : surroundings_.disk(path);
    if (disk.capacity_bytes == 0) {
      return {64 * kMiB, uint64_t{1} << 60, kGiB, "the disk's size is not known",
              "the disk's size"};
    }
    const uint64_t tenth = disk.free_bytes / 10 / kMiB * kMiB;
    return {64 * kMiB, disk.capacity_bytes, std::clamp(tenth, 64 * kMiB, 16 * kGiB),
            absl::StrFormat("min(10 %% of %s free, 16 GiB)", FormatBytes(disk.free_bytes))};
  }

  void ResolveSequences() {
    SequencesConfig& sequences = loaded_.config.sequences;
    sequences.idle_timeout = absl::Milliseconds(static_cast<int64_t>(
        Number("sequences.idle_timeout_ms", said_.sequences().idle_timeout_ms(),
               {1, 2'592'000'000, 600'000, "10 min"})));
    sequences.recall = "estimated(0.02)";
    if (IsSaid("sequences.recall", "output error of 2 %, by estimate")) {
      sequences.recall = said_.sequences().recall();
      IsPlain("sequences.recall", sequences.recall);
    }
  }

  const v1::Config& said_;
  const YamlRead& read_;
  const Surroundings& surroundings_;
  LoadedConfig& loaded_;
  std::set<std::string> mistaken_;
};

LoadedConfig CannotRead(std::string_view why) {
  LoadedConfig loaded;
  loaded.mistakes.push_back({0, absl::StrFormat("can't be read: %s", why)});
  return loaded;
}

}  // namespace

void LoadedConfig::AddMistake(const std::string& field, std::string_view what) {
  const auto line = lines.find(field);
  ConfigMistake mistake{line == lines.end() ? 0 : line->second,
                        absl::StrFormat("%s: %s", field, what)};
  const auto after = std::upper_bound(mistakes.begin(), mistakes.end(), mistake,
                                      [](const auto& a, const auto& b) { return a.line < b.line; });
  mistakes.insert(after, std::move(mistake));
}

LoadedConfig LoadConfig(std::string_view text, const Surroundings& surroundings) {
  v1::Config said;
  const YamlRead read = ReadYaml(text, said);
  LoadedConfig loaded;
  loaded.lines = read.lines;
  loaded.mistakes = read.mistakes;
  Resolver(said, read, surroundings, loaded).Resolve();
  return loaded;
}

LoadedConfig LoadConfigFile(const std::string& path, const Surroundings& surroundings) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return CannotRead("it is a folder");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return CannotRead(std::strerror(errno));
  }
  std::string text(kYamlBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return CannotRead("reading failed");
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return LoadConfig(text, surroundings);
}

std::string FormatMistakes(std::string_view source, const std::vector<ConfigMistake>& mistakes) {
  std::string text;
  for (const ConfigMistake& mistake : mistakes) {
    const std::string place = Printable(source);
    const std::string message = Printable(mistake.message);
    text += mistake.line > 0 ? absl::StrFormat("%s:%d: %s\n", place, mistake.line, message)
                             : absl::StrFormat("%s: %s\n", place, message);
  }
  return text;
}

}  // namespace ebbtide::service
