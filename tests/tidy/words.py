# SPDX-License-Identifier: Apache-2.0
#
# Words that have no place: names that the glossary replaces, names that say nothing, hooks for
# tests in the product, sleeps, exceptions, open ends, and paths of somebody's machine.

import re

from tree import SOURCE, Violation, without_comments_and_strings

PRODUCT = ("base/", "gpu/", "storage/", "service/", "client/")
NO_SLEEP = ("base/", "gpu/", "storage/", "service/", "tests/")  # A client waits between its attempts.

# In code, comments and literals aside: pattern, what to do, folders ("" is everywhere).
_CODE_RULES = [
    (r"\w*(?i:offload)\w*", "say demote (docs/glossary.md)", ("",)),
    (r"\w*(?i:swap_?(?:in|out))(?:_\w*|\b)", "say recall or demote (docs/glossary.md)", ("",)),
    (r"(?:class|struct)\s+\w+(?:Manager|Utils?|Helpers?|Impl)\b",
     "name the thing after what it is", ("",)),
    (r"\bfriend\b(?!\s+[^;{]*\b(?:operator|AbslHashValue)\b)",
     "no friends: a test that cannot reach it lacks a seam", PRODUCT),
    (r"\w*ForTest(?:ing)?\b", "no hooks for tests in the product", PRODUCT),
    (r"\b(?:sleep_for|sleep_until|SleepFor|usleep|nanosleep)\b",
     "no sleeps: inject a clock, or wait for the event", NO_SLEEP),
    (r"\bthrow\b", "no exceptions of ours: return a status", PRODUCT),
]

_FILE_NAMES = re.compile(r"(?:^|[_/])(utils?|helpers?|manager|impl|misc)\.(h|cc|py)$")

_OPEN_END = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b")

# What every machine has may be named, and what is everybody's: ada's home, a disk at /data.
_EVERYWHERE = "bin|boot|data|dev|etc|home/ada|lib|lib64|mnt|opt|proc|run|sbin|srv|sys|tmp|usr|var"
_OURS = "docs|ebbtide|tests"  # Where a path is put together from parts.
_MACHINE_PATH = re.compile(r"(?<![\w.~}$)\]*>@/+-])(?<!::)/(?!(?:%s|%s)\b)[A-Za-z]\w[\w-]*/[\w.-]+"
                           % (_EVERYWHERE, _OURS))

_NOLINT = re.compile(r"NOLINT(?:NEXTLINE|BEGIN)?(?!\w)(?!\([\w.,* -]+\):? \S)")

_SELF = "tests/tidy/"  # Holds these words to look for them.


def check(tree):
    violations = []
    for path in tree.paths(*SOURCE, ".proto"):
        violations += _check_code(tree, path)
    for path in tree.paths():
        if _FILE_NAMES.search(path):
            violations.append(Violation(path, 1, "name the file after the one thing inside"))
        if not path.startswith(_SELF) and path != "LICENSE":
            violations += _check_text(tree, path)
    return violations


def _check_code(tree, path):
    code = without_comments_and_strings(tree.text(path))
    for pattern, advice, folders in _CODE_RULES:
        if path.startswith(tuple(folders)):
            for match in re.finditer(pattern, code):
                line = code.count("\n", 0, match.start()) + 1
                yield Violation(path, line, f"'{match.group(0)}': {advice}")


def _check_text(tree, path):
    for number, line in tree.lines(path):
        if match := _OPEN_END.search(line):
            yield Violation(path, number, f"'{match.group(0)}': finish it, or write down where it stands")
        if match := _MACHINE_PATH.search(line):
            yield Violation(path, number, f"'{match.group(0)}' is a path of one machine")
        if path.endswith(SOURCE) and (match := _NOLINT.search(line)):
            yield Violation(path, number, "NOLINT names its check and its reason: NOLINT(check): why")
