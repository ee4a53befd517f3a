"""The forward kernel: consumers and one producer in a persistent block."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .consumer import work
from .gluon_compat import mbarrier
from .pipeline import barriers, pipeline, producer, told


class Pointers(NamedTuple):
    """``t``: what the kernel reads and writes beside what is copied."""

    out: Any
    lse: Any
    table: Any  # the order of the tiles (schedule.py), where each block's tiles end
    ends: Any
    counter: Any = None  # what tiles are drawn from
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    spans: Any = None  # of documents (documents.py), as are the ranges
    q_range: Any = None
    k_range: Any = None
    q_ids: Any = None
    k_ids: Any = None
    alibi: Any = None
    sink: Any = None
    bias: Any = None  # where it is gathered


class Numbers(NamedTuple):
    """``n``. No kernel is compiled anew for them."""

    heads: Any  # of a tile: query heads, or kv heads where a tile holds all that share one
    kv_heads: Any
    keys: Any  # whose keys and values fill what the L2 cache has for them
    nq: Any
    nk: Any
    left: Any
    right: Any
    batch: Any
    scale: Any  # what the exponential takes scores times
    inner: Any  # what scores are times inside a softcap
    bias_b: Any
    bias_h: Any
    bias_q: Any
    bias_k: Any
    ids_q: Any  # 0 where ids are the same in all sequences, else how many a sequence has
    ids_k: Any
    each_b: Any  # 0 where the copied bias is one for all sequences, all heads
    each_h: Any
    hq: Any
    ratio: Any  # heads of a tile that read one kv head
    total_q: Any


@gluon.jit
def consumer(
    C: gl.constexpr, c: gl.constexpr, out, lse, buffers, bars, shared, mail, sizes, terms, rest
):
    """Warpgroup c: rows ``64 c`` to ``64 c + 63`` of every tile of this block."""
    messages, m_full, m_empty = mail
    tile, live = told(C, 0, messages, m_full)
    mbarrier.arrive(m_empty.index(0), count=1)
    if live:
        work(C, c, tile, out, lse, buffers, bars, shared, mail, sizes, terms, rest)


@gluon.jit
def consumer0(C: gl.constexpr, out, lse, buffers, bars, shared, mail, sizes, terms, rest):
    consumer(C, 0, out, lse, buffers, bars, shared, mail, sizes, terms, rest)


@gluon.jit
def consumer1(C: gl.constexpr, out, lse, buffers, bars, shared, mail, sizes, terms, rest):
    consumer(C, 1, out, lse, buffers, bars, shared, mail, sizes, terms, rest)


@gluon.jit
def consumer2(C: gl.constexpr, out, lse, buffers, bars, shared, mail, sizes, terms, rest):
    consumer(C, 2, out, lse, buffers, bars, shared, mail, sizes, terms, rest)


@gluon.jit
def blocks_of(desc, n: gl.constexpr):
    """n buffers in shared memory for what the descriptor copies."""
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_type.shape, desc.layout)


@gluon.jit
def forward(
    q0, q1, k0, k1, v0, v1, bias_tiles, out_tiles, t, n,
    C: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr,
):  # fmt: skip
    """Eight to tell the copy engine what to copy, the bundles, what is compiled in, and the
    registers of a consumer's thread and of the producer's. What a problem lacks is None."""
    qs0 = blocks_of(q0, C.WARPGROUPS * C.Q_STAGES)
    ks0 = blocks_of(k0, C.K_STAGES)
    vs0 = blocks_of(v0, C.V_STAGES)
    qs1 = qs0
    ks1 = ks0
    vs1 = vs0
    if C.D1:
        qs1 = blocks_of(q1, C.WARPGROUPS * C.Q_STAGES)
        ks1 = blocks_of(k1, C.K_STAGES)
    if C.DV1:
        vs1 = blocks_of(v1, C.V_STAGES)
    # barriers that nobody uses would lie where something else does
    shared = (None, None, None)
    if C.BIAS == "copied":
        each: gl.constexpr = C.WARPGROUPS * C.B_STAGES
        shared = (blocks_of(bias_tiles, each), barriers(each, 1), barriers(each, 1))
    messages = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = (messages, barriers(2, 1), barriers(2, C.WARPGROUPS))
    bars = pipeline(C)
    buffers = (qs0, qs1, ks0, ks1, vs0, vs1)
    descs = (q0, q1, k0, k1, v0, v1, bias_tiles)
    order = (t.table, t.ends, t.counter, n.heads, n.kv_heads, n.keys)
    sizes = (n.nq, n.nk, n.left, n.right)
    seqs = (t.cu_q, t.cu_k, n.batch, t.spans)
    terms = (
        n.inner, t.alibi, t.bias, n.bias_b, n.bias_h, n.bias_q, n.bias_k, t.sink,
        t.q_ids, t.k_ids, n.ids_q, n.ids_k, t.q_range, t.k_range,
    )  # fmt: skip
    rest = (n.scale, n.hq, n.total_q)
    more = (t.lengths, n.each_b, n.each_h, n.ratio)
    outs = qs0
    if C.STAGED:
        outs = blocks_of(out_tiles, C.WARPGROUPS)
    out = (t.out, out_tiles, outs)
    lse = t.lse
    if C.WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consumer0, (C, out, lse, buffers, bars, shared, mail, sizes, terms, rest)),
                (producer, (C, descs, buffers, bars, shared, mail, order, sizes, seqs, more)),
            ],
            [1],
            [R1],
        )
    elif C.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consumer0, (C, out, lse, buffers, bars, shared, mail, sizes, terms, rest)),
                (consumer1, (C, out, lse, buffers, bars, shared, mail, sizes, terms, rest)),
                (producer, (C, descs, buffers, bars, shared, mail, order, sizes, seqs, more)),
            ],
            [4, 1],
            [R0, R1],
        )
    else:
        gl.warp_specialize(
            [
                (consumer0, (C, out, lse, buffers, bars, shared, mail, sizes, terms, rest)),
                (consumer1, (C, out, lse, buffers, bars, shared, mail, sizes, terms, rest)),
                (consumer2, (C, out, lse, buffers, bars, shared, mail, sizes, terms, rest)),
                (producer, (C, descs, buffers, bars, shared, mail, order, sizes, seqs, more)),
            ],
            [4, 4, 1],
            [R0, R0, R1],
        )
