"""The Python examples of a Markdown page, as one program in the page's own lines.

The blocks ``python`` of a page are one program, from top to bottom. A comment on the line before a
block says what it needs, and readers of the page do not see it::

    <!-- needs: cuda -->
    <!-- needs: transformers -->
    <!-- not run: its reason -->

``needs`` names ``cuda`` or modules, separated by commas. A block that lacks one is left out, as is
one that is not run; the blocks after it run.

A block ``text`` that follows a block ``python``, with only empty lines between them, is its output,
character by character. ``<!-- numbers vary -->`` on the line before it marks times and rates of the
reader's machine: its words are compared, and its numbers are not.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple

import torch

_FENCE = re.compile(r"```(python|text)\s*$")
_MARKER = re.compile(r"<!-- (needs|not run): (.+) -->\s*$")
_VARY = "<!-- numbers vary -->"
_NUMBER = re.compile(r"\s*[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")

#: ends the output of a block: the number of the line that closes it follows
END = "\x00end "


class Output(NamedTuple):
    """The output that a page prints below a block."""

    line: int  # the line of its fence
    text: str
    varies: bool


class Program(NamedTuple):
    """The code of a page and the blocks that are left out."""

    code: str  # as many lines as the page: a traceback has the page's line numbers
    ran: int
    skipped: tuple[str, ...]
    outputs: dict[int, Output]  # by the line that closes the block


def program_of(page: str) -> Program:
    """Return the program of a page.

    Raises:
        ValueError: a marker in another form, or without a block after it.
    """
    lines = page.splitlines()
    code, skipped, ran, outputs = [""] * len(lines), [], 0, {}
    inside, reason, closed = "", None, None  # closed: the last line of a block that ran
    for n, line in enumerate(lines):
        fence = _FENCE.match(line)
        if inside and not line.startswith("```"):
            if inside == "python" and reason is None:
                code[n] = line
            elif inside == "output":
                outputs[closed] = outputs[closed]._replace(text=outputs[closed].text + line + "\n")
        elif inside:
            if inside == "python" and reason is None:
                code[n] = f"print({END!r} {str(n + 1)!r})"
            closed = n + 1 if inside == "python" and reason is None else None
            inside = ""
        elif fence and fence[1] == "text" and closed is not None:
            inside = "output"
            outputs[closed] = Output(n + 1, "", lines[n - 1] == _VARY)
        elif fence and fence[1] == "python":
            inside, reason = "python", _reason(lines[n - 1] if n else "")
            if reason is None:
                ran += 1
            else:
                skipped.append(f"line {n + 1}: {reason}")
        elif line.startswith("```"):
            inside = "other"
        elif line.startswith(("<!-- needs", "<!-- not run")) and not (
            _MARKER.match(line) and _opens(lines, n + 1, "python")
        ):
            raise ValueError(f"line {n + 1}: {line!r}; want '<!-- needs: NAME -->' before a block")
        elif line.startswith("<!-- numbers") and not (
            line == _VARY and closed is not None and _opens(lines, n + 1, "text")
        ):
            raise ValueError(f"line {n + 1}: {line!r}; want {_VARY!r} between a block and its text")
        elif line.strip() and line != _VARY:
            closed = None
    return Program("\n".join(code) + "\n", ran, tuple(skipped), outputs)


def outputs_of(printed: str) -> dict[int, str]:
    """Return what each block printed, by the line that closes it."""
    text, *parts = printed.split(END)
    texts = {}
    for part in parts:
        end, _, following = part.partition("\n")
        texts[int(end)] = text
        text = following
    return texts


def differences(program: Program, printed: str) -> list[str]:
    """Return a text for each output of a page that is not what its block printed."""
    texts, found = outputs_of(printed), []
    for end, output in program.outputs.items():
        if end not in texts:
            found.append(f"line {output.line}: the block above has not run")
            continue
        got, want = _comparable(texts[end], output.varies), _comparable(output.text, output.varies)
        if got != want:
            found.append(f"line {output.line}: the page has\n{output.text}, printed\n{texts[end]}")
    return found


def _comparable(text: str, varies: bool) -> str:
    """Return the text without spaces at the ends of lines, and without numbers that vary."""
    text = "\n".join(line.rstrip() for line in text.rstrip().splitlines())
    return _NUMBER.sub(" 0", text) if varies else text


def _opens(lines: list[str], n: int, kind: str) -> bool:
    """Return True if line n opens a block of this kind."""
    fence = _FENCE.match(lines[n]) if n < len(lines) else None
    return fence is not None and fence[1] == kind


def _reason(before: str) -> str | None:
    """Return why the block after this line does not run here, or None."""
    marker = _MARKER.match(before)
    if marker is None:
        return None
    kind, text = marker.groups()
    if kind == "not run":
        return text
    lacking = [name for name in re.split(r",\s*", text) if not _installed(name)]
    return f"needs {', '.join(lacking)}" if lacking else None


def _installed(name: str) -> bool:
    return torch.cuda.is_available() if name == "cuda" else find_spec(name) is not None
