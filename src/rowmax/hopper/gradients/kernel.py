"""The backward kernel: two consumers, one that brings and one that takes away."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernel import blocks_of
from ..pipeline import barriers
from .consumer import consumer
from .pipeline import all_barriers, producer, writer


@gluon.jit
def consumer0(C: gl.constexpr, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest):
    consumer(C, 0, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest)


@gluon.jit
def consumer1(C: gl.constexpr, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest):
    consumer(C, 1, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest)


#: no kernel is compiled anew for these
NUMBERS = [
    "heads", "keys", "tiles", "nq", "nk", "left", "right", "batch", "ids_q", "ids_k", "each_b",
    "each_h", "hq", "group",
]  # fmt: skip


# fmt: off
@gluon.jit(do_not_specialize=NUMBERS)
def backward(
    q, do, rows, k, v, dq, bias, dbias,  # what copies each; rows are lse and delta
    dk, dv,
    table, ends, counter, heads, keys,  # the order of the tiles
    turns, tiles,  # how many steps each tile of keys has done; tiles of a head
    nq, nk, left, right,
    cu_q, cu_k, batch, lengths, spans, q_ids, k_ids, ids_q, ids_k,
    each_b, each_h,  # 0 where the bias is one for all sequences, all heads
    inner, alibi, scale, out_scale, hq, group,
    C: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr,
):
    qs = blocks_of(q, C.Q_STAGES)
    dos = blocks_of(do, C.DO_STAGES)
    stats = blocks_of(rows, C.Q_STAGES)
    ks = blocks_of(k, 1)
    vs = blocks_of(v, 1)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK_Q, C.BLOCK_K], q.dtype)
    dss = gl.allocate_shared_memory(q.dtype, [2, C.BLOCK_Q, C.BLOCK_K], DS)
    dqs = blocks_of(dq, C.WARPGROUPS)
    messages = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = (messages, barriers(2, 1), barriers(2, C.WARPGROUPS + 1))
    bars = all_barriers(C)
    buffers = (qs, dos, stats, ks, vs, dss, dqs)
    descs = (q, do, rows, k, v, bias)
    order = (table, ends, counter, heads, heads, keys)
    sizes = (nq, nk, left, right, spans)
    seqs = (cu_k, cu_q, batch, lengths)
    terms = (inner, alibi, q_ids, k_ids, ids_q, ids_k)
    rest = (scale, out_scale, group, heads)
    spread = (group, hq, each_b, each_h)
    gl.warp_specialize(
        [
            (consumer0, (C, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest)),
            (consumer1, (C, dk, dv, dbias, buffers, bars, mail, sizes, terms, rest)),
            (producer, (C, descs, buffers[:6], bars, mail, order, sizes, seqs, lengths, spread)),
            (writer, (C, dq, dqs, bars, mail, turns, sizes, tiles, heads, group, hq)),
        ],
        [4, 1, 1],
        [R0, R1, R1],
    )
# fmt: on
