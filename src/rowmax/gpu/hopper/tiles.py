# ruff: noqa: N802  (names that kernels read are in capitals)
"""Tile shapes for an H100 or H200, as data, and the constants of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from ...call.flops import forward_flops
from ...call.problem import Problem
from .lib.order import tile_count

ROWS = 64  # query rows of one warpgroup: the height of a wgmma
SHARED = 227 * 1024  # bytes of shared memory a block may have
#: bytes of shared memory for a warpgroup's conversion of its output, and for all barriers
SCRATCH = 2304
BARRIERS = 1024


@dataclass(frozen=True)
class Tile:
    """A tile of ``64 warpgroups`` rows by ``block_k`` keys.

    ``k_stages`` are buffers of K, ``v_stages`` of V, ``q_stages`` of Q, ``b_stages`` of a copied
    bias. Registers are those of a consumer's thread and of the producer's. ``overlap``: a
    warpgroup's products run under its own softmax; else under that of the other warpgroups. A block
    has one tile at a time on each of its ``sides``, which share only the buffers of the bias.
    """

    warpgroups: int
    block_k: int
    k_stages: int
    v_stages: int
    q_stages: int
    b_stages: int = 1
    registers: tuple[int, int] = (240, 24)
    ordered: bool = False  # warpgroups issue their products in turn
    overlap: bool = True
    strip: bool = False  # b_stages are all key tiles: sequences share the bias of a query tile
    sides: int = 1
    onto_bias: bool = False  # products add scores to the bias


#: by (D, Dv), both padded to one of the sizes below
TILES = {
    (32, 32): Tile(2, 128, 4, 4, 2),
    (64, 64): Tile(2, 128, 4, 4, 2),
    (80, 80): Tile(2, 128, 2, 2, 2),
    (96, 96): Tile(2, 128, 2, 2, 2),
    (128, 128): Tile(2, 128, 2, 2, 2),
    (192, 128): Tile(2, 128, 2, 2, 1),
    (192, 192): Tile(2, 64, 2, 2, 2),
    (256, 256): Tile(2, 64, 2, 2, 1),
    (512, 256): Tile(2, 32, 2, 2, 1),
    (576, 256): Tile(2, 32, 1, 2, 1),
    # both warpgroups have the same rows (forward_wide.py)
    (512, 512): Tile(2, 32, 2, 2, 1),
    (576, 512): Tile(2, 32, 2, 2, 1),
}
#: tiles of one warpgroup, for processors that have no more rows: one warpgroup finishes sooner, and
#: with more buffers fewer loads wait
FEW = {
    (32, 32): Tile(1, 128, 4, 4, 1),
    (64, 64): Tile(1, 128, 4, 4, 1),
    (80, 80): Tile(1, 128, 4, 4, 1),
    (96, 96): Tile(1, 128, 4, 4, 1),
    (128, 128): Tile(1, 128, 3, 3, 1),
    (192, 128): Tile(1, 128, 2, 2, 1),
    (192, 192): Tile(1, 64, 4, 4, 1),
    (256, 256): Tile(1, 64, 3, 3, 1),
    (512, 256): Tile(1, 32, 3, 3, 1),
    (576, 256): Tile(1, 32, 2, 3, 1),
    (512, 512): TILES[512, 512],
    (576, 512): TILES[576, 512],
}
SIZES = (32, 64, 80, 96, 128, 192, 256, 512, 576)
#: columns of values for which a consumer's registers hold the output; for more there are launches
MOST_COLUMNS = 256
#: head size 64 without score terms, with many keys: three warpgroups. Taller tiles waste more at
#: the end of a sequence, on a diagonal and at the edge of a window. Turns are taken (config_for)
#: where they were measured: without packed sequences or prefixes
LONG_64 = Tile(3, 128, 4, 4, 2, registers=(160, 32), ordered=True)
#: words of local memory that a thread of that tile may use. Compiled by triton 3.6.0 (ptxas 12.8 or
#: 12.9) it uses 0, causal 8 and under a window 16, by triton 3.7 under a window 36, by triton 3.9.0
#: 32, all once a query tile. Compiled by triton 3.9.0 it uses 56, causal, and 38 to 56 under a
#: window, also in its loops over keys
LONG_64_SPILLS = 36
#: the same with columns in two parts, for more keys than were measured with two warpgroups. Three
#: have no registers to overlap their own products and softmax
_LONG_PARTS = Tile(3, 128, 3, 2, 1, registers=(160, 32), overlap=False)
LONG = {
    (32, 32): LONG_64,
    (64, 64): LONG_64,
    (80, 80): replace(_LONG_PARTS, v_stages=3),
    (96, 96): _LONG_PARTS,
}
#: by head size and mask, the keys of a query above which three warpgroups are faster; above head
#: size 64 also the queries
LONG_KEYS = {
    (32, "full"): 768,
    (64, "full"): 1536,
    **dict.fromkeys([(32, "causal"), (64, "causal")], 3072),
    **dict.fromkeys([(d, mask) for d in (80, 96) for mask in ("full", "causal")], 8192),
}
#: by head sizes and mask, the operations from which on the reference lags (``lags``): where it was
#: measured. 5e11 take 0.7 ms, and the second launch 8 us.
LAGS_OPERATIONS: dict[tuple[tuple[int, int], str], float] = {
    ((32, 32), "full"): 1e12,
    ((64, 64), "full"): 5e11,
    ((64, 64), "causal"): 5e11,
    ((80, 80), "full"): 5e11,
    ((80, 80), "causal"): 2.5e11,
    ((96, 96), "full"): 1e12,
    ((96, 96), "causal"): 1e12,
    ((128, 128), "full"): 2.5e11,
    ((128, 128), "causal"): 2.5e11,
    ((192, 128), "full"): 5e11,
    ((192, 128), "causal"): 2.5e11,
    ((192, 192), "full"): 1e12,
    ((192, 192), "causal"): 5e11,
    ((64, 64), "window"): 2.5e11,
}
#: likewise the keys of a query above which it lags: with two warpgroups it was slower, and in a
#: window of 1024 keys no faster
LAGS_KEYS = {((96, 96), "full"): LONG_KEYS[96, "full"], ((64, 64), "window"): 2000}
#: the most keys of a query in a window whose tiles have 64 keys: fewer of a tile's are masked.
#: Measured at head sizes of 32, 64, 96 and 128
NARROW = 384
#: the fewest tiles of a block, and of sequences and heads, that share a strip of a bias
STRIP_SHARERS = 4
#: the most heads that share a tile, unless queries are few. Tiles of 128 rows then have 16
#: positions; with fewer they would save few keys more
SHARING = 8
#: heads share tiles that have fewer steps than so many of those of tiles of one head
FEWER_STEPS = 0.99
#: four consumers: products of one run under the softmax of the others
_FOUR = {"block_k": 64, "q_stages": 1, "registers": (112, 24), "overlap": False}
#: the operations from which on four consumers add products to the bias (``onto_bias``)
ONTO_OPERATIONS = 3e10
_SIDES = {"sides": 2, "warpgroups": 2, "k_stages": 4, "v_stages": 4, **_FOUR}
#: by preference, the changes of a tile with a strip; at head sizes of 32 alone with four
#: consumers. Sides of one warpgroup have half the strip, and read keys twice as often.
STRIPS: tuple[dict[str, Any], ...] = (
    _SIDES,
    {"sides": 4, "warpgroups": 1, "k_stages": 2, "v_stages": 2, **_FOUR},
    {"k_stages": 4, "v_stages": 4},
    {"k_stages": 4, "v_stages": 4, "q_stages": 1},
    {"k_stages": 2, "v_stages": 2, "q_stages": 1},
    {"block_k": 64, "k_stages": 4, "v_stages": 4, "q_stages": 1},
    {"block_k": 64, "k_stages": 2, "v_stages": 2, "q_stages": 1},
)


class Widths:
    """The parts of columns of a tile (lib/parts.py), and its ends, for all kernels."""

    D: int
    DV: int
    VARLEN: bool
    PREFIX: bool

    @property
    def D0(self) -> int:
        return first_part(self.D)

    @property
    def D1(self) -> int:
        return self.D - self.D0

    @property
    def DV0(self) -> int:
        return first_part(self.DV)

    @property
    def DV1(self) -> int:
        return self.DV - self.DV0

    @property
    def PADDED(self) -> bool:
        """Return True if a key tile may end past its sequence, in values that must not be read."""
        return self.VARLEN or self.PREFIX


@dataclass(frozen=True)
class Config(Widths):
    """The constants of one kernel, under the names that the kernel uses."""

    D: int  # head sizes of the tile
    DV: int
    DV_OUT: int  # the columns of values and the output, DV or less
    OUT_ROW: int  # the numbers of a row of the output: more, if other launches make the others
    BLOCK_K: int
    K_STAGES: int
    V_STAGES: int
    Q_STAGES: int
    WARPGROUPS: int
    GROUP: int = 1  # query heads of a kv head that share a tile
    LEFT: bool = False  # the band has a left limit
    RIGHT: bool = False
    APART: bool = False  # no key tile is cut by both limits of the band, nor the last by its left
    VARLEN: bool = False
    PREFIX: bool = False
    DOCUMENTS: bool = False
    SOFTCAP: bool = False
    ALIBI: bool = False
    SINK: bool = False
    DROPOUT: bool = False
    BIAS: str = ""  # path of the bias (host.bias_path), or none
    B_STAGES: int = 1  # buffers of a copied bias
    STRIP: int = 0  # key tiles of a bias that a block keeps for all its sequences; 0: none
    ONTO_BIAS: bool = False  # products add scores to the bias, with the scale in Q (``onto_bias``)
    SIDES: int = 1
    EVEN_K: bool = False  # key tiles fill every sequence's keys
    STAGED: int = 0  # columns of the output that TMA copies at a time; 0: threads store them
    TURNED: bool = False  # threads convert rows for stores of 16 bytes
    NATURAL: bool = False  # scores and the reference are in natural units (Problem.natural)
    ROUND_LATE: bool = False  # round the weights after the product that overlaps with their softmax
    ORDERED: bool = False  # warpgroups issue their products in turn
    CLOCKS: int = 0  # events, a bit each, whose clocks the first block stores (lib/clocks.py)
    OVERLAP: bool = True  # O of a key tile runs under the softmax of the next
    LAGS: bool = False  # full tiles take no maximum; lse of an overflowed row is NaN
    MENDS: bool = False  # only tiles with such a row are computed
    CONSUMER_REGISTERS: int = 240  # registers of a thread
    PRODUCER_REGISTERS: int = 24

    @property
    def TOKENS(self) -> int:
        """Return the query positions of one warpgroup."""
        return ROWS // self.GROUP

    @property
    def ROW_GROUPS(self) -> int:
        """Return the warpgroups that have rows, and scores, of their own."""
        return self.WARPGROUPS

    @property
    def TILE(self) -> int:
        """Return the query positions of all warpgroups."""
        return self.ROW_GROUPS * self.TOKENS

    @property
    def DRAWN(self) -> bool:
        """Return True if blocks take tiles from a counter: lengths are only on the device."""
        return (self.VARLEN or self.DOCUMENTS) and not self.MENDS

    @property
    def SOUGHT(self) -> bool:
        """Return True if a block cannot know its next tile before it takes it."""
        return self.DRAWN or self.MENDS

    @property
    def LAST_FIRST(self) -> bool:
        """Return True if the last tile of a sequence is the longest."""
        return self.RIGHT

    @property
    def FLYING(self) -> int:
        """Return the products that stay in flight while a warpgroup waits for its scores.

        Each part of O is one. Both were measured in flight at head size 80; at 96 that is slower.
        """
        if not self.OVERLAP:
            return 0
        return 2 if self.DV == 80 else 1

    @property
    def FIRST_LAGS(self) -> bool:
        """Return True if the first step of a query tile takes no maximum, either.

        At 384 and 512 keys that was 1.02 to 1.03 times as fast, at 768 it took 1.10 times as long.
        """
        return self.ONTO_BIAS and 0 < self.STRIP * self.BLOCK_K <= 512

    @property
    def FOLLOWS_LATE(self) -> bool:
        """Return True if a reference that lags follows a tile's weights before they are rounded.

        Under a causal mask three warpgroups would spill if it followed in the next step.
        """
        return self.LAGS and self.ROUND_LATE and self.RIGHT

    @property
    def SKIPS(self) -> bool:
        """Return True if a warp whose reference stays does not multiply O, in a full key tile.

        Three warpgroups would spill under a causal mask.
        """
        return self.LAGS or not (self.ROUND_LATE and self.RIGHT)

    @property
    def UNROUNDED(self) -> bool:
        """Return True if a step's softmax does not round its weights."""
        return self.ROUND_LATE or self.DROPOUT

    @property
    def ADDED(self) -> bool:
        """Return True if there are terms that the scale does not multiply."""
        return self.ALIBI or bool(self.BIAS)


@dataclass(frozen=True)
class WideConfig(Config):
    """The constants of ``forward_wide.py``: two warpgroups share rows, and each has half of V."""

    @property
    def DV0(self) -> int:
        return self.DV // 2

    @property
    def DV1(self) -> int:
        return self.DV // 2

    @property
    def ROW_GROUPS(self) -> int:
        return 1


class Constants:
    """A config as kernels read it: every name in capitals is a constexpr."""

    def __init__(self, config: Any) -> None:
        self.config = config
        for name in filter(str.isupper, dir(config)):
            value = getattr(config, name)
            value = Constants(value) if is_dataclass(value) else value  # half of a step
            setattr(self, name, gl.constexpr(value))

    def __repr__(self) -> str:
        """Return every name and value: caches on disk know a kernel by this text and its source."""
        values = {name: getattr(self, name).value for name in filter(str.isupper, vars(self))}
        return f"{type(self.config).__name__}({values})"

    def __hash__(self) -> int:
        return hash(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.config == other.config


def first_part(d: int) -> int:
    """Return the largest power of two in d: shapes are powers of two, so 96 is 64 + 32."""
    return 1 << (d.bit_length() - 1)


def dense(p: Problem) -> bool:
    """Return True without a bias and without tiles that end past their sequence.

    Tiles of 80 columns, and LONG above head size 64, were measured on such calls.
    """
    return p.bias is None and not (p.varlen or p.prefix)


def sizes_of(p: Problem) -> tuple[int, int]:
    """Return the head sizes of the tile that holds (d, dv); missing columns read as zero."""
    sizes = [size for size in SIZES if size != 80 or dense(p)]
    big, big_v = (next(size for size in sizes if size >= n) for n in (p.d, p.dv))
    both = max(big, big_v)
    return (big, big_v) if (big, big_v) in TILES else (both, min(both, MOST_COLUMNS))


def is_wide(p: Problem, bias: str) -> bool:
    """Return True if one launch computes all columns of values wider than MOST_COLUMNS.

    Keys must be as wide. With a bias each launch computes its scores again.
    """
    return min(p.d, p.dv) > MOST_COLUMNS and p.dv <= 512 and not bias


def is_long(p: Problem, d: int, few: bool) -> bool:
    """Return True if three warpgroups are faster at head size d; ``few``: rows are few."""
    keys = LONG_KEYS[d, "full" if p.right is None else "causal"]
    if d <= 64:
        return p.most_seen > keys
    return dense(p) and not few and min(p.nq, p.most_seen) > keys


def is_narrow(p: Problem, tile: Tile) -> bool:
    """Return True if tiles of half the keys are faster, under a window."""
    return p.left is not None and p.most_seen <= NARROW and tile.block_k == 128


def tile_for(
    p: Problem, bias: str, processors: int, spilled: bool = False, held: bool = True
) -> Tile:
    """Return the tile of a problem with a bias of this path.

    ``spilled``: the second best, if the kernel of three warpgroups spilled registers. ``held``:
    blocks may keep a bias that sequences share.
    """
    d, dv = sizes_of(p)
    tile = TILES[d, dv]
    rows = p.total_q // ROWS + p.batch if p.varlen else -(-p.nq // ROWS) * p.batch
    few = rows * p.hq <= processors
    if few:
        tile = FEW[d, dv]
    plain = not (bias or p.heads or p.documents or p.softcap > 0 or p.dropout_p > 0)
    if not spilled and plain and (d, dv) in LONG and is_long(p.usual, d, few):
        return LONG[d, dv]
    if plain and not few and is_narrow(p.usual, tile):
        return replace(tile, block_k=64, k_stages=4, v_stages=4)
    if bias in ("row", "gathered"):  # numbers in flight need registers too
        return replace(tile, block_k=64 if dv <= 128 else 32)
    if bias != "copied":
        return tile
    assert p.bias_dtype is not None
    strip = strip_for(p, tile, processors) if held else None
    if strip is not None:
        return strip
    one = replace(tile, q_stages=1)
    two = replace(one, k_stages=2, v_stages=2)
    every = [replace(t, b_stages=n) for n in (2, 1) for t in (tile, one, two)]
    for choice in (*every, replace(two, block_k=64)):
        if shared_bytes(choice, d, dv, p.bias_dtype) <= SHARED:
            return choice
    raise AssertionError("a bias that does not fit is gathered")


def strip_for(p: Problem, tile: Tile, processors: int) -> Tile | None:
    """Return the tile that keeps the bias of its queries and all keys for many sequences, or None.

    Streamed, a bias is two thirds of what a block reads from L2 at head size 32. Where it has no
    room, two sides read each tile of the bias at the same time, if they have as many key tiles.
    """
    assert p.bias is not None
    assert p.bias_dtype is not None
    d, dv = sizes_of(p)
    sharers = p.batch // p.bias[0] * (p.hq // p.bias[1])
    tiles = -(-p.nq // (tile.warpgroups * ROWS)) * p.batch * p.hq
    banded = p.left is not None or p.right is not None or p.documents
    if p.dropout_p or banded or sharers < STRIP_SHARERS or tiles < STRIP_SHARERS * processors:
        return None
    for changes in STRIPS:
        choice = replace(tile, strip=True, **changes)
        choice = replace(choice, b_stages=-(-p.nk // choice.block_k))
        if choice.sides > 1 and (max(d, dv) > 32 or sharers % choice.sides):
            continue
        if strip_bytes(choice, d, dv, p.bias_dtype) <= SHARED:
            return replace(choice, onto_bias=choice.sides > 1 and onto_bias(p))
    if max(d, dv) > 32 or sharers % 2 or p.prefix:
        return None
    sides = replace(tile, onto_bias=onto_bias(p), **_SIDES)
    streamed = (replace(sides, b_stages=stages) for stages in (4, 2))
    return next(t for t in streamed if strip_bytes(t, d, dv, p.bias_dtype) <= SHARED)


def onto_bias(p: Problem) -> bool:
    """Return True if four consumers add products to the bias, without maxima (``lags``).

    Other terms do not come after the scale alone. With fewer operations the second launch took
    what the first one saves. It read every lse then.
    """
    terms = p.heads or p.softcap > 0
    return p.dtype == torch.bfloat16 and not terms and forward_flops(p) >= ONTO_OPERATIONS


def strip_bytes(tile: Tile, d: int, dv: int, bias: torch.dtype) -> int:
    """Return the bytes of a block whose sides share a bias, with copied columns of the output."""
    staged = min(dv, 128) if dv == first_part(dv) else 0
    strip = tile.b_stages * tile.warpgroups * ROWS * tile.block_k * bias.itemsize
    side = shared_bytes(tile, d, dv, bias, staged) - strip - BARRIERS
    return strip + tile.sides * side + BARRIERS // 2 * (1 + tile.sides)


def bias_fits(p: Problem) -> bool:
    """Return True if tiles of the bias have room in shared memory."""
    assert p.bias_dtype is not None
    d, dv = sizes_of(p)
    least = replace(TILES[d, dv], block_k=64, k_stages=2, v_stages=2, q_stages=1)
    return shared_bytes(least, d, dv, p.bias_dtype) <= SHARED


def shared_bytes(
    tile: Tile, d: int, dv: int, bias: torch.dtype | None = None, staged: int = 0
) -> int:
    """Return the bytes of a block, with a copied bias, and columns of the output (STAGED)."""
    rows = tile.warpgroups * ROWS
    q = tile.q_stages * rows * d * 2
    kv = tile.block_k * (tile.k_stages * d + tile.v_stages * dv) * 2
    terms = tile.b_stages * rows * tile.block_k * bias.itemsize if bias is not None else 0
    out = rows * staged * 2
    if not (staged or terms):
        out = tile.warpgroups * SCRATCH
    return q + kv + terms + out + BARRIERS


def config_for(p: Problem, tile: Tile, bias: str, group: int) -> Config:
    """Return the config of a problem: the tile, and the features that it has."""
    d, dv = sizes_of(p)
    wide = dv > MOST_COLUMNS
    added = tile.onto_bias
    return (WideConfig if wide else Config)(
        D=d, DV=dv, DV_OUT=p.dv, OUT_ROW=p.dv, GROUP=group,
        WARPGROUPS=tile.warpgroups, BLOCK_K=tile.block_k,
        K_STAGES=tile.k_stages, V_STAGES=tile.v_stages, Q_STAGES=tile.q_stages,
        LEFT=p.left is not None, RIGHT=p.right is not None,
        APART=limits_apart(p, tile.block_k),
        VARLEN=p.varlen, PREFIX=p.prefix, DOCUMENTS=p.documents,
        SOFTCAP=p.softcap > 0, ALIBI=p.distance, SINK=p.sink, NATURAL=p.natural and not added,
        DROPOUT=p.dropout_p > 0,
        BIAS=bias, B_STAGES=tile.b_stages if bias == "copied" else 1,
        STRIP=tile.b_stages if tile.strip else 0, SIDES=tile.sides, ONTO_BIAS=added,
        EVEN_K=not (p.varlen or p.prefix) and p.nk % tile.block_k == 0,
        STAGED=0 if wide else staged_columns(p, tile, bias),
        TURNED=wide or is_turned(p, tile, bias),
        OVERLAP=tile.overlap, ROUND_LATE=tile.warpgroups == 3 and tile.overlap,
        ORDERED=tile.ordered and not (p.varlen or p.prefix),
        LAGS=added or lags(p, bias),
        CONSUMER_REGISTERS=tile.registers[0], PRODUCER_REGISTERS=tile.registers[1],
    )  # fmt: skip


def limits_apart(p: Problem, block_k: int) -> bool:
    """Return True if no key tile of 64 queries is cut by both limits of the band.

    They are a tile and 64 queries apart, less one. Nor does the left one cut the last tile that
    queries need: without lengths it ends at the right limit, or less than a tile past a query.
    """
    if p.left is None or p.right is None or p.prefix or p.documents:
        return False
    return p.most_seen >= block_k + ROWS - 1 and p.left >= block_k - 1


def lags(p: Problem, bias: str) -> bool:
    """Return True if the reference of the softmax lags, and a second launch mends overflowed rows.

    Score terms keep the maximum: they were not measured, and ALiBi of queries before their keys may
    rise by more than a tile's range. So do left limits alone, which were not measured, either. So
    do float16, whose weights end at 2^16, and wide values, whose kernel has no step without one.
    """
    terms = bias or p.heads or p.documents or p.softcap > 0
    if terms or p.dtype != torch.bfloat16 or sizes_of(p)[1] > MOST_COLUMNS:
        return False
    mask = "full" if p.right is None else "causal"
    if p.left is not None:
        mask = "left" if p.right is None else "window"
    p = p.usual
    operations = forward_flops(p)
    if p.varlen:  # as many sequences of the longest length as there are queries for
        operations = operations * p.total_q // max(p.batch * p.nq, 1)
    size = sizes_of(p), mask
    enough = p.most_seen > LAGS_KEYS.get(size, 0)
    return enough and operations >= LAGS_OPERATIONS.get(size, math.inf)


def staged_columns(p: Problem, tile: Tile, bias: str) -> int:
    """Return the columns of the output that have room in shared memory for a TMA copy."""
    d, dv = sizes_of(p)
    columns = min(dv, 128)
    if dv % columns or dv != first_part(dv):
        return 0
    if tile.strip or tile.sides > 1:
        return columns
    copied = p.bias_dtype if bias == "copied" else None
    return columns if shared_bytes(tile, d, dv, copied, columns) <= SHARED else 0


def is_turned(p: Problem, tile: Tile, bias: str) -> bool:
    """Return True if shared memory has room to convert rows of the output.

    Where TMA copies it, threads store only the ends of sequences.
    """
    if bias == "copied" or staged_columns(p, tile, bias):
        return False
    return shared_bytes(tile, *sizes_of(p)) <= SHARED


def packed_heads(p: Problem, tile: Tile, bias: str) -> int:
    """Return the query heads of a kv head that share a tile: 1, or a power of 2.

    Tiles of fewer positions read fewer keys that their queries do not see, and short sequences fill
    more of them. Where they read as many, one head was up to 2% faster; so it was, by 5%, with
    three warpgroups at head size 96, whose loops have more instructions.
    """
    group = min(p.group & -p.group, ROWS)  # the greatest power of 2 that divides it
    if bias in ("copied", "row") or group == 1 or tile == LONG[96, 96]:
        return 1
    wide = p.dv > MOST_COLUMNS  # packed ones were not measured
    rows = ROWS * (1 if wide else tile.warpgroups)
    most = group if p.nq <= rows // SHARING else min(group, SHARING)
    if (p.varlen or p.documents) and not wide:  # any tile may be cut
        return most

    def steps(heads: int) -> int:
        """Return the key tiles of ``most`` heads, of which so many share tiles."""
        each = tile_count(rows // heads, tile.block_k, p.nq, p.nk, p.left, p.right)
        return most // heads * int(each.sum())

    return most if steps(most) < FEWER_STEPS * steps(1) else 1
