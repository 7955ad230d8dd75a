# SPDX-License-Identifier: Apache-2.0
#
# Nothing is too long to read: files, headers, tests and functions. The allow list (allowed_sizes.txt)
# starts empty; a line in it needs a decision record.

import ast
import re

from tree import SOURCE, Violation, without_comments_and_strings

HEADER_LINES = 300
SOURCE_LINES = 600
TEST_LINES = 800
FUNCTION_LINES = 70
ALLOWED = "tests/tidy/allowed_sizes.txt"

_NOT_A_FUNCTION = re.compile(r"^\s*(?:typedef\s+)?(?:(?:namespace|class|struct|union|enum)\b|extern\s*$)")
_CONTROL = re.compile(r"^\s*(if|for|while|switch|do|else|try|catch|return)\b")
_TEMPLATE = re.compile(r"^\s*template\s*<[^{}]*?>\s*(?=class|struct|union)")


def check(tree):
    allowed = _allowed(tree)
    violations = []
    for path in tree.paths(*SOURCE, ".py", ".proto", ".cmake", "CMakeLists.txt", ".sh"):
        lines = len(tree.lines(path))
        limit, kind = _file_limit(path)
        if lines > limit and path not in allowed:
            violations.append(Violation(path, lines, f"{kind} of {lines} lines, limit {limit}; "
                                        "split it by reason to change"))
        for name, first, length in _functions(tree, path):
            if length > FUNCTION_LINES and f"{path} {name}" not in allowed:
                violations.append(Violation(path, first, f"function {name} of {length} lines, "
                                            f"limit {FUNCTION_LINES}"))
    return violations


def _allowed(tree):
    if not tree.exists(ALLOWED):
        return set()
    return {line.split("#")[0].strip() for _, line in tree.lines(ALLOWED)} - {""}


def _file_limit(path):
    if re.search(r"_test\.(cc|py)$", path):
        return TEST_LINES, "test"
    # Highway's -inl.h files are sources, compiled once for each instruction set.
    if path.endswith((".h", ".cuh")) and not path.endswith("-inl.h"):
        return HEADER_LINES, "header"
    return SOURCE_LINES, "file"


def _functions(tree, path):
    """(name, first line, number of lines) of every function."""
    if path.endswith(".py"):
        return _python_functions(tree.text(path))
    if path.endswith(SOURCE):
        return cpp_functions(tree.text(path))
    return []


def _python_functions(text):
    return [(node.name, node.lineno, node.end_lineno - node.lineno + 1)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def cpp_functions(text):
    """Braces that open after a parameter list, outside every other function."""
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: "\n" * m.group(0).count("\n"),
                  without_comments_and_strings(text), flags=re.MULTILINE)
    found = []
    open_braces = []  # (what the brace opened, head before it, line of that head)
    head = ""         # What stands since the last ; { or }.
    head_line = line = 1
    for char in code:
        if char == "\n":
            line += 1
        if char == "{":
            kind = "value" if _opens_value(head) else "scope"
            if kind == "scope" and _opens_function(head) and all(
                    outer[0] != "function" for outer in open_braces):
                kind = "function"
            open_braces.append((kind, head, head_line))
            head = ""
        elif char == "}":
            kind, before, first = open_braces.pop() if open_braces else ("scope", "", line)
            if kind == "function":
                found.append((_name(before), first, line - first + 1))
            head, head_line = (before, first) if kind == "value" else ("", line)
        elif char == ";" and head.count("(") <= head.count(")"):
            head = ""
        else:
            if not head.strip() and not char.isspace():
                head, head_line = "", line
            head += char
    return found


def _opens_value(head):
    """A braced value or a lambda within a statement that goes on: `: c_{b}`, `f(g = [] {})`."""
    return bool(re.search(r"[\w>]$", head)) or head.count("(") > head.count(")")


def _opens_function(head):
    head = _TEMPLATE.sub("", head)
    if "(" not in head or _NOT_A_FUNCTION.match(head) or _CONTROL.match(head):
        return False
    return not re.search(r"=\s*$|\[[^\]]*\]\s*$|,\s*$", head)


def _name(head):
    match = re.search(r"([~\w:]+(?:operator\s*[^\s\w(]+)?)\s*\(([^)]*)", head)
    if not match:
        return "?"
    if match.group(1).startswith(("TEST", "TYPED_TEST")):
        return ".".join(part.strip() for part in match.group(2).split(","))
    return match.group(1)
