"""Report docstrings, comments and pages that are not in plain words.

    python tools/plain_words.py src demo benchmarks tools tests docs *.md

The docstring of a function begins with a verb ("Return the ...", "Launch ..."). Those of modules,
classes, properties and tests may begin with a noun. No comment begins with "of". No sentence begins
with "What" or "Whether", and none has more than 25 words. Parts of a program are no persons: a
cache holds entries, a kernel waits on a barrier.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 25

#: words and phrases, each with a plain form
WORDS = {
    "who|whoever|whom|nobody|somebody": "name the part of the program",
    "asks?|asked|listens?|listened|tells?|told|wants": "request, read, return, distinguish, need",
    "lets? go(?: of)?": "release",
    "for ever": "without end",
    "on its way": "in flight",
    "at hand": "available, installed, in the cache",
    "once more|anew": "again",
    "but for|but under|save for": "except",
    "nothing but": "only",
    "all else": "everything else",
    "beside": "next to, other than, while",
    "by way of": "through",
    "in the place of": "instead of",
    "(?:is|are|was|were) (?:not |then |still )?to be": "must be",
    "bundles": "kernel arguments",
    "whatsoever|wholly|lest|whereof|whereby|therein|thereof|hitherto": "use a common word",
}
_WORDS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): hint for words, hint in WORDS.items()}

#: no docstring begins with these
_CLAUSE = re.compile(r"(?:What|Whether|Where|Of|Which|Who|Whose|How|Why)\b")
#: nor that of a function with these
_NO_VERB = re.compile(
    r"(?:The|An?|This|That|These|It|Its|True|False|None|One|Each|Every|All|No|In|On|At|For|From|To"
    r"|With|By|As|If|When)\b"
)
_VERB = re.compile(r"[A-Z][a-z]+(?<![^s]s)\b")
_NO_COMMENT = re.compile(r"(?:of|what|whether|who)\b", re.IGNORECASE)
_SUBJECT = re.compile(r"(?:What|Whether|Who)\b(?![^.]*\?)")

#: code and formulas of a page
_LITERAL = re.compile(r"`[^`]*`|\$\$[^$]*\$\$|\$(?! )[^$\n]*(?<! )\$")

#: decorators of functions that are read as attributes
_PROPERTIES = {"property", "cached_property"}


class Text(NamedTuple):
    """A docstring, a run of comments or a paragraph, and its first line."""

    line: int
    kind: str  # "function", "docstring", "comment", "page", or "row" of a table
    text: str


def texts(source: str, python: bool) -> Iterator[Text]:
    """Yield the docstrings and comments of Python code, or the paragraphs of a Markdown page."""
    if not python:
        yield from _paragraphs(source)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield Text(node.body[0].lineno, _kind(node), text)
    yield from _comments(source)


def _kind(node: ast.AST) -> str:
    """Return "function" for a function that is neither a property nor a test, else "docstring"."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "docstring"
    if node.name.startswith("test_"):
        return "docstring"
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return "docstring" if names & _PROPERTIES else "function"


def _comments(source: str) -> Iterator[Text]:
    """Yield each run of comments in the same column of consecutive lines."""
    run: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = token.line[:column].strip() == ""
            if run and not (alone and run[-1][:2] == (line - 1, column)):
                yield Text(run[0][0], "comment", "\n".join(text for *_, text in run))
                run = []
            run.append((line, column, token.string.lstrip("#:! ")))
    if run:
        yield Text(run[0][0], "comment", "\n".join(text for *_, text in run))


def _paragraphs(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown page, without code."""
    code, first, lines = False, 0, []
    for n, line in enumerate([*source.splitlines(), ""], 1):
        table = line.lstrip().startswith(("|", "#"))
        code ^= line.lstrip().startswith("```")
        if lines and (code or table or not line.strip()):
            yield Text(first, "page", _LITERAL.sub("x", "\n".join(lines).replace("**", "")))
            lines = []
        if table and not code:
            yield Text(n, "row", _LITERAL.sub("x", line))
        elif not code and line.strip() and not line.lstrip().startswith("```"):
            first = first if lines else n
            lines.append(line)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, sentence) of prose; lines of code and tables are indented or have columns."""
    for paragraph in re.finditer(r"(?:[^\n]|\n(?!\s*\n|\s*[-*] |\s{4}))+", text):
        if "   " in paragraph[0].strip().replace("\n    ", "\n"):
            continue
        for sentence in re.finditer(
            r"\S.*?(?:[.:;?!]\)?(?=\s|$)|$(?!\n))", paragraph[0], re.DOTALL
        ):
            yield paragraph.start() + sentence.start(), sentence[0]


def complaints(name: str, source: str) -> Iterator[str]:
    """Yield a line for each part of a file that is not plain.

    >>> list(complaints("a.py", "# of a kernel"))
    ["a.py:1: a comment begins with 'of a kernel'; name the thing"]
    """
    for text in texts(source, name.endswith(".py")):
        for offset, complaint in sorted(_complaints(text)):
            yield f"{name}:{text.line + text.text[:offset].count(chr(10))}: {complaint}"


def _complaints(text: Text) -> Iterator[tuple[int, str]]:
    """Yield (offset, complaint) of one text."""
    start, kind = text.text.strip(), text.kind
    for offset, sentence in sentences(text.text) if kind != "row" else ():
        if kind != "comment" and offset and _SUBJECT.match(sentence):
            yield offset, f"a clause is the subject of {sentence[:30]!r}; name the thing"
        words = [word for word in sentence.split() if re.search("[A-Za-z]{2}", word)]
        if len(words) > MOST_WORDS:
            yield offset, f"{len(words)} words in a sentence; at most {MOST_WORDS}"
    for pattern, hint in _WORDS.items():
        for found in pattern.finditer(text.text):
            yield found.start(), f"{found[0]!r}; plainly: {hint}"
    if kind == "comment" and _NO_COMMENT.match(start):
        yield 0, f"a comment begins with {start[:20]!r}; name the thing"
    if kind in ("function", "docstring") and _CLAUSE.match(start):
        yield 0, f"a docstring begins with {start[:20]!r}; begin with a verb"
    elif kind == "function" and (_NO_VERB.match(start) or not _VERB.match(start)):
        yield 0, f"a function's docstring begins with {start[:20]!r}, not a verb"


def files_of(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files of these names, and the Python and Markdown files of these folders."""
    for path in map(Path, names):
        if path.is_dir():
            yield from sorted({*path.rglob("*.py"), *path.rglob("*.md")})
        else:
            yield path


def main() -> int:
    """Print the findings; return 1 if there are any."""
    files = files_of(sys.argv[1:])
    found = [text for file in files for text in complaints(str(file), file.read_text())]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
