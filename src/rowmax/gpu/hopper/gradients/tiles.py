# ruff: noqa: N802  (what kernels read is in capitals)
"""Tile shapes of the backward, as data, and what is compiled into its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....call.problem import Problem

ROWS = 64  # keys of one warpgroup: the height of a wgmma
WARPGROUPS = 2


@dataclass(frozen=True)
class GradientTile:
    """How a head size is cut: ``block_q`` queries by 128 keys, so many buffers of Q and of dO.

    In the launch that makes all gradients a step waits for the next one's Q before it lets go of
    its own: two of Q at least, and no fewer than of dO (pipeline.wait_done). In the launch for dq
    alone (wide.py) keys and queries change places; in that for dk and dv (pair.py) 64 keys stay.
    """

    block_q: int
    q_stages: int
    do_stages: int
    held: bool = False  # K and V in registers as well, where no bias needs those
    kv_stages: int = 1
    dq_stages: int = 1
    ahead: bool = False  # registers for S of the next step beside dQ
    held_0: int = 0  # columns of K that are in registers as well (pair.py)
    held_1: int = 0  # of V
    alone: bool = False  # half of K and half of V, and these nowhere else
    registers: tuple[int, int] = (240, 24)


#: by (D, Dv), both padded to one of these
TILES = {
    (64, 64): GradientTile(64, 4, 3, held=True, kv_stages=2, dq_stages=2, ahead=True),
    (128, 128): GradientTile(64, 3, 2),
}
#: by (D, Dv) and by what a launch makes: heads for which one has no registers (wide.py, pair.py)
WIDE = {
    (256, 128): {
        "dq": GradientTile(64, 2, 2),
        "pair": GradientTile(64, 3, 2, held_0=256, held_1=128),
    },
    (256, 256): {
        "dq": GradientTile(64, 2, 1),
        "pair": GradientTile(64, 3, 2, held_0=128, held_1=128, alone=True),
    },
}
#: by (D, Dv): 128 queries of a bias that is shared, by so many keys (shared_bias.py)
SHARED_BIAS = {
    (64, 64): GradientTile(128, 2, 2, kv_stages=2),
    (128, 128): GradientTile(128, 2, 1),
    (256, 128): GradientTile(64, 1, 2, kv_stages=2),
    (256, 256): GradientTile(64, 1, 1, kv_stages=2),
}


class ProductTile(NamedTuple):
    """Queries and keys of a step of a plain product, warps, and how many steps are on their way."""

    rows: int
    columns: int
    warps: int
    stages: int


DQ_OF_DBIAS = ProductTile(128, 64, 8, 4)
SIZES = (64, 128, 256)
#: keys up to which dQ is added up in order anyway, by (head size, whether there is a diagonal),
#: where there are so many tiles of keys
IN_ORDER = {(64, False): 1024, (64, True): 512, (128, False): 1024, (128, True): 1024}
MANY = 512
#: by what a launch makes
Tiles = dict[str, GradientTile]


def tiles_of(sizes: tuple[int, int]) -> Tiles:
    return WIDE[sizes] if sizes in WIDE else {"all": TILES[sizes]}


@dataclass(frozen=True)
class GradientConfig:
    """What is compiled into one kernel, under the names that the kernel uses."""

    D: int  # head sizes of the tile
    DV: int
    D_OUT: int  # of the tensors, D or less
    DV_OUT: int
    BLOCK_Q: int
    Q_STAGES: int
    DO_STAGES: int
    HELD: bool = False
    LEFT: bool = False  # the band has a left limit
    RIGHT: bool = False
    RAGGED: bool = False  # a tile of keys may run past those in use
    VARLEN: bool = False
    PREFIX: bool = False
    DOCUMENTS: bool = False
    SOFTCAP: bool = False
    ALIBI: bool = False
    BIAS: bool = False
    DBIAS: bool = False  # stored tile by tile: the bias broadcasts over nothing
    ROW: bool = False  # the bias is a number a key
    COLUMN: bool = False  # the bias is a number a query
    NATURAL: bool = False  # scores and lse are in natural units, else in base 2 (Problem.natural)
    DROW: bool = False  # and its gradient is added up over queries
    DQ: bool = True  # made as tiles pass by; else afterwards, of dbias (dq_of_dbias.py)
    ORDERED: bool = False  # dQ is added up tile of keys by tile of keys, in a fixed order
    FRESH: bool = False  # ... and the first to add to a tile of it writes it
    ABREAST: bool = False  # tile m of every head of a group passes by before the next tile does
    AHEAD: bool = False  # S of the next step is made before dQ
    DQ_STAGES: int = 1
    EVERY: int = 2  # steps after which others are told how many are done (pipeline.take_away)
    HELD_0: int = 0  # columns of K that are in registers as well (pair.py)
    HELD_1: int = 0  # of V
    ALONE: bool = False  # and nowhere else
    KV_STAGES: int = 1  # 2: K and V (or a shared bias) of the next tile come under this one
    #: what is made; or dq alone (wide.py), dk and dv: pair (pair.py), or dbias (shared_bias.py)
    KIND: str = "all"

    # what follows, for the kernels

    @property
    def WARPGROUPS(self) -> int:
        return WARPGROUPS

    @property
    def TOKENS(self) -> int:
        """Rows of one warpgroup."""
        return ROWS

    @property
    def READERS(self) -> int:
        """Who is told of a tile: consumers, and who takes dQ away."""
        return WARPGROUPS + (self.KIND == "all" and self.DQ)

    @property
    def QUERIES_DOWN(self) -> bool:
        """Whether rows of a tile of scores are queries and columns keys."""
        return self.KIND in ("dq", "dbias")

    @property
    def BLOCK_K(self) -> int:
        """Keys of a tile, or queries where those stay."""
        return ROWS if self.KIND == "pair" else WARPGROUPS * ROWS

    @property
    def TILE(self) -> int:
        """Positions of what is worked on at a time."""
        return self.BLOCK_K

    @property
    def PADDED(self) -> bool:
        """Whether a tile of keys may end in what is no one's, or another sequence's."""
        return self.VARLEN or self.PREFIX

    @property
    def PASSES_SHORT(self) -> bool:
        """The same of a tile of what passes by wide heads: keys, or queries."""
        return self.PADDED if self.QUERIES_DOWN else self.VARLEN

    @property
    def STAYS_SHORT(self) -> bool:
        """Whether what stays there is to be cleared: it has rows of the sum of its own, so only
        where those are stored, past prefix lengths, and are made of what V holds."""
        return self.PREFIX and self.KIND == "pair"

    @property
    def DS_STAGES(self) -> int:
        """Buffers of dS. A tile of a bias is brought to where dS of its step will lie, while dS of
        the step before and of that before it are in use."""
        return 3 if self.BIAS else 2

    @property
    def MASKS(self) -> bool:
        return self.RIGHT or self.LEFT or self.RAGGED or self.DOCUMENTS

    @property
    def LOW_MASKED(self) -> bool:
        """Whether there are partial tiles before the full ones."""
        band = self.LEFT if self.QUERIES_DOWN else self.RIGHT or self.RAGGED
        return self.DOCUMENTS or band

    @property
    def HIGH_MASKED(self) -> bool:
        return self.RIGHT or self.RAGGED if self.QUERIES_DOWN else self.LEFT

    @property
    def DRAWN(self) -> bool:
        """Whether blocks draw their tiles from a counter."""
        return self.ORDERED or self.VARLEN or self.DOCUMENTS

    @property
    def UP(self) -> bool:
        """Whether tiles of queries pass by from the first to the last, and the last tile of keys
        is drawn first: the order in which turns come by themselves (``schedule.py``)."""
        return self.ORDERED and self.RIGHT and not self.LEFT and not self.ABREAST

    @property
    def LAST_FIRST(self) -> bool:
        """Whether the last tile of a sequence is drawn first: where it is the longest, or UP."""
        return self.UP or (self.KIND == "dq" and self.RIGHT)

    @property
    def NEIGHBOUR(self) -> int:
        """From a tile of keys to the one that adds to dQ just before it."""
        return 1 if self.UP else -1


def sizes_of(d: int, dv: int) -> tuple[int, int]:
    """The head sizes of the tile that holds (d, dv); what is missing reads as zero."""
    big, big_v = (next(size for size in SIZES if size >= n) for n in (d, dv))
    both = max(big, big_v)
    return (big, big_v) if (big, big_v) in WIDE else (both, both)


def config_for(p: Problem, tile: GradientTile, **options: Any) -> GradientConfig:
    d, dv = sizes_of(p.d, p.dv)
    adds = options.get("KIND", "all") == "all" and options.get("DQ", True)
    ordered = adds and (p.deterministic or soon_in_order(p, d))
    config = GradientConfig(
        D=d,
        DV=dv,
        D_OUT=p.d,
        DV_OUT=p.dv,
        BLOCK_Q=tile.block_q,
        Q_STAGES=tile.q_stages,
        DO_STAGES=tile.do_stages,
        HELD=tile.held and not options.get("BIAS"),
        HELD_0=tile.held_0,
        HELD_1=tile.held_1,
        ALONE=tile.alone,
        KV_STAGES=tile.kv_stages,
        AHEAD=tile.ahead,
        DQ_STAGES=tile.dq_stages,
        LEFT=p.left is not None,
        RIGHT=p.right is not None,
        RAGGED=p.varlen or p.prefix or p.nk % (WARPGROUPS * ROWS) > 0,
        VARLEN=p.varlen,
        PREFIX=p.prefix,
        DOCUMENTS=p.documents,
        SOFTCAP=p.softcap > 0,
        ALIBI=p.alibi,
        NATURAL=p.natural,
        ORDERED=ordered,
        FRESH=ordered and every_query_sees(p),
        ABREAST=ordered and p.group > 1 and p.right is not None and p.left is None,
    )
    return replace(config, **options)


def soon_in_order(p: Problem, d: int) -> bool:
    """Whether to add to dQ in order is faster than as it comes: where sequences are short, to zero
    dQ takes longer than to wait for turns, if there are others' tiles to do meanwhile."""
    few = p.batch * p.hk * -(-p.nk // (WARPGROUPS * ROWS)) < MANY
    long = p.nk > IN_ORDER[d, p.right is not None]
    return not (few or long) and p.bias is None and every_query_sees(p)


def every_query_sees(p: Problem) -> bool:
    """Whether every query sees a key whatever the numbers are: then every tile of dq is met."""
    if p.varlen or p.prefix or p.documents or (p.left or 0) < 0:
        return False
    if p.left is not None and p.right is not None and p.left + p.right < 0:
        return False
    return p.right is None or p.offset + p.right >= 0
