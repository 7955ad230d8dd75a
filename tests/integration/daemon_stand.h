// SPDX-License-Identifier: Apache-2.0
//
// A folder in which daemons live: a home, a socket, configuration files, logs.

#pragma once

#include <nlohmann/json.hpp>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/daemon_process.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::test {

class DaemonStand {
 public:
  DaemonStand() { std::filesystem::create_directory(home()); }

  std::filesystem::path home() const { return folder_.path() / "home"; }
  std::string path(const std::string& name) const { return folder_.path() / name; }

  // A small daemon's configuration; `more` replaces or adds sections.
  std::string WriteConfig(const std::string& text) const {
    const std::string file = path("ebbtide.yaml");
    std::ofstream(file) << text;
    return file;
  }
  std::string SmallConfig(const std::string& socket = "e.sock",
                          const std::string& rocksdb = "rocksdb") const {
    return "server: {listen: 'unix:" + path(socket) + "', threads: 2}\n" +
           "device: {budget: 32MiB}\nhost: {budget: 64MiB}\n" + "rocksdb: {path: " + path(rocksdb) +
           ", budget: 256MiB}\n";
  }

  // With an environment in which only HOME and XDG_RUNTIME_DIR are set.
  std::unique_ptr<DaemonProcess> Start(const std::vector<std::string>& arguments) const {
    return std::make_unique<DaemonProcess>(
        DaemonSetup{.program = EBBTIDED_PATH,
                    .arguments = arguments,
                    .environment = {{"HOME", home()}, {"XDG_RUNTIME_DIR", folder_.path()}},
                    .stderr_file = path("stderr")});
  }

  // Started and serving: what it said about itself goes to `said`.
  std::unique_ptr<DaemonProcess> Serve(const std::vector<std::string>& arguments,
                                       nlohmann::json* said) const {
    std::unique_ptr<DaemonProcess> daemon = Start(arguments);
    const std::string line = daemon->ReadLine();
    *said = nlohmann::json::parse(line, nullptr, false);
    EXPECT_TRUE(said->is_object()) << line << daemon->ReadStderr();
    return daemon;
  }

  std::string Stderr() const {
    std::ifstream file(path("stderr"));
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  const TempFolder folder_;
};

}  // namespace ebbtide::test
