# SPDX-License-Identifier: Apache-2.0
#
# What a page or a comment points to is there: links of documents with their headings, and paths
# named in the comments of sources.

import os
import re

from tree import SOURCE, Violation

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_CITED = re.compile(r"(?<![\w/.-])((?:docs|tests|cmake|scripts|bench|proto|base|gpu|storage"
                    r"|service|client)/[\w/.-]*\w\.(?:md|cc|h|py|cmake|proto|txt|cu))(#[\w-]+)?")


def check_pages(tree):
    """Links of documents."""
    violations = []
    for path in tree.paths(".md"):
        violations += _check_page(tree, path)
    return violations


def check_citations(tree):
    """Paths named in comments."""
    violations = []
    for path in tree.paths(*SOURCE, ".proto", ".py", ".cmake", "CMakeLists.txt"):
        if not path.startswith("tests/tidy/"):
            violations += _check_comments(tree, path)
    return violations


def _check_page(tree, path):
    is_code = False
    for number, line in tree.lines(path):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code:
            continue
        for match in _LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = match.group(1) or match.group(2)
            if re.match(r"[a-z]+:", target):
                continue
            message = _complaint(tree, path, target)
            if message:
                yield Violation(path, number, message)


def _check_comments(tree, path):
    mark = "//" if path.endswith(SOURCE + (".proto",)) else "#"
    for number, line in tree.lines(path):
        comment = line.partition(mark)[2]
        for match in _CITED.finditer(comment):
            message = _complaint(tree, "", match.group(1) + (match.group(2) or ""))
            if message:
                yield Violation(path, number, message)


def _complaint(tree, page, target):
    """What is wrong with `target` as written on `page`, if anything is."""
    file, _, heading = target.partition("#")
    full = os.path.normpath(os.path.join(os.path.dirname(page), file)) if file else page
    if full.startswith(".."):
        return f"'{target}' points outside the repository"
    if not tree.exists(full):
        return f"'{target}' points to nothing"
    if heading and full.endswith(".md") and heading not in headings(tree.text(full)):
        return f"'{target}': no such heading in {full}"
    return None


def headings(text):
    """Anchors of a page's headings, as GitHub makes them."""
    anchors = set()
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        match = re.match(r"#+\s+(.*?)\s*#*$", line)
        if match:
            title = re.sub(r"[^\w\- ]", "", match.group(1).lower())
            anchor = title.replace(" ", "-")
            count = 0
            while (anchor if count == 0 else f"{anchor}-{count}") in anchors:
                count += 1
            anchors.add(anchor if count == 0 else f"{anchor}-{count}")
    return anchors
