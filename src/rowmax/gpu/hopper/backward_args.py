"""The arguments of the backward kernels other than descriptors of copies.

A pointer that is ``None`` is a compile-time constant: a kernel has no code for absent features. A
new number does not recompile a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pointers(NamedTuple):
    """``t`` of the kernels that compute gradients."""

    out: Any  # dk, or dq in the kernel of dq alone
    dv: Any = None
    rows: Any = None  # lse and delta, unless TMA copies them
    table: Any = None  # the order of the tiles, and the end of each block's places in it
    ends: Any = None
    counter: Any = None  # the number of places that blocks have taken
    done: Any = None  # the number of steps that each tile of keys has added to dq
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    spans: Any = None  # the streamed tiles that documents leave, and those that need no mask
    alike: Any = None
    q_range: Any = None  # the least and the greatest id of each tile, where there are no spans
    k_range: Any = None
    q_ids: Any = None
    k_ids: Any = None
    alibi: Any = None
    seed: Any = None  # DROPOUT: int64 []
    bias: Any = None  # the bias, unless TMA copies it and its gradient
    dbias: Any = None  # sums [B, Hk, Nk] of a bias of one row, float32
    parts: Any = None  # dbias of each part of the sequences and heads that share it, float32
    sums: Any = None  # as in RowPointers, where this launch rounds dq
    dq: Any = None
    dk_rows: Any = None  # where rows of dk and dv are, if not one after the other (inputs.Places)
    dv_rows: Any = None
    dk_alone: Any = None  # rows of dk and dv that no other call adds to
    dv_alone: Any = None


class Numbers(NamedTuple):
    """``n`` of the kernels that compute gradients."""

    heads: Any  # heads of the resident side
    streamed: Any  # streamed positions that fill their share of the L2 cache
    rows: Any  # rows of a plane of lse, delta and dq
    nq: Any
    nk: Any
    left: Any
    right: Any
    batch: Any
    ids_q: Any  # number of ids of a sequence, 0 where all sequences share them
    ids_k: Any
    each_b: Any  # 0 where all sequences (each_h: all heads) share the bias, else 1
    each_h: Any
    inner: Any  # factor of the products inside a softcap
    scale: Any  # factor from a product to the units of the scores
    out_scale: Any
    hq: Any
    group: Any  # streamed heads of a resident head
    ratio: Any  # query heads of a kv head
    bias_b: Any  # strides of the bias in units of 8; 0 where a dimension is broadcast
    bias_h: Any
    bias_q: Any
    shift: Any  # for ALiBi's distances in a block of a longer call; None: 0
    parts: Any = None  # parts of the sequences and heads that share a bias; None: one
    shares: Any = None  # resident heads of a kv head, each with a share of its group; None: one
    share_rows: Any = 0  # rows of dk and dv of a share
    zeroed: Any = 0  # kv heads of all sequences whose sums of dq begin with zeros (COMPLETE)
    threshold: Any = None  # DROPOUT: the least draw that is kept
    keep_scale: Any = None  # the factor of kept weights
    first_query: Any = None  # the first query in a longer call, 64 keys, head and sequence
    first_block: Any = None
    first_head: Any = None
    first_sequence: Any = None


class RowPointers(NamedTuple):
    """``t`` of the passes over rows (``row_stats.py``)."""

    out: Any = None
    dout: Any = None
    lse: Any = None
    dlse: Any = None
    sink: Any = None
    #: float32 [planes, 2, rows], lse in the units of the scores and delta (lib.from_memory_order)
    stats: Any = None
    dsink: Any = None  # float32, one number for each tile of rows
    cu_q: Any = None
    cu_k: Any = None
    sums: Any = None  # dq, float32 [planes, tiles, ROW_TILE D] (backward_steps.thread_order)
    done: Any = None
    counters: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dcolumn: Any = None  # float32 [B, Hq, Nq], for a bias of one number for each query
    rest: Any = None  # the rounding error of lse, only for natural scores (gpu/preprocess.py)
    scaled: Any = None  # only with rest: dout over the sum of the weights, with dout's strides


class RowNumbers(NamedTuple):
    """``n`` of the passes over rows."""

    batch: Any
    total_q: Any
    total_k: Any
    hq: Any
    hk: Any
    tiles: Any  # tiles of rows in a plane
    done: Any  # words of ``done``, one for each tile of keys
    stride_b: Any  # strides of dout, in units of 8
    stride_n: Any
    stride_h: Any
    scale: Any
    nq: Any
    zeroed: Any  # planes of the sums of dq that begin with zeros
    shares: Any  # dk and dv of all shares follow one another


class RowConstants(NamedTuple):
    """``c`` of the passes over rows."""

    D: Any
    DV: Any
    D0: Any  # the parts of a tile of dq (lib/parts.py)
    D1: Any
    BLOCK_DV: Any
    ROWS: Any
    NATURAL: Any  # scores and lse are in natural units
    COMPLETE: Any  # done words count tiles (backward_complete.py)


class PartPointers(NamedTuple):
    """``t`` of the sum of the parts of a gradient."""

    parts: Any = None  # float32 [parts, ...]
    total: Any = None
    other_parts: Any = None  # those of a second gradient
    other_total: Any = None


class PartNumbers(NamedTuple):
    """``n`` of the sum of the parts of a gradient."""

    size: Any  # numbers of a part
    parts: Any
    other_size: Any = 0


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
    tiles: Any  # tiles of queries of a head
    stride_q: Any  # strides of dbias, in units of 8
    stride_b: Any  # strides of k, in units of 8
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
