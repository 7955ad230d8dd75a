// SPDX-License-Identifier: Apache-2.0

#include "service/policy/policy.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "base/status_macros.h"
#include "service/model/geometry.h"
#include "service/reason.h"

namespace ebbtide::service {
namespace {

absl::Status Wrong(std::string_view reason, const std::string& message) {
  return Refuse(absl::StatusCode::kInvalidArgument, reason, message);
}

// One word of the text form: "name" or "name(argument, argument)".
struct Term {
  std::string name;
  std::vector<std::string> arguments;
};

absl::StatusOr<Term> ParseTerm(std::string_view text, std::string_view reason) {
  const std::string trimmed(
      absl::StripAsciiWhitespace(absl::string_view(text.data(), text.size())));
  const size_t open = trimmed.find('(');
  if (open == std::string::npos) return Term{.name = trimmed, .arguments = {}};
  if (trimmed.back() != ')') {
    return Wrong(reason, absl::StrCat("\"", trimmed, "\" does not end its parenthesis; add \")\""));
  }
  Term term{.name = std::string(absl::StripAsciiWhitespace(trimmed.substr(0, open))),
            .arguments = {}};
  const std::string inner = trimmed.substr(open + 1, trimmed.size() - open - 2);
  for (const absl::string_view piece : absl::StrSplit(inner, ',')) {
    term.arguments.emplace_back(absl::StripAsciiWhitespace(piece));
  }
  return term;
}

constexpr std::array<std::pair<std::string_view, BaseScore>, 5> kBases = {{
    {"streaming", BaseScore::kStreaming},
    {"keydiff", BaseScore::kKeyDiff},
    {"h2o", BaseScore::kH2o},
    {"tova", BaseScore::kTova},
    {"snapkv", BaseScore::kSnapKv},
}};
constexpr std::array<std::pair<std::string_view, ValueWeighting>, 2> kWeightings = {{
    {"caote", ValueWeighting::kCaote},
    {"fastcaote", ValueWeighting::kFastCaote},
}};

template <typename Table>
std::string NamesOf(const Table& table) {
  std::string names;
  for (const auto& [name, value] : table) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(name));
  }
  return names;
}

template <typename Table, typename Value>
std::string NameOf(const Table& table, Value wanted) {
  const auto found = std::ranges::find(table, wanted, [](const auto& row) { return row.second; });
  return found == table.end() ? "" : std::string(found->first);
}

absl::Status SetParameter(std::string_view argument, PolicySpec* spec) {
  struct Parameter {
    std::string_view name;
    int32_t* value;
    int32_t least;
    int32_t most;
    bool is_for_window;
  };
  const std::array<Parameter, 4> parameters = {{
      {"sinks", &spec->sinks, 0, 4096, false},
      {"recent", &spec->recent, 0, 1 << 20, false},
      {"window", &spec->window, 1, 256, true},
      {"kernel", &spec->kernel, 1, 63, true},
  }};
  const size_t equals = argument.find('=');
  const std::string name(argument.substr(0, equals));
  const auto found = std::ranges::find(parameters, name, &Parameter::name);
  if (equals == std::string_view::npos || found == parameters.end() ||
      (found->is_for_window && !spec->is_windowed())) {
    return Wrong(
        "POLICY_INVALID",
        absl::StrCat("policy parameter \"", std::string(argument), "\" is not known here; ",
                     "sinks=N and recent=N go with every base, window=N and kernel=N with snapkv"));
  }
  int32_t value = 0;
  const std::string text(argument.substr(equals + 1));
  if (!absl::SimpleAtoi(text, &value) || value < found->least || value > found->most) {
    return Wrong("POLICY_INVALID",
                 absl::StrCat("policy parameter ", name, " is \"", text, "\"; it must be ",
                              found->least, " to ", found->most));
  }
  if (name == "kernel" && value % 2 == 0) {
    return Wrong("POLICY_INVALID",
                 absl::StrCat("policy parameter kernel is ", value, "; it must be odd"));
  }
  *found->value = value;
  return absl::OkStatus();
}

absl::StatusOr<double> ParseTau(const Term& term) {
  double tau = 0;
  if (term.arguments.size() != 1 || !absl::SimpleAtod(term.arguments[0], &tau) || !(tau > 0) ||
      !(tau < 1)) {
    return Wrong("RECALL_INVALID",
                 absl::StrCat("recall ", term.name, " takes one number above 0 and below 1, ",
                              "the relative error aimed at: ", term.name, "(0.02)"));
  }
  return tau;
}

}  // namespace

absl::StatusOr<PolicySpec> ParsePolicy(std::string_view text) {
  const size_t plus = text.find('+');
  EBBTIDE_ASSIGN_OR_RETURN(const Term base, ParseTerm(text.substr(0, plus), "POLICY_INVALID"));
  const auto found =
      std::ranges::find(kBases, base.name, [](const auto& row) { return std::string(row.first); });
  if (found == kBases.end()) {
    return Wrong("POLICY_INVALID", absl::StrCat("policy \"", base.name,
                                                "\" is not known; choose auto, ", NamesOf(kBases)));
  }
  PolicySpec spec{.base = found->second};
  std::set<std::string> names;
  for (const std::string& argument : base.arguments) {
    EBBTIDE_RETURN_IF_ERROR(SetParameter(argument, &spec));
    if (const auto [name, is_new] = names.insert(argument.substr(0, argument.find('='))); !is_new) {
      return Wrong("POLICY_INVALID", absl::StrCat("policy parameter ", *name, " is given twice"));
    }
  }
  if (plus == std::string_view::npos) return spec;

  EBBTIDE_ASSIGN_OR_RETURN(const Term weighting,
                           ParseTerm(text.substr(plus + 1), "POLICY_INVALID"));
  const auto weight = std::ranges::find(kWeightings, weighting.name,
                                        [](const auto& row) { return std::string(row.first); });
  if (weight == kWeightings.end() || !weighting.arguments.empty()) {
    return Wrong("POLICY_INVALID",
                 absl::StrCat("value weighting \"", std::string(text.substr(plus + 1)),
                              "\" is not known; choose ", NamesOf(kWeightings)));
  }
  if (!spec.needs_queries()) {
    return Wrong("POLICY_INVALID",
                 absl::StrCat(weighting.name, " weighs attention mass, which ", base.name,
                              " does not have; use h2o, tova or snapkv with it"));
  }
  spec.weighting = weight->second;
  return spec;
}

std::string PolicyText(const PolicySpec& spec) {
  std::string text = absl::StrCat(NameOf(kBases, spec.base), "(sinks=", spec.sinks);
  if (spec.recent >= 0) absl::StrAppend(&text, ",recent=", spec.recent);
  if (spec.is_windowed()) absl::StrAppend(&text, ",window=", spec.window, ",kernel=", spec.kernel);
  text += ")";
  if (spec.weighting != ValueWeighting::kNone) {
    absl::StrAppend(&text, "+", NameOf(kWeightings, spec.weighting));
  }
  return text;
}

absl::StatusOr<ResolvedPolicy> ResolvePolicy(std::string_view text, bool sends_queries,
                                             int32_t budget_tokens, int page_tokens) {
  ResolvedPolicy resolved;
  if (text.empty() || text == "auto") {
    resolved.spec =
        sends_queries ? PolicySpec{.base = BaseScore::kSnapKv, .weighting = ValueWeighting::kCaote}
                      : PolicySpec{.base = BaseScore::kKeyDiff};
    resolved.why = sends_queries
                       ? "auto: the worker sends queries, so attention decides, weighed by values"
                       : "auto: the worker sends no queries, so keys alone decide";
  } else {
    EBBTIDE_ASSIGN_OR_RETURN(resolved.spec, ParsePolicy(text));
    resolved.why = "as asked";
  }
  PolicySpec& spec = resolved.spec;
  if (spec.needs_queries() && !sends_queries) {
    return Wrong(
        "POLICY_NEEDS_QUERIES",
        absl::StrCat("policy ", PolicyText(spec),
                     " scores by queries, and the worker said it sends ",
                     "none; use keydiff, streaming or auto, or open with QUERIES_EVERY_STEP"));
  }
  if (spec.recent < 0) spec.recent = std::min(128, budget_tokens / 4);
  const int32_t window = spec.is_windowed() ? spec.window : 0;
  resolved.protected_tokens = spec.sinks + std::max({spec.recent, window, page_tokens});
  if (budget_tokens <= resolved.protected_tokens) {
    return Wrong(
        "BUDGET_TOO_SMALL",
        absl::StrCat("budget is ", budget_tokens, " tokens, and ", resolved.protected_tokens,
                     " are protected (", spec.sinks, " sinks + the largest of ", spec.recent,
                     " recent, ", window, " policy window and ", page_tokens,
                     " of a page); ask for more than ", resolved.protected_tokens));
  }
  return resolved;
}

absl::StatusOr<PrefillSpec> ParsePrefill(std::string_view text) {
  if (text.empty()) return PrefillSpec{};
  EBBTIDE_ASSIGN_OR_RETURN(const Term term, ParseTerm(text, "PREFILL_INVALID"));
  if (term.name == "exact" && term.arguments.empty()) return PrefillSpec{};
  int32_t tokens = 0;
  if (term.name == "blockwise" && term.arguments.size() == 1 &&
      absl::SimpleAtoi(term.arguments[0], &tokens) && tokens >= 1 && tokens <= kChunkTokensMax) {
    return PrefillSpec{.mode = PrefillMode::kBlockwise, .block_tokens = tokens};
  }
  return Wrong(
      "PREFILL_INVALID",
      absl::StrCat("prefill \"", std::string(text),
                   "\" is not known; choose exact, or blockwise(B) with B 1 to ", kChunkTokensMax));
}

std::string PrefillText(const PrefillSpec& spec) {
  return spec.mode == PrefillMode::kExact ? "exact"
                                          : absl::StrCat("blockwise(", spec.block_tokens, ")");
}

absl::StatusOr<RecallSpec> ParseRecall(std::string_view text) {
  EBBTIDE_ASSIGN_OR_RETURN(const Term term, ParseTerm(text, "RECALL_INVALID"));
  if (term.name == "off" && term.arguments.empty()) return RecallSpec{.mode = RecallMode::kOff};
  if (term.name == "exact" && term.arguments.empty()) return RecallSpec{.mode = RecallMode::kExact};
  if (term.name != "bounded" && term.name != "estimated") {
    return Wrong(
        "RECALL_INVALID",
        absl::StrCat("recall \"", std::string(text),
                     "\" is not known; choose off, bounded(tau), estimated(tau) or exact"));
  }
  EBBTIDE_ASSIGN_OR_RETURN(const double tau, ParseTau(term));
  return RecallSpec{.mode = term.name == "bounded" ? RecallMode::kBounded : RecallMode::kEstimated,
                    .tau = tau};
}

std::string RecallText(const RecallSpec& spec) {
  switch (spec.mode) {
    case RecallMode::kOff:
      return "off";
    case RecallMode::kExact:
      return "exact";
    case RecallMode::kBounded:
      return absl::StrCat("bounded(", spec.tau, ")");
    case RecallMode::kEstimated:
      return absl::StrCat("estimated(", spec.tau, ")");
  }
  return "";
}

}  // namespace ebbtide::service
