// SPDX-License-Identifier: Apache-2.0

#include "service/reason.h"

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

#include "gpu/host_memory_full.h"

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

absl::Status WithDeviceReason(const absl::Status& status) {
  if (status.ok() || !ReasonOf(status).empty()) return status;
  const absl::string_view message = status.message();
  const std::string_view reason = gpu::IsHostMemoryFull(status)       ? "HOST_MEMORY_FULL"
                                  : absl::IsResourceExhausted(status) ? "DEVICE_FULL"
                                  : absl::IsUnavailable(status)       ? "DEVICE_LOST"
                                                                      : "DEVICE_REFUSED";
  return Refuse(status.code(), reason, {message.data(), message.size()});
}

}  // namespace ebbtide::service
