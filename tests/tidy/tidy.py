#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
#
# The rules of CONTRIBUTING.md as tests: `python3 tests/tidy/tidy.py [RULE…]` checks the repository
# and names every place that breaks one. Run by ctest (label tidy); tidy_test.py tests the rules.

import os
import sys

import layers
import links
import opening
import presets
import reasons
import sizes
import words
from tree import Tree

RULES = {
    "citations": links.check_citations,
    "layers": layers.check,
    "links": links.check_pages,
    "opening": opening.check,
    "presets": presets.check,
    "reasons": reasons.check,
    "sizes": sizes.check,
    "words": words.check,
}


def main(names):
    unknown = [name for name in names if name not in RULES]
    if unknown:
        print(f"tidy: no rule {', '.join(unknown)}; there are {', '.join(RULES)}", file=sys.stderr)
        return 2
    root = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
    tree = Tree.of_folder(root)
    failures = 0
    for name in names or RULES:
        for violation in RULES[name](tree):
            print(f"{violation} [{name}]")
            failures += 1
    print(f"tidy: {len(tree.paths())} files, {failures} broken rules")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
