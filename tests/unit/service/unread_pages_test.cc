// SPDX-License-Identifier: Apache-2.0
//
// What an answer says it has not read, it has not looked at. First an engine answers while every
// part it fetches is written down, and what it says it touched is held against that. Then the same
// calls again, with NaN in the place of all else: of each part of a record that the answer did not
// fetch, of every slot of the device that holds no token of the working set, and of the tokens of
// recalled pages that are resident already. The answers are the same to the bit.

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/backend.h"
#include "storage/block_record.h"
#include "storage/tier.h"
#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using storage::PagePart;
using test::EngineStand;
using test::Tokens;
using test::Worker;

// Block, page within its record, part.
using Parts = std::set<std::tuple<uint32_t, uint32_t, PagePart>>;
constexpr PagePart kParts[] = {PagePart::kExact, PagePart::kCoarse, PagePart::kFine};

void FillWithNaN(std::span<std::byte> f32) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (size_t i = 0; i + 4 <= f32.size(); i += 4) std::memcpy(f32.data() + i, &nan, 4);
}

// Passes everything on; what differs is overridden.
class PassingTier : public storage::Tier {
 public:
  explicit PassingTier(storage::Tier& tier) : tier_(tier) {}
  std::string_view name() const override { return tier_.name(); }
  absl::Status Write(std::span<const storage::BlockWrite> blocks) override {
    return tier_.Write(blocks);
  }
  absl::Status Read(std::span<storage::PageRead> pages, absl::Duration patience) override {
    return tier_.Read(pages, patience);
  }
  storage::BlockPin Pin(const storage::BlockKey& key) override { return tier_.Pin(key); }
  absl::Status Erase(std::span<const storage::BlockKey> keys) override { return tier_.Erase(keys); }
  absl::Status Probe() override { return tier_.Probe(); }
  storage::TierUsage Usage() const override { return tier_.Usage(); }
  storage::TierRoom Room(std::span<const storage::RecordSize> sizes) const override {
    return tier_.Room(sizes);
  }

 private:
  storage::Tier& tier_;
};

class UnpinnedTier final : public PassingTier {
 public:
  using PassingTier::PassingTier;
  storage::BlockPin Pin(const storage::BlockKey&) override { return nullptr; }
};

// Stands below an unpinned host tier and reads what lies there, noting each part.
class NotingTier final : public PassingTier {
 public:
  NotingTier(storage::Tier& below, storage::Tier& host, Parts& parts)
      : PassingTier(below), host_(host), parts_(parts) {}
  absl::Status Read(std::span<storage::PageRead> pages, absl::Duration patience) override {
    for (const storage::PageRead& page : pages)
      parts_.emplace(page.key.block, page.page, page.part);
    return host_.Read(pages, patience);
  }

 private:
  storage::Tier& host_;
  Parts& parts_;
};

// Pins copies of records in which only `parts` are as they were written.
class PoisonedTier final : public PassingTier {
 public:
  PoisonedTier(storage::Tier& tier, const Parts& parts)
      : PassingTier(tier), tier_(tier), parts_(parts) {}
  storage::BlockPin Pin(const storage::BlockKey& key) override {
    const storage::BlockPin sound = tier_.Pin(key);
    if (sound == nullptr) return nullptr;
    auto copy = std::make_shared<Copy>();
    copy->bytes.assign(sound->begin(), sound->end());
    copy->span = copy->bytes;
    const auto header = storage::ParseHeader(*sound);
    EXPECT_OK(header.status());
    const storage::RecordGeometry& geometry = header->geometry;
    for (uint32_t page = 0; page < geometry.pages(); ++page) {
      for (const PagePart part : kParts) {
        if (parts_.contains({key.block, page, part})) continue;
        FillWithNaN(std::span(copy->bytes)
                        .subspan(geometry.part_offset(page, part), geometry.part_bytes(part)));
      }
    }
    return {copy, &copy->span};
  }

 private:
  struct Copy {
    std::vector<std::byte> bytes;
    std::span<const std::byte> span;
  };
  storage::Tier& tier_;
  const Parts& parts_;
};

// Puts NaN into every slot that a batch of attends may not look at: in place where it is the
// device's own memory, in a copy elsewhere.
class PoisonedBackend final : public gpu::Backend {
 public:
  explicit PoisonedBackend(gpu::Backend& backend) : backend_(backend) {}
  std::string_view name() const override { return backend_.name(); }
  bool is_simulated() const override { return backend_.is_simulated(); }
  absl::StatusOr<gpu::DeviceBuffer> Allocate(size_t bytes) override {
    auto buffer = backend_.Allocate(bytes);
    if (buffer.ok()) pool_ = buffer->bytes();
    return buffer;
  }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> MakeStream() override {
    return backend_.MakeStream();
  }
  absl::Status Run(gpu::Stream& stream, const gpu::Batch& batch) override {
    const auto* attends = std::get_if<std::span<const gpu::AttendArgs>>(&batch);
    if (attends == nullptr) return backend_.Run(stream, batch);
    std::vector<std::vector<gpu::Extent>> extents;
    std::vector<std::vector<std::byte>> copies;
    std::vector<gpu::AttendArgs> poisoned(attends->begin(), attends->end());
    for (gpu::AttendArgs& args : poisoned) {
      auto& own = extents.emplace_back(args.extents.begin(), args.extents.end());
      const auto row = static_cast<size_t>(args.head_dim) * gpu::DtypeBytes(args.dtype);
      for (gpu::Extent& extent : own) {
        extent.key = Poison(extent, extent.key, row, copies);
        extent.value = Poison(extent, extent.value, row, copies);
      }
      args.extents = own;
    }
    return backend_.Run(stream, std::span<const gpu::AttendArgs>(poisoned));
  }
  uint64_t slots_poisoned() const { return slots_poisoned_; }

 private:
  const std::byte* Poison(const gpu::Extent& extent, const std::byte* rows, size_t row,
                          std::vector<std::vector<std::byte>>& copies) {
    const auto slots = static_cast<size_t>(extent.slots);
    std::byte* own = nullptr;
    if (rows >= pool_.data() && rows < pool_.data() + pool_.size()) {
      own = pool_.data() + (rows - pool_.data());
    } else {
      copies.emplace_back(rows, rows + slots * row);
      own = copies.back().data();
    }
    for (size_t slot = 0; slot < slots; ++slot) {
      if (extent.index[slot] != gpu::kNoToken) continue;
      FillWithNaN({own + slot * row, row});
      ++slots_poisoned_;
    }
    return own;
  }

  gpu::Backend& backend_;
  std::span<std::byte> pool_;
  uint64_t slots_poisoned_ = 0;
};

struct Step {
  StepAnswer answer;
  Parts parts;  // Fetched for it.
};

// Pages by the last rung that was read of them, and bytes by rung.
using Touched = std::map<std::string, std::pair<uint64_t, uint64_t>>;

Touched WhatItSays(const StepAnswer& answer) {
  Touched touched;
  for (const TouchedRung& rung : answer.touched) {
    auto& [pages, bytes] = touched[std::string(rung.rung)];
    pages += rung.pages;
    bytes += rung.bytes;
  }
  return touched;
}

Touched WhatItRead(const Parts& parts, const storage::RecordGeometry& geometry) {
  Touched touched;
  for (const auto& [block, page, part] : parts) {
    const bool is_last =
        part == PagePart::kExact ||
        (!parts.contains({block, page, PagePart::kExact}) &&
         (part == PagePart::kFine || !parts.contains({block, page, PagePart::kFine})));
    auto& [pages, bytes] = touched[part == PagePart::kExact    ? "exact"
                                   : part == PagePart::kCoarse ? "coarse"
                                                               : "fine"];
    pages += is_last ? 1 : 0;
    bytes += geometry.part_bytes(part);
  }
  return touched;
}

// Policy, recall.
class UnreadPagesTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  static constexpr int32_t kPrompt = 96;
  static constexpr int32_t kEnd = 136;

  // All calls of a run; `each` is called after every one, when everything is sealed.
  void Run(EngineStand& stand, const std::function<void(StepAnswer)>& each,
           const std::function<void()>& before) {
    Worker worker(stand.engine(), tokens_, "a");
    worker.open = {.policy = std::get<0>(GetParam()),
                   .recall = std::get<1>(GetParam()),
                   .budget_tokens = 48,
                   .chunk_tokens = 32};
    ASSERT_OK(worker.Open().status());
    for (int32_t first = 0; first < kEnd;) {
      const bool is_prompt = first < kPrompt;
      const int32_t count = is_prompt ? 32 : 1;
      for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
        before();
        StepAnswer answer = worker.Step({.layer = layer,
                                         .first = first,
                                         .count = count,
                                         .phase = is_prompt ? Phase::kPrefill : Phase::kDecode});
        ASSERT_OK(answer.status);
        stand.Settle();
        each(std::move(answer));
      }
      first += count;
    }
  }

  const Tokens tokens_{.geometry = test::SmallGeometry()};
};

TEST_P(UnreadPagesTest, AreNotLookedAt) {
  std::vector<Step> steps;
  Parts parts;
  {
    storage::Tier* host = nullptr;
    EngineStand stand({.rocksdb_bytes = 192 << 20,
                       .wrap_host =
                           [&](storage::Tier& tier) {
                             host = &tier;
                             return std::make_unique<UnpinnedTier>(tier);
                           },
                       .wrap_rocksdb =
                           [&](storage::Tier& tier) {
                             return std::make_unique<NotingTier>(tier, *host, parts);
                           }});
    Run(
        stand,
        [&](StepAnswer answer) { steps.push_back({.answer = std::move(answer), .parts = parts}); },
        [&] { parts.clear(); });
  }
  for (const Step& step : steps) {
    ASSERT_EQ(WhatItSays(step.answer), WhatItRead(step.parts, tokens_.geometry.record(0)));
  }

  size_t next = 0;
  Parts allowed;
  PoisonedBackend* backend = nullptr;
  EngineStand stand(
      {.wrap_host =
           [&](storage::Tier& tier) { return std::make_unique<PoisonedTier>(tier, allowed); },
       .wrap_backend =
           [&](gpu::Backend& inner) {
             auto poisoned = std::make_unique<PoisonedBackend>(inner);
             backend = poisoned.get();
             return poisoned;
           }});
  Run(
      stand,
      [&](const StepAnswer& answer) {
        const StepAnswer& sound = steps[next++].answer;
        ASSERT_EQ(answer.output, sound.output) << next;
        ASSERT_EQ(answer.lse, sound.lse) << next;
        ASSERT_EQ(answer.certificate.error_bound, sound.certificate.error_bound) << next;
        ASSERT_EQ(answer.certificate.mass_bound, sound.certificate.mass_bound) << next;
        ASSERT_EQ(answer.certificate.met, sound.certificate.met) << next;
        ASSERT_EQ(answer.absent_pages, sound.absent_pages) << next;
      },
      [&] { allowed = steps[next].parts; });
  EXPECT_EQ(next, steps.size());
  EXPECT_GT(backend->slots_poisoned(), 0U);
}

INSTANTIATE_TEST_SUITE_P(
    Recall, UnreadPagesTest,
    testing::Combine(testing::Values("h2o+caote", "keydiff", "snapkv+fastcaote"),
                     testing::Values("off", "bounded(0.5)", "bounded(0.1)", "bounded(0.02)",
                                     "estimated(0.1)", "exact")),
    [](const auto& test) {
      std::string name = std::string(std::get<0>(test.param)) + "_" + std::get<1>(test.param);
      std::erase_if(name, [](char c) { return c == '(' || c == ')' || c == '.'; });
      std::ranges::replace(name, '+', '_');
      return name;
    });

}  // namespace
}  // namespace ebbtide::service
