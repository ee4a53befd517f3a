"""The problem of a page: sizes, tiles, masks and random inputs, with the bounds of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.check import Arguments
from ..call.normalize import normalized
from ..call.problem import Problem, Tensors, problem_of
from ..errors import bad
from ..masks import Causal, Documents, Mask, Prefix, Window
from ..rules import mask as mask_rules

#: the masks that a page offers
MASKS = ("none", "causal", "window", "documents", "prefix")
MOST_ROWS = 64
MOST_HEAD_DIM = 16
MOST_TILES = 256


@dataclass(frozen=True)
class Setting:
    """One head of one sequence. None means a value that suits the number of keys.

    Raises:
        ValueError: naming the field, what it got and what it accepts.
    """

    queries: int = 24
    keys: int | None = None
    head_dim: int = 4
    block_q: int = 4
    block_k: int = 4
    window: tuple[int | None, int | None] | None = None
    documents: int = 5
    prefix: int | None = None
    softcap: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (("queries", MOST_ROWS), ("head_dim", MOST_HEAD_DIM)):
            _within(name, getattr(self, name), 1, most)
        _within("keys", self.nk, 1, MOST_ROWS)
        _within("block_q", self.block_q, 1, MOST_ROWS)
        _within("block_k", self.block_k, 1, MOST_ROWS)
        _within("documents", self.documents, 1, MOST_ROWS)
        _within("prefix", self.prefix_length, 0, self.nk)
        tiles = -(-self.queries // self.block_q) * -(-self.nk // self.block_k)
        if tiles > MOST_TILES:
            got = f"{self.block_q} by {self.block_k}, which makes {tiles} tiles"
            raise bad("block_q, block_k", got, f"sizes that make at most {MOST_TILES}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise bad("softcap", self.softcap, "0 (none) or a positive number")
        if not -(2**63) <= self.seed < 2**63:
            raise bad("seed", self.seed, "an integer of 64 bits")

    @property
    def nk(self) -> int:
        """The number of keys."""
        return self.queries if self.keys is None else self.keys

    @property
    def prefix_length(self) -> int:
        """The number of keys that every query sees under the mask "prefix"."""
        return self.nk // 3 if self.prefix is None else self.prefix

    @property
    def window_limits(self) -> tuple[int | None, int | None]:
        """The limits (left, right) of the mask "window"."""
        return (self.nk // 3, 0) if self.window is None else self.window


class Tile(NamedTuple):
    """The numbers of a tile and its ranges; ``state`` is one of ``rules.mask``."""

    i: int
    j: int
    rows: slice
    cols: slice
    state: int


class Call(NamedTuple):
    """One head of one sequence under one mask, in float64."""

    name: str
    text: str  # the mask in a formula
    problem: Problem
    tensors: Tensors
    dout: Tensor  # like out, [1, Nq, 1, D]
    states: Tensor  # ``rules.mask.tile_states``, [tiles of queries, tiles of keys]
    seen: Tensor  # bool [Nq, Nk]
    query_tiles: tuple[slice, ...]
    key_tiles: tuple[slice, ...]

    def tile(self, i: int, j: int) -> Tile:
        """Return the tile of these numbers."""
        return Tile(i, j, self.query_tiles[i], self.key_tiles[j], int(self.states[i, j]))

    def tiles_of_queries(self, i: int) -> Iterator[Tile]:
        """Yield the tiles of keys that a tile of queries visits, in order."""
        tiles = (self.tile(i, j) for j in range(len(self.key_tiles)))
        return (tile for tile in tiles if tile.state != mask_rules.SKIP)

    def tiles_of_keys(self, j: int) -> Iterator[Tile]:
        """Yield the tiles of queries that a tile of keys visits, in order."""
        tiles = (self.tile(i, j) for i in range(len(self.query_tiles)))
        return (tile for tile in tiles if tile.state != mask_rules.SKIP)


def calls(setting: Setting) -> Iterator[Call]:
    """Yield the call of each mask, all with the same q, k, v and dout."""
    nq, nk, d = setting.queries, setting.nk, setting.head_dim
    random = torch.Generator().manual_seed(setting.seed)
    q, k, v, dout = (
        torch.randn(1, n, 1, d, generator=random, dtype=torch.float64) for n in (nq, nk, nk, nq)
    )
    q = 1.5 * q  # scores differ enough for the maximum to move
    for name in MASKS:
        mask, text = _mask(setting, name)
        given = Arguments(q, k, v, mask, softcap=setting.softcap)
        tensors, options, _ = normalized(given)
        problem = problem_of(tensors, options)
        blocks = setting.block_q, setting.block_k
        yield Call(
            name,
            text,
            problem,
            tensors,
            dout,
            mask_rules.tile_states(problem, tensors, *blocks)[0, 0],
            mask_rules.dense(problem, tensors).expand(1, 1, nq, nk)[0, 0],
            _cuts(nq, setting.block_q),
            _cuts(nk, setting.block_k),
        )


def _mask(setting: Setting, name: str) -> tuple[Mask, str]:
    """Return the mask of this name, and its definition with the numbers of the setting."""
    nk, offset = setting.nk, setting.nk - setting.queries
    if name == "causal":
        return Causal(), f"j ≤ {_shifted(offset)}"
    if name == "window":
        left, right = setting.window_limits
        low = "" if left is None else f"{_shifted(offset - left)} ≤ "
        high = "" if right is None else f" ≤ {_shifted(offset + right)}"
        return Window(left, right), f"{low}j{high}" if low or high else "every pair"
    if name == "documents":
        n = setting.documents
        ids, q_ids = (x * n // nk for x in (torch.arange(nk), torch.arange(offset, nk)))
        return Documents(ids, q_ids=q_ids), f"query and key in the same of {n} documents"
    if name == "prefix":
        length = setting.prefix_length
        return Prefix(torch.tensor([length])), f"j < {length} or j ≤ {_shifted(offset)}"
    return Mask(), "every pair"


def _shifted(n: int) -> str:
    """Return ``i + n`` in the shortest form."""
    return "i" if n == 0 else f"i {'+' if n > 0 else '−'} {abs(n)}"  # noqa: RUF001


def _cuts(n: int, block: int) -> tuple[slice, ...]:
    return tuple(slice(x, min(x + block, n)) for x in range(0, n, block))


def _within(name: str, got: int, least: int, most: int) -> None:
    if not least <= got <= most:
        raise bad(name, got, f"{least} to {most}")
