// SPDX-License-Identifier: Apache-2.0
//
// Waits for what another thread or process does, and gives up: a test whose condition never comes
// fails, and says which, instead of hanging until it is killed.
//
//   ASSERT_TRUE(ComesTrue([&] { return Stats().answers() >= 4; }));

#pragma once

#include <chrono>
#include <thread>

#include "gtest/gtest.h"

namespace ebbtide::test {

// Asks until `condition` holds; false where it does not within half a minute, which is long on a
// busy machine and under any sanitizer, or once the test has failed.
template <class Condition>
[[nodiscard]] bool ComesTrue(Condition condition) {
  constexpr std::chrono::seconds kPatience(30);
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() > give_up || testing::Test::HasFailure()) return false;
  }
  return true;
}

}  // namespace ebbtide::test
