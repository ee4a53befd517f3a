"""Draw the pictures of chapters 6 and on: a band, the Hopper forward and its clocks, devices.

    python docs/pictures/schedules.py

It writes each picture for light and dark, next to this file.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from derivation import picture
from tiles import THEMES, Colors, rect, text

#: the band of the picture: four queries, sixteen keys, tiles of two keys
QUERIES, KEYS, TILE = range(8, 12), 16, 2
BACK, AHEAD = 6, 1

KERNEL = Path(__file__).parents[2] / "src/rowmax/gpu/hopper/forward_kernel.py"
#: the calls of the kernel's ``step`` that the picture shows, each with its words
CALLS = {
    "issue_scores": "issue S(n) = Q K(n)",
    "issue_output": "issue O += P(n-1) V(n-1)",
    "wait_scores": "wait for S(n)",
    "ring.release(shared.k)": "release K(n)",
    "softmax_step": "mask and softmax of S(n)",
    "ring.wait_full(shared.k)": "wait for K(n+1)",
    "wait_output": "wait for O",
    "ring.release(shared.v)": "release V(n-1)",
    "scaled_rows": "rescale O",
}
#: functions of the kernel that have some of these calls
PARTS = ("issue_products", "finish_output")
#: clocks that the kernel stored (benchmarks/clocks.py)
CLOCKS = Path(__file__).parents[2] / "benchmarks/results/hopper_clocks.csv"
#: by cell: the first use of K in the picture of clocks, and the clocks that are drawn
SEEN = {"D64 N16384 full": (41, 8000), "D128 N16384 full": (41, 8000)}
#: the parts of a step: from an event to the next one, or to the next step
SPANS = (
    ("begin", "products issued", "issue S and O += P V"),
    ("scores done", "softmax done", "softmax"),
    ("softmax done", "begin", "wait for O, rescale, round"),
)
#: the layouts of the picture: the device of each of eight chunks, for four devices
DEVICES = 4
LAYOUTS = {"contiguous": (0, 0, 1, 1, 2, 2, 3, 3), "zigzag": (0, 1, 2, 3, 3, 2, 1, 0)}

#: the width of the softmax in the picture: it is the longest part of a step on the threads
SOFTMAX = 4


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


def order_of_step(source: str) -> list[str]:
    """Return the names of ``CALLS`` in the order in which the kernel's ``step`` has them.

    ``PARTS`` of the step are functions of their own. The picture shows their branch for overlap.
    """
    functions = {
        node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    found: list[str] = []

    def add(nodes: list[ast.stmt]) -> None:
        calls = [x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Call)]
        for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            name = ast.unparse(call.func)
            if name in PARTS:
                (overlap,) = (x for x in functions[name].body if isinstance(x, ast.If))
                assert ast.unparse(overlap.test) == "C.OVERLAP"
                add(overlap.body)
            if name.startswith("ring."):
                name = f"{name}({ast.unparse(call.args[0])})"
            if name in CALLS and name not in found:  # O has two parts
                found.append(name)

    add(functions["step"].body)
    return found


def schedule(c: Colors) -> Iterator[str]:
    """Yield two steps of a warpgroup: the copies, the tensor core, and the threads."""
    order = order_of_step(KERNEL.read_text(encoding="utf-8"))
    left, unit, height = 118, 27, 24
    tops = {"copies": 40, "tensor core": 84, "threads": 128}
    widths = [SOFTMAX if name == "softmax_step" else 1 for name in order]
    starts = [sum(widths[:n]) for n in range(len(order) + 1)]
    length = starts[-1]
    for name, top in tops.items():
        yield text(left - 12, top + 17, name, c.text, 12, "end")
    for n in range(2):
        at = {name: n * length + start for name, start in zip(order, starts, strict=False)}
        tile = f"n{'+1' * n}"
        before = "n-1" if n == 0 else "n"

        def bar(lane: str, begin: float, end: float, words: str, fill: str) -> Iterator[str]:
            x, y = left + begin * unit, tops[lane]
            stroke = c.step if lane == "copies" else c.line
            yield rect(x + 1, y, (end - begin) * unit - 2, height, fill, stroke)
            yield text(x + (end - begin) * unit / 2, y + 16, words, c.text, 11, "middle")

        seen = at["wait_scores"] + 1
        yield from bar("tensor core", at["issue_scores"] + 1, seen, f"S({tile})", c.partial)
        done = at["wait_output"] + 1
        yield from bar("tensor core", seen, done, f"O += P({before}) V({before})", c.partial)
        key, value = at["ring.release(shared.k)"] + 1, at["ring.release(shared.v)"] + 1
        yield from bar("copies", key, key + 3, f"K({'n+2' if n == 0 else 'n+3'})", "none")
        yield from bar("copies", value, value + 3, f"V({'n+1' if n == 0 else 'n+2'})", "none")
        for number, (name, width) in enumerate(zip(order, widths, strict=True), 1):
            words = f"softmax({tile})" if name == "softmax_step" else str(number)
            fill = c.partial if name == "softmax_step" else "none"
            yield from bar("threads", at[name], at[name] + width, words, fill)
    for number, name in enumerate(order, 1):
        x, y = left + 240 * ((number - 1) // 3), 186 + 20 * ((number - 1) % 3)
        yield text(x, y, f"{number}  {CALLS[name]}", c.faint, 12)


def stored_clocks(cell: str) -> dict[int, dict[int, dict[str, int]]]:
    """Return the clock of each event of a cell, by part and use of K."""
    found: dict[int, dict[int, dict[str, int]]] = {}
    with CLOCKS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["cell"] == cell:
                uses = found.setdefault(int(row["part"]), {})
                uses.setdefault(int(row["use"]), {})[row["event"]] = int(row["clock"])
    return found


def spans_of(uses: dict[int, dict[str, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (number of a span of ``SPANS``, its begin, its end) of a warpgroup."""
    for use, at in uses.items():
        for n, (begin, end, _) in enumerate(SPANS):
            after = uses.get(use + 1, {}) if end == "begin" else at
            if begin in at and end in after:
                yield n, at[begin], after[end]


def clocks(c: Colors) -> Iterator[str]:
    """Yield measured steps of each warpgroup, for two head sizes, over clocks."""
    left, width, height = 118, 740, 22
    fills = (c.full, c.partial, "none")
    top = 34
    for cell, (first, length) in SEEN.items():
        found = stored_clocks(cell)
        producer = max(found)
        start = min(found[part][first]["begin"] for part in range(producer))
        unit = width / length
        yield text(left, top - 12, cell.replace(" full", ", full"), c.text, 13)
        for part in range(producer):
            y = top + part * (height + 6)
            yield text(left - 12, y + 15, f"warpgroup {part}", c.text, 12, "end")
            for n, begin, end in spans_of(found[part]):
                x0, x1 = (min(max(x - start, 0), length) * unit for x in (begin, end))
                if x1 > x0:
                    yield rect(round(left + x0, 1), y, round(x1 - x0, 1), height, fills[n], c.line)
        y = top + producer * (height + 6)
        yield text(left - 12, y + 15, "copies", c.text, 12, "end")
        for use, at in found[producer].items():
            for event, name in (("K issued", "K"), ("V issued", "V")):
                x = (at[event] - start) * unit
                if 0 <= x <= width:
                    words = f"{name}({use if name == 'K' else use - 1})"
                    yield text(round(left + x, 1), y + 15, words, c.faint, 11, "middle")
        for clock in range(0, length + 1, 1000):
            yield text(left + clock * unit, y + 38, str(clock), c.faint, 11, "middle")
        top = y + 86
    for n, (_, _, words) in enumerate(SPANS):
        x = left + 250 * n
        yield rect(x, top - 34, 14, 14, fills[n], c.line)
        yield text(x + 20, top - 22, words, c.faint, 12)


def devices(c: Colors) -> Iterator[str]:
    """Yield the causal tiles of the chunks of four devices, and the work of each device."""
    cell, top = 24, 40
    for n, (name, owners) in enumerate(LAYOUTS.items()):
        left = 84 + 400 * n
        yield text(left, 22, name, c.text, 15)
        work = [0.0] * DEVICES
        for i, owner in enumerate(owners):
            yield text(left - 10, top + i * cell + 16, f"device {owner}", c.faint, 12, "end")
            work[owner] += i + 0.5
            for j in range(len(owners)):
                fill = c.full if j < i else c.partial if j == i else "none"
                yield rect(left + j * cell, top + i * cell, cell - 2, cell - 2, fill, c.line)
        across = left + len(owners) * cell + 16
        yield text(across, top - 6, "full tiles", c.faint, 12)
        for owner, tiles in enumerate(work):
            y = top + 2 * owner * cell
            yield rect(across, y + 12, 5 * tiles, 18, c.partial, c.line)
            yield text(across + 5 * tiles + 6, y + 26, f"{owner}: {tiles:g}", c.text, 12)


PICTURES = {
    "band": Picture("A band: the keys that some, and all, queries of a tile see.", 600, 260, band),
    "schedule": Picture("Two steps of the Hopper forward, in order.", 880, 244, schedule),
    "clocks": Picture("Measured steps of the Hopper forward, in clocks.", 880, 366, clocks),
    "devices": Picture("Causal work of four devices in two layouts.", 780, 244, devices),
}


def main(folder: Path = Path(__file__).parent) -> None:
    """Write the pictures of each theme."""
    for mode, colors in THEMES.items():
        for name, (title, width, height, draw) in PICTURES.items():
            content = picture(title, width, height, draw(colors))
            (folder / f"{name}-{mode}.svg").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
