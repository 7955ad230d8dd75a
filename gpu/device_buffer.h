// SPDX-License-Identifier: Apache-2.0
//
// Memory of a device that frees itself.

#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <utility>

namespace ebbtide::gpu {

// Thread-compatible. Owns its bytes; `release` is called once with them.
class DeviceBuffer {
 public:
  using Release = std::function<void(std::span<std::byte>)>;

  DeviceBuffer() = default;
  DeviceBuffer(std::span<std::byte> bytes, Release release)
      : bytes_(bytes), release_(std::move(release)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~DeviceBuffer() {
    if (!bytes_.empty()) release_(bytes_);
  }

  // Addresses are the device's; only a simulated device's may be read or written by this process.
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  void swap(DeviceBuffer& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
  }

  std::span<std::byte> bytes_;
  Release release_;
};

}  // namespace ebbtide::gpu
