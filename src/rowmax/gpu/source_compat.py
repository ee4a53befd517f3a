"""Read the sources of jitted functions faster than Triton does.

Triton's ways remain where a source or a release has another form. Tried with triton 3.6.0 and
3.9.0.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

# --- source lines ------------------------------------------------------------------------------

_QUOTES = re.compile(r'"""|\'\'\'')
_getsourcelines = inspect.getsourcelines


def _folders() -> tuple[str, ...]:
    """Return the folders of the packages whose sources are read here."""
    found = None
    with suppress(ImportError, ValueError):  # a stand-in for triton has no spec
        found = find_spec("triton")
    places = list(found.submodule_search_locations or ()) if found else []
    return tuple(os.path.join(x, "") for x in (*places, Path(__file__).parents[1]))


_FOLDERS = _folders()


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return (lines, number of the first), equal to those of ``inspect.getsourcelines``.

    inspect finds the end by Python's tokenizer: 0.4 ms for each of the 300 functions that a first
    call imports. Here the end is the last line with code, then lines that are indented deeper than
    the head. Inspect reads a source in which that may be wrong, and those of other packages.
    """
    if type(function) is FunctionType and not hasattr(function, "__wrapped__"):
        code = function.__code__
        file, first = code.co_filename, code.co_firstlineno - 1
        if file.startswith(_FOLDERS):
            linecache.checkcache(file)
            lines = linecache.getlines(file)
            end = _end(lines, first, max(_numbers(code)))
            if end is not None:
                return lines[first:end], first + 1
    return _getsourcelines(function)


def _numbers(code: CodeType) -> Iterator[int]:
    """Yield the numbers of the lines of a code, and of those within it."""
    yield code.co_firstlineno
    for _, _, line in code.co_lines():
        if line is not None:
            yield line
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _numbers(x)


def _end(lines: list[str], first: int, last: int) -> int | None:
    """Return the end of the function at the line ``first``, or None if it is uncertain.

    ``last`` is the number of the last line that has code.
    """
    if last > len(lines) or not lines[first].lstrip().startswith(("def ", "@")):
        return None
    head = _indent(lines[first])
    end, comment = last, False
    for n in range(last, len(lines)):
        text = lines[n].strip()
        indent = _indent(lines[n])
        if not text:
            continue
        if text[0] == "#":
            comment |= indent > head
        elif indent > head or text[0] in ")]}":
            end, comment = n + 1, False
        else:
            break
    if comment:  # inspect keeps it if it is as deep as the body
        return None
    tail = lines[last - 1 : end]
    if tail[-1].endswith("\\\n") or len(_QUOTES.findall("".join(tail))) % 2:
        return None
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@contextmanager
def _quick_inspect() -> Iterator[None]:
    """Let inspect read by ``source_lines`` in this context."""
    inspect.getsourcelines = source_lines
    try:
        yield
    finally:
        if inspect.getsourcelines is source_lines:
            inspect.getsourcelines = _getsourcelines


class _Inspect(ModuleType):
    """The module inspect, with a faster ``getsourcelines``."""

    getsourcelines = staticmethod(source_lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


with _quick_inspect():  # Triton reads 48 functions of its own as it is imported: 16 ms
    from triton.runtime import jit

if getattr(jit, "inspect", None) is inspect:
    jit.inspect = _Inspect("inspect")  # pyright: ignore
