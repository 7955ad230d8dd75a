// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a configuration file: they are refused with a reason, or what they resolve to prints
// and reads back to the same configuration.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status_macros.h"
#include "service/config/load_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using ebbtide::service::LoadConfig;
  using ebbtide::service::LoadedConfig;
  const ebbtide::service::Surroundings surroundings = {.memory_bytes = uint64_t{8} << 30,
                                                       .cpus = 4,
                                                       .uid = 1000,
                                                       .home = "/home/ada",
                                                       .runtime_folder = "/run/user/1000",
                                                       .state_folder = "",
                                                       .disk = [](const std::string&) {
                                                         return ebbtide::service::DiskSpace{
                                                             .capacity_bytes = uint64_t{1} << 40,
                                                             .free_bytes = uint64_t{1} << 39};
                                                       }};
  const std::string_view text(reinterpret_cast<const char*>(data), size);

  const LoadedConfig loaded = LoadConfig(text, surroundings);
  for (const auto& mistake : loaded.mistakes) {
    EBBTIDE_CHECK(!mistake.message.empty() && mistake.line >= 0, "a mistake without a reason");
  }
  if (loaded.ok()) {
    const std::string printed = PrintConfig(loaded.config, loaded.origins);
    const LoadedConfig again = LoadConfig(printed, surroundings);
    EBBTIDE_CHECK(again.ok() && again.config == loaded.config, printed.c_str());
  }
  return 0;
}
