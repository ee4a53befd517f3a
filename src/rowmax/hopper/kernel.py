"""The forward kernel: consumers and one producer in a persistent block."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .consumer import consumer
from .pipeline import barriers, pipeline, producer


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


# fmt: off
@gluon.jit
def forward(
    q0, q1, k0, k1, v0, v1, bias_tiles,  # what copies each; second parts and bias may be idle
    out, lse,
    table, ends, counter, heads, kv_heads, keys,  # the order of the tiles
    nq, nk, left, right,
    cu_q, cu_k, batch, lengths, spans,
    inner, alibi, bias, bias_b, bias_h, bias_q, bias_k, sink,
    q_ids, k_ids, ids_q, ids_k, q_range, k_range,
    each_b, each_h,  # 0 where the copied bias is one for all sequences, all heads
    scale, hq, ratio, total_q,
    C: gl.constexpr, R0: gl.constexpr, R1: gl.constexpr,
):
    qs0 = blocks_of(q0, C.WARPGROUPS * C.Q_STAGES)
    ks0 = blocks_of(k0, C.STAGES)
    vs0 = blocks_of(v0, C.STAGES)
    qs1 = qs0
    ks1 = ks0
    vs1 = vs0
    if C.D1:
        qs1 = blocks_of(q1, C.WARPGROUPS * C.Q_STAGES)
        ks1 = blocks_of(k1, C.STAGES)
    if C.DV1:
        vs1 = blocks_of(v1, C.STAGES)
    biases = qs0
    b_full = barriers(1, 1)
    b_empty = barriers(1, C.WARPGROUPS)
    if C.BIAS == "copied":
        biases = blocks_of(bias_tiles, C.WARPGROUPS)
    messages = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = (messages, barriers(2, 1), barriers(2, C.WARPGROUPS))
    bars = pipeline(C)
    buffers = (qs0, qs1, ks0, ks1, vs0, vs1)
    shared = (biases, b_full, b_empty)
    descs = (q0, q1, k0, k1, v0, v1, bias_tiles)
    order = (table, ends, counter, heads, kv_heads, keys)
    sizes = (nq, nk, left, right)
    seqs = (cu_q, cu_k, batch, spans)
    terms = (
        inner, alibi, bias, bias_b, bias_h, bias_q, bias_k, sink,
        q_ids, k_ids, ids_q, ids_k, q_range, k_range,
    )
    rest = (scale, hq, total_q)
    more = (lengths, each_b, each_h, ratio)
    if C.WARPGROUPS == 2:
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
# fmt: on
