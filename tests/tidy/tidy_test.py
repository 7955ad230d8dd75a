# SPDX-License-Identifier: Apache-2.0
#
# Tests of the rules: each must find what is planted, and let pass what is right. Trees are made in
# memory; a rule that finds nothing anywhere would fail here.

import os
import tempfile
import unittest

import layers
import links
import opening
import presets
import reasons
import sizes
import words
from tree import Tree, without_comments_and_strings

OPEN = "// SPDX-License-Identifier: Apache-2.0\n//\n// Says what it is.\n"


def places(check, texts):
    """Where `check` finds something in a tree of `texts`, as "path:line"."""
    return [f"{v.path}:{v.line}" for v in check(Tree(texts))]


class LayersTest(unittest.TestCase):
    def broken(self, path, include):
        return places(layers.check, {path: f"\n#include {include}\n"}) == [f"{path}:2"]

    def test_edges_that_do_not_exist_are_found(self):
        for path, include in [
            ("gpu/kernels/mass.h", '"storage/tier.h"'),
            ("storage/tier.h", '"gpu/shape.h"'),
            ("base/clock.h", '"gpu/shape.h"'),
            ("storage/host/host_tier.cc", '"storage/rocksdb/rocksdb_tier.h"'),
            ("service/model/lane.h", '"service/cache.h"'),
            ("service/policy/policy.cc", '"service/movement/mover.h"'),
            ("service/policy/policy.cc", '"storage/tier.h"'),
            ("service/movement/mover.cc", '"service/attention/attention.h"'),
            ("service/rpc/convert.cc", '"service/cache.h"'),
            ("service/engine.cc", '"service/rpc/convert.h"'),
            ("service/engine.cc", '"service/daemon.h"'),
            ("client/cpp/src/client.cc", '"service/reason.h"'),
            ("client/cli/main.cc", '"gpu/shape.h"'),
            ("client/cli/main.cc", '"storage/tier.h"'),
            ("base/clock.cc", '"tests/support/fake_clock.h"'),
            ("gpu/shape.h", '"gpu/backend.h"'),
        ]:
            self.assertTrue(self.broken(path, include), f"{path} {include}")

    def test_libraries_stay_in_their_corner(self):
        for path, include in [
            ("service/cache.cc", "<grpcpp/grpcpp.h>"),
            ("service/cache.cc", '"google/protobuf/message.h"'),
            ("service/model/lane.h", '"ebbtide/v1/types.pb.h"'),
            ("storage/host/host_tier.cc", '"rocksdb/db.h"'),
            ("service/movement/mover.cc", "<rocksdb/db.h>"),
            ("service/rpc/server.cc", "<yaml-cpp/yaml.h>"),
            ("service/cache.cc", "<hwy/highway.h>"),
            ("service/cache.cc", "<spdlog/spdlog.h>"),
            ("storage/tier.cc", '"gtest/gtest.h"'),
        ]:
            self.assertTrue(self.broken(path, include), f"{path} {include}")

    def test_edges_that_exist_pass(self):
        for path, include in [
            ("gpu/cpu/cpu_backend.cc", '"base/executor.h"'),
            ("service/movement/mover.cc", '"storage/tier.h"'),
            ("service/attention/attention.cc", '"gpu/backend.h"'),
            ("service/rpc/cache_service.cc", '"ebbtide/v1/cache.grpc.pb.h"'),
            ("service/rpc/cache_service.cc", '"service/engine.h"'),
            ("service/daemon.cc", '"storage/rocksdb/rocksdb_tier.h"'),
            ("storage/rocksdb/rocksdb_tier.cc", '"rocksdb/db.h"'),
            ("client/cpp/src/client.cc", '"ebbtide/v1/cache.grpc.pb.h"'),
            ("client/cli/main.cc", '"ebbtide/client.h"'),
            ("tests/unit/storage/a_test.cc", '"rocksdb/db.h"'),
            ("service/cache.cc", "<vector>"),
        ]:
            self.assertEqual(places(layers.check, {path: f"#include {include}\n"}), [])

    def test_file_without_a_room_is_found(self):
        self.assertEqual(places(layers.check, {"service/odd/x.cc": "", "loose.cc": ""}),
                         ["loose.cc:1", "service/odd/x.cc:1"])

    def test_table_has_no_loops(self):
        for room, used in layers.MAY_USE.items():
            for other in used or ():
                back = layers.MAY_USE[other]
                self.assertFalse(back is not None and room in back, f"{room} and {other}")


class SizesTest(unittest.TestCase):
    def test_long_files_are_found(self):
        self.assertEqual(places(sizes.check, {
            "a.cc": "\n" * 601, "b.cc": "\n" * 600,
            "a.h": "\n" * 301, "b.h": "\n" * 300,
            "a_test.cc": "\n" * 801, "b_test.cc": "\n" * 800,
            "a.py": "\n" * 601, "a-inl.h": "\n" * 600,
        }), ["a.cc:601", "a.h:301", "a.py:601", "a_test.cc:801"])

    def test_long_functions_are_found_and_named(self):
        long = "int Sum(int a,\n        int b) {\n" + "  a += b;\n" * 69 + "}\n"
        fits = "int Sum(int a,\n        int b) {\n" + "  a += b;\n" * 67 + "}\n"

        self.assertEqual(places(sizes.check, {"a.cc": "\n" + long, "b.cc": fits}), ["a.cc:2"])
        self.assertEqual(sizes.cpp_functions(long), [("Sum", 1, 72)])
        self.assertEqual(sizes.cpp_functions(fits), [("Sum", 1, 70)])

    def test_python_functions_are_measured(self):
        text = "class A:\n  def f(self):\n" + "    x = 1\n" * 70

        self.assertEqual(places(sizes.check, {"a.py": text}), ["a.py:2"])

    def test_every_form_of_function_is_seen(self):
        for head in [
            "void f() {", "auto f() -> std::vector<int> {", "bool A::f() const noexcept {",
            "template <typename T>\nT f(T t) {", "A::A(int b) : b_(b), c_{b} {", "A::~A() {",
            "bool operator==(const A& a, const A& b) {", "TEST(LaneTest, FullPageIsSealed) {",
            "TEST_P(Tier, Misses) {", "static constexpr int f(int a = 3) {",
            "[[nodiscard]] int f() {", "void f(std::function<void()> g = [] {}) {",
            "int f(const char* s = \"{\") {", "extern \"C\" int f() {",
            "#define M(x) {\nint f() {",
        ]:
            text = "namespace a {\nclass B {\n" + head + "\n" + "x;\n" * 71 + "}\n};\n}\n"
            lengths = [length for _, _, length in sizes.cpp_functions(text)]
            self.assertEqual(len(lengths), 1, head)
            self.assertGreaterEqual(lengths[0], 73, head)

    def test_what_is_no_function_is_not_measured(self):
        for text in [
            "namespace a {\n" + "int x;\n" * 99 + "}\n",
            "class A : public B<int(int)> {\n" + "int x;\n" * 99 + "};\n",
            "const int kTable[] = {\n" + "1,\n" * 99 + "};\n",
            "constexpr std::array kTable = {\n" + "F(1),\n" * 99 + "};\n",
            "enum class A : uint8_t {\n" + "kB,\n" * 99 + "};\n",
            "// void f() {\n" + "int x;\n" * 99 + "// }\n",
        ]:
            self.assertEqual([n for n in sizes.cpp_functions(text) if n[2] > 70], [], text[:40])

    def test_allow_list_is_read(self):
        long = "int Sum(int a) {\n" + "  a += 1;\n" * 70 + "}\n"
        allow = "# why\na.cc Sum  # 0009\nb.cc\n"

        self.assertEqual(places(sizes.check, {sizes.ALLOWED: allow, "a.cc": long,
                                              "b.cc": "\n" * 601, "c.cc": long}), ["c.cc:1"])


class OpeningTest(unittest.TestCase):
    def test_missing_licence_is_found(self):
        self.assertEqual(places(opening.check, {
            "a.cc": "// Says what it is.\n", "b.h": "", "c.py": "import os\n", "d.proto": "package a;\n",
            "e.cmake": "set(a b)\n", "scripts/f": "#!/usr/bin/env bash\necho\n",
        }), ["a.cc:1", "b.h:1", "c.py:1", "d.proto:1", "e.cmake:1", "scripts/f:1"])

    def test_missing_first_comment_is_found(self):
        licence = "SPDX-License-Identifier: Apache-2.0"
        self.assertEqual(places(opening.check, {
            "a.h": f"// {licence}\n\n#pragma once\n",
            "b.cc": f"// {licence}\n\n#include \"a.h\"\n",
            "c.py": f"# {licence}\n\nimport os\n",
        }), ["a.h:2", "b.cc:2", "c.py:2"])

    def test_right_openings_pass(self):
        licence = "SPDX-License-Identifier: Apache-2.0"
        self.assertEqual(places(opening.check, {
            "a.h": OPEN, "gpu/a.cc": f"// {licence}\n\n#include \"gpu/a.h\"\n",
            "a_test.cc": f"// {licence}\n\n#include \"gpu/a.h\"\n",
            "a_cpu.cc": f"// {licence}\n\n#include \"gpu/a.h\"\n",
            "b.py": f"# {licence}\n#\n# Says what it is.\n",
            "c.py": f"#!/usr/bin/env python3\n# {licence}\n\"\"\"Says what it is.\"\"\"\n",
            "CMakeLists.txt": f"# {licence}\nset(a b)\n",
        }), [])


class WordsTest(unittest.TestCase):
    def broken(self, path, line):
        return places(words.check, {path: "\n" + line + "\n"}) == [f"{path}:2"]

    def test_banned_words_are_found(self):
        for path, line in [
            ("service/a.cc", "int offload_count = 0;"),
            ("proto/a.proto", "uint64 offload_bytes = 3;"),
            ("client/a.cc", "bool is_swapped = SwapOut(page);"),
            ("service/a.h", "class TierManager {};"),
            ("service/a.h", "struct LaneHelper {};"),
            ("service/a.h", "class CacheImpl final {};"),
            ("service/a.h", "friend class LaneTest;"),
            ("service/a.h", "void ClearForTesting();"),
            ("tests/unit/a_test.cc", "std::this_thread::sleep_for(1s);"),
            ("gpu/a.cc", "throw std::runtime_error(x);"),
            ("gpu/a.cc", "// TO" + "DO: later"),
            ("docs/a.md", "FIX" + "ME"),
            ("docs/a.md", "see /" + "somewhere/main/x"),
            ("docs/a.md", "listen: unix:/" + "somewhere/s"),
            ("scripts/a", "cp x /" + "root/x"),
            ("scripts/a", "cp x /" + "home/somebody/x"),
            ("gpu/a.cc", "int x;  // NOLINT"),
            ("gpu/a.cc", "int x;  // NOLINTNEXTLINE(bugprone-x)"),
        ]:
            self.assertTrue(self.broken(path, line), f"{path} {line}")

    def test_file_names_that_say_nothing_are_found(self):
        self.assertEqual(places(words.check, {"base/string_util.cc": "", "base/helpers.h": "",
                                              "gpu/manager.h": ""}),
                         ["base/helpers.h:1", "base/string_util.cc:1", "gpu/manager.h:1"])

    def test_right_words_pass(self):
        for path, line in [
            ("service/a.cc", "// Other caches offload whole prefixes."),
            ("service/a.cc", 'Log("offload");'),
            ("service/a.h", "friend bool operator==(const A&, const A&) = default;"),
            ("service/a.h", "template <typename H> friend H AbslHashValue(H hash, const A& a) {}"),
            ("client/a.cc", "absl::SleepFor(backoff);"),
            ("docs/a.md", "the network and its roots"),
            ("docs/a.md", "https://example.org/work/root/home/x/"),
            ("docs/a.md", "unix:/tmp/ebbtide-0/s, /home/ada/x, tokens/s/lane, ../a/b"),
            ("gpu/a.cc", "int x;  // NOLINT(bugprone-x): the driver asks for it"),
        ]:
            self.assertEqual(places(words.check, {path: line + "\n"}), [], line)


class LinksTest(unittest.TestCase):
    def test_dead_links_are_found(self):
        self.assertEqual(places(links.check_pages, {
            "docs/a.md": "# A\n[x](b.md)\n[x](c.md)\n[x](b.md#there)\n[x](b.md#not-there)\n"
                         "![x](../y.svg)\n[x](#gone)\n[x](../../up.md)\n",
            "docs/b.md": "# B\n## There\n",
        }), ["docs/a.md:3", "docs/a.md:5", "docs/a.md:6", "docs/a.md:7", "docs/a.md:8"])

    def test_live_links_pass(self):
        self.assertEqual(places(links.check_pages, {
            "README.md": "# A `b` (c), d\n[x](docs/b.md) [y](docs) [z](#a-b-c-d) [u](https://x.org)\n"
                         "`[code](nowhere)`\n```\n[code](nowhere)\n```\n",
            "docs/b.md": "# B\n## Twice\n## Twice\n[x](#twice-1) [y](../README.md#a-b-c-d)\n",
        }), [])

    def test_dead_citations_are_found(self):
        self.assertEqual(places(links.check_citations, {
            "gpu/a.h": "// See docs/b.md#there.\n// Tested by tests/unit/a_test.cc.\n",
            "gpu/b.h": "// See docs/b.md#gone.\nint x;  // docs/c.md\n",
            "cmake/a.cmake": "# scripts/gone.py\n",
            "docs/b.md": "# There\n",
        }), ["cmake/a.cmake:1", "gpu/a.h:2", "gpu/b.h:1", "gpu/b.h:2"])


class PresetsTest(unittest.TestCase):
    def broken(self, page):
        text = '{"configurePresets": [{"name": "base", "hidden": true}, {"name": "dev"}]}'
        table = "| `other` |\n| preset | what | leaves out |\n| --- | --- | --- |\n" + page
        return places(presets.check, {"CMakePresets.json": text, "docs/testing.md": table})

    def test_a_preset_without_a_row_and_a_row_without_a_preset_are_found(self):
        self.assertEqual(self.broken("| `asan` | gone | – |\n"),
                         ["docs/testing.md:1", "docs/testing.md:4"])

    def test_every_preset_but_the_hidden_has_its_row(self):
        self.assertEqual(self.broken("| `dev` | debug | – |\n"), [])


class ReasonsTest(unittest.TestCase):
    def test_reasons_that_differ_are_found(self):
        self.assertEqual(places(reasons.check, {
            "docs/errors.md": "| `ABORTED` | x |\n| `INDEX_GAP` | x |\n| `GONE` | x |\n",
            "proto/a.proto": "enum A {\n  PHASE_DECODE = 1;\n}\n",
            "service/a.cc": 'Refuse("INDEX_GAP");\nRefuse("NEW_ONE");\ngetenv("XDG_HOME");\n"PHASE_DECODE"\n',
        }), ["service/a.cc:2", "docs/errors.md:3"])


class TreeTest(unittest.TestCase):
    def test_comments_and_literals_are_emptied_and_lines_kept(self):
        text = 'a /* x\ny */ b; // z {\nc = "}\\"{"; d = \'{\'; e = R"(}\n})"; 1\'000;\n'

        self.assertEqual(without_comments_and_strings(text),
                         "a \n b; \nc = ; d = ; e = \n; 1'000;\n")

    def test_folder_without_git_is_walked(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "docs"))
            os.makedirs(os.path.join(folder, "build"))
            for name in ("docs/a.md", "build/b.md", "c.cc"):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write("x")
            with open(os.path.join(folder, "d.bin"), "wb") as file:
                file.write(b"\0\1")
            tree = Tree.of_folder(folder)

            self.assertEqual(tree.paths(), ["c.cc", "d.bin", "docs/a.md"])
            self.assertEqual(tree.text("d.bin"), "")
            self.assertTrue(tree.exists("docs"))
            self.assertFalse(tree.exists("doc"))


if __name__ == "__main__":
    unittest.main()
