# SPDX-License-Identifier: Apache-2.0
#
# docs/errors.md lists the reasons that code gives, and no others.

import re

from tree import Violation

PAGE = "docs/errors.md"

_IN_CODE = re.compile(r'"([A-Z]{2,}(?:_[A-Z]+)*)"')
_IN_PAGE = re.compile(r"^\| `([A-Z_]+)` \|")
_ENVIRONMENT = re.compile(r"XDG_|EBBTIDE_|HOME$|TMPDIR$|PATH$")
_ENUMERATOR = re.compile(r"^\s*([A-Z][A-Z_]+)\s*=\s*\d+", re.MULTILINE)
_CODES = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED", "RESOURCE_EXHAUSTED",
          "UNAVAILABLE", "PERMISSION_DENIED", "DEADLINE_EXCEEDED", "CANCELLED", "UNIMPLEMENTED",
          "INTERNAL"}


def check(tree):
    listed = {}
    for number, line in tree.lines(PAGE) if tree.exists(PAGE) else []:
        match = _IN_PAGE.match(line)
        if match and match.group(1) not in _CODES:
            listed[match.group(1)] = number
    names_on_the_wire = {name for path in tree.paths(".proto")
                         for name in _ENUMERATOR.findall(tree.text(path))}
    given = set()
    violations = []
    for path in tree.paths(".cc", ".h"):
        if path.startswith(("service/", "client/cpp/")) and path != "service/main.cc":
            for number, line in tree.lines(path):
                for reason in _IN_CODE.findall(line.split("//")[0]):
                    if _ENVIRONMENT.match(reason) or reason in names_on_the_wire:
                        continue
                    given.add(reason)
                    if path.startswith("service/") and reason not in listed:
                        violations.append(Violation(path, number, f"{reason} is not in {PAGE}"))
    for reason, number in listed.items():
        if reason not in given:
            violations.append(Violation(PAGE, number, f"no code gives the reason {reason}"))
    return violations
