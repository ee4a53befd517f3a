"""The arguments of the backward kernels beside descriptors of copies.

``None`` among the pointers is a compile-time constant: the code for a feature that a problem lacks
is not compiled. Numbers compile nothing anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pointers(NamedTuple):
    """``t`` of the kernels that make gradients."""

    out: Any  # dk, or dq in the kernel of dq alone
    dv: Any = None
    rows: Any = None  # lse and delta, where they are not copied
    table: Any = None  # the order of the tiles, and the end of each block's places
    ends: Any = None
    counter: Any = None  # of the places that blocks have taken
    done: Any = None  # steps that each tile of keys has added to dq
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    spans: Any = None  # of documents
    q_ids: Any = None
    k_ids: Any = None
    alibi: Any = None
    bias: Any = None  # where it and its gradient are not copied
    dbias: Any = None  # of a row: sums [B, Hk, Nk] in float32


class Numbers(NamedTuple):
    """``n`` of the kernels that make gradients."""

    heads: Any  # of the resident side
    streamed: Any  # streamed positions that fill their share of the L2 cache
    rows: Any  # of a plane of lse, delta and dq
    nq: Any
    nk: Any
    left: Any
    right: Any
    batch: Any
    ids_q: Any  # ids of a sequence, 0 where all sequences have the same
    ids_k: Any
    each_b: Any  # 0 where the bias is the same for all sequences, all heads
    each_h: Any
    inner: Any  # factor of the products inside a softcap
    scale: Any  # factor that gives scores in their units
    out_scale: Any
    hq: Any
    group: Any  # heads that pass by one resident head
    ratio: Any  # query heads of a kv head
    bias_b: Any  # strides of the bias in units of 8; 0 where a dimension is broadcast
    bias_h: Any
    bias_q: Any
    shift: Any  # of ALiBi's distances in a block of a longer call; None: 0


class RowPointers(NamedTuple):
    """``t`` of the passes over rows (``row_stats.py``)."""

    out: Any = None
    dout: Any = None
    lse: Any = None
    dlse: Any = None
    sink: Any = None
    #: float32 [planes, 2, rows], lse in the units of the scores and delta (lib.from_memory_order)
    stats: Any = None
    dsink: Any = None  # float32, of each tile of rows
    cu_q: Any = None
    cu_k: Any = None
    sums: Any = None  # float32 [planes, tiles, ROW_TILE D], of dq (backward_fused.thread_order)
    done: Any = None
    counters: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dcolumn: Any = None  # float32 [B, Hq, Nq], of a bias that is a number for each query
    rest: Any = None  # of natural scores: the rounding error of lse (triton/row_sums.py)
    scaled: Any = None  # with that: dout over the sum of the weights, strides as dout's


class RowNumbers(NamedTuple):
    """``n`` of the passes over rows."""

    batch: Any
    total_q: Any
    total_k: Any
    hq: Any
    hk: Any
    tiles: Any  # of rows, a plane
    done: Any  # words of ``done``, one a tile of keys
    stride_b: Any  # of dout, in units of 8
    stride_n: Any
    stride_h: Any
    scale: Any
    nq: Any


class RowConstants(NamedTuple):
    """``c`` of the passes over rows."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ROWS: Any
    NATURAL: Any  # scores and lse are in natural units


class ProductPointers(NamedTuple):
    """``t`` of the product that gives dq from dbias."""

    dbias: Any = None
    k: Any = None
    dq: Any = None
    lengths: Any = None


class ProductNumbers(NamedTuple):
    """``n`` of the product that gives dq from dbias."""

    nq: Any
    nk: Any
    left: Any
    right: Any
    hq: Any
    ratio: Any  # query heads of a kv head
    tiles: Any  # of queries, a head
    stride_q: Any  # of dbias, in units of 8
    stride_b: Any  # of k, in units of 8
    stride_n: Any
    stride_h: Any
    scale: Any


class ProductConstants(NamedTuple):
    """``c`` of the product that gives dq from dbias."""

    D: Any
    BLOCK_D: Any
    ROWS: Any
    COLUMNS: Any
    LEFT: Any
    RIGHT: Any
