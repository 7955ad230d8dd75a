// SPDX-License-Identifier: Apache-2.0

#include "service/attention/recall.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <tuple>
#include <utility>

namespace ebbtide::service {
namespace {

constexpr int kRoundsMax = 8;
constexpr double kAim = 0.95;          // Of the target: a little slack spares a round.
constexpr double kLeaveUnread = 0.25;  // Of the target: what unread pages may add up to.
constexpr double kFineGain = 16;       // Four more bits divide a step by so much.
constexpr double kRoomMin = 0.1;       // Of the target: what forms may always add up to.
constexpr int kPriceSteps = 40;

struct Choice {
  size_t lane = 0;
  size_t page = 0;  // Number in the lane's pages().
  Rung rung = Rung::kCoarse;
};

struct Doubt {
  size_t lane = 0;
  size_t page = 0;
  double weight = 0;  // What the page adds to the token's error, about.
};

class Climb {
 public:
  Climb(std::span<LaneAnswer> lanes, const RecallTools& tools) : lanes_(lanes), tools_(tools) {
    for (const auto part :
         {storage::PagePart::kExact, storage::PagePart::kCoarse, storage::PagePart::kFine}) {
      bytes_[static_cast<size_t>(part)] = static_cast<double>(tools.source.bytes_of(part));
    }
  }

  void ReadEverything() {
    std::vector<Choice> all;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      for (size_t page = 0; page < lanes_[lane].pages().size(); ++page)
        all.push_back({lane, page, Rung::kExact});
    }
    Read(all);
    Compose(false);
  }

  void ReadUntilMet(double tau, bool by_experience) {
    RecallHistory& history = tools_.history;
    if (history.exact_answers_left > 0) {
      --history.exact_answers_left;
      ReadEverything();
      return;
    }
    Refine(by_experience ? tau : tau / (1 + tau), by_experience);
    if (BytesRead() > BytesOfEverything()) history.exact_answers_left = kExactAnswers;
  }

  // Nothing goes uncertified.
  void Finish() {
    const auto is_unread = [](const AbsentPage& page) { return page.rung == Rung::kDigest; };
    for (LaneAnswer& lane : lanes_) {
      if (std::ranges::any_of(lane.pages(), is_unread))
        status_.Update(lane.EnsureBounds(tools_.device));
    }
    tools_.parallel.Run(static_cast<int>(lanes_.size()), [this](int l) {
      LaneAnswer& lane = lanes_[static_cast<size_t>(l)];
      if (!lane.has_bounds()) lane.DrawBounds();
    });
  }

  RecallResult Take() {
    return {.status = status_, .stopped_by = stopped_by_, .touched = std::move(touched_)};
  }

 private:
  void Refine(double target, bool by_experience) {
    Compose(!by_experience);
    for (int round = 0; round < kRoundsMax; ++round) {
      std::vector<Choice> choices = Choose(target, by_experience);
      if (choices.empty()) return;
      const bool has_time = Read(choices);
      Compose(!by_experience);
      if (!has_time) return;
    }
    if (!Choose(target, by_experience).empty()) ReadTheRest();
  }

  uint64_t BytesRead() const {
    uint64_t bytes = 0;
    for (const TouchedRung& touched : touched_) bytes += touched.bytes;
    return bytes;
  }

  uint64_t BytesOfEverything() const {
    uint64_t pages = 0;
    for (const LaneAnswer& lane : lanes_) pages += lane.pages().size();
    return pages * tools_.source.bytes_of(storage::PagePart::kExact);
  }

  void Compose(bool with_bounds) {
    tools_.parallel.Run(static_cast<int>(lanes_.size()), [&](int l) {
      LaneAnswer& lane = lanes_[static_cast<size_t>(l)];
      lane.Compose();
      if (with_bounds) lane.DrawBounds();
    });
  }

  // The last resort.
  void ReadTheRest() {
    std::vector<Choice> rest;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      for (size_t p = 0; p < lanes_[lane].pages().size(); ++p) {
        const AbsentPage& page = lanes_[lane].pages()[p];
        if (page.rung != Rung::kExact && !page.is_lost) rest.push_back({lane, p, Rung::kExact});
      }
    }
    Read(rest);
    Compose(false);
  }

  // What to read next, for every token that is not met.
  std::vector<Choice> Choose(double target, bool by_experience) {
    std::vector<Choice> choices;
    std::vector<std::vector<uint8_t>> is_chosen;
    for (const LaneAnswer& lane : lanes_) is_chosen.emplace_back(lane.pages().size(), 0);
    for (int m = 0; m < lanes_.front().queries(); ++m) {
      for (const Choice& choice : ChooseFor(m, target, by_experience)) {
        if (std::exchange(is_chosen[choice.lane][choice.page], 1) == 0) choices.push_back(choice);
      }
    }
    return choices;
  }

  std::vector<Choice> ChooseFor(int m, double target, bool by_experience) const {
    double error_squares = 0;
    double output_squares = 0;
    std::vector<std::vector<double>> errors(lanes_.size());
    for (size_t l = 0; l < lanes_.size(); ++l) {
      const LaneAnswer& lane = lanes_[l];
      for (int row = m; row < lane.rows(); row += lane.queries()) {
        const double error = by_experience ? lane.Estimate(row) : lane.Bound(row).error;
        errors[l].push_back(error);
        error_squares += error * error;
        for (const float x : lane.output(row)) output_squares += static_cast<double>(x) * x;
      }
    }
    const double limit = target * std::sqrt(output_squares);
    const double error = std::sqrt(error_squares);
    if (error <= limit) return {};
    const std::vector<Doubt> doubts = DoubtsOf(m, errors, error, by_experience);
    std::vector<Choice> choices = FirstReads(doubts, kLeaveUnread * limit);
    if (choices.empty()) choices = Useless(doubts);
    if (choices.empty()) choices = FinerReads(doubts, kAim * limit / error, by_experience ? 2 : 1);
    if (choices.empty() && !doubts.empty()) {
      choices.push_back({doubts.front().lane, doubts.front().page, Rung::kExact});
    }
    return choices;
  }

  // Each page's part in the token's error: its part in each row, weighed by how much the row
  // counts.
  std::vector<Doubt> DoubtsOf(int m, const std::vector<std::vector<double>>& errors, double error,
                              bool by_experience) const {
    std::vector<Doubt> doubts;
    for (size_t l = 0; l < lanes_.size(); ++l) {
      const LaneAnswer& lane = lanes_[l];
      for (size_t p = 0; p < lane.pages().size(); ++p) {
        const AbsentPage& page = lane.pages()[p];
        if (page.rung == Rung::kExact || page.is_lost) continue;
        double weight = 0;
        size_t head = 0;
        for (int row = m; row < lane.rows(); row += lane.queries(), ++head) {
          const double share = std::isfinite(error) ? errors[l][head] / error : 1.0;
          weight += share * lane.Contribution(page, row, by_experience);
        }
        doubts.push_back({.lane = l, .page = p, .weight = weight});
      }
    }
    std::ranges::sort(doubts, [](const Doubt& a, const Doubt& b) {
      return std::tuple(-a.weight, a.lane, a.page) < std::tuple(-b.weight, b.lane, b.page);
    });
    return doubts;
  }

  // Unread pages go to the coarse form, but for those that together add less than `leave`.
  std::vector<Choice> FirstReads(const std::vector<Doubt>& doubts, double leave) const {
    std::vector<Choice> choices;
    double left = 0;
    for (auto doubt = doubts.rbegin(); doubt != doubts.rend(); ++doubt) {
      if (PageOf(*doubt).rung != Rung::kDigest) continue;
      left += doubt->weight;
      if (left > leave) choices.push_back({doubt->lane, doubt->page, FirstRung(*doubt)});
    }
    return choices;
  }

  // Forms that prove nothing at all: pages that leave the range of their codes.
  std::vector<Choice> Useless(const std::vector<Doubt>& doubts) const {
    std::vector<Choice> choices;
    for (const Doubt& doubt : doubts) {
      if (!std::isfinite(doubt.weight)) choices.push_back({doubt.lane, doubt.page, Rung::kExact});
    }
    return choices;
  }

  // The cheapest rungs that bring the error down to `share` of what it is. At a price for a byte,
  // each page takes the rung where its error and its bytes cost least; the highest price at which
  // errors fit is found by halving. Errors add by their `power`, 1 or 2: independent ones by
  // squares.
  std::vector<Choice> FinerReads(const std::vector<Doubt>& doubts, double share, int power) const {
    double unread = 0;
    double now = 0;
    for (const Doubt& doubt : doubts) {
      (PageOf(doubt).rung == Rung::kDigest ? unread : now) +=
          PageOf(doubt).rung == Rung::kDigest ? doubt.weight : Power(doubt.weight, power);
    }
    const double whole = unread + (power == 2 ? std::sqrt(now) : now);
    const double room = Power(std::max(share * whole - unread, kRoomMin * share * whole), power);
    double low = -100;  // Of the price's logarithm to base 2, relative to `now`.
    double high = 10;
    for (int step = 0; step < kPriceSteps; ++step) {
      const double middle = (low + high) / 2;
      (ErrorAt(doubts, now * std::exp2(middle), power) <= room ? low : high) = middle;
    }
    std::vector<Choice> choices;
    for (const Doubt& doubt : doubts) {
      const Offer offer = BestOffer(doubt, now * std::exp2(low), power);
      if (offer.rung != PageOf(doubt).rung) choices.push_back({doubt.lane, doubt.page, offer.rung});
    }
    return choices;
  }

  static double Power(double x, int power) { return power == 2 ? x * x : x; }

  struct Offer {
    Rung rung = Rung::kExact;
    double error = 0;
    double bytes = 0;
  };

  Offer BestOffer(const Doubt& doubt, double price, int power) const {
    const AbsentPage& page = PageOf(doubt);
    Offer best{.bytes = BytesOf(Rung::kExact)};
    const auto consider = [&](const Offer& offer) {
      if (offer.error + price * offer.bytes < best.error + price * best.bytes) best = offer;
    };
    if (page.rung == Rung::kCoarse && !page.is_code_lost) {
      consider({Rung::kFine, Power(doubt.weight / kFineGain, power), BytesOf(Rung::kFine)});
    }
    if (page.rung != Rung::kDigest) consider({page.rung, Power(doubt.weight, power), 0});
    return page.rung == Rung::kDigest ? Offer{.rung = Rung::kDigest} : best;
  }

  double ErrorAt(const std::vector<Doubt>& doubts, double price, int power) const {
    double sum = 0;
    for (const Doubt& doubt : doubts) sum += BestOffer(doubt, price, power).error;
    return sum;
  }

  double BytesOf(Rung rung) const { return bytes_[static_cast<size_t>(PartOf(rung))]; }

  Rung FirstRung(const Doubt& doubt) const {
    return PageOf(doubt).is_code_lost ? Rung::kExact : Rung::kCoarse;
  }

  const AbsentPage& PageOf(const Doubt& doubt) const {
    return lanes_[doubt.lane].pages()[doubt.page];
  }

  // Reads the chosen rungs, a staging share at a time; false where time ran out before the last.
  bool Read(std::span<const Choice> choices) {
    for (size_t first = 0; first < choices.size();) {
      if (tools_.clock.SinceStart() >= tools_.deadline) {
        stopped_by_ = "DEADLINE";
        return false;
      }
      size_t end = first;
      uint64_t bytes = 0;
      while (end < choices.size() && (end == first || bytes < tools_.source.group_bytes())) {
        bytes += tools_.source.bytes_of(PartOf(choices[end].rung));
        ++end;
      }
      ReadGroup(choices.subspan(first, end - first));
      first = end;
    }
    return true;
  }

  static storage::PagePart PartOf(Rung rung) {
    return rung == Rung::kCoarse ? storage::PagePart::kCoarse
           : rung == Rung::kFine ? storage::PagePart::kFine
                                 : storage::PagePart::kExact;
  }

  void ReadGroup(std::span<const Choice> choices) {
    std::vector<PageRequest> requests;
    for (const Choice& choice : choices) {
      requests.push_back({.kv_head = static_cast<int>(choice.lane),
                          .page = lanes_[choice.lane].pages()[choice.page].page,
                          .part = PartOf(choice.rung)});
    }
    tools_.source.Fetch(requests, tools_.deadline - tools_.clock.SinceStart());

    std::vector<std::vector<AbsentPage*>> exact(lanes_.size());
    std::vector<std::vector<std::span<const std::byte>>> exact_bytes(lanes_.size());
    std::vector<size_t> forms;
    for (size_t i = 0; i < choices.size(); ++i) {
      AbsentPage& page = lanes_[choices[i].lane].pages()[choices[i].page];
      if (!Note(requests[i], page)) continue;
      if (requests[i].part == storage::PagePart::kExact) {
        exact[choices[i].lane].push_back(&page);
        exact_bytes[choices[i].lane].push_back(requests[i].bytes);
      } else {
        forms.push_back(i);
      }
    }
    tools_.parallel.Run(static_cast<int>(forms.size()), [&](int f) {
      const size_t i = forms[static_cast<size_t>(f)];
      LaneAnswer& lane = lanes_[choices[i].lane];
      lane.AttendForm(lane.pages()[choices[i].page], choices[i].rung, requests[i].bytes);
    });
    std::vector<gpu::AttendArgs> attends;
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (!exact[lane].empty())
        attends.push_back(lanes_[lane].ExactArgs(exact[lane], exact_bytes[lane]));
    }
    if (attends.empty()) return;
    status_.Update(tools_.device.Run(attends));
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (!exact[lane].empty()) lanes_[lane].TakeExact();
    }
  }

  // Counts what was read; a part that can't be had leaves its page to the next rung, or lost.
  bool Note(const PageRequest& request, AbsentPage& page) {
    if (request.state != FetchState::kOk) {
      page.is_lost = request.part == storage::PagePart::kExact;
      page.is_code_lost = true;
      if (page.is_lost) {
        stopped_by_ =
            request.state == FetchState::kUnavailable ? "TIER_UNAVAILABLE" : "CORRUPT_PAGE";
      }
      return false;
    }
    const std::string_view rung =
        RungName(request.part == storage::PagePart::kExact    ? Rung::kExact
                 : request.part == storage::PagePart::kCoarse ? Rung::kCoarse
                                                              : Rung::kFine);
    auto found = std::ranges::find_if(touched_, [&](const TouchedRung& touched) {
      return touched.rung == rung && touched.tier == request.tier;
    });
    if (found == touched_.end()) {
      touched_.push_back({.rung = rung, .tier = request.tier});
      found = std::prev(touched_.end());
    }
    // A page counts once, under the last rung that was read of it; its bytes under each.
    if (page.touched >= 0) --touched_[static_cast<size_t>(page.touched)].pages;
    page.touched = static_cast<int>(found - touched_.begin());
    ++found->pages;
    found->bytes += request.bytes.size();
    return true;
  }

  const std::span<LaneAnswer> lanes_;
  const RecallTools& tools_;
  double bytes_[3] = {};  // Of each PagePart.
  absl::Status status_;
  std::string_view stopped_by_;
  std::vector<TouchedRung> touched_;
};

}  // namespace

std::string_view RungName(Rung rung) {
  switch (rung) {
    case Rung::kDigest:
      return "digest";
    case Rung::kCoarse:
      return "coarse";
    case Rung::kFine:
      return "fine";
    case Rung::kExact:
      return "exact";
  }
  return "";
}

RecallResult Recall(const RecallSpec& spec, std::span<LaneAnswer> lanes, const RecallTools& tools) {
  Climb climb(lanes, tools);
  switch (spec.mode) {
    case RecallMode::kOff:
      for (LaneAnswer& lane : lanes) lane.Compose();
      break;
    case RecallMode::kExact:
      climb.ReadEverything();
      break;
    case RecallMode::kBounded:
      climb.ReadUntilMet(spec.tau, false);
      break;
    case RecallMode::kEstimated:
      climb.ReadUntilMet(spec.tau, true);
      break;
  }
  climb.Finish();
  return climb.Take();
}

}  // namespace ebbtide::service
