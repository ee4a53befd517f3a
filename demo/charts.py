"""Charts as inline SVG. The page's style sheet colours them (``s0``, ``s1``, ... for series).

Each chart is drawn twice, for a wide page and for a phone. The style sheet shows one of them, so
that its text is never scaled below its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

#: points of one line
Points = Sequence[tuple[float, float]]


class Size(NamedTuple):
    """The size of a drawing and its margins, in pixels of the page."""

    name: str
    width: int
    height: int
    left: int
    most_ticks: int
    right: int = 26
    top: int = 58  # above: the title of the vertical axis and the legend
    bottom: int = 46


WIDE = Size("wide-only", 860, 340, 66, 7)
PHONE = Size("phone-only", 316, 290, 56, 4)


class Limit(NamedTuple):
    """A dashed line at a height."""

    value: float
    name: str


class Axes(NamedTuple):
    """The titles of both axes, the texts of their ticks, and their scales."""

    x: str
    y: str
    x_format: str = "{:g}"
    y_format: str = "{:g}"
    doubling: bool = False  # every length is the double of the one before: both axes by powers


def lines(series: Mapping[str, Points], axes: Axes, limit: Limit | None = None) -> str:
    """Return a chart of lines, for both widths. A value that is not finite leaves a gap."""
    return "".join(_drawn(series, axes, limit, size) for size in (WIDE, PHONE))


class _Scale(NamedTuple):
    """A map from values of one axis to pixels."""

    low: float
    high: float
    start: float
    end: float
    powers: bool

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.powers:
            value, low, high = (math.log2(max(x, 1e-12)) for x in (value, low, high))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)


def _drawn(series: Mapping[str, Points], axes: Axes, limit: Limit | None, size: Size) -> str:
    """Return the drawing of one width."""
    xs = sorted({x for points in series.values() for x, _ in points}) or [0.0]
    ys = [y for points in series.values() for _, y in points if math.isfinite(y)] or [0.0]
    x_ticks, y_ticks = _x_ticks(xs, axes, size), _y_ticks(ys, axes, limit, size)
    right, bottom = size.width - size.right, size.height - size.bottom
    at_x = _Scale(xs[0], xs[-1], size.left, right, axes.doubling)
    low, high = y_ticks[0], y_ticks[-1]
    if not axes.doubling:
        low, high = min(low, *ys), max(high, *ys)
    at_y = _Scale(low, high, bottom, size.top, axes.doubling)
    parts = [_open(size, f"{axes.y} by {axes.x}")]
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(
            f'<line class="grid" x1="{size.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        )
        parts.append(_text(size.left - 8, y + 5, axes.y_format.format(tick), "end"))
    parts += [_text(at_x(x), bottom + 20, axes.x_format.format(x), "middle") for x in x_ticks]
    parts.append(_text((size.left + right) / 2, size.height - 6, axes.x, "middle", "label"))
    parts.append(_text(2, 18, axes.y, "start", "label"))
    if limit is not None:
        y = at_y(limit.value)
        parts.append(
            f'<line class="limit" x1="{size.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        )
        parts.append(_text(right - 4, y - 7, limit.name, "end", "label"))
    for n, (name, points) in enumerate(series.items()):
        placed = [(at_x(x), at_y(y) if math.isfinite(y) else y) for x, y in points]
        parts.append(f'<path class="curve s{n}" d="{_path(placed)}"/>')
        if len(points) <= 12:
            both = zip(points, placed, strict=True)
            parts += [_dot(n, name, point, place, axes) for point, place in both]
    if len(series) > 1:
        parts += _legend(list(series), size)
    return "".join([*parts, "</svg>"])


def _x_ticks(xs: list[float], axes: Axes, size: Size) -> list[float]:
    """Return the lengths themselves, every second where they would touch; or round numbers."""
    if axes.doubling:
        return xs[:: 1 + (len(xs) > size.most_ticks)]
    return [x for x in ticks(xs[0], xs[-1], size.most_ticks) if xs[0] <= x <= xs[-1]]


def _y_ticks(ys: list[float], axes: Axes, limit: Limit | None, size: Size) -> list[float]:
    """Return powers of ten, or round numbers; from 0 where there is a limit."""
    if axes.doubling:
        positive = [y for y in ys if y > 0] or [1.0]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return [10.0**n for n in range(first, max(last, first + 1) + 1)]
    low, high = min(ys), max(ys)
    if limit is not None:
        low, high = 0.0, max(high, limit.value * 1.15)
    return ticks(low, high, size.most_ticks)


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


def _open(size: Size, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{size.name}" width="{size.width}" '
        f'height="{size.height}" viewBox="0 0 {size.width} {size.height}" role="img" '
        f'aria-label="{escape(label)}">'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _dot(
    n: int, name: str, point: tuple[float, float], place: tuple[float, float], axes: Axes
) -> str:
    """Return a point with its numbers, which a browser shows under the pointer."""
    text = f"{name}: {point[1]:.4g} {axes.y} at {axes.x} {point[0]:g}"
    return (
        f'<circle class="dot s{n}" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4.5">'
        f"<title>{escape(text)}</title></circle>"
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


def _legend(names: Sequence[str], size: Size) -> list[str]:
    """Return the names of the series in a row below the title of the vertical axis."""
    parts, x = [], 2.0
    for n, name in enumerate(names):
        parts.append(f'<path class="curve s{n}" d="M{x:.0f} 38L{x + 24:.0f} 38"/>')
        parts.append(_text(x + 30, 43, name, "start", "label"))
        x += 48 + 8.2 * len(name)
    return parts
