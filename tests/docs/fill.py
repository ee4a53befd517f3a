"""Write the outputs of blocks into pages.

    python -m tests.docs.fill docs/derivation/*.md

Each block ``text`` below a block ``python`` becomes what that block prints here. Read the
differences before you commit them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .blocks import outputs_of, program_of
from .test_pages import run


def filled(page: Path) -> str:
    """Return the page with the outputs of its blocks.

    Raises:
        RuntimeError: the program of the page fails.
    """
    text = page.read_text(encoding="utf-8")
    program, done = program_of(text), run(page)
    if done.returncode:
        raise RuntimeError(f"{page}:\n{done.stderr}")
    printed = outputs_of(done.stdout)
    lines = text.splitlines()
    for end, output in sorted(program.outputs.items(), reverse=True):
        first = output.line  # the line after the fence, counted from 0
        last = first + len(output.text.splitlines())
        lines[first:last] = [line.rstrip() for line in printed[end].rstrip().splitlines()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the pages that the command line names."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
