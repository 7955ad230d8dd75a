// SPDX-License-Identifier: Apache-2.0
//
// A device that was lost once is known as lost, whoever was told and whatever it answers later.
// That what it passes on is a backend: backend_test.cc.

#include "gpu/loss_noting_backend.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;

// Answers every call as told, and has no memory.
class ToldBackend final : public Backend {
 public:
  absl::Status allocate, make_stream, run, wait;

  std::string_view name() const override { return "told"; }
  bool is_simulated() const override { return true; }
  absl::StatusOr<DeviceBuffer> Allocate(size_t /*bytes*/) override {
    if (!allocate.ok()) return allocate;
    return DeviceBuffer();
  }
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override {
    if (!make_stream.ok()) return make_stream;
    return std::make_unique<ToldStream>(*this);
  }
  absl::Status Run(Stream& /*stream*/, const Batch& /*batch*/) override { return run; }

 private:
  class ToldStream final : public Stream {
   public:
    explicit ToldStream(const ToldBackend& backend) : backend_(backend) {}
    absl::Status Wait() override { return backend_.wait; }

   private:
    const ToldBackend& backend_;
  };
};

// Each call once; the first error that one answers.
absl::Status CallAll(Backend& backend) {
  EBBTIDE_RETURN_IF_ERROR(backend.Allocate(1).status());
  EBBTIDE_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend.MakeStream());
  EBBTIDE_RETURN_IF_ERROR(backend.Run(*stream, std::vector<ZeroArgs>()));
  return stream->Wait();
}

TEST(LossNotingBackendTest, LossIsPassedOnFromEveryCallAndNeverForgotten) {
  for (absl::Status ToldBackend::*const call :
       {&ToldBackend::allocate, &ToldBackend::make_stream, &ToldBackend::run, &ToldBackend::wait}) {
    ToldBackend device;
    LossNotingBackend noting(device);
    EXPECT_OK(CallAll(noting));
    EXPECT_FALSE(noting.has_failed());

    device.*call = absl::UnavailableError("lost");
    EXPECT_THAT(CallAll(noting), StatusIs(absl::StatusCode::kUnavailable, "lost"));
    EXPECT_TRUE(noting.has_failed());

    device.*call = absl::OkStatus();
    EXPECT_OK(CallAll(noting));
    EXPECT_TRUE(noting.has_failed());
  }
}

TEST(LossNotingBackendTest, ADeviceThatIsFullIsNotLost) {
  ToldBackend device;
  LossNotingBackend noting(device);
  device.allocate = absl::ResourceExhaustedError("full");

  EXPECT_THAT(CallAll(noting), StatusIs(absl::StatusCode::kResourceExhausted, "full"));
  EXPECT_FALSE(noting.has_failed());
}

}  // namespace
}  // namespace ebbtide::gpu
