"""Share what the parts of the forward kernels need: arguments, records of a block, key ranges."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .lib import rules
from .lib.order import Tile
from .lib.parts import Parts
from .lib.ring import Mailbox, Ring


class Pointers(NamedTuple):
    """``t``: the tensors that the kernel reads and writes without TMA.

    None is a constant: the kernel has no code for absent features.
    """

    out: Any
    lse: Any
    table: Any  # the order of the tiles (lib/order.py), each block's end, and the counter
    ends: Any
    counter: Any = None
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    spans: Any = None  # documents.Spans, with the ranges
    q_range: Any = None
    k_range: Any = None
    q_ids: Any = None
    k_ids: Any = None
    alibi: Any = None  # [Hq]
    sink: Any = None
    bias: Any = None  # unless TMA copies it
    seed: Any = None  # DROPOUT: int64 []
    overflow: Any = None  # LAGS, MENDS: not 0 since some row of this plan overflowed
    arrived: Any = None  # int32 [1], the copies to the memory of keys that are done (lib/arrivals)
    needed: Any = None  # int32, those that a tile of keys waits for (rules/arrivals.py)
    clocks: Any = None  # lib/clocks.py


class Numbers(NamedTuple):
    """``n``: numbers at run time."""

    heads: Any  # query heads, or kv heads where a tile holds all query heads of one
    kv_heads: Any
    keys: Any  # keys and values of a head that fill their share of the L2 cache
    nq: Any
    nk: Any
    left: Any  # None: no limit
    right: Any
    batch: Any
    scale: Any  # the factor of a score in the exponential, or before other terms
    inner: Any  # the factor inside a softcap
    bias_b: Any
    bias_h: Any
    bias_q: Any
    bias_k: Any
    ids_q: Any  # number of ids of a sequence, 0 where all sequences share them
    ids_k: Any
    each_b: Any  # 0 where all sequences (each_h: all heads) share the copied bias, else 1
    each_h: Any
    hq: Any
    ratio: Any  # heads of a tile that share a kv head
    total_q: Any
    shift: Any  # for ALiBi's distances in a block of a longer call; None: 0
    parts: Any = None  # parts of a tile's keys, each with its tile; None: one
    early: Any = None  # queries before a gap (``call.inputs.Gap``); None: there is no gap
    gap: Any = None  # its keys
    threshold: Any = None  # DROPOUT: the least draw that is kept
    keep_scale: Any = None  # the factor of kept weights
    first_query: Any = None  # the first query in a longer call, 64 keys, head and sequence
    first_block: Any = None
    first_head: Any = None
    first_sequence: Any = None


class Copies(NamedTuple):
    """The descriptors of TMA copies, or None."""

    q: Parts
    k: Parts
    v: Parts
    bias: Any
    out: Any


class Shared(NamedTuple):
    """The shared memory of a block. Each warpgroup has its own rings of q and of the bias."""

    q: Ring
    k: Ring
    v: Ring
    bias: Ring
    out: Any
    mail: Mailbox


class Source(NamedTuple):
    """The place of a tile's keys and values: sequence, first row, kv head, and number."""

    b: Any
    row: Any
    head: Any
    nk: Any


# --- tiles -------------------------------------------------------------------------------------


@gluon.jit
def tile_of(C: gl.constexpr, row, t, n):
    """Return the tile of a row."""
    first, b = row.first, sequence_of(row.b, n)
    nq = n.nq
    nk = n.nk
    q_row, k_row = 0, 0
    if C.VARLEN:
        q_row, nq = row.row, row.length
        k_row, nk = row.other_row, row.other_length
    offset = nk - nq
    if n.early is not None:
        offset -= gl.where(first < n.early, n.gap, 0)
    if C.PREFIX:
        nk = gl.minimum(nk, gl.load(t.lengths + b))
    last = gl.minimum(first + C.TILE, nq) - 1
    low, high = rules.any_range(first, last, offset, n.left, n.right, nk)
    if C.DOCUMENTS:
        tiles = (n.nq + C.TILE - 1) // C.TILE
        at = t.spans + 2 * (b * tiles + first // C.TILE)
        low = gl.maximum(low, gl.load(at))
        high = gl.minimum(high, gl.load(at + 1))
    lo, hi = rules.key_tiles(low, high, C.BLOCK_K)
    if n.parts is not None:
        part, count = row.b // n.batch, hi - lo
        hi = lo + count * (part + 1) // n.parts
        lo = lo + count * part // n.parts
        # a prefix may have fewer tiles than parts: one tile of no key in use stands for none
        nk = gl.where(hi > lo, nk, 0)
        hi = gl.maximum(hi, lo + 1)
    return Tile(first, row.head, row.b, q_row, k_row, nq, nk, offset, lo, hi)


@gluon.jit
def sequence_of(b, n):
    """Return the sequence of a tile; in parts, b counts on through all sequences of each part."""
    if n.parts is not None:
        b = b % n.batch
    return b


@gluon.jit
def full_range(C: gl.constexpr, first, tile, n):
    """Return (low, high): the keys that all queries of a warpgroup, from ``first`` on, see."""
    last = first + C.TOKENS - 1
    return rules.all_range(first, last, tile.offset, n.left, n.right, tile.used)


@gluon.jit
def full_tiles(C: gl.constexpr, first, tile, n):
    """Return (begin, end) of the key tiles before the last that the band does not cut.

    The 64 rows begin at ``first``.
    """
    begin = tile.lo
    end = tile.hi - 1
    if C.LEFT or C.RIGHT:
        # without filled_tiles, whose scalars spill at head size 256
        low, high = full_range(C, first, tile, n)
        if C.RIGHT:
            if C.LAGS:  # the tile with the last key of the first row, so that m exists
                high -= 1
            end = gl.minimum(gl.maximum(high // C.BLOCK_K, begin), end)
        if C.LEFT:
            begin = gl.minimum(gl.maximum((low + C.BLOCK_K - 1) // C.BLOCK_K, begin), end)
    return begin, end


@gluon.jit
def other_strip(a, b, n):
    """Return True if two tiles read the bias of other queries, heads or sequences."""
    other = (a.first != b.first) | (a.head * n.each_h != b.head * n.each_h)
    return other | (a.b * n.each_b != b.b * n.each_b)
