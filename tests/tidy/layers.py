# SPDX-License-Identifier: Apache-2.0
#
# Who may include whom. A room is a folder or a few files of one; the table lists for each room the
# rooms it may use besides itself. docs/decisions/0001-folders-and-edges.md says why; a new edge
# needs a decision record.

import re

from tree import SOURCE, Violation

# The first pattern that matches a path names its room.
ROOMS = [
    ("base", r"base/"),
    ("proto", r"ebbtide/v1/|proto/"),  # As included: generated code.
    ("gpu/words", r"gpu/(shape|extent|element)\.(h|cc)$"),
    ("gpu", r"gpu/"),
    ("storage/records", r"storage/(block_key|block_record)\.(h|cc)$"),
    ("storage/host", r"storage/host/"),
    ("storage/rocksdb", r"storage/rocksdb/"),
    ("storage", r"storage/"),
    ("service/words", r"service/(calls|reason)\.(h|cc)$|service/model/geometry\.(h|cc)$"),
    ("service/model", r"service/model/"),
    ("service/policy", r"service/policy/"),
    ("service/cache", r"service/cache[a-z_]*\.(h|cc)$"),
    ("service/movement", r"service/movement/"),
    ("service/attention", r"service/attention/"),
    ("service/engine", r"service/engine[a-z_]*\.(h|cc)$"),
    ("service/config", r"service/config/"),
    ("service/rpc", r"service/rpc/"),
    ("service/daemon", r"service/(daemon[a-z_]*|main)\.(h|cc)$"),
    ("client/cli", r"client/cli/"),
    ("client", r"client/|ebbtide/[a-z_]+\.h$"),
    ("tests", r"tests/"),
    ("bench", r"bench/"),
]

# Words are values that several rooms speak in: shapes, names of blocks, calls and reasons.
_WORDS = {"base", "gpu/words", "storage/records", "service/words"}
ANYTHING = None

MAY_USE = {
    "base": set(),
    "proto": set(),
    "gpu/words": {"base"},
    "gpu": {"base", "gpu/words"},
    "storage/records": {"base"},
    "storage": {"base", "storage/records"},
    "storage/host": {"base", "storage/records", "storage"},
    "storage/rocksdb": {"base", "storage/records", "storage"},
    "service/words": {"base", "gpu/words", "gpu", "storage/records"},
    "service/model": _WORDS | {"gpu"},
    "service/policy": _WORDS | {"gpu", "service/model"},
    "service/cache": _WORDS | {"service/model", "service/policy"},
    "service/movement": _WORDS | {"gpu", "storage", "service/model", "service/policy",
                                  "service/cache"},
    "service/attention": _WORDS | {"gpu", "service/model", "service/policy", "service/cache",
                                   "service/movement"},
    "service/engine": _WORDS | {"gpu", "storage", "storage/host", "service/model", "service/policy",
                                "service/cache", "service/movement", "service/attention"},
    "service/config": {"base", "proto"},
    "service/rpc": _WORDS | {"proto", "service/config", "service/engine"},
    "service/daemon": ANYTHING,
    "client": {"base", "proto"},
    "client/cli": {"base", "proto", "client"},
    "tests": ANYTHING,
    "bench": ANYTHING,
}

_OUTSIDE = {"service/daemon", "tests", "bench"}  # May use anything; nothing of the product uses them.

# Libraries whose headers stay in their corner: pattern, rooms.
_WIRE = {"service/rpc", "service/config", "service/daemon", "client", "client/cli"}
CORNERS = [
    (r"(grpc|grpcpp|google/protobuf|google/rpc)/|.*\.pb\.h$", _WIRE),
    (r"rocksdb/", {"storage/rocksdb"}),
    (r"yaml-cpp/", {"service/config"}),
    (r"hwy/", {"gpu"}),
    (r"cuda", {"gpu"}),
    (r"spdlog/", {"base"}),
    (r"CLI/", {"client/cli", "service/daemon"}),
    (r"(gtest|gmock|benchmark)/", set()),
]

_INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')


def room_of(path):
    for room, pattern in ROOMS:
        if re.match(pattern, path):
            return room
    return None


def check(tree):
    violations = []
    for path in tree.paths(*SOURCE):
        room = room_of(path)
        if room is None:
            violations.append(Violation(path, 1, "belongs to no room of tests/tidy/layers.py"))
            continue
        for number, line in tree.lines(path):
            match = _INCLUDE.match(line)
            if match:
                message = _complaint(room, match.group(2))
                if message:
                    violations.append(Violation(path, number, message))
    return violations


def _complaint(room, header):
    """What is wrong with `room` including `header`, if anything is."""
    if room in ("tests", "bench"):
        return None
    for pattern, rooms in CORNERS:
        if re.match(pattern, header) and room not in rooms:
            return f"{room} may not include <{header}>; only {_list(rooms)} may"
    target = room_of(header)
    if target is None or target == room:
        return None
    if target in _OUTSIDE:
        return f"{room} may not include {header}: nothing stands on {target}"
    allowed = MAY_USE[room]
    if allowed is not ANYTHING and target not in allowed:
        return f"{room} may not include {header} ({target}); it may use {_list(allowed)}"
    return None


def _list(rooms):
    return ", ".join(sorted(rooms)) or "tests and benchmarks"
