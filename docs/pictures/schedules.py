"""Draw the pictures of chapters 6 and on: a band, the Hopper forward, layouts of devices.

    python docs/pictures/schedules.py

It writes each picture for light and dark, next to this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from derivation import picture
from tiles import THEMES, Colors, rect, text

#: the band of the picture: four queries, sixteen keys, tiles of two keys
QUERIES, KEYS, TILE = range(8, 12), 16, 2
BACK, AHEAD = 6, 1


class Picture(NamedTuple):
    """A picture, its size and the function that draws it."""

    title: str
    width: int
    height: int
    draw: Callable[[Colors], Iterator[str]]


def band(c: Colors) -> Iterator[str]:
    """Yield the keys that each query of a tile sees, the two bounds, and the tiles of keys."""
    left, top, cell = 120, 34, 28
    seen = {i: range(i - BACK, i + AHEAD + 1) for i in QUERIES}
    for n, i in enumerate(QUERIES):
        yield text(left - 12, top + n * cell + 19, f"query {i}", c.faint, 12, "end")
        for j in range(KEYS):
            fill = c.partial if j in seen[i] else "none"
            yield rect(left + j * cell, top + n * cell, cell - 3, cell - 3, fill, c.line)
    for j in range(KEYS):
        yield text(left + j * cell + 12, top - 10, str(j), c.faint, 12, "middle")
    some = range(seen[QUERIES[0]].start, seen[QUERIES[-1]].stop)
    every = range(seen[QUERIES[-1]].start, seen[QUERIES[0]].stop)
    below = top + len(QUERIES) * cell + 10
    for n, (name, keys, fill) in enumerate((("some", some, c.partial), ("all", every, c.full))):
        y = below + 24 * n
        yield text(left - 12, y + 12, f"{name} see", c.text, 12, "end")
        yield rect(left + keys.start * cell, y, len(keys) * cell - 3, 14, fill, c.line)
    yield text(left - 12, below + 66, "tile of keys", c.text, 12, "end")
    for j in range(0, KEYS, TILE):
        tile = range(j, j + TILE)
        full = all(n in every for n in tile)
        kind = "full" if full else "partial" if any(n in some for n in tile) else "skipped"
        fill = {"full": c.full, "partial": c.partial, "skipped": "none"}[kind]
        yield rect(left + j * cell, below + 54, TILE * cell - 3, 16, fill, c.line)
        yield text(left + (j + 1) * cell - 2, below + 88, kind, c.faint, 12, "middle")


PICTURES = {
    "band": Picture("A band: the keys that some, and all, queries of a tile see.", 600, 260, band),
}


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the pictures of each theme."""
    for mode, colors in THEMES.items():
        for name, (title, width, height, draw) in PICTURES.items():
            content = picture(title, width, height, draw(colors))
            (folder / f"{name}-{mode}.svg").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
