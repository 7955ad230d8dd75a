// SPDX-License-Identifier: Apache-2.0
//
// An Engine that answers what a test tells it to and keeps what it was asked.

#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "service/engine.h"

namespace ebbtide::service {

// Thread-safe where the scripts are. A script left out answers something valid.
class ScriptedEngine : public Engine {
 public:
  using StepScript =
      std::function<std::vector<StepAnswer>(const StepCall&, std::span<const StepItem>)>;

  std::function<absl::StatusOr<Geometry>(std::string_view, const Geometry&, std::string_view)>
      register_model =
          [](std::string_view, const Geometry& geometry, std::string_view) { return geometry; };
  std::function<absl::StatusOr<OpenAnswer>(const OpenArgs&)> open_sequence = [](const OpenArgs&) {
    return OpenAnswer{};
  };
  StepScript step = [](const StepCall&, std::span<const StepItem> items) {
    return std::vector<StepAnswer>(items.size());
  };
  std::function<absl::StatusOr<std::vector<PageBytes>>(const ReadPagesArgs&)> read_pages =
      [](const ReadPagesArgs&) { return std::vector<PageBytes>(); };
  std::function<absl::StatusOr<uint64_t>(std::string_view, uint64_t)> truncate =
      [](std::string_view, uint64_t length) { return length; };
  std::function<absl::Status(std::string_view)> close_sequence = [](std::string_view) {
    return absl::OkStatus();
  };
  bool device_is_lost = false;
  std::function<Stats()> get_stats = [] { return Stats{}; };
  std::function<std::vector<SequenceSummary>(std::string_view, size_t)> list_sequences =
      [](std::string_view, size_t) { return std::vector<SequenceSummary>(); };
  std::function<absl::StatusOr<SequenceDescription>(const DescribeArgs&)> describe =
      [](const DescribeArgs&) { return SequenceDescription{}; };

  absl::StatusOr<Geometry> RegisterModel(std::string_view name, const Geometry& geometry,
                                         std::string_view weights) override {
    return register_model(name, geometry, weights);
  }
  absl::StatusOr<OpenAnswer> OpenSequence(const OpenArgs& args) override {
    return open_sequence(args);
  }
  std::vector<StepAnswer> Step(const StepCall& call, std::span<const StepItem> items) override {
    return step(call, items);
  }
  absl::StatusOr<std::vector<PageBytes>> ReadPages(const ReadPagesArgs& args) override {
    return read_pages(args);
  }
  absl::StatusOr<uint64_t> Truncate(std::string_view sequence, uint64_t length) override {
    return truncate(sequence, length);
  }
  absl::Status CloseSequence(std::string_view sequence) override {
    return close_sequence(sequence);
  }
  Stats GetStats() override { return get_stats(); }
  std::vector<SequenceSummary> ListSequences(std::string_view after, size_t limit) override {
    return list_sequences(after, limit);
  }
  absl::StatusOr<SequenceDescription> Describe(const DescribeArgs& args) override {
    return describe(args);
  }
  void CloseIdle() override {}
  bool Settle(absl::Duration) override { return true; }
  bool is_device_lost() override { return device_is_lost; }
  void CheckInvariants() override {}
};

}  // namespace ebbtide::service
