"""Draw the picture of README: one step of the online softmax, and the tiles of four masks.

    python docs/pictures/tiles.py

It writes tiles-light.svg and tiles-dark.svg next to this file. rowmax computes the tiles: a pair is
seen where a one-hot value arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import rowmax

TILES, SIZE = 8, 4  # tiles a side, positions a tile
WIDTH, HEIGHT = 860, 318
ROW, COL = 6, 3  # the tile of the step


class Colors(NamedTuple):
    """The colors of one theme of GitHub."""

    text: str
    faint: str
    line: str
    partial: str
    full: str
    step: str


THEMES = {
    "light": Colors("#1f2328", "#59636e", "#d1d9e0", "#b6d7f5", "#4493d8", "#d1570a"),
    "dark": Colors("#f0f6fc", "#9198a1", "#3d444d", "#1f4468", "#4493f8", "#f0883e"),
}
N = TILES * SIZE
MASKS = {
    "causal": rowmax.Causal(),
    "window": rowmax.Window(left=N // 4, right=0),
    "documents": rowmax.Documents(cu_seqlens=torch.tensor([0, 10, 24, N])) & rowmax.Causal(),
    "prefix": rowmax.Prefix(torch.tensor([12])),
}


def seen_share(mask: rowmax.Mask) -> list[list[float]]:
    """Return the share of pairs of each tile that may attend, ``[rows][columns]``."""
    zeros, one_hot = torch.zeros(1, N, 1, 1), torch.eye(N)[None, :, None]
    pairs = rowmax.attention(zeros, zeros, one_hot, mask=mask, backend="reference")[0, :, 0] > 0
    tiles = pairs.unflatten(0, (TILES, SIZE)).unflatten(2, (TILES, SIZE))
    return tiles.float().mean((1, 3)).tolist()


def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str, width: float = 1) -> str:
    """Return a rectangle with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{width:g}"/>'
    )


def text(x: float, y: float, words: str, fill: str, size: int = 13, anchor: str = "start") -> str:
    """Return a line of text; ``<tspan>`` may be part of it."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}">'
        f"{words}</text>"
    )


def grid(x: float, y: float, cell: float, mask: rowmax.Mask, c: Colors) -> Iterator[str]:
    """Yield the tiles of a mask; skipped tiles are empty."""
    for i, row in enumerate(seen_share(mask)):
        for j, share in enumerate(row):
            fill = "none" if share == 0 else c.full if share == 1 else c.partial
            yield rect(x + j * cell, y + i * cell, cell - 2, cell - 2, fill, c.line)


def step(c: Colors) -> Iterator[str]:
    """Yield the left half: a query tile, the key tile that passes, and all that stays."""
    x, y, cell = 66, 84, 26
    yield text(x, 26, "One step of the online softmax", c.text, 15)
    yield text(x + COL * cell + 12, 54, "K, V", c.step, 13, "middle")
    yield text(x - 44, y + ROW * cell + 17, "Q", c.step)
    yield from grid(x, y, cell, MASKS["causal"], c)
    yield rect(x + COL * cell, y - 22, cell - 2, 14, c.step, c.step)
    yield rect(x - 24, y + ROW * cell, 14, cell - 2, c.step, c.step)
    yield rect(x + COL * cell - 1, y + ROW * cell - 1, cell, cell, "none", c.step, 3)
    yield text(x, y + TILES * cell + 10, "N x N scores: never stored", c.faint, 12)
    right = x + TILES * cell + 18
    top = y + ROW * cell
    arrow = f"M{right - 14} {top + 12} h22 m-6 -5 l6 5 l-6 5"
    yield f'<path d="{arrow}" fill="none" stroke="{c.step}"/>'
    yield text(right + 14, top - 62, "This tile of scores", c.text)
    yield text(right + 14, top - 44, "exists only in this step.", c.text)
    yield text(right + 14, top - 14, "Each row keeps:", c.text)
    for n, (name, meaning) in enumerate((("m", "maximum"), ("l", "sum"), ("out", "D values"))):
        yield rect(right + 14, top - 2 + 21 * n, 30, 17, "none", c.step)
        yield text(right + 29, top + 11 + 21 * n, name, c.text, 12, "middle")
        yield text(right + 52, top + 11 + 21 * n, meaning, c.faint, 12)


def masks(c: Colors) -> Iterator[str]:
    """Yield the right half: the tiles of each mask, and the meaning of the colors."""
    left, cell = 520, 13
    yield text(left, 26, "Masks skip tiles", c.text, 15)
    for n, (name, mask) in enumerate(MASKS.items()):
        x, y = left + 160 * (n % 2), 44 + 126 * (n // 2)
        yield from grid(x, y, cell, mask, c)
        yield text(x, y + TILES * cell + 12, name, c.faint, 12)
    kinds = {"full": c.full, "partial": c.partial, "skipped": "none"}
    for n, (name, fill) in enumerate(kinds.items()):
        yield rect(left + 90 * n, HEIGHT - 17, 11, 11, fill, c.line)
        yield text(left + 17 + 90 * n, HEIGHT - 7, name, c.faint, 12)


def picture(c: Colors) -> str:
    """Return the SVG in the colors of a theme."""
    title = "Left: rowmax keeps one tile of scores at a time. Right: tiles that masks skip."
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{title}</title>", *step(c), *masks(c), "</svg>", ""])


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the picture of each theme."""
    for name, colors in THEMES.items():
        (folder / f"tiles-{name}.svg").write_text(picture(colors), encoding="utf-8")


if __name__ == "__main__":
    main()
