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
// Chosen on the recorded model (docs/benchmarks.md, every policy on a recorded model), where they
// make a step of bounded(0.02) read 906 KiB and one of estimated(0.02) 468.

// Of the target: a little slack spares a round. 0.8 reads 944 KiB, 1.0 890 in more rounds.
constexpr double kAim = 0.95;
// Of the target: what unread pages may add up to. 0.1 reads as much; 0.5 makes estimated(0.02) read
// 495 KiB, and its largest error 1.7 % instead of 1.2 %.
constexpr double kLeaveUnread = 0.25;
// Four more bits divide a step by so much. 8 reads 1115 KiB.
constexpr double kFineGain = 16;
// Of the target: what forms may always add up to, however much is unread. 0.03 to 0.3 are alike.
constexpr double kRoomMin = 0.1;
// Halvings of the price's logarithm, 110 wide: to 1e-10 of it.
constexpr int kPriceSteps = 40;
// What a read costs beside its bytes, in bytes, where the ladder is weighed against reading exactly
// at once. A disk moves whole sectors, 4 KiB more on average, but with 2048 a step of
// bounded(0.02) reads 983 KiB, with 4096 1533, and bytes are what it is asked to spare.
constexpr uint64_t kReadBytes = 1024;

// What is read is cut by these numbers alone, so that an answer's bits depend neither on where its
// pages lie nor on how much staging there is.
constexpr size_t kBlockChoices = 1024;  // Dearest blocks first; within one, as memory lies.
constexpr size_t kGroupChoices = 256;   // Fetched together, small enough to be attended from cache.
constexpr size_t kRunPages = 8;         // Attended exactly as one, rounded once.

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
    Compose();
  }

  void ReadUntilMet(double tau, bool by_experience) {
    if (tools_.reads_exactly) {
      ReadEverything();
    } else {
      Refine(by_experience ? tau : tau / (1 + tau), by_experience);
    }
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
    return {.status = status_,
            .stopped_by = stopped_by_,
            .touched = std::move(touched_),
            .lost = std::move(lost_),
            .spent = CostOf(reads_),
            .exact = CostOf(Everything())};
  }

 private:
  void Refine(double target, bool by_experience) {
    ComposeAndWeigh(by_experience);
    for (int round = 0; round < kRoundsMax; ++round) {
      std::vector<Choice> choices = Choose(target, by_experience);
      if (choices.empty()) return;
      const bool has_time = Read(choices);
      ComposeAndWeigh(by_experience);
      if (!has_time) return;
    }
    if (!Choose(target, by_experience).empty()) ReadTheRest();
  }

  // What was asked of tiers.
  struct Reads {
    uint64_t count = 0;
    uint64_t bytes = 0;
  };

  static uint64_t CostOf(const Reads& reads) { return reads.bytes + reads.count * kReadBytes; }

  Reads Everything() const {
    Reads all;
    for (const LaneAnswer& lane : lanes_) all.count += lane.pages().size();
    all.bytes = all.count * tools_.source.bytes_of(storage::PagePart::kExact);
    return all;
  }

  void Compose() {
    tools_.parallel.Run(static_cast<int>(lanes_.size()),
                        [&](int l) { lanes_[static_cast<size_t>(l)].Compose(); });
  }

  void ComposeAndWeigh(bool by_experience) {
    tools_.parallel.Run(static_cast<int>(lanes_.size()), [&](int l) {
      LaneAnswer& lane = lanes_[static_cast<size_t>(l)];
      lane.Compose();
      lane.Weigh(by_experience);
      if (!by_experience) lane.DrawBounds();
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
    Compose();
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
    double rounding_squares = 0;
    std::vector<std::vector<double>> errors(lanes_.size());
    for (size_t l = 0; l < lanes_.size(); ++l) {
      const LaneAnswer& lane = lanes_[l];
      for (int row = m; row < lane.rows(); row += lane.queries()) {
        const double error = by_experience ? lane.Estimate(row) : lane.Bound(row).error;
        errors[l].push_back(error);
        error_squares += error * error;
        for (const float x : lane.output(row)) output_squares += static_cast<double>(x) * x;
        const double rounding = lane.RoundingError(row, tools_.output_dtype);
        rounding_squares += rounding * rounding;
      }
    }
    // What rounding the output takes of the target, no reading gives back; where it takes all, the
    // target is aimed at without it.
    double limit = target * std::sqrt(output_squares);
    if (const double rounding = std::sqrt(rounding_squares); rounding < limit) limit -= rounding;
    const double error = std::sqrt(error_squares);
    if (error <= limit) return {};
    const std::vector<Doubt> doubts = DoubtsOf(m, errors, error);
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
  std::vector<Doubt> DoubtsOf(int m, const std::vector<std::vector<double>>& errors,
                              double error) const {
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
          weight += share * lane.Weight(p, row);
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

  // Pages of one kind with what each adds to the error, the most first.
  struct Kind {
    Rung rung = Rung::kCoarse;
    bool has_fine = false;
    std::vector<double> error = {};
    std::vector<double> sum = {0};  // Of the first so many.

    void Add(double more) {
      error.push_back(more);
      sum.push_back(sum.back() + more);
    }
    double Between(size_t first, size_t end) const { return sum[end] - sum[first]; }
  };

  // The cheapest rungs that bring the error down to `share` of what it is. At a price for a byte,
  // each page takes the rung where its error and its bytes cost least; the highest price at which
  // errors fit is found by halving. Errors add by their `power`, 1 or 2: independent ones by
  // squares.
  std::vector<Choice> FinerReads(const std::vector<Doubt>& doubts, double share, int power) const {
    Kind kinds[] = {
        {.rung = Rung::kCoarse, .has_fine = true}, {.rung = Rung::kCoarse}, {.rung = Rung::kFine}};
    double unread = 0;
    double now = 0;
    for (const Doubt& doubt : doubts) {
      const AbsentPage& page = PageOf(doubt);
      if (page.rung == Rung::kDigest) {
        unread += doubt.weight;
        continue;
      }
      const double error = Power(doubt.weight, power);
      now += error;
      kinds[page.rung == Rung::kFine ? 2 : page.is_code_lost ? 1 : 0].Add(error);
    }
    const double whole = unread + (power == 2 ? std::sqrt(now) : now);
    const double room = Power(std::max(share * whole - unread, kRoomMin * share * whole), power);
    double low = -100;  // Of the price's logarithm to base 2, relative to `now`.
    double high = 10;
    for (int step = 0; step < kPriceSteps; ++step) {
      const double middle = (low + high) / 2;
      double error = 0;
      for (const Kind& kind : kinds) error += ErrorAt(kind, now * std::exp2(middle), power);
      (error <= room ? low : high) = middle;
    }
    std::vector<Choice> choices;
    for (const Doubt& doubt : doubts) {
      const AbsentPage& page = PageOf(doubt);
      if (page.rung == Rung::kDigest) continue;
      const bool has_fine = page.rung == Rung::kCoarse && !page.is_code_lost;
      const Rung best =
          BestRung(page.rung, has_fine, Power(doubt.weight, power), now * std::exp2(low), power);
      if (best != page.rung) choices.push_back({doubt.lane, doubt.page, best});
    }
    return choices;
  }

  static double Power(double x, int power) { return power == 2 ? x * x : x; }

  // Of a page in the form `rung` that adds `error`: the more, the finer.
  Rung BestRung(Rung rung, bool has_fine, double error, double price, int power) const {
    Rung best = Rung::kExact;
    double least = price * BytesOf(Rung::kExact);
    const double fine = error / Power(kFineGain, power) + price * BytesOf(Rung::kFine);
    if (has_fine && fine < least) {
      best = Rung::kFine;
      least = fine;
    }
    return error < least ? rung : best;
  }

  // What pages of one kind still add where each takes its best rung.
  double ErrorAt(const Kind& kind, double price, int power) const {
    const auto count_of = [&](auto is_so) {
      return static_cast<size_t>(std::ranges::partition_point(kind.error, is_so) -
                                 kind.error.begin());
    };
    const auto best = [&](double error) {
      return BestRung(kind.rung, kind.has_fine, error, price, power);
    };
    const size_t exact = count_of([&](double error) { return best(error) == Rung::kExact; });
    const size_t finer = count_of([&](double error) { return best(error) != kind.rung; });
    return kind.Between(exact, finer) / Power(kFineGain, power) +
           kind.Between(finer, kind.error.size());
  }

  double BytesOf(Rung rung) const { return bytes_[static_cast<size_t>(PartOf(rung))]; }

  Rung FirstRung(const Doubt& doubt) const {
    return PageOf(doubt).is_code_lost ? Rung::kExact : Rung::kCoarse;
  }

  const AbsentPage& PageOf(const Doubt& doubt) const {
    return lanes_[doubt.lane].pages()[doubt.page];
  }

  // Choices that are attended together: a form, or a run of exact pages of one lane.
  using Together = std::span<const Choice>;

  // Reads the chosen rungs, a group at a time; false where time ran out before the last.
  bool Read(std::span<Choice> choices) {
    for (size_t first = 0; first < choices.size(); first += kBlockChoices) {
      const size_t count = std::min(kBlockChoices, choices.size() - first);
      if (!ReadBlock(choices.subspan(first, count))) return false;
    }
    return true;
  }

  bool ReadBlock(std::span<Choice> block) {
    const std::vector<Together> all = PutTogether(block);
    for (size_t first = 0; first < all.size();) {
      if (tools_.clock.SinceStart() >= tools_.deadline) {
        StopBy("DEADLINE");
        return false;
      }
      size_t end = first;
      size_t count = 0;
      uint64_t bytes = 0;
      while (end < all.size()) {
        const uint64_t more =
            all[end].size() * tools_.source.bytes_of(PartOf(all[end].front().rung));
        if (end > first &&
            (count + all[end].size() > kGroupChoices || bytes + more > tools_.source.group_bytes()))
          break;
        count += all[end].size();
        bytes += more;
        ++end;
      }
      ReadGroup(std::span(all).subspan(first, end - first));
      first = end;
    }
    return true;
  }

  // Forms in the order in which pages lie, then runs of exact pages by their first.
  static std::vector<Together> PutTogether(std::span<Choice> block) {
    std::ranges::sort(block, [](const Choice& a, const Choice& b) {
      const auto key = [](const Choice& choice) {
        const bool is_exact = choice.rung == Rung::kExact;
        return std::tuple(is_exact, is_exact ? choice.lane : 0, choice.page, choice.lane);
      };
      return key(a) < key(b);
    });
    std::vector<Together> all;
    for (size_t first = 0; first < block.size();) {
      const auto belongs = [&](const Choice& next) {
        return next.rung == Rung::kExact && next.lane == block[first].lane;
      };
      size_t end = first + 1;
      while (end < block.size() && end < first + kRunPages && belongs(block[first]) &&
             belongs(block[end]))
        ++end;
      all.push_back(block.subspan(first, end - first));
      first = end;
    }
    std::ranges::stable_sort(all, [](const Together& a, const Together& b) {
      const auto key = [](const Together& run) {
        return std::tuple(run.front().rung == Rung::kExact, run.front().page);
      };
      return key(a) < key(b);
    });
    return all;
  }

  static storage::PagePart PartOf(Rung rung) {
    return rung == Rung::kCoarse ? storage::PagePart::kCoarse
           : rung == Rung::kFine ? storage::PagePart::kFine
                                 : storage::PagePart::kExact;
  }

  void ReadGroup(std::span<const Together> group) {
    requests_.clear();
    for (const Together& run : group) {
      for (const Choice& choice : run) {
        requests_.push_back({.kv_head = static_cast<int>(choice.lane),
                             .page = PageOf(choice).page,
                             .part = PartOf(choice.rung)});
      }
    }
    tools_.source.Fetch(requests_, tools_.deadline - tools_.clock.SinceStart());
    status_.Update(tools_.source.status());

    struct Form {
      const Choice* choice;
      std::span<const std::byte> bytes;
    };
    std::vector<Form> forms;
    std::vector<gpu::AttendArgs> attends;
    const PageRequest* request = requests_.data();
    for (const Together& run : group) {
      std::vector<AbsentPage*> pages;
      std::vector<std::span<const std::byte>> bytes;
      for (const Choice& choice : run) {
        const PageRequest& read = *request++;
        if (!Note(read, PageOf(choice))) continue;
        if (choice.rung != Rung::kExact) {
          lanes_[choice.lane].MakeRoomForForms();
          forms.push_back({&choice, read.bytes});
          continue;
        }
        pages.push_back(&PageOf(choice));
        bytes.push_back(read.bytes);
      }
      if (!pages.empty()) attends.push_back(lanes_[run.front().lane].ExactArgs(pages, bytes));
    }
    tools_.parallel.Run(static_cast<int>(forms.size()), [&](int f) {
      const Form& form = forms[static_cast<size_t>(f)];
      lanes_[form.choice->lane].AttendForm(PageOf(*form.choice), form.choice->rung, form.bytes);
    });
    if (!attends.empty()) {
      status_.Update(tools_.device.Run(attends));
      for (LaneAnswer& lane : lanes_) lane.TakeExact();
    }
    tools_.source.GiveUp();
  }

  AbsentPage& PageOf(const Choice& choice) { return lanes_[choice.lane].pages()[choice.page]; }

  // Counts what was read; a part that can't be had leaves its page to the next rung, or lost.
  bool Note(const PageRequest& request, AbsentPage& page) {
    if (request.state != FetchState::kOk) {
      page.is_lost = request.part == storage::PagePart::kExact;
      page.is_code_lost = true;
      if (page.is_lost) NoteLost(request);
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
    ++reads_.count;
    reads_.bytes += request.bytes.size();
    return true;
  }

  void NoteLost(const PageRequest& request) {
    switch (request.state) {
      case FetchState::kOk:
      case FetchState::kDeviceFailed:  // The answer fails with it.
        return;
      case FetchState::kUnavailable:
        return StopBy("TIER_UNAVAILABLE");
      case FetchState::kOutOfTime:
        return StopBy("DEADLINE");
      case FetchState::kNoStaging:
        return StopBy("STAGING_BUSY");
      case FetchState::kMissing:
      case FetchState::kCorrupt:
        lost_.push_back(tools_.source.Lost(request));
        return StopBy(lost_.back().reason());
    }
  }

  void StopBy(std::string_view reason) {
    if (stopped_by_.empty()) stopped_by_ = reason;
  }

  const std::span<LaneAnswer> lanes_;
  const RecallTools& tools_;
  double bytes_[3] = {};  // Of each PagePart.
  absl::Status status_;
  std::string_view stopped_by_;
  std::vector<TouchedRung> touched_;
  Reads reads_;
  std::vector<PageRequest> requests_;  // Of the group that is being read.
  std::vector<LostPage> lost_;
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
