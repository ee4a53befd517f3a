# ruff: noqa: N802  (names that kernels read are in capitals)
"""The constants of each backward kernel, and its tile shapes as data.

A tile shape is a config without the features of a problem; ``config_for`` adds the features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from ...call.problem import Problem
from .gluon_compat import COPIES_OPERANDS
from .packed import MOST_IN_RUNS
from .tiles import Widths

ROWS = 64  # rows of one warpgroup: the height of a wgmma
WARPGROUPS = 2
#: rows of a tile of lse, delta and the sums of dq, in all kernels (row_stats.py)
ROW_TILE = 64
#: the number that a tile of keys that writes adds to the count of done tiles; others add 1
#: (backward_complete.py)
FIRST = 1 << 24
#: tiles of rows that a place of the order rounds
ROUNDED_TILES = 16
#: runs of the last packed sequences under a diagonal (packed.py); the least head size, the least
#: mean length and the most tiles of keys where they were measured to be faster
LATE_RUNS, LATE_D, LATE_KEYS, LATE_TILES = 4, 128, 512, 2000


@dataclass(frozen=True, kw_only=True)
class Config(Widths):
    """The constants of all backward kernels, under the names that kernels use.

    A resident tile stays in shared memory while streamed tiles pass.
    """

    D: int  # head sizes of the tile
    DV: int
    BLOCK_STREAMED: int = 64
    WARPGROUPS: int = WARPGROUPS  # consumers: two, or three of ``backward_fused.py``
    CONSUMER_REGISTERS: int = 240
    PRODUCER_REGISTERS: int = 24
    LEFT: bool = False  # the band has a left limit
    RIGHT: bool = False
    RAGGED: bool = False  # a tile of keys may exceed the keys in use
    VARLEN: bool = False
    PREFIX: bool = False
    DOCUMENTS: bool = False
    SOFTCAP: bool = False
    ALIBI: bool = False
    DROPOUT: bool = False
    BIAS: bool = False  # a number for each pair
    BIAS_FLOAT32: bool = False  # it has float32 numbers, whatever the dtype of q
    ROW: bool = False  # the bias is a number for each key
    COLUMN: bool = False  # the bias is a number for each query
    LATE_RUNS: int = 1  # runs of the last packed sequences in the order (packed.py)
    NATURAL: bool = False  # scores and lse are in natural units, else in base 2 (Problem.natural)

    QUERIES_RESIDENT = False
    LAST_FIRST = False  # the last tile of a sequence comes first
    TOKENS = ROWS  # rows of one warpgroup
    ROW_TILE = ROW_TILE

    @property
    def BUFFER_D(self) -> int:
        """Return the columns of a buffer that holds both parts of D side by side."""
        return self.D0 << (self.D1 > 0)

    @property
    def BLOCK_RESIDENT(self) -> int:
        return self.WARPGROUPS * ROWS

    @property
    def TILE(self) -> int:
        """Return the positions of a tile of the order (order.row_at)."""
        return self.BLOCK_RESIDENT

    @property
    def MASKS(self) -> bool:
        return self.RIGHT or self.LEFT or self.RAGGED or self.DOCUMENTS

    @property
    def SPANS(self) -> bool:
        """Return True if a table holds the streamed tiles that documents leave."""
        return self.DOCUMENTS

    @property
    def LOW_MASKED(self) -> bool:
        """Return True if partial streamed tiles come before the full ones."""
        band = self.LEFT if self.QUERIES_RESIDENT else self.RIGHT or self.RAGGED
        return self.DOCUMENTS or band

    @property
    def HIGH_MASKED(self) -> bool:
        band = self.RIGHT or self.RAGGED if self.QUERIES_RESIDENT else self.LEFT
        return self.DOCUMENTS or band

    @property
    def PASSES(self) -> int:
        """Return the passes of a head over a tile (``backward_order.steps_of_pass``)."""
        return 2 if self.LOW_MASKED and self.HIGH_MASKED else 1

    @property
    def DRAWN(self) -> bool:
        """Return True if blocks take their tiles from a counter."""
        return self.VARLEN or self.DOCUMENTS


@dataclass(frozen=True, kw_only=True)
class FusedConfig(Config):
    """The constants of ``backward_fused.py``.

    A step waits for Q of the next step before it releases its own Q. So there are at least two
    buffers of Q, and at least as many as of dO (``backward_lib.wait_done``).
    """

    D_OUT: int = 0  # head sizes of the tensors, D and DV or less
    DV_OUT: int = 0
    Q_STAGES: int
    DO_STAGES: int
    KV_STAGES: int = 1  # 2: K and V of the next tile arrive during this one
    DQ_STAGES: int = 1
    BIAS_STAGES: int = 2  # buffers of a float32 bias
    HELD: bool = False  # K and V in registers as well, unless a bias needs the registers
    AHEAD: bool = False  # S of the next step starts before dQ, where registers hold both
    HALVED: bool = False  # a step computes S, P and dS of half of its queries at a time
    DP_HALVED: bool = False  # also dP, where registers are few
    DBIAS: bool = False  # dbias is stored tile by tile: the bias broadcasts over nothing
    DROW: bool = False  # dbias of a row is summed over queries
    DQ: bool = True  # dq is computed here; else afterwards, from dbias (backward_dbias.py)
    ORDERED: bool = False  # the tiles of keys add to dQ in a fixed order
    FRESH: bool = False  # the first tile of keys writes a tile of dQ, the others add
    ABREAST: bool = False  # tile m of every head of a group passes before tile m + 1
    COMPLETE: bool = False  # this launch rounds dq, too (backward_complete.py)
    EVERY: int = 2  # steps between two stores of the number of done steps (add_dq)
    ONE_HEAD: bool = False  # packed sequences whose kv heads have one query head each

    def __post_init__(self) -> None:
        if self.HALVED and (self.DBIAS or self.BIAS_FLOAT32 or self.ROW or self.COLUMN):
            raise ValueError("HALVED: got a bias that is not a tile of q's dtype, or its gradient")
        if self.COMPLETE and self.ORDERED:
            raise ValueError("COMPLETE: got ORDERED as well; want one of them")
        if self.HALVED and self.AHEAD:
            raise ValueError("HALVED: got AHEAD as well; want one of them")
        if self.ABREAST and self.LEFT:  # steps of a window's edge take one head after the other
            raise ValueError("ABREAST: got LEFT as well; want one of them")
        if self.KEY_TILES > 1 and (self.BIAS or self.D1 or self.DV1):
            raise ValueError(
                f"WARPGROUPS: got {self.WARPGROUPS} with a bias or columns in two parts; want "
                f"{WARPGROUPS}"
            )

    @property
    def READERS(self) -> int:
        """Return the partitions that read a message: the consumers, and the writer of dQ."""
        return self.WARPGROUPS + self.DQ

    @property
    def HALF(self) -> FusedConfig | None:
        """Return the constants of half a step, where a step has halves."""
        if not self.HALVED:
            return None
        return replace(self, HALVED=False, BLOCK_STREAMED=self.BLOCK_STREAMED // 2)

    @property
    def HELD_K(self) -> bool:
        """Return True if K is in registers as well."""
        return self.HELD or (self.HALVED and not self.DP_HALVED)

    @property
    def KEY_TILES(self) -> int:
        """Return the tiles of K, V and dS of a step: 192 keys are three, for powers of two."""
        return 3 if self.WARPGROUPS == 3 else 1

    @property
    def DS_STAGES(self) -> int:
        """Return the number of buffers of dS.

        A tile of a bias arrives in the buffer of dS of its step, while dS of two earlier steps is
        in use. A float32 bias has buffers of its own.
        """
        return 3 if self.BIAS and not self.BIAS_FLOAT32 else 2

    @property
    def DRAWN(self) -> bool:
        return self.ORDERED or self.COMPLETE or self.VARLEN or self.DOCUMENTS

    @property
    def DRAWN_STEPS(self) -> int:
        """Return the last steps of a tile, under which its block draws the next one.

        The row of a packed tile comes from memory, which takes longer than the buffers last.
        """
        return self.DO_STAGES + (2 if self.VARLEN else 0)

    @property
    def UP(self) -> bool:
        """Return True if the last tile of keys begins first, and queries pass from the first on.

        In this order no tile of keys waits (``backward_order.py``).
        """
        return self.ORDERED and self.RIGHT and not self.LEFT and not self.ABREAST

    @property
    def LAST_FIRST(self) -> bool:
        return self.UP

    @property
    def ENDS_FIRST(self) -> bool:
        """Return True if only the first step of a tile of keys may have the last queries."""
        return self.ONE_HEAD and not self.UP

    @property
    def NEIGHBOUR(self) -> int:
        """Return the offset from a tile of keys to the one that adds to dQ just before it."""
        return 1 if self.UP else -1


@dataclass(frozen=True, kw_only=True)
class DqConfig(Config):
    """The constants of ``backward_dq.py``."""

    D_OUT: int = 0
    K_STAGES: int
    V_STAGES: int
    DBIAS: bool = False

    QUERIES_RESIDENT = True

    @property
    def LAST_FIRST(self) -> bool:
        return self.RIGHT


@dataclass(frozen=True, kw_only=True)
class DkdvConfig(Config):
    """The constants of ``backward_dkdv.py``."""

    D_OUT: int = 0
    DV_OUT: int = 0
    Q_STAGES: int
    DO_STAGES: int
    HELD_K: int  # columns of K in registers
    HELD_V: int
    ALONE: bool = False  # these columns are only in registers
    DROW: bool = False

    @property
    def BLOCK_RESIDENT(self) -> int:
        return ROWS


@dataclass(frozen=True, kw_only=True)
class WideConfig(Config):
    """The constants of ``backward_wide.py``.

    A step waits for the first tile of the next step before it releases its own. So there are at
    least two buffers of it.
    """

    GRADIENT: str  # q, k or v
    D_OUT: int = 0
    DV_OUT: int = 0
    BLOCK_STREAMED: int = 32
    FIRST_STAGES: int
    SECOND_STAGES: int  # buffers of half of the columns
    HELD: int = 128  # columns of the first resident tensor in registers alone

    def __post_init__(self) -> None:
        if self.FIRST_STAGES < 2:
            raise ValueError(f"FIRST_STAGES: got {self.FIRST_STAGES}; want 2 or more")

    @property
    def QUERIES_RESIDENT(self) -> bool:
        return self.GRADIENT == "q"

    @property
    def SCORES_ALONE(self) -> bool:
        """Return True if the gradient needs the weights, and not dS."""
        return self.GRADIENT == "v"

    @property
    def BLOCK_RESIDENT(self) -> int:
        return ROWS

    @property
    def WIDTH(self) -> int:
        """Return the columns of the gradient."""
        return self.DV if self.SCORES_ALONE else self.D

    @property
    def OUT(self) -> int:
        """Return its columns in the tensor."""
        return self.DV_OUT if self.SCORES_ALONE else self.D_OUT

    @property
    def HALF(self) -> int:
        """Return the columns of one warpgroup."""
        return self.WIDTH // WARPGROUPS

    @property
    def HALF_V(self) -> int:
        """Return the columns of a buffer of the second streamed tensor."""
        return self.DV // WARPGROUPS

    @property
    def FIRST_READERS(self) -> int:
        """Return the warpgroups that read the first streamed tensor."""
        return 1 if self.SCORES_ALONE else WARPGROUPS

    @property
    def PLACES(self) -> int:
        """Return how many times the columns in registers fit into a buffer of the first tensor."""
        return self.BLOCK_STREAMED * self.D // (ROWS * self.HELD)

    @property
    def OPERAND_STAGES(self) -> int:
        """Return the buffers of dS or P."""
        return 2 if self.SCORES_ALONE else 1

    @property
    def LAST_FIRST(self) -> bool:
        return self.QUERIES_RESIDENT and self.RIGHT


@dataclass(frozen=True, kw_only=True)
class DbiasConfig(Config):
    """The constants of ``backward_dbias.py``."""

    QK_STAGES: int
    VDO_STAGES: int
    BIAS_STAGES: int
    BIAS: bool = True

    QUERIES_RESIDENT = True

    @property
    def SPANS(self) -> bool:
        """Return False: a tile of the bias is not that of one sequence."""
        return False

    @property
    def RUNS(self) -> bool:
        """Return True if each sequence may see other keys."""
        return self.PREFIX or self.DOCUMENTS


def by_sizes(*tiles: tuple[Config, ...]) -> dict[tuple[int, int], tuple[Config, ...]]:
    """Return the tiles of kernels by their head sizes."""
    return {(kernels[0].D, kernels[0].DV): kernels for kernels in tiles}


_32 = FusedConfig(
    D=32, DV=32, Q_STAGES=4, DO_STAGES=3, KV_STAGES=2, DQ_STAGES=2, HELD=True, AHEAD=True
)
_64 = replace(_32, D=64, DV=64)
#: by (D, DV), both padded to one of these: the kernels of dq, dk and dv
TILES: dict[tuple[int, int], tuple[Config, ...]] = by_sizes(
    (_32,),
    (_64,),
    (FusedConfig(D=128, DV=128, Q_STAGES=3, DO_STAGES=2),),
    # the fused kernel has no registers for heads of 256
    (
        DqConfig(D=256, DV=128, K_STAGES=2, V_STAGES=2),
        DkdvConfig(D=256, DV=128, Q_STAGES=3, DO_STAGES=2, HELD_K=256, HELD_V=128),
    ),
    (
        DqConfig(D=256, DV=256, K_STAGES=2, V_STAGES=1),
        DkdvConfig(D=256, DV=256, Q_STAGES=3, DO_STAGES=2, HELD_K=128, HELD_V=128, ALONE=True),
    ),
    (
        WideConfig(D=512, DV=512, GRADIENT="q", FIRST_STAGES=2, SECOND_STAGES=2),
        WideConfig(D=512, DV=512, GRADIENT="k", FIRST_STAGES=2, SECOND_STAGES=2),
        WideConfig(
            D=512, DV=512, GRADIENT="v", FIRST_STAGES=3, SECOND_STAGES=4,
            HELD=64 if COPIES_OPERANDS else 128,  # copies of more would spill
        ),
    ),
)  # fmt: skip
#: half of a step at a time leaves registers for K and V, but not for copies of them
HALVES_OF_96 = FusedConfig(D=96, DV=96, Q_STAGES=4, DO_STAGES=2, HALVED=True, HELD=True)
#: by (D, DV): long sequences (``is_long``). At 64 Q, dO and sums of dQ pass once for 192 keys
LONG = {
    (64, 64): FusedConfig(
        D=64, DV=64, WARPGROUPS=3, CONSUMER_REGISTERS=160, HALVED=True, Q_STAGES=4, DO_STAGES=2,
        KV_STAGES=2,
    ),
    **({} if COPIES_OPERANDS else {(96, 96): HALVES_OF_96}),
}  # fmt: skip
#: by (D, DV), the fewest keys of a long sequence (in the mean, where sequences are packed), and the
#: fewest tiles of keys. At 64 those are 8 a processor: with fewer the last tiles take longer than
#: those of 128 keys
LONG_KEYS = {(64, 64): 4096, (96, 96): 2048}
LONG_TILES = {(64, 64): 8 * 132, (96, 96): 0}
#: the features with which it is slower
LONG_WITHOUT = {
    (64, 64): ("window", "lengths", "documents", "alibi"),
    (96, 96): ("softcap", "alibi"),
}
#: head size 32 with a bias that sequences or heads share: four consumers of 112 registers hide more
#: of a step. A tile of the bias has 256 keys.
FOUR = FusedConfig(
    D=32, DV=32, WARPGROUPS=4, CONSUMER_REGISTERS=112, HALVED=True, DP_HALVED=True, Q_STAGES=4,
    DO_STAGES=3, KV_STAGES=2, DQ_STAGES=2,
)  # fmt: skip
#: the fewest tiles of keys for it: with fewer processors wait
FOUR_TILES = 4 * 132
#: head sizes in between, in two parts of columns. A bias takes their registers, and the tile above
BETWEEN: dict[tuple[int, int], tuple[Config, ...]] = by_sizes(
    (
        FusedConfig(
            D=80, DV=80, Q_STAGES=3, DO_STAGES=3, KV_STAGES=2, DQ_STAGES=2,
            HELD=not COPIES_OPERANDS,  # copies of K and V would spill
        ),
    ),
    (FusedConfig(D=96, DV=96, Q_STAGES=4, DO_STAGES=3),),
    (
        DqConfig(D=192, DV=128, K_STAGES=2, V_STAGES=2),
        DkdvConfig(D=192, DV=128, Q_STAGES=3, DO_STAGES=2, HELD_K=192, HELD_V=128),
    ),
)  # fmt: skip
#: by (D, DV): dbias of a bias that sequences or heads share
SHARED_BIAS = {
    (c.D, c.DV): c
    for c in (
        DbiasConfig(D=32, DV=32, BLOCK_STREAMED=128, QK_STAGES=4, VDO_STAGES=4, BIAS_STAGES=2),
        DbiasConfig(D=64, DV=64, BLOCK_STREAMED=128, QK_STAGES=2, VDO_STAGES=2, BIAS_STAGES=2),
        DbiasConfig(D=128, DV=128, BLOCK_STREAMED=128, QK_STAGES=2, VDO_STAGES=1, BIAS_STAGES=1),
        DbiasConfig(D=256, DV=128, QK_STAGES=1, VDO_STAGES=2, BIAS_STAGES=2),
        DbiasConfig(D=256, DV=256, QK_STAGES=1, VDO_STAGES=1, BIAS_STAGES=2),
    )
}
#: at head size 32 by four consumers, of 256 queries, where there are no documents
SHARED_BY_FOUR = DbiasConfig(
    D=32, DV=32, WARPGROUPS=4, CONSUMER_REGISTERS=112, QK_STAGES=3, VDO_STAGES=3, BIAS_STAGES=2
)
#: by (D, DV): the same two for a bias of float32 numbers
FLOAT32_BIAS: dict[tuple[int, int], tuple[FusedConfig, DbiasConfig]] = {
    (32, 32): (
        replace(_32, BIAS_STAGES=3, BIAS_FLOAT32=True),
        replace(SHARED_BIAS[32, 32], QK_STAGES=2, VDO_STAGES=2, BIAS_FLOAT32=True),
    ),
    (64, 64): (
        replace(_64, KV_STAGES=1, HELD=False, BIAS_FLOAT32=True),
        replace(SHARED_BIAS[64, 64], BIAS_STAGES=1, BIAS_FLOAT32=True),
    ),
}


class ProductTile(NamedTuple):
    """The tile of the product that computes dq from dbias."""

    rows: int
    columns: int
    warps: int
    stages: int


DQ_OF_DBIAS = ProductTile(128, 64, 8, 4)
SIZES = (32, 64, 128, 256, 512)
#: (head size, under a diagonal) -> the most keys for which the ordered sum of dQ is faster, if
#: there are at least MANY tiles of keys; and the most keys of a query in a window, measured at head
#: sizes of 64 and 128
IN_ORDER = {
    **dict.fromkeys([(32, False), (64, False)], 1024),
    **dict.fromkeys([(32, True), (64, True)], 512),
    **dict.fromkeys([(d, causal) for d in (80, 96, 128) for causal in (False, True)], 1024),
}
IN_ORDER_IN_WINDOW = 300
MANY = 512
#: where the launch that sums dQ also rounds it: the widest heads, and the fewest tiles of keys. At
#: head size 128 it was 0.84 to 1.06 times as fast on an H100: sums that wait for their rounding
#: have twice the bytes in the cache. With few tiles blocks wait at both ends (0.89).
COMPLETE_D, COMPLETE_TILES = 64, 6 * 132
#: (under a diagonal, heads share keys) -> the fewest and the most keys for which it is faster
COMPLETE_KEYS = {
    (False, False): (512, 4096),
    (True, False): (512, 2**31),
    (False, True): (1024, 4096),
    (True, True): (2048, 2**31),
}
#: the widest heads whose K and V are in registers next to a bias
HELD_WITH_BIAS = 32


def shared_bias_tile(p: Problem) -> DbiasConfig:
    """Return the tile of the gradient of a bias that sequences or heads share."""
    sizes = sizes_of(p.d, p.dv)
    if float32_bias(p):
        return FLOAT32_BIAS[sizes][1]
    four = fill_four(p.nq) and not (p.documents or p.dropout_p)
    if sizes == (SHARED_BY_FOUR.D, SHARED_BY_FOUR.DV) and four:
        return SHARED_BY_FOUR
    return SHARED_BIAS[sizes]


def fill_four(rows: int) -> bool:
    """Return True if tiles of four consumers have no more rows than those of two."""
    return 2 * -(-rows // (4 * ROWS)) == -(-rows // (WARPGROUPS * ROWS))


def float32_bias(p: Problem) -> bool:
    """Return True if the bias has another dtype than q: float32."""
    return p.bias is not None and p.bias_dtype != p.dtype


def sizes_of(d: int, dv: int) -> tuple[int, int]:
    """Return the head sizes of the tile that holds (d, dv); the columns past d and dv are zero."""
    big, big_v = (next(size for size in SIZES if size >= n) for n in (d, dv))
    both = max(big, big_v)
    return (big, big_v) if (big, big_v) in TILES else (both, both)


def tiles_of(p: Problem, copied: bool) -> tuple[Config, ...]:
    """Return the tiles of dq, dk and dv; ``copied``: tiles of the bias are copied."""
    size = sizes_of(p.d, p.dv)
    if copied and float32_bias(p):
        return FLOAT32_BIAS[size][:1]
    fits = [x for x in BETWEEN if p.d <= x[0] and p.dv <= x[1] and x < size]
    size = fits[0] if fits and p.bias is None else size
    if is_long(p, size):
        return (LONG[size],)
    if copied and takes_four(p, size):
        return (FOUR,)
    return BETWEEN[size] if size in BETWEEN else TILES[size]


def is_long(p: Problem, size: tuple[int, int]) -> bool:
    """Return True if the tile of long sequences is faster, as far as it was measured."""
    if size not in LONG or p.bias is not None or p.dropout_p:
        return False
    keys = p.total_k // max(p.batch, 1) if p.varlen else p.nk
    tiles = p.batch * p.hk * -(-keys // LONG[size].BLOCK_RESIDENT)
    has = {
        "window": p.left is not None,
        "lengths": p.prefix,
        "documents": p.documents,
        "softcap": p.softcap > 0,
        "alibi": p.distance,
    }
    slower = any(has[name] for name in LONG_WITHOUT[size])
    return not slower and keys >= LONG_KEYS[size] and tiles >= LONG_TILES[size]


def takes_four(p: Problem, size: tuple[int, int]) -> bool:
    """Return True if four consumers are faster for a bias that is copied tile by tile."""
    if size != (FOUR.D, FOUR.DV) or p.bias is None or p.bias[:2] == (p.batch, p.hq):
        return False
    if p.dropout_p:
        return False
    # with documents 19 words spill in the loops
    tiles = p.batch * p.hk * -(-p.nk // FOUR.BLOCK_RESIDENT)
    return not p.documents and fill_four(p.nk) and tiles >= FOUR_TILES


_Config = TypeVar("_Config", bound=Config)


def config_for(p: Problem, tile: _Config, **options: Any) -> _Config:
    """Return the tile with the features of a problem, and those of ``options`` that it has."""
    warpgroups = options.get("WARPGROUPS", tile.WARPGROUPS)
    found = {
        "D_OUT": p.d,
        "DV_OUT": p.dv,
        "LEFT": p.left is not None,
        "RIGHT": p.right is not None,
        "RAGGED": p.varlen or p.prefix or p.nk % (warpgroups * ROWS) > 0,
        "VARLEN": p.varlen,
        "ONE_HEAD": p.varlen and p.group == 1,
        "PREFIX": p.prefix,
        "DOCUMENTS": p.documents,
        "SOFTCAP": p.softcap > 0,
        "ALIBI": p.distance,
        "DROPOUT": p.dropout_p > 0,
        "NATURAL": p.natural,
    }
    if isinstance(tile, FusedConfig):
        makes = options.get("DQ", True)
        complete = makes and not p.deterministic and completes(p, tile)
        ordered = makes and (p.deterministic or (not complete and faster_in_order(p, tile)))
        found["ORDERED"] = ordered
        found["FRESH"] = ordered and every_query_sees(p)
        found["ABREAST"] = ordered and p.group > 1 and p.right is not None and p.left is None
        found["COMPLETE"] = complete
        found["HELD"] = tile.HELD and not (options.get("BIAS") and tile.D > HELD_WITH_BIAS)
    # in order the neighbour of a tile of keys has an earlier place
    by_keys = isinstance(tile, (FusedConfig, DkdvConfig)) and not found.get("ORDERED")
    if by_keys and has_late_runs(p, tile):
        found["LATE_RUNS"] = LATE_RUNS
    names = {field.name for field in fields(tile)}
    return replace(tile, **{name: x for name, x in (found | options).items() if name in names})


def has_late_runs(p: Problem, tile: Config) -> bool:
    """Return True if the last packed sequences have several runs in the order of tiles of keys."""
    falls = p.right is not None and p.left is None  # tiles of a window are as long as each other
    tiles = p.hk * -(-p.total_k // tile.BLOCK_RESIDENT)
    few = p.batch <= MOST_IN_RUNS and tiles <= LATE_TILES
    long = tile.D >= LATE_D and p.total_k >= LATE_KEYS * p.batch
    return p.varlen and falls and few and long


def faster_in_order(p: Problem, tile: FusedConfig) -> bool:
    """Return True if the ordered sum of dQ is faster than the unordered one.

    The unordered sum begins with zeros. For short sequences zeroing takes longer than waiting for
    the neighbour's steps, if there are tiles of other heads to compute meanwhile.
    """
    few = p.batch * p.hk * -(-p.nk // (WARPGROUPS * ROWS)) < MANY
    narrow = p.left is not None and p.most_seen <= IN_ORDER_IN_WINDOW
    long = p.nk > IN_ORDER[tile.D, p.right is not None] and not narrow
    measured = p.bias is None or tile.WARPGROUPS == FOUR.WARPGROUPS
    return measured and not (few or long) and every_query_sees(p)


def every_query_sees(p: Problem) -> bool:
    """Return True if every query sees a key for any tensors: then every tile of dq is written."""
    if p.varlen or p.prefix or p.documents or (p.left or 0) < 0:
        return False
    if p.left is not None and p.right is not None and p.left + p.right < 0:
        return False
    return p.right is None or p.offset + p.right >= 0


def completes(p: Problem, tile: FusedConfig) -> bool:
    """Return True if the launch that sums dQ also rounds it, where that is faster.

    The first tile of keys writes all tiles of dQ: it must have every tile of queries. With a bias
    it was 0.96 to 1.01 times as fast.
    """
    if tile.D > COMPLETE_D or p.bias is not None or p.left is not None or not every_query_sees(p):
        return False
    least, most = COMPLETE_KEYS[p.right is not None, p.group > 1]
    tiles = p.batch * p.hk * -(-p.nk // tile.BLOCK_RESIDENT)
    return least <= p.nk <= most and tiles >= COMPLETE_TILES
