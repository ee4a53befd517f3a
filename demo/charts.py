"""Charts as inline SVG. The page's style sheet colours them (``s0``, ``s1``, ... for series)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 860, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 40


def lines(
    series: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    first: int = 1,
    height: int = HEIGHT,
    y_format: str = "{:g}",
    limit: tuple[float, str] | None = None,
) -> str:
    """Return curves over ``first``, ``first`` + 1, ..., with a legend.

    ``limit`` is the height and the name of a dashed line. A value that is not finite leaves a gap.
    """
    count = max(map(len, series.values()))
    values = [y for ys in series.values() for y in ys if math.isfinite(y)] or [0.0]
    low, high = min(values), max(values)
    if limit is not None:
        low, high = 0.0, max(high, limit[0] * 1.15)
    y_ticks = ticks(low, high)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def at_x(n: float) -> float:
        return LEFT + (n - first) / max(1, count - 1) * (right - LEFT)

    def at_y(value: float) -> float:
        return bottom - (value - low) / ((high - low) or 1.0) * (bottom - TOP)

    parts = [_open(height, f"{y_label} by {x_label}")]
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, y_format.format(tick), "end"))
    parts += [
        _text(at_x(tick), bottom + 18, f"{tick:g}", "middle")
        for tick in ticks(first, first + count - 1)
        if first <= tick <= first + count - 1
    ]
    parts.append(_text((LEFT + right) / 2, height - 4, x_label, "middle", "label"))
    if limit is not None:
        y = at_y(limit[0])
        parts.append(f'<line class="limit" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(_text(right - 4, y - 6, limit[1], "end", "label"))
    for n, ys in enumerate(series.values()):
        path = _path([(at_x(first + i), at_y(y)) for i, y in enumerate(ys)])
        parts.append(f'<path class="curve s{n}" d="{path}"/>')
    if len(series) > 1:
        parts += _legend(list(series), right)
    parts.append("</svg>")
    return "".join(parts)


def bars(rows: Mapping[str, tuple[float, str]]) -> str:
    """Return a horizontal bar for each name, with its length and the text next to it."""
    step, left = 40, 250
    height = step * len(rows) + 4
    longest = max(value for value, _ in rows.values()) or 1.0
    parts = [_open(height, ", ".join(f"{name}: {text}" for name, (_, text) in rows.items()))]
    for n, (name, (value, text)) in enumerate(rows.items()):
        y = n * step + 6
        width = max(2.0, value / longest * (WIDTH - left - 130))
        parts.append(_text(left - 12, y + 19, name, "end", "label"))
        parts.append(
            f'<rect class="bar s{n}" x="{left}" y="{y}" width="{width:.1f}" height="28" rx="4"/>'
        )
        parts.append(_text(left + width + 10, y + 19, text, "start", "value"))
    parts.append("</svg>")
    return "".join(parts)


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers that span low to high.

    >>> ticks(1.3, 5.6)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 10) for n in range(first, last + 1)]


def _open(height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}">'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    steps, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            steps.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(steps)


def _legend(names: Sequence[str], right: float) -> list[str]:
    parts = []
    for n, name in enumerate(names):
        x, y = right - 110, TOP + 18 + 24 * n
        parts.append(f'<path class="curve s{n}" d="M{x} {y}L{x + 34} {y}"/>')
        parts.append(_text(x + 44, y + 5, name, "start", "label"))
    return parts
