"""The Python examples of a Markdown page, as one program in the page's own lines.

The blocks ``python`` of a page are one program, from top to bottom. A comment on the line before a
block says what it needs, and readers of the page do not see it::

    <!-- needs: cuda -->
    <!-- needs: transformers -->
    <!-- not run: its reason -->

``needs`` names ``cuda`` or modules, separated by commas. A block that lacks one is left out, as is
one that is not run; the blocks after it run.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple

import torch

_FENCE = re.compile(r"```python\s*$")
_MARKER = re.compile(r"<!-- (needs|not run): (.+) -->\s*$")


class Program(NamedTuple):
    """The code of a page and the blocks that are left out."""

    code: str  # as many lines as the page: a traceback has the page's line numbers
    ran: int
    skipped: tuple[str, ...]


def program_of(page: str) -> Program:
    """Return the program of a page.

    Raises:
        ValueError: a marker in another form, or without a block after it.
    """
    lines = page.splitlines()
    code, skipped, ran = [""] * len(lines), [], 0
    inside, reason = False, None
    for n, line in enumerate(lines):
        if inside:
            inside = not line.startswith("```")
            if inside and reason is None:
                code[n] = line
        elif _FENCE.match(line):
            inside, reason = True, _reason(lines[n - 1] if n else "")
            if reason is None:
                ran += 1
            else:
                skipped.append(f"line {n + 1}: {reason}")
        elif line.startswith(("<!-- needs", "<!-- not run")) and not (
            _MARKER.match(line) and n + 1 < len(lines) and _FENCE.match(lines[n + 1])
        ):
            raise ValueError(f"line {n + 1}: {line!r}; want '<!-- needs: NAME -->' before a block")
    return Program("\n".join(code) + "\n", ran, tuple(skipped))


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
