"""Report functions that do not fit a screen.

    python tools/form.py src demo benchmarks tools tests

A function has at most 80 lines from ``def`` on, without its docstring; kernels count like others.
Ruff counts arguments (at most 12) and finds missing docstrings.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from plain_words import files_of

MOST_LINES = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def length(function: Function) -> int:
    """Return the lines of a function from ``def`` on, without its docstring.

    >>> text = '''def add(a, b):
    ...     \"\"\"Return the sum.\"\"\"
    ...     return a + b
    ... '''
    >>> length(ast.parse(text).body[0])
    2
    """
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def complaints(name: str, source: str) -> Iterator[str]:
    """Yield a line for each function of a file that is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and length(node) > MOST_LINES:
            lines = length(node)
            yield f"{name}:{node.lineno}: {node.name} has {lines} lines; at most {MOST_LINES}"


def main() -> int:
    """Print the findings; return 1 if there are any."""
    files = [file for file in files_of(sys.argv[1:]) if file.suffix == ".py"]
    found = [text for file in files for text in complaints(str(file), file.read_text())]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
