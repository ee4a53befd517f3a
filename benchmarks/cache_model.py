"""Predict which steps of a Hopper backward find their queries in the L2 cache.

    python -m benchmarks.cache_model --cells "b=8 hq=32 hk=8 d=128 n=2048|4096 causal=1" --mib 24 40

Every block makes a step at a time, all at the same speed. A step reads Q and dO, and adds dQ, of a
tile of queries of one head. The cache has the tiles that were used last. The orders:

    dense   the table of the host: each block has tiles of its own
    drawn   tiles from a counter, as packed sequences have them: a block draws a tile as soon as it
            begins the one before
    late    the same, drawn at the end of the tile before
    runs    the same, the longest tiles of the last sequences first (gpu/hopper/packed.py)

Printed are the steps that miss, and the part of the time in which a block has steps. Of a cell only
``b``, ``hq``, ``hk``, ``d``, ``n`` and ``causal`` are read.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple
from unittest import mock

import torch

from rowmax.bench.cells import Cell, cells
from rowmax.call.inputs import Options, Tensors
from rowmax.call.problem import Problem, problem_of
from rowmax.gpu.hopper import backward_plan
from rowmax.gpu.hopper.backward_order import counter_table
from rowmax.gpu.hopper.backward_tiles import LATE_RUNS, FusedConfig, config_for, tiles_of

PROCESSORS = 132
#: sizes of packed sequences whose backward is slow, and of heads with kv heads of their own
CELLS = [
    "b=8 hq=32 hk=8 d=128 n=2048 causal=1",
    "b=2 hq=32 hk=8 d=128 n=8192 causal=1",
    "b=2 hq=16 d=128 n=8192 causal=1",
]


class Tile(NamedTuple):
    """A tile of keys of a kv head."""

    sequence: int
    head: int
    first: int  # its first key


class Result(NamedTuple):
    """Shares of an order."""

    misses: float  # steps that miss, of all
    busy: float  # time with steps, of the time of all blocks


def problem(cell: Cell) -> Problem:
    """Return a call in bfloat16."""
    q, k = (
        torch.empty(cell.b, cell.n, h, cell.d, dtype=torch.bfloat16, device="meta")
        for h in (cell.hq, cell.hk)
    )
    options = Options(scale=1.0, right=0 if cell.causal else None)
    return problem_of(Tensors(q, k, k), options)._replace(device="cuda")


def steps(
    p: Problem, c: FusedConfig, tile: Tile, abreast: bool = False
) -> Iterator[tuple[int, ...]]:
    """Yield what each step of a tile reads: the place of a tile of queries."""
    first = tile.first // c.BLOCK_STREAMED if p.right == 0 else 0
    queries = range(-(-p.nq // c.BLOCK_STREAMED) - 1, first - 1, -1)
    heads = range(p.group)
    every = (
        ((g, m) for m in queries for g in heads)
        if abreast
        else ((g, m) for g in heads for m in queries)
    )
    return ((tile.sequence, tile.head, *at) for at in every)


def dense_order(p: Problem, c: FusedConfig) -> list[list[Tile]]:
    """Return the tiles of each block in the order of the host, where another launch rounds dq."""
    with mock.patch.object(backward_plan, "processors", return_value=PROCESSORS):
        blocks, table, ends = backward_plan.order_for(p, c, torch.device("cpu"))
    assert table is not None
    assert ends is not None
    rows = [table[block:end:blocks].tolist() for block, end in enumerate(ends.tolist())]
    return [[Tile(b, head, first) for first, head, b, _ in mine] for mine in rows]


def drawn_order(p: Problem, c: FusedConfig) -> list[Tile]:
    """Return the tiles in the order of a counter: one sequence after another, in sections."""
    many = backward_plan.SECTION_BYTES // (backward_plan.query_bytes(p) * p.nq)
    tiles = -(-p.nk // c.BLOCK_RESIDENT)
    table, _ = counter_table(tiles, c.BLOCK_RESIDENT, 1, p.hk, max(1, many), False)
    return [Tile(b, head, first) for b in range(p.batch) for first, head, _, _ in table.tolist()]


def in_runs(p: Problem, c: FusedConfig, tiles: list[Tile]) -> list[Tile]:
    """Return the tiles with those of the last sequences in runs of halved lengths.

    A sequence is one of the last if those after it end before its longest tile.
    """
    longest = min(p.nq, p.nk)
    work = p.hk * longest * (p.nk - longest / 2) / c.BLOCK_RESIDENT
    last = -(-longest * PROCESSORS // max(work, 1.0))  # sequences

    def run_of(tile: Tile) -> int:
        if tile.sequence < p.batch - last:
            return 0
        seen = min(p.nq, p.nk - tile.first)
        parts = (r for r in range(LATE_RUNS - 1) if seen > longest >> (r + 1))
        return next(parts, LATE_RUNS - 1)

    return sorted(tiles, key=run_of)


def drawn_by_blocks(tiles: Iterable[Tile], ahead: bool) -> list[Iterator[Tile]]:
    """Return the tiles of each block, which takes them from a counter of all blocks.

    ``ahead``: a block draws a tile as it begins the one before, else at the end of that.
    """
    counter = iter(tiles)

    def block(first: Tile | None) -> Iterator[Tile]:
        tile = first
        while tile is not None:
            coming = next(counter, None) if ahead else None
            yield tile
            tile = coming if ahead else next(counter, None)

    firsts = [next(counter, None) for _ in range(PROCESSORS)]
    return [block(first) for first in firsts]


def run(blocks: list[Iterator[tuple[int, ...]]], room: int) -> Result:
    """Make the steps of all blocks; the cache has ``room`` tiles of queries."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    rounds, total, misses, live = 0, 0, 0, blocks
    while live:
        rounds += 1
        going = []
        for block in live:
            at = next(block, None)
            if at is None:
                continue
            going.append(block)
            total += 1
            misses += at not in cache
            cache[at] = None
            cache.move_to_end(at)
            if len(cache) > room:
                cache.popitem(last=False)
        live = going
    return Result(misses / total, total / (len(blocks) * (rounds - 1)))


def predict(p: Problem, mib: float, abreast: bool = False) -> dict[str, Result]:
    """Return the result of each order; ``abreast``: a step of each head of a group in turn."""
    c = config_for(p, tiles_of(p, False)[0], COMPLETE=False)
    assert isinstance(c, FusedConfig)
    room = int(mib * 2**20 / (backward_plan.query_bytes(p) / p.group * c.BLOCK_STREAMED))

    def walk(tiles: Iterable[Tile]) -> Iterator[tuple[int, ...]]:
        return (at for tile in tiles for at in steps(p, c, tile, abreast))

    found = {"dense": run([walk(mine) for mine in dense_order(p, c)], room)}
    tiles = drawn_order(p, c)
    orders = [("drawn", tiles, True), ("late", tiles, False)]
    if p.right is not None:
        orders.append(("runs", in_runs(p, c, tiles), False))
    for name, order, ahead in orders:
        blocks = drawn_by_blocks(order, ahead)
        found[name] = run([walk(block) for block in blocks], room)
    return found


def main() -> None:
    """Print the results of cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--mib", nargs="+", type=float, default=[24.0, 40.0])
    parser.add_argument(
        "--abreast", action="store_true", help="a step of each head of a group in turn"
    )
    given = parser.parse_args()
    for cell, mib in product([x for text in given.cells for x in cells(text)], given.mib):
        for name, result in predict(problem(cell), mib, given.abreast).items():
            text = f"misses {result.misses:.3f} busy {result.busy:.3f}"
            print(f"{cell.name} {mib:g} MiB  {name:6} {text}")


if __name__ == "__main__":
    main()
