"""Draw the picture of docs/distributed.md: the tiles that each of four ranks computes.

    python docs/pictures/layouts.py

It writes layouts-light.svg and layouts-dark.svg next to this file. rowmax computes the tiles, the
rows of each rank and the imbalance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tiles import SIZE, THEMES, TILES, N, rect, seen_share, text

import rowmax
from rowmax.distributed import Layout

RANKS = 4
WIDTH, HEIGHT, CELL = 860, 270, 22
#: the color of each rank, on light and on dark pages
COLORS = ("#4493d8", "#d1790a", "#2f9e63", "#a466c9")

CAUSAL = rowmax.Causal()
DOCUMENTS = rowmax.Documents(cu_seqlens=torch.tensor([0, 18, 22, N])) & CAUSAL


class Panel(NamedTuple):
    """A layout of a mask."""

    title: str
    layout: Layout
    mask: rowmax.Mask


PANELS = (
    Panel("contiguous, causal", Layout.contiguous(N, RANKS), CAUSAL),
    Panel("zigzag, causal", Layout.zigzag(N, RANKS), CAUSAL),
    Panel("zigzag, documents", Layout.zigzag(N, RANKS), DOCUMENTS),
    Panel("balanced, documents", Layout.balanced(DOCUMENTS, N, RANKS, chunk=SIZE), DOCUMENTS),
)


def owners(layout: Layout) -> list[int]:
    """Return the rank of each row of tiles."""
    found = [0] * TILES
    for rank in range(layout.ranks):
        for chunk in layout.chunks(rank):
            for i in chunk[::SIZE]:
                found[i // SIZE] = rank
    return found


def tiles_of(x: float, y: float, panel: Panel, line: str) -> Iterator[str]:
    """Yield the tiles in the color of the rank that computes them; partial ones are pale."""
    for i, (row, rank) in enumerate(zip(seen_share(panel.mask), owners(panel.layout), strict=True)):
        for j, share in enumerate(row):
            fill = COLORS[rank] if share else "none"
            one = rect(x + j * CELL, y + i * CELL, CELL - 2, CELL - 2, fill, line)
            yield one.replace("/>", ' fill-opacity="0.5"/>') if 0 < share < 1 else one


def picture(theme: str) -> str:
    """Return the SVG in the colors of a theme."""
    c = THEMES[theme]
    title = "The tiles that each of four ranks computes, for three layouts."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">',
        f"<title>{title}</title>",
    ]
    for n, panel in enumerate(PANELS):
        x, y = 14 + n * 214, 44
        parts.append(text(x, 26, panel.title, c.text, 15))
        parts += tiles_of(x, y, panel, c.line)
        worst = panel.layout.imbalance(panel.mask)
        words = f"most loaded: {worst:.2f} of the mean"
        parts.append(text(x, y + TILES * CELL + 16, words, c.faint, 12))
    for rank, color in enumerate(COLORS):
        parts.append(rect(14 + 90 * rank, HEIGHT - 19, 11, 11, color, c.line))
        parts.append(text(31 + 90 * rank, HEIGHT - 9, f"rank {rank}", c.faint, 12))
    return "\n".join([*parts, "</svg>", ""])


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the picture of each theme."""
    for name in THEMES:
        (folder / f"layouts-{name}.svg").write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main()
