// SPDX-License-Identifier: Apache-2.0
//
// Matchers for absl::Status and absl::StatusOr. There is deliberately none for "some error": a test
// names the code.
//
//   EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("free")));
//   ASSERT_OK_AND_ASSIGN(const uint64_t bytes, ParseBytes("4MiB"));

#pragma once

#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebbtide::test {

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER(IsOk, negation ? "is an error" : "is OK") {
  *result_listener << StatusOf(arg).ToString();
  return arg.ok();
}

MATCHER_P2(StatusIsMatcher, code, message,
           "has code " + absl::StatusCodeToString(code) + " and a message that " +
               testing::DescribeMatcher<std::string>(message)) {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).code() == code &&
         testing::Matches(message)(std::string(StatusOf(arg).message()));
}

template <typename MessageMatcher>
auto StatusIs(absl::StatusCode code, MessageMatcher message) {
  return StatusIsMatcher(code, testing::Matcher<std::string>(std::move(message)));
}

inline auto StatusIs(absl::StatusCode code) {
  return StatusIsMatcher(code, testing::Matcher<std::string>(testing::_));
}

// The StatusOr is OK and its value matches.
MATCHER_P(IsOkAndHolds, value, "is OK and holds a value that matches") {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return testing::ExplainMatchResult(value, *arg, result_listener);
}

}  // namespace ebbtide::test

namespace absl {

// GoogleTest would print the bytes of the object.
template <typename T>
void PrintTo(const StatusOr<T>& result, std::ostream* os) {
  *os << (result.ok() ? std::string("OK") : result.status().ToString());
}

}  // namespace absl

#define EXPECT_OK(expression) EXPECT_THAT(expression, ::ebbtide::test::IsOk())
#define ASSERT_OK(expression) ASSERT_THAT(expression, ::ebbtide::test::IsOk())

#define EBBTIDE_TEST_CONCAT_INNER(a, b) a##b
#define EBBTIDE_TEST_CONCAT(a, b) EBBTIDE_TEST_CONCAT_INNER(a, b)
#define ASSERT_OK_AND_ASSIGN(declaration, expression) \
  ASSERT_OK_AND_ASSIGN_NAMED(EBBTIDE_TEST_CONCAT(or_, __LINE__), declaration, expression)
#define ASSERT_OK_AND_ASSIGN_NAMED(name, declaration, expression) \
  auto name = (expression);                                       \
  ASSERT_TRUE(name.ok()) << name.status();                        \
  declaration = *std::move(name)
