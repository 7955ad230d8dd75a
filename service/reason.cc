// SPDX-License-Identifier: Apache-2.0

#include "service/reason.h"

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace ebbtide::service {
namespace {

constexpr char kReasonUrl[] = "ebbtide.dev/reason";

}  // namespace

absl::Status Refuse(absl::StatusCode code, std::string_view reason, std::string_view message) {
  absl::Status status(code, absl::string_view(message.data(), message.size()));
  status.SetPayload(kReasonUrl, absl::Cord(absl::string_view(reason.data(), reason.size())));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace ebbtide::service
