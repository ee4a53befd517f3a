"""What the kernels of the backward take beside what copies tiles: pointers and numbers.

``None`` among the pointers is a compile-time constant: the code for what a problem lacks is not
compiled. No kernel is compiled anew for a number.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pointers(NamedTuple):
    """``t`` of the kernels that make gradients."""

    out: Any  # dk, or dq where that is made alone
    dv: Any = None
    rows: Any = None  # lse and delta, where they are not copied alone
    table: Any = None  # the order of the tiles, and where it ends
    ends: Any = None
    counter: Any = None  # what tiles are drawn from
    turns: Any = None  # whose turn it is to add to a tile of dq
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    spans: Any = None  # of documents
    q_ids: Any = None
    k_ids: Any = None
    alibi: Any = None
    bias: Any = None  # where it is not copied, nor its gradient
    dbias: Any = None  # of a row: sums [B, Hk, Nk] in float32


class Numbers(NamedTuple):
    """``n`` of the kernels that make gradients."""

    heads: Any  # of what stays
    keys: Any  # how many positions of what passes by the cache has room for
    rows: Any  # of a plane of lse, delta and dq
    nq: Any
    nk: Any
    left: Any
    right: Any
    batch: Any
    ids_q: Any  # 0 where ids are the same in all sequences, else how many a sequence has
    ids_k: Any
    each_b: Any  # 0 where the bias is one for all sequences, all heads
    each_h: Any
    inner: Any  # what scores are times inside a softcap
    scale: Any  # what makes scores of them, in their units
    out_scale: Any
    hq: Any
    group: Any  # heads that pass by one that stays
    ratio: Any  # query heads of a kv head
    bias_b: Any  # steps of the bias, in units of 8; 0 where it is one for all
    bias_h: Any
    bias_q: Any


class RowPointers(NamedTuple):
    """``t`` of what is done row by row."""

    out: Any = None
    dout: Any = None
    lse: Any = None
    dlse: Any = None
    sink: Any = None
    #: float32 [planes, 2, rows], lse in the units of the scores and delta (layouts.by_columns)
    stats: Any = None
    dsink: Any = None  # float32, of each tile of rows
    cu_q: Any = None
    cu_k: Any = None
    sums: Any = None  # float32 [planes, tiles, BLOCK_Q D], of dq, as layouts.by_threads has it
    turns: Any = None
    counters: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dcolumn: Any = None  # float32 [B, Hq, Nq], of a bias that is a number a query
    rest: Any = None  # of natural scores: what lse lost when it was rounded (triton/row_sums.py)
    scaled: Any = None  # with that: dout over the sum of the weights, strides as dout's


class RowNumbers(NamedTuple):
    """``n`` of what is done row by row."""

    batch: Any
    total_q: Any
    total_k: Any
    hq: Any
    hk: Any
    tiles: Any  # of rows, a plane
    turns: Any  # words, one a tile of keys
    b_step: Any  # of dout, in units of 8
    n_step: Any
    h_step: Any
    scale: Any
    nq: Any


class RowConstants(NamedTuple):
    """``c`` of what is done row by row."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ROWS: Any
    NATURAL: Any  # scores and lse are in natural units


class DbiasPointers(NamedTuple):
    """``t`` of what makes dq of dbias."""

    dbias: Any = None
    k: Any = None
    dq: Any = None
    lengths: Any = None


class DbiasNumbers(NamedTuple):
    """``n`` of what makes dq of dbias."""

    nq: Any
    nk: Any
    left: Any
    right: Any
    hq: Any
    ratio: Any  # query heads of a kv head
    tiles: Any  # of queries, a head
    q_step: Any  # of dbias, in units of 8
    b_step: Any  # of k, in units of 8
    n_step: Any
    h_step: Any
    scale: Any


class DbiasConstants(NamedTuple):
    """``c`` of what makes dq of dbias."""

    D: Any
    BLOCK_D: Any
    ROWS: Any
    COLUMNS: Any
    LEFT: Any
    RIGHT: Any
