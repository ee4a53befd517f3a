"""Draw the pictures of the derivation: the limits of an H200, and the two orders of the loops.

    python docs/pictures/derivation.py

It writes roofline and loops, each for light and dark, next to this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from tiles import THEMES, Colors, rect, text

RATE, BANDWIDTH = 989e12, 4.8e12  # an H200's, by its data sheet
N, UNIT = 16384, 2
#: TFLOP/s of rowmax, by head size: benchmarks/results/hopper_forward.csv, N 16384, full
MEASURED = {64: 534, 128: 684, 256: 798}
ROOF = {"width": 640, "height": 360}
LEFT, RIGHT, TOP, BOTTOM = 64, 620, 40, 312
INTENSITIES, RATES = (16, 16384), (50, 1500)  # the axes, both logarithmic


def operations(d: int) -> int:
    """Return the operations of a head."""
    return 4 * N * N * d


def dense_intensity(d: int) -> float:
    """Return the operations a byte of dense attention."""
    return operations(d) / (UNIT * (4 * N * N + 4 * N * d))


def least_intensity(d: int) -> float:
    """Return the operations a byte where each input is read once."""
    return operations(d) / (UNIT * 4 * N * d)


def place(intensity: float, tflops: float) -> tuple[float, float]:
    """Return the point of the picture."""
    share = [
        math.log(value / low) / math.log(high / low)
        for value, (low, high) in ((intensity, INTENSITIES), (tflops, RATES))
    ]
    return LEFT + share[0] * (RIGHT - LEFT), BOTTOM - share[1] * (BOTTOM - TOP)


def line(points: list[tuple[float, float]], color: str, width: float = 1, dash: str = "") -> str:
    """Return a line through points."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{dashed}/>'


def dot(point: tuple[float, float], fill: str, stroke: str) -> str:
    """Return a small circle."""
    x, y = point
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{stroke}"/>'


def roofline(c: Colors) -> Iterator[str]:
    """Yield the limits, dense attention on them, and the measured rates."""
    for intensity in (16, 64, 256, 1024, 4096, 16384):
        x, _ = place(intensity, RATES[0])
        yield line([(x, TOP), (x, BOTTOM)], c.line)
        yield text(x, BOTTOM + 18, str(intensity), c.faint, 12, "middle")
    for tflops in (50, 100, 200, 500, 1000):
        _, y = place(INTENSITIES[0], tflops)
        yield line([(LEFT, y), (RIGHT, y)], c.line)
        yield text(LEFT - 8, y + 4, str(tflops), c.faint, 12, "end")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 40, "operations a byte", c.text, 13, "middle")
    yield text(LEFT - 48, TOP - 16, "TFLOP/s, N 16384, bfloat16", c.text)
    peak, ridge = RATE / 1e12, RATE / BANDWIDTH
    low = INTENSITIES[0]
    corner = [
        place(low, low * BANDWIDTH / 1e12),
        place(ridge, peak),
        place(INTENSITIES[1], peak),
    ]
    yield line(corner, c.text, 2)
    x, y = place(ridge, peak)
    yield text(x + 4, y - 8, f"ridge {ridge:.0f}", c.text, 12)
    for d, tflops in MEASURED.items():
        intensity = dense_intensity(d)
        limit = place(intensity, intensity * BANDWIDTH / 1e12)
        yield dot(limit, c.step, c.step)
        yield text(limit[0] + 10, limit[1] + 12, f"dense, D {d}", c.text, 12)
        reached = place(least_intensity(d), tflops)
        yield dot(reached, c.full, c.full)
        yield text(reached[0] - 10, reached[1] + 4, f"rowmax, D {d}", c.text, 12, "end")


def visits(x: float, y: float, c: Colors, keys_outside: bool) -> Iterator[str]:
    """Yield a grid of tiles with the path of a loop through it."""
    size, cell = 4, 44
    for i in range(size):
        for j in range(size):
            yield rect(x + j * cell, y + i * cell, cell - 4, cell - 4, c.partial, c.line)
    first, last = (cell - 4) / 2, (size - 1) * cell + (cell - 4) / 2
    for n in range(size):
        across = n * cell + first
        ends = (
            [(across, first), (across, last)] if keys_outside else [(first, across), (last, across)]
        )
        begin, end = ((x + a, y + b) for a, b in ends)
        yield line([begin, end], c.step, 2)
        head = [(-5, -8), (0, 0), (5, -8)] if keys_outside else [(-8, -5), (0, 0), (-8, 5)]
        yield line([(end[0] + a, end[1] + b) for a, b in head], c.step, 2)
        yield text(*begin_label(x, y, cell, n), f"Q{n + 1}", c.faint, 12, "end")
        yield text(x + n * cell + first, y - 8, f"K{n + 1}", c.faint, 12, "middle")


def begin_label(x: float, y: float, cell: float, n: int) -> tuple[float, float]:
    """Return the place of the name of a row."""
    return x - 8, y + n * cell + cell / 2 + 2


def loops(c: Colors) -> Iterator[str]:
    """Yield both orders, and what moves in each."""
    orders = (
        ("Keys outside", True, "K, V stay for a column.", "Out, m and l come and go in each tile."),
        (
            "Queries outside",
            False,
            "Q, out, m and l stay for a row.",
            "K, V are read in each tile.",
        ),
    )
    for n, (name, keys_outside, stays, moves) in enumerate(orders):
        x = 48 + 320 * n
        yield text(x, 24, name, c.text, 15)
        yield from visits(x, 64, c, keys_outside)
        yield text(x, 264, stays, c.text)
        yield text(x, 284, moves, c.text)


def picture(title: str, width: int, height: int, parts: Iterator[str]) -> str:
    """Return an SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>", ""])


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the pictures of each theme."""
    for mode, colors in THEMES.items():
        limits = picture(
            "Limits of an H200: dense attention is below the ridge, rowmax is not limited by it.",
            ROOF["width"],
            ROOF["height"],
            roofline(colors),
        )
        orders = picture("The two orders of the loops over tiles.", 640, 300, loops(colors))
        (folder / f"roofline-{mode}.svg").write_text(limits, encoding="utf-8")
        (folder / f"loops-{mode}.svg").write_text(orders, encoding="utf-8")


if __name__ == "__main__":
    main()
