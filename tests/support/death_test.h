// SPDX-License-Identifier: Apache-2.0
//
// Death tests of code that has threads about. A plain fork may inherit a lock that no thread will
// ever give back; in this style the child runs the test anew in a process of its own.

#pragma once

#include "gtest/gtest.h"

namespace ebbtide::test {

class ThreadsafeDeathTest : public testing::Test {
 protected:
  ThreadsafeDeathTest() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

}  // namespace ebbtide::test
