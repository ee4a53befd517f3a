"""Whose turn it is to add to dQ: every order that the schedule gives, under any luck.

    python -m tests.hopper.turns_model [--seeds 3]

Blocks draw tiles of keys and make their steps one at a time, whichever the dice choose; what a
block has done others may learn late, as far as ``pipeline.take_away`` may tell late. Nobody waits
for ever, and a tile of dQ takes what is added to it in one order, whoever adds and when.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.hopper import language, machine

language.install()

from rowmax.gpu.hopper.documents import tile_spans  # noqa: E402
from rowmax.gpu.hopper.gradients.schedule import (  # noqa: E402
    band,
    neighbour_of,
    order_of,
    passing,
    steps_of,
    turns_before,
)
from rowmax.gpu.hopper.gradients.tiles import GradientConfig  # noqa: E402

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
    """One that has drawn a tile of keys: how far it is, and what it has told."""

    def __init__(self, tile: tuple[int, int]) -> None:
        self.tile, self.step, self.seen = tile, 0, 0


def played(case: Case, blocks: int, dice: random.Random) -> dict[Any, list[int]]:
    """Who has added to each tile of dQ, in which order."""
    C = GradientConfig(
        D=64, DV=64, D_OUT=64, DV_OUT=64, BLOCK_Q=BLOCK_Q, Q_STAGES=3, DO_STAGES=2,
        ORDERED=True, LEFT=case.left is not None, RIGHT=case.right is not None,
        PREFIX=case.used is not None, DOCUMENTS=bool(case.documents), ABREAST=case.abreast,
    )  # fmt: skip
    spans = machine.Pointer(spans_of(case))
    sizes = (case.nq, case.nk, case.left or 0, case.right or 0, spans)
    used = case.nk if case.used is None else case.used
    steps = steps_of(BLOCK_Q, BLOCK_K, case.nq, case.nk, case.left, case.right)
    table, _ = order_of(steps, 1, case.heads, case.section, blocks, True, C.UP)
    offset = case.nk - case.nq

    def tile_of(first: int) -> tuple[Any, ...]:
        lo, hi = (int(n) for n in band(C, first, 0, case.nq, used, offset, sizes))
        return first, 0, 0, 0, 0, case.nq, used, offset, lo, hi

    tiles = [tile_of(first) for first in range(0, case.nk, BLOCK_K)]
    before = [[int(n) for n in neighbour_of(C, tile, sizes)] for tile in tiles]
    waiting = [(int(first) // BLOCK_K, int(head)) for first, head, _, _ in table]
    done: dict[tuple[int, int], int] = defaultdict(int)
    told: dict[tuple[int, int], int] = defaultdict(int)
    added: dict[Any, list[int]] = defaultdict(list)
    running: list[Block | None] = [None] * blocks

    def moved(n: int) -> bool:
        """One step of block n, or a tile drawn; False where it has to wait."""
        block = running[n]
        if block is None:
            if waiting:
                running[n] = Block(waiting.pop(0))
            return running[n] is not None
        key, head = block.tile
        lo, hi = tiles[key][-2:]
        if block.step == (hi - lo) * case.group:
            told[block.tile] = block.step
            running[n] = None
            return True
        m, g = (int(n) for n in passing(C, block.step, lo, hi, case.group))
        ours = int(turns_before(C, g, m, before[key], case.group))
        if block.seen < ours:
            block.seen = told[key + C.NEIGHBOUR, head]
            if block.seen < ours:
                behind = told[block.tile] < block.step
                told[block.tile] = block.step
                return behind
        assert (ours == 0) == (not added[head, g, m]), "the first to add is told that it is"
        added[head, g, m].append(key)
        block.step += 1
        told[block.tile] = max(told[block.tile], block.step - 1)
        done[block.tile] = block.step
        return True

    while waiting or any(running):
        order = list(range(blocks))
        dice.shuffle(order)
        few = order[: dice.randint(1, blocks)]
        if not sum(moved(n) for n in few):
            assert any(moved(n) for n in order), "all wait"
    for tile, count in done.items():
        lo, hi = tiles[tile[0]][-2:]
        assert count == (hi - lo) * case.group
    return added


def spans_of(case: Case) -> np.ndarray:
    if not case.documents:
        return np.zeros(1, np.int32)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 5, case.nk)
    ids = torch.from_numpy(np.sort(ids) if case.documents == "sorted" else ids)[None]
    at = torch.arange(case.nq).clamp(max=case.nk - 1)
    return tile_spans(ids, ids[:, at], BLOCK_K, BLOCK_Q, 1).numpy().reshape(-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for case in CASES:
        found = [
            played(case, blocks, random.Random(seed))
            for seed in range(options.seeds)
            for blocks in (1, 2, 3, 5, 40)
        ]
        assert all(one == found[0] for one in found), case
    print(f"{len(CASES)} right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
