// SPDX-License-Identifier: Apache-2.0
//
// ebbctl: the daemon's command line. Says what there is to say, and exits with 0 only when all is
// well: 1 where something is not, 2 where the command itself was wrong or a file that it names is,
// whoever finds out. Tested by tests/integration/ebbctl_test.cc.

#include <CLI/CLI.hpp>
#include <malloc.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "base/printable.h"
#include "base/standard_files.h"
#include "client/cli/demo.h"
#include "client/cli/interrupt.h"
#include "client/cli/replay.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {
namespace {

constexpr int kExitNotWell = 1;
constexpr int kExitUsage = 2;

using Verb = std::function<absl::StatusOr<bool>()>;

constexpr char kAbout[] =
    "ebbctl asks a running ebbtided, or starts one of its own for a demonstration.\n\n"
    "Examples:\n"
    "  ebbctl status\n"
    "  ebbctl demo\n"
    "  ebbctl replay trace.safetensors --policy snapkv+caote --budget 12.5% --recall off,exact\n"
    "  ebbctl describe chat-17 --lane 0/0 --tokens\n";

constexpr char kExitCodes[] =
    "Exit codes\n"
    "  0  all is well      1  something is not, or failed, with the reason on standard error\n"
    "  2  wrong usage, or a trace or configuration that is not there or has mistakes";

// Keeps big messages on the heap: mapping and unmapping each of them costs more than the copy.
void TuneMalloc() {
  // NOLINTBEGIN(concurrency-mt-unsafe): there is one thread yet
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2047 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
  // NOLINTEND(concurrency-mt-unsafe)
}

// An empty word is a variable that nobody set, not a wish for the default.
CLI::Validator NotEmpty(const std::string& what) {
  return CLI::Validator(
      [what](const std::string& text) {
        return text.empty() ? absl::StrFormat("\"\" says nothing; give %s", what) : std::string();
      },
      "");
}

void AddWatchingVerbs(CLI::App& app, const Common& common, Verb& verb) {
  app.add_subcommand("status", "Is the daemon well: version, tiers, answers, what was refused")
      ->fallthrough()
      ->callback([&] { verb = [&] { return RunStatus(common); }; });
  app.add_subcommand("tiers", "What each tier holds, of what it may hold")
      ->fallthrough()
      ->callback([&] { verb = [&] { return RunTiers(common); }; });
  app.add_subcommand("sequences", "Open sequences and where their tokens lie")
      ->fallthrough()
      ->callback([&] { verb = [&] { return RunSequences(common); }; });
}

void AddDescribe(CLI::App& app, const Common& common, DescribeArgs& args, Verb& verb) {
  CLI::App* describe = app.add_subcommand("describe", "One sequence: its lanes, and their tokens");
  describe->fallthrough();
  describe->add_option("SEQUENCE", args.sequence, "its name, as `ebbctl sequences` lists it")
      ->required()
      ->check(NotEmpty("a name"));
  describe->add_option("--lane", args.lane, "only this lane: LAYER/KV_HEAD, both counted from 0")
      ->check(NotEmpty("LAYER/KV_HEAD, such as 0/0"));
  describe->add_flag("--tokens", args.with_tokens,
                     "each token of the lane: position, tier, score, and why it is there");
  describe->footer("Example:\n  ebbctl describe chat-17 --lane 0/0 --tokens");
  describe->callback([&] { verb = [&] { return RunDescribe(common, args); }; });
}

void AddConfig(CLI::App& app, const Common& common, std::string& file, Verb& verb) {
  CLI::App* config = app.add_subcommand("config", "The daemon's configuration file");
  config->fallthrough()->require_subcommand(1);
  CLI::App* check = config->add_subcommand("check", "Every mistake in a file, with its line");
  check->fallthrough();
  check->add_option("FILE", file, "the configuration file")->required();
  check->footer("Example:\n  ebbctl config check /etc/ebbtide/ebbtided.yaml");
  check->callback([&] { verb = [&] { return RunConfigCheck(common, file); }; });
}

void AddReplay(CLI::App& app, const Common& common, ReplayArgs& args, Verb& verb) {
  CLI::App* replay = app.add_subcommand(
      "replay",
      "Play recorded models through the daemon and hold every answer against exact "
      "attention in float64");
  replay->fallthrough();
  replay->add_option("TRACE", args.traces, "files of format ebbtide.trace.v1")->required();
  replay->add_option("--policy", args.policies, "who leaves; several, separated by commas")
      ->required();
  replay->add_option("--budget", args.budget, "tokens per lane, or a percentage of the trace")
      ->required();
  replay
      ->add_option("--recall", args.recalls,
                   "off, bounded(tau), estimated(tau), exact; several; default: the daemon's")
      ->check(NotEmpty("a recall mode, such as exact"));
  replay->add_option("--prefill", args.prefills, "exact (default), blockwise(B); several")
      ->check(NotEmpty("a prefill mode, such as exact"));
  replay
      ->add_option("--layers", args.layers,
                   "these of the recorded layers, by their numbers in the model; default: all")
      ->check(NotEmpty("layers, such as 0,15"));
  replay
      ->add_option("--chunk", args.chunk,
                   "tokens per prefill call, from 1 to 512, or to B where blockwise(B); default "
                   "512, or 128 where blockwise")
      ->check(NotEmpty("tokens, such as 128"))
      ->type_name("TOKENS");
  replay->footer(
      "Every combination of policy, recall and prefill is one run; all bytes are read back at its\n"
      "end. Exit code 1 if a byte differs or a true error is above its certified bound.\n\n"
      "Examples:\n"
      "  ebbctl replay tests/data/traces/smollm2-kjv-4096.safetensors --policy snapkv+caote,h2o "
      "\\\n"
      "      --budget 12.5% --recall \"off,bounded(0.02)\"\n"
      "  ebbctl replay trace.safetensors --policy auto --budget 512 -o json");
  replay->callback([&] { verb = [&] { return RunReplay(common, args); }; });
}

void AddDemo(CLI::App& app, const Common& common, DemoArgs& args, Verb& verb) {
  CLI::App* demo = app.add_subcommand(
      "demo", "Start a daemon of its own, play a recorded model through it, check every byte");
  demo->fallthrough();
  demo->add_option("--trace", args.trace, "another trace than the one of the source tree")
      ->check(NotEmpty("a file"));
  demo->add_option("--budget", args.budget, "tokens per lane, or a percentage; default 12.5%");
  demo->footer(
      "Needs ebbtided beside this program. Leaves nothing behind. Exit code 0 only where no byte\n"
      "differs and no certificate was violated.");
  demo->callback([&] { verb = [&] { return RunDemo(common, args); }; });
}

// Why a verb that did not fail of itself is not done: it was told to end, or could not write.
std::string WhyEnded() {
  const absl::Status interrupted = CheckInterrupted();
  return interrupted.ok() ? "standard output did not take all of it; is its disk full?"
                          : std::string(interrupted.message());
}

int Exit(const absl::StatusOr<bool>& well) {
  const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (well.ok() && is_written) return *well ? 0 : kExitNotWell;
  const bool is_cancelled = absl::IsCancelled(well.status()) && !CheckInterrupted().ok();
  if (!is_written || is_cancelled) absl::FPrintF(stderr, "ebbctl: %s\n", WhyEnded());
  if (well.ok() || is_cancelled) return kExitNotWell;
  const std::string reason = client::ErrorReason(well.status());
  absl::FPrintF(stderr, "ebbctl: %s%s\n", PrintableLines(std::string(well.status().message())),
                reason.empty() ? "" : absl::StrFormat(" [%s]", reason));
  return absl::IsInvalidArgument(well.status()) ? kExitUsage : kExitNotWell;
}

// Where a verb is missing, CLI11 says no more than that; this names the word that is none, and the
// verbs there are. Empty where the mistake is another.
std::string WhatVerb(const CLI::App& app) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  std::vector<std::string> verbs;
  for (const CLI::App* verb : at->get_subcommands(nullptr)) verbs.push_back(verb->get_name());
  if (verbs.empty()) return "";
  const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
  const std::string mistake = unknown.empty() ? "no verb"
                              : unknown.front().starts_with('-')
                                  ? absl::StrFormat("%s is no option", unknown.front())
                                  : absl::StrFormat("\"%s\" is no verb", unknown.front());
  const std::string of = at == &app ? "" : at->get_name() + ": ";
  return absl::StrFormat("%s%s; say one of %s", of, mistake, absl::StrJoin(verbs, ", "));
}

int ExitOfParser(const CLI::App& app, const CLI::ParseError& error) {
  const bool lacks_one = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  const std::string what_verb = lacks_one ? WhatVerb(app) : "";
  if (what_verb.empty()) return app.exit(error) == 0 ? Exit(true) : kExitUsage;
  absl::FPrintF(stderr, "ebbctl: %s\nRun with --help for more information.\n",
                Printable(what_verb));
  return kExitUsage;
}

int Main(int argc, char** argv) {
  CLI::App app(kAbout, "ebbctl");
  Common common;
  DescribeArgs describe;
  std::string config_file;
  ReplayArgs replay;
  DemoArgs demo;
  Verb verb;
  app.require_subcommand(1);
  app.set_version_flag("--version", "ebbctl " EBBTIDE_VERSION);
  app.footer(kExitCodes);
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    return PrintableLines("ebbctl: " + CLI::FailureMessage::simple(failed, error));
  });
  app.add_option(
         "--socket", common.socket,
         "the daemon's endpoint, unix:PATH or HOST:PORT; default " + client::DefaultTarget())
      ->check(NotEmpty("unix:PATH or HOST:PORT"));
  app.add_option("-o,--output", common.output, "table (default) or json")
      ->transform(CLI::Transformer(
          std::map<std::string, Output>{{"table", Output::kTable}, {"json", Output::kJson}}))
      ->transform(CLI::IsMember({"table", "json"}))  // Is asked first.
      ->option_text("table|json");
  AddWatchingVerbs(app, common, verb);
  AddDescribe(app, common, describe, verb);
  AddConfig(app, common, config_file, verb);
  AddReplay(app, common, replay, verb);
  AddDemo(app, common, demo, verb);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return ExitOfParser(app, error);
  }
  return Exit(verb());
}

}  // namespace
}  // namespace ebbtide::cli

int main(int argc, char** argv) {
  ebbtide::OpenStandardFiles();
  ebbtide::cli::TuneMalloc();
  std::signal(SIGPIPE, [](int) {});  // What is written fails, and Exit says why.
  try {
    return ebbtide::cli::Main(argc, argv);
  } catch (const std::exception& error) {  // Of CLI11 or the JSON writer: a mistake of ours.
    std::fprintf(stderr, "ebbctl: %s\n", error.what());
    return ebbtide::cli::kExitNotWell;
  }
}
