"""Report words of docstrings and comments that hide what is meant.

    python tools/plain_words.py src tests demo

A docstring begins with what a function returns or does, not with a clause ("Whether ...",
"What ..."). Parts of a program are no persons: a cache holds entries, a kernel waits on a barrier.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: no docstring begins with these
OPENINGS = re.compile(r"(What|Whether|Where|Of|Which|Who|How|Why)\b")
#: persons and riddles
WORDS = re.compile(
    r"\b(who|whoever|whom|nobody|told|listens?|listened|lets? go|for ever|on its way|let go of)\b",
    re.IGNORECASE,
)


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, is a docstring) of the docstrings and comments of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def complaints(path: Path) -> Iterator[str]:
    for line, text, is_docstring in texts(path):
        opening = OPENINGS.match(text.strip()) if is_docstring else None
        if opening:
            yield f"{path}:{line}: a docstring begins with {opening[0]!r}; begin with a verb"
        for found in WORDS.finditer(text):
            at = line + text[: found.start()].count("\n")
            yield f"{path}:{at}: {found[0]!r}; name the part of the program and what it does"


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]]
    files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    found = [text for file in files for text in complaints(file)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
