# SPDX-License-Identifier: Apache-2.0
#
# docs/testing.md lists the presets of CMakePresets.json, and no others.

import json
import re

from tree import Violation

PRESETS = "CMakePresets.json"
PAGE = "docs/testing.md"

_HEADING = "| preset | what | leaves out |"
_ROW = re.compile(r"^\| `([a-z]+)` \|")


def check(tree):
    if not tree.exists(PRESETS):
        return []
    wanted = {preset["name"] for preset in json.loads(tree.text(PRESETS))["configurePresets"]
              if not preset.get("hidden")}
    listed = {}
    in_table = False
    for number, line in tree.lines(PAGE) if tree.exists(PAGE) else []:
        in_table = line == _HEADING or (in_table and line.startswith("|"))
        match = _ROW.match(line) if in_table else None
        if match:
            listed[match.group(1)] = number
    missing = [Violation(PAGE, 1, f"preset {name} is not in its table")
               for name in sorted(wanted - listed.keys())]
    return missing + [Violation(PAGE, number, f"{PRESETS} has no preset {name}")
                      for name, number in listed.items() if name not in wanted]
