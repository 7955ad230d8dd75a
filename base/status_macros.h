// SPDX-License-Identifier: Apache-2.0
//
// Passes an error up unchanged, and stops the process where a contract within the daemon is broken.

#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebbtide {

// Prints the condition, its place and `message`, then aborts. Out of line to keep callers small.
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line,
                              const char* message);

}  // namespace ebbtide

// Contracts within the daemon only; bad input from outside is answered with a status.
#define EBBTIDE_CHECK(condition, message)                              \
  do {                                                                 \
    if (!(condition)) [[unlikely]] {                                   \
      ::ebbtide::CheckFailed(#condition, __FILE__, __LINE__, message); \
    }                                                                  \
  } while (false)

#define EBBTIDE_RETURN_IF_ERROR(expression)                   \
  do {                                                        \
    if (absl::Status status_ = (expression); !status_.ok()) { \
      return status_;                                         \
    }                                                         \
  } while (false)

// NOLINTBEGIN(bugprone-macro-parentheses): names and declarations take none.
#define EBBTIDE_CONCAT_INNER(a, b) a##b
#define EBBTIDE_CONCAT(a, b) EBBTIDE_CONCAT_INNER(a, b)
#define EBBTIDE_ASSIGN_OR_RETURN(declaration, expression) \
  EBBTIDE_ASSIGN_OR_RETURN_NAMED(EBBTIDE_CONCAT(or_, __LINE__), declaration, expression)
#define EBBTIDE_ASSIGN_OR_RETURN_NAMED(name, declaration, expression) \
  auto name = (expression);                                           \
  if (!name.ok()) {                                                   \
    return std::move(name).status();                                  \
  }                                                                   \
  declaration = *std::move(name)
// NOLINTEND(bugprone-macro-parentheses): back to the rule.
