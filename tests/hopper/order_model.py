"""The ordered sum of dQ: every order of tiles that the host makes, whichever blocks run first.

    python -m tests.hopper.order_model [--seeds 3]

Blocks take tiles of keys and make their steps one at a time, in a random order. Others may learn
late that a step is done, as far as ``backward_writer.add_dq`` may publish late. No block waits for
ever, and the tiles of keys add to a tile of dQ in one order.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests import emulator
from tests.emulator.values import Pointer

emulator.install()

from rowmax.gpu.hopper.backward_order import (  # noqa: E402
    counter_table,
    neighbour_range,
    step_of,
    steps_before,
    streamed_range,
)
from rowmax.gpu.hopper.backward_tiles import FusedConfig  # noqa: E402
from rowmax.gpu.hopper.lib.order import Tile  # noqa: E402
from tests.hopper.document_spans import sorted_spans  # noqa: E402

BLOCK_Q, BLOCK_K = 64, 128


@dataclass(frozen=True)
class Case:
    nq: int
    nk: int
    left: int | None = None
    right: int | None = None
    used: int | None = None
    documents: str = ""  # sorted, unsorted
    heads: int = 3
    group: int = 1
    section: int = 2
    abreast: bool = False


CASES = [
    Case(512, 512),
    Case(512, 512, right=0),
    Case(300, 900, right=0, group=2),
    Case(900, 300, right=0, section=1),
    Case(200, 1500, right=900, heads=1),
    Case(1000, 1000, left=200, right=0, group=2),
    Case(1000, 1000, left=0, right=0),
    Case(700, 900, left=150, right=70, section=3),
    Case(900, 700, left=300),
    Case(400, 900, used=500, right=0),
    Case(400, 900, used=130),
    Case(400, 900, used=0, right=0),
    Case(1000, 1000, documents="sorted", right=0),
    Case(1000, 700, documents="sorted"),
    Case(600, 900, documents="unsorted"),
    Case(900, 900, documents="unsorted", right=0, left=300),
    Case(1000, 1000, right=0, group=3, abreast=True),
    Case(300, 900, right=0, group=2, abreast=True),
    Case(900, 300, right=0, group=2, section=1, abreast=True),
    Case(200, 1500, right=900, heads=1, group=4, abreast=True),
    Case(400, 900, used=500, right=0, group=2, abreast=True),
    Case(1000, 1000, documents="sorted", right=0, group=2, abreast=True),
    Case(600, 900, documents="unsorted", right=0, group=2, abreast=True),
]


class Block:
    """A block with a tile of keys: its steps, and those of its neighbour that it knows of."""

    def __init__(self, tile: tuple[int, int]) -> None:
        self.tile, self.step, self.seen = tile, 0, 0


def simulate(case: Case, blocks: int, dice: random.Random) -> dict[Any, list[int]]:
    """Return the tiles of keys that have added to each tile of dQ, in their order."""
    C: Any = FusedConfig(
        D=64, DV=64, Q_STAGES=3, DO_STAGES=2,
        ORDERED=True, LEFT=case.left is not None, RIGHT=case.right is not None,
        PREFIX=case.used is not None, DOCUMENTS=bool(case.documents), ABREAST=case.abreast,
    )  # fmt: skip
    n = SimpleNamespace(nq=case.nq, nk=case.nk, left=case.left, right=case.right)
    t = SimpleNamespace(spans=Pointer(spans_of(case)))
    used = case.nk if case.used is None else case.used
    count = -(-case.nk // BLOCK_K)
    table, _ = counter_table(count, BLOCK_K, 1, case.heads, case.section, C.UP)
    offset = case.nk - case.nq

    def tile_of(first: int) -> Tile:
        found = streamed_range(C, first, 0, case.nq, used, offset, t, n)
        lo, hi = (int(x) for x in found)
        return Tile(first, 0, 0, 0, 0, case.nq, used, offset, lo, hi)

    tiles = [tile_of(first) for first in range(0, case.nk, BLOCK_K)]
    before = [[int(x) for x in neighbour_range(C, tile, t, n)] for tile in tiles]
    waiting = [(int(first) // BLOCK_K, int(head)) for first, head, _, _ in table]
    done: dict[tuple[int, int], int] = defaultdict(int)
    published: dict[tuple[int, int], int] = defaultdict(int)
    added: dict[Any, list[int]] = defaultdict(list)
    running: list[Block | None] = [None] * blocks

    def moves(n: int) -> bool:
        """Make one step of block n, or take a tile; return False where it has to wait."""
        block = running[n]
        if block is None:
            if waiting:
                running[n] = Block(waiting.pop(0))
            return running[n] is not None
        key, head = block.tile
        tile = tiles[key]
        if block.step == (tile.hi - tile.lo) * case.group:
            published[block.tile] = block.step
            running[n] = None
            return True
        m, g = (int(n) for n in step_of(C, block.step, tile, case.group))
        ours = int(steps_before(C, g, m, *before[key], case.group))
        if block.seen < ours:
            block.seen = published[key + C.NEIGHBOUR, head]
            if block.seen < ours:
                behind = published[block.tile] < block.step
                published[block.tile] = block.step
                return behind
        assert (ours == 0) == (not added[head, g, m]), "the first to add knows that it is"
        added[head, g, m].append(key)
        block.step += 1
        published[block.tile] = max(published[block.tile], block.step - 1)
        done[block.tile] = block.step
        return True

    while waiting or any(running):
        order = list(range(blocks))
        dice.shuffle(order)
        few = order[: dice.randint(1, blocks)]
        if not sum(moves(n) for n in few):
            assert any(moves(n) for n in order), "all wait"
    for (key, _), steps in done.items():
        assert steps == (tiles[key].hi - tiles[key].lo) * case.group
    return added


def spans_of(case: Case) -> np.ndarray:
    if not case.documents:
        return np.zeros(1, np.int32)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 5, case.nk)
    ids = torch.from_numpy(np.sort(ids) if case.documents == "sorted" else ids)[None]
    at = torch.arange(case.nq).clamp(max=case.nk - 1)
    return sorted_spans(ids, ids[:, at], 1, BLOCK_K, BLOCK_Q, 1)[0].numpy().reshape(-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for case in CASES:
        found = [
            simulate(case, blocks, random.Random(seed))
            for seed in range(options.seeds)
            for blocks in (1, 2, 3, 5, 40)
        ]
        assert all(one == found[0] for one in found), case
    print(f"{len(CASES)} right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
