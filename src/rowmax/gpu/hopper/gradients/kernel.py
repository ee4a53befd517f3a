"""The backward kernel: two consumers, one that brings and one that takes away."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lib.ring import barriers
from ..lib.ring import tile_buffers as blocks_of
from .consumer import consumer
from .pipeline import all_barriers, follow, producer, take_away


@gluon.jit
def consumer0(C: gl.constexpr, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest):
    consumer(C, 0, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest)


@gluon.jit
def consumer1(C: gl.constexpr, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest):
    consumer(C, 1, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest)


@gluon.jit
def writer(C: gl.constexpr, dq, dqs, bars, mail, turns, sizes, tiles, heads, group, hq):
    if C.DQ:
        take_away(C, dq, dqs, bars, mail, turns, sizes, tiles, heads, group, hq)


@gluon.jit
def backward(
    q, do, rows, k, v, dq, bias, dbias, t, n,
    C: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr,
):  # fmt: skip
    """What tells the copy engine what to copy (rows are lse and delta), the bundles, what is
    compiled in, and registers: a consumer's thread's, then the others'."""
    qs = blocks_of(q, C.Q_STAGES)
    dos = blocks_of(do, C.DO_STAGES)
    stats = blocks_of(rows, C.Q_STAGES)
    ks = blocks_of(k, C.KV_STAGES)
    vs = blocks_of(v, C.KV_STAGES)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK_Q, C.BLOCK_K], q.dtype)
    dss = gl.allocate_shared_memory(q.dtype, [C.DS_STAGES, C.BLOCK_Q, C.BLOCK_K], DS)
    dqs = dss  # nobody's, where dQ is not made here
    if C.DQ:
        dqs = blocks_of(dq, C.DQ_STAGES)
    messages = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = (messages, barriers(2, 1), barriers(2, C.READERS))
    bars = all_barriers(C)
    buffers = (qs, dos, stats, ks, vs, dss, dqs)
    descs = (q, do, rows, k, v, bias)
    order = (t.table, t.ends, t.counter, n.heads, n.heads, n.keys)
    sizes = (n.nq, n.nk, n.left, n.right, t.spans)
    seqs = (t.cu_k, t.cu_q, n.batch, t.lengths)
    length = n.nq if C.COLUMN else n.nk
    row = (t.bias, n.each_b, n.each_h, n.each_h * (n.hq - 1) + 1, length)
    terms = (n.inner, t.alibi, t.q_ids, t.k_ids, n.ids_q, n.ids_k, row)
    rest = (n.scale, n.out_scale, n.group, n.heads, t.dbias)
    spread = (n.group, n.hq, n.each_b, n.each_h)
    follow()
    tiles = (n.nk + C.BLOCK_K - 1) // C.BLOCK_K  # of keys, a head
    if C.ORDERED and C.VARLEN:
        tiles = gl.load(t.cu_k + n.batch) // C.BLOCK_K + n.batch
    gl.warp_specialize(
        [
            (consumer0, (C, t.out, t.dv, dbias, buffers, bars, mail, sizes, terms, rest)),
            (consumer1, (C, t.out, t.dv, dbias, buffers, bars, mail, sizes, terms, rest)),
            (producer, (C, descs, buffers[:6], bars, mail, order, sizes, seqs, t.lengths, spread)),
            (writer, (C, dq, dqs, bars, mail, t.turns, sizes, tiles, n.heads, n.group, n.hq)),
        ],
        [4, 1, 1],
        [R0, R1, R1],
    )
