# SPDX-License-Identifier: Apache-2.0
#
# The files of the repository as the rules see them: paths from the root, text, lines. A self-test
# makes a tree of its own in memory.

import dataclasses
import os
import re
import subprocess

SOURCE = (".cc", ".h", ".cu", ".cuh")


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken rule at one place."""

    path: str
    line: int
    message: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.message}"


class Tree:
    """Paths and texts. Binary files and files that are only listed have no text."""

    def __init__(self, texts):
        self._texts = dict(texts)

    @staticmethod
    def of_folder(root):
        return Tree({path: _read(os.path.join(root, path)) for path in _list(root)})

    def paths(self, *suffixes):
        return sorted(p for p in self._texts if not suffixes or p.endswith(suffixes))

    def exists(self, path):
        path = os.path.normpath(path)
        return path in self._texts or any(p.startswith(path + "/") for p in self._texts)

    def text(self, path):
        return self._texts[path] or ""

    def lines(self, path):
        """(number, line) pairs, numbers from 1."""
        return list(enumerate(self.text(path).splitlines(), start=1))


def _list(root):
    """What git tracks or would track; without git (an exported tree), what is not a build output."""
    try:
        listed = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", root, "ls-files", "-z", "--cached", "--others",
             "--exclude-standard"],
            check=True, capture_output=True).stdout.decode()
        return [p for p in listed.split("\0") if p and os.path.isfile(os.path.join(root, p))]
    except (OSError, subprocess.CalledProcessError):
        return list(_walk(root))


def _walk(root):
    for folder, folders, files in os.walk(root):
        if folder == root:
            folders[:] = [f for f in folders if f not in ("build", ".git", ".ccache", "venv")]
        for file in files:
            yield os.path.relpath(os.path.join(folder, file), root)


def _read(path):
    with open(path, "rb") as file:
        data = file.read()
    if b"\0" in data[:8192]:
        return None
    return data.decode("utf-8", errors="replace")


_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'',
    re.DOTALL)


def without_comments_and_strings(text):
    """C++ `text` with the same lines, every comment and literal emptied."""

    def blank(match):
        return "\n" * match.group(0).count("\n")

    return _CODE.sub(blank, text)
