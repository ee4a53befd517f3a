"""The symbols of the book: those of its list, and those that a page uses.

Formulas are cut into tokens: a symbol of the list, the longest that fits, or a letter, or a
command. Commands of layout and the functions of school are no symbols.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMMAND = r"\\(?:[A-Za-z]+|.)"
#: layout, brackets, spaces, relations, and functions that need no definition
KNOWN = frozenset(
    re.findall(
        _COMMAND,
        r"\left\right\lvert\rvert\frac\sqrt\begin\end\text\lceil\rceil\dots\ldots\cdot\times\qquad\quad\,\;\!"
        r"\\\le\ge\ne\in\approx\to\leftarrow\infty\sum\exp\log\max\min\tanh",
    )
)
_FORMULA = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^$\s](?:[^$\n]*[^$\s])?)\$", re.S
)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
_ROW = re.compile(r"\| (?P<symbols>\$.*?\$) \|.*\| \[(?P<chapter>\d+)\]\(\S+\) \|$")
_WORDS = re.compile(r"\\text\{[^}]*\}|\\(?:begin|end)\{[^}]*\}")
_TOKEN = re.compile(rf"{_COMMAND}|[A-Za-z]")
#: wrappers whose argument belongs to the symbol
_WRAPPED = re.compile(r"\\(?:mathrm|operatorname|tilde|mathcal|hat|bar|dot)\{[^}]*\}")


class Use(NamedTuple):
    """A symbol on a page."""

    line: int
    symbol: str


def listed(index: str) -> dict[str, int]:
    """Return the chapter that defines each symbol of the list.

    Raises:
        ValueError: a symbol is listed twice.
    """
    found: dict[str, int] = {}
    for line in index.splitlines():
        row = _ROW.match(line)
        for symbol in re.findall(r"\$([^$]+)\$", row["symbols"]) if row else ():
            if symbol in found:
                raise ValueError(f"symbol {symbol} is listed twice")
            found[symbol] = int(row["chapter"])
    return found


def formulas(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, formula) of a page, without its code."""
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page)
    for formula in _FORMULA.finditer(text):
        yield text[: formula.start()].count("\n") + 1, formula["block"] or formula["inline"]


def used(page: str, symbols: dict[str, int]) -> Iterator[Use]:
    """Yield each symbol, letter and unknown command of a page's formulas, in their order."""
    names = sorted(symbols, key=len, reverse=True)
    whole = "|".join(
        re.escape(name) + (r"(?![A-Za-z])" if re.search(r"\\[A-Za-z]+$", name) else "")
        for name in names
    )
    token = re.compile("|".join(filter(None, (whole, _WRAPPED.pattern, _TOKEN.pattern))))
    for line, formula in formulas(page):
        text = _WORDS.sub(" ", formula)
        for found in token.finditer(text):
            if found[0] not in KNOWN:
                yield Use(line + text[: found.start()].count("\n"), found[0])


def mistakes(page: str, chapter: int, symbols: dict[str, int]) -> list[str]:
    """Return a text for each symbol that is not listed, or is used before its chapter."""
    found = {}
    for line, symbol in used(page, symbols):
        defined = symbols.get(symbol)
        if defined is None:
            found.setdefault(symbol, f"line {line}: {symbol} is not in the list of symbols")
        elif defined > chapter:
            found.setdefault(symbol, f"line {line}: {symbol} is defined in chapter {defined}")
    return list(found.values())


def missing(page: str, chapter: int, symbols: dict[str, int]) -> list[str]:
    """Return the symbols that the list has for this chapter and the page does not use."""
    here = {use.symbol for use in used(page, symbols)}
    own = (symbol for symbol, defined in symbols.items() if defined == chapter)
    return [symbol for symbol in own if symbol not in here]
