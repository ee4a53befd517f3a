"""Report functions that are too long, and docstrings of functions that do not begin with a verb.

python tools/form.py src demo benchmarks tools tests
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: lines of a function from ``def`` on, without its docstring: one screen
MOST_LINES = 80

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without decorators and docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def complaints(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function) and length(node) > MOST_LINES:
            yield (
                f"{path}:{node.lineno}: {node.name} has {length(node)} lines; at most {MOST_LINES}"
            )


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]]
    files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    found = [text for file in files for text in complaints(file)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
