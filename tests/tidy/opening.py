# SPDX-License-Identifier: Apache-2.0
#
# Every file opens with its licence, and says what it is. A source may leave that to the header it
# implements, which it then includes first.

import os
import re

from tree import SOURCE, Violation

LICENCE = "SPDX-License-Identifier: Apache-2.0"

_ROW = re.compile(r"(_(reference|cpu|cuda|test|bench))+$")  # Files of one row share a header.


def check(tree):
    violations = []
    for path in tree.paths(*SOURCE, ".proto", ".py"):
        mark = "#" if path.endswith(".py") else "//"
        violations += _check(tree, path, mark, needs_words=True)
    for path in tree.paths(".cmake", "CMakeLists.txt", ".sh"):
        violations += _check(tree, path, "#", needs_words=False)
    for path in tree.paths():
        if tree.text(path).startswith("#!"):
            violations += _check(tree, path, "#", needs_words=True)
    return violations


def _check(tree, path, mark, needs_words):
    lines = tree.text(path).splitlines()
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    if not lines or lines[0] != f"{mark} {LICENCE}":
        return [Violation(path, 1, f"must open with '{mark} {LICENCE}'")]
    if not needs_words or _includes_own_header(path, lines):
        return []
    for line in lines[1:]:
        if line.strip() == mark:
            continue
        if line.startswith(mark + " ") or (mark == "#" and line.startswith('"""')):
            return []
        break
    return [Violation(path, 2, "its first comment must say what the file is")]


def _includes_own_header(path, lines):
    if not path.endswith((".cc", ".cu")):
        return False
    stem = os.path.splitext(os.path.basename(path))[0]
    for line in lines:
        match = re.match(r'#include "([^"]+)"', line)
        if match:
            header = os.path.splitext(os.path.basename(match.group(1)))[0]
            return header in (stem, _ROW.sub("", stem))
    return False
