"""The backward of the tangent: tasks are those of the backward, with three times its products.

Names are those of ``rules/tangent.py``. Operands are of the accumulator's dtype, never pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..call.flops import tangent_backward_flops
from ..call.inputs import Cotangents, Gradients, Results, Tangents, Tensors, WantedSecond
from ..call.problem import Problem
from ..rules import row_stats
from ..rules.softmax import LOG2E
from .backward import finished, outputs, owners_of, parts_of, sum_far_rows, write_parts
from .call import Call
from .functions import STRICT, array, inner, number
from .gradient_rows import add_to_bias, buffers_of, weight, write_rows
from .heads import add_to_dheads
from .kernel import kernel, launch
from .operands import memory_of, pack_panels, rows_are_finite, sparse_product
from .products import from_columns, from_rows
from .rows import keep_row, position, query_scale, score_row, tangent_row
from .rules import curved_by_softcap, score_gradients
from .tangent import pack_queries, sum_of_products
from .tiles import (
    all_sequences,
    columns,
    key_range,
    numbers_at,
    place_of,
    row_address,
    row_at,
    score_tile,
    tile_range,
)
from .vector import TILE_K, TILE_Q, fetch_add


class HeadMemory(NamedTuple):
    """Addresses of a kv head's operands and sums, in a thread's scratch memory."""

    k_panels: int  # [keys / panel, d, panel]
    tk_panels: int
    v_panels: int
    tv_panels: int
    dk: int  # [keys, d_padded]
    dtk: int
    dv: int  # [keys, value_d_padded]
    dtv: int


class TileMemory(NamedTuple):
    """Addresses of a tile's operands and sums, in a thread's scratch memory."""

    queries: int  # [d, TILE_Q]
    tqueries: int
    douts: int  # [value_d, TILE_Q], e
    dtouts: int  # g
    s: int  # [TILE_Q, TILE_K], then P R
    t: int  # x', then s', then P R D
    beta: int  # g.v, then dS' and dX'
    gamma: int  # g.v' + e.v, then dS and dX
    dq: int  # [TILE_Q, d_padded]
    dtq: int


class Rows(NamedTuple):
    """Numbers of the rows of a tile, arrays ``[n]``."""

    b: np.ndarray
    c: np.ndarray
    tlse: np.ndarray
    lse: np.ndarray  # in the units of the scores; +inf for a row that sees nothing
    rest: np.ndarray  # the rounding error of LSE, natural; empty where scores are in base 2


def tangent_backward(
    problem: Problem,
    tensors: Tensors,
    tangents: Tangents,
    results: Results,
    cotangents: Cotangents,
    wanted: WantedSecond,
) -> tuple[Gradients, Gradients]:
    """Return the wanted gradients of the inputs and of their tangents, as a backward does."""
    call = Call(problem, tensors, bfloats=False)
    call.tangents(tangents)
    lse, tlse = (t.to(call.dtype).contiguous() for t in (results.lse, results.tlse))
    deltas = row_stats.second_deltas(results._replace(lse=lse), cotangents)
    rest = torch.zeros_like(lse) if problem.natural else None
    g = torch.zeros_like(results.out) if cotangents.tout is None else cotangents.tout
    call.tensor("dtout", call.rows(g))
    if cotangents.out is not None:
        call.tensor("dout", call.rows(cotangents.out))
    numbers = {"lse": row_stats.score_lse(lse, problem.natural), "tlse": tlse, "rest": rest}
    numbers |= {"row_b": deltas[0].contiguous(), "row_c": deltas[1].contiguous()}
    for name, t in numbers.items():
        if t is not None:
            call.tensor(name, t)
    starts, order = owners_of(problem, wanted.inputs.bias or wanted.tangents.bias)
    tasks = len(starts) - 1
    parts = parts_of(problem, tasks)
    sums = [
        outputs(call, tensors, wanted.inputs, parts, "d"),
        outputs(call, tensors, wanted.tangents, parts, "dt"),
    ]
    arguments = (call.record, starts, order, call.like)
    flops = tangent_backward_flops(problem)
    launch(tangent_backward_worker, *arguments, tasks=tasks * parts, flops=flops)
    done = [finished(problem, tensors, s) for s in sums]
    if wanted.inputs.sink or wanted.tangents.sink:
        assert tensors.sink is not None
        found = row_stats.second_dsink(tensors.sink, tangents.sink, (lse, tlse), deltas, rest)
        for part, want, x in zip(done, wanted, found, strict=True):
            if want.sink:
                part["sink"] = x.to(tensors.sink.dtype)
    return Gradients(**done[0]), Gradients(**done[1])


@kernel
def tangent_backward_worker(calls, starts, order, like, counters):
    """Compute the tasks of one thread until the counter of owners has passed the last."""
    call = calls[0]
    sequences = all_sequences(call)
    longest = (call.longest_k + TILE_K - 1) // TILE_K * TILE_K
    heads_owner, memory = head_memory(call, longest, like)
    tiles_owner, tile_mem = tile_memory(call, like)
    buffers_owner, buffers = buffers_of(call, call.bent, like)
    finite = np.empty(longest // TILE_K, np.bool_)
    while True:
        t = fetch_add(counters.ctypes.data, 1)
        if t >= (len(starts) - 1) * call.parts:
            break
        owner, p = t // call.parts, t % call.parts
        for n in range(starts[owner], starts[owner + 1]):
            s, hk = order[n].s, order[n].h
            seq = sequences[s]
            pack_head(call, seq, s, hk, memory, finite, like)
            count = (seq.queries + TILE_Q - 1) // TILE_Q
            for h in range(hk * call.group, (hk + 1) * call.group):
                for tile in range(p, count, call.parts):
                    place = place_of(seq, s, h, tile)
                    second_tile(call, seq, finite, place, p, memory, tile_mem, buffers, like)
            write_head(call, seq, (p, s, hk), memory, like)
    return heads_owner.size + tiles_owner.size + buffers_owner.size


@inner
def head_memory(call, longest, like):
    """Return (the array that owns it, the memory of a kv head of up to ``longest`` keys)."""
    d, value_d = call.d_operand, call.value_d_operand
    padded, value_padded = call.d_padded, call.value_d_padded
    columns = d, d, value_d, value_d, padded, padded, value_padded, value_padded
    owner, at = memory_of(like, longest, columns)
    return owner, HeadMemory(*at)


@inner
def tile_memory(call, like):
    """Return (the array that owns it, the memory of a tile)."""
    d, value_d, padded = call.d_operand, call.value_d_operand, call.d_padded
    tiles = TILE_K, TILE_K, TILE_K, TILE_K
    owner, at = memory_of(like, TILE_Q, (d, d, value_d, value_d, *tiles, padded, padded))
    return owner, TileMemory(*at)


@inner
def pack_head(call, seq, s, h, memory, finite, like):
    """Write a kv head's operands as panels; note the finite tiles of keys; clear its sums."""
    zero = like.dtype.type(0)
    for tile in tile_range(0, seq.keys):
        finite[tile] = True
    at, d, value_d = (seq, s, h), call.d_operand, call.value_d_operand
    pack_rows(call.k, memory.k_panels, at, d, True, finite, like)
    pack_rows(call.tk, memory.tk_panels, at, d, True, finite, like)
    pack_rows(call.v, memory.v_panels, at, value_d, False, finite, like)
    pack_rows(call.tv, memory.tv_panels, at, value_d, False, finite, like)
    for to in (memory.dk, memory.dtk):
        array(to, seq.keys * call.d_padded, like)[:] = zero
    for to in (memory.dv, memory.dtv):
        array(to, seq.keys * call.value_d_padded, like)[:] = zero


@inner
def pack_rows(rows, to, at, d, check, finite, like):
    """Write the rows of a kv head as panels; ``check`` notes which tiles are not finite."""
    if not rows.address:
        return
    seq, s, h = at
    row_bytes, n = like.itemsize * rows.n, seq.keys
    address = rows.address + like.itemsize * row_at(rows, s, seq.key, h)
    for tile in tile_range(0, n):
        j0 = tile * TILE_K
        pack_panels(like, to, address, row_bytes, j0, n, d)
        if check:
            here, count = address + row_bytes * j0, min(TILE_K, n - j0)
            finite[tile] = finite[tile] and rows_are_finite(like, here, row_bytes, count, d)


@inner
def write_head(call, seq, at, memory, like):
    """Write the gradients of a kv head's keys and values, and of their tangents."""
    write_parts(call.dk, memory.dk, call.d, call, seq, at, like, like)
    write_parts(call.dtk, memory.dtk, call.d, call, seq, at, like, like)
    write_parts(call.dv, memory.dv, call.value_d, call, seq, at, like, like)
    write_parts(call.dtv, memory.dtv, call.value_d, call, seq, at, like, like)


@inner
def second_tile(call, seq, finite, place, p, head, tile, buffers, like):
    """Compute a tile of queries over its keys: add to the sums of keys, write dQ and dQ'."""
    n, d, value_d, factor = place.n, call.d_operand, call.value_d_operand, query_scale(call)
    clean = pack_queries(call.q, tile.queries, seq, place, d, factor, like)
    clean &= pack_queries(call.tq, tile.tqueries, seq, place, d, factor, like)
    clean &= pack_queries(call.dout, tile.douts, seq, place, value_d, 1.0, like)
    clean &= pack_queries(call.dtout, tile.dtouts, seq, place, value_d, 1.0, like)
    for to in (tile.dq, tile.dtq):
        array(to, TILE_Q * call.d_padded, like)[:] = like.dtype.type(0)

    low, high = key_range(call, seq, place)
    rows = rows_of(call, seq, place, like)
    if call.natural:
        sum_far_rows(call, seq, place, rows, head, tile, buffers, like, like)
    for tile_k in tile_range(low, high):
        part = columns(call, place, low, high, tile_k, like)
        if part.width <= 0:
            continue
        score_products(call, part, n, head, tile, like)
        for r in range(n):
            second_row(call, seq, place, r, part, p, rows, tile, buffers, like)
        whole = clean and finite[tile_k]
        add_to_keys(call, seq, place, part, whole, head, tile, like)
        add_to_queries(call, seq, place, part, whole, tile, like)
    write_queries(call.dq, tile.dq, call, seq, place, like)
    write_queries(call.dtq, tile.dtq, call, seq, place, like)


@inner
def write_queries(to, rows, call, seq, place, like):
    """Write a tile of dQ, or of dQ', if it is wanted."""
    if to.address:
        address = row_address(to, seq, place, like)
        write_rows(address, to.n, rows, place.n, call.d, call.d_padded, like, like)


@inner
def rows_of(call, seq, place, like):
    """Return the numbers of the rows of a tile of queries."""
    at = like.itemsize, place.s, place.h, seq.query + place.i0
    n = place.n
    return Rows(
        array(numbers_at(call.row_b, *at), n, like),
        array(numbers_at(call.row_c, *at), n, like),
        array(numbers_at(call.tlse, *at), n, like),
        array(numbers_at(call.lse, *at), n, like),
        array(numbers_at(call.rest, *at), n if call.natural else 0, like),
    )


@inner
def score_products(call, part, n, head, tile, like):
    """Write the products ``Q K^T``, x', beta and gamma of a tile of keys, ``[n, part.width]``."""
    d, value_d = call.d_operand, call.value_d_operand
    score_tile(like, tile.s, tile.queries, head.k_panels, part, n, d, 0)
    first = call.tq, tile.tqueries, head.k_panels
    sum_of_products(tile.t, first, (call.tk, tile.queries, head.tk_panels), part, n, d, like)
    score_tile(like, tile.beta, tile.dtouts, head.v_panels, part, n, value_d, 0)
    first, second = (call.dout, tile.douts, head.v_panels), (call.tv, tile.dtouts, head.tv_panels)
    sum_of_products(tile.gamma, first, second, part, n, value_d, like)


@inner
def second_row(call, seq, place, r, part, p, rows, tile, buffers, like):
    """Compute row r of a tile: ``P R``, ``P R D``, dX' and dX, both times scale.

    Add to the gradients of the bias and of heads' parameters.
    """
    s, h, i, width = place.s, place.h, place.i0 + r, part.width
    offset = like.itemsize * r * TILE_K
    P, T = array(tile.s + offset, width, like), array(tile.t + offset, width, like)
    dts, ds = array(tile.beta + offset, width, like), array(tile.gamma + offset, width, like)
    y, tx = buffers.y[:width], buffers.x[:width]
    score_row(P, y, call, seq, s, h, i, part)
    for j in range(tx.size):
        tx[j] = T[j]
    tangent_row(T, y, call, seq, s, h, i, part)
    kept = buffers.kept
    if call.threshold:
        kept = keep_row(buffers.kept, width, call, s, h, i, part.j0)
    first, second = call.dbias.address or call.dheads.address, call.dtbias.address
    # where nothing else reads dS and dS' they include the scale, which saves a pass
    apart = first or second or call.dtheads.address or y.size > 0
    rest = rows.rest[r] if call.natural else like.dtype.type(0)
    numbers = rows.b[r], rows.c[r], rows.tlse[r], rows.lse[r], rest, call.natural
    gradient_rows((P, T, dts, ds), kept, numbers, call.keep_scale, 1.0 if apart else call.scale)
    if not apart:
        return
    at = position(call, seq, i, part)
    if call.dbias.address:
        add_to_bias(call.dbias, ds[: part.keys], call.store_bias, s, h, i, part.j0, p)
    if call.dtbias.address:
        add_to_bias(call.dtbias, dts[: part.keys], call.store_bias, s, h, i, part.j0, p)
    if call.dheads.address:  # added terms, and no others (``supports``): x and y are not read
        add_to_dheads(ds, ds, ds, call, call.dheads, s, h, at, p)
    if call.dtheads.address:
        add_to_dheads(dts, dts, dts, call, call.dtheads, s, h, at, p)
    scaled_dx(ds, dts, tx, y, call.scale)


@inner(fastmath=STRICT)
def gradient_rows(tiles, kept, row, keep_scale, unit):
    """Replace (scores, s', beta, gamma) by ``(P R, P R D, unit dS', unit dS)``.

    A weight of 0 has no gradient, even if its value is NaN.
    """
    P, T, dts, ds = tiles
    b, c, tlse, lse, rest, natural = row
    zero, unit = number(0, lse), number(unit, lse)
    rest = rest * number(LOG2E, lse)
    if kept.size:
        scale = P.dtype.type(keep_scale)
        for j in range(P.size):
            w, d = weight(P[j], lse, rest, natural), T[j] - tlse
            keep = scale if kept[j] else zero
            first, second = score_gradients(unit * w, dts[j] * keep, ds[j] * keep, d, b, c)
            ds[j] = zero if w == zero else first
            dts[j] = zero if w == zero else second
            P[j] = w * keep
            T[j] = zero if P[j] == zero else P[j] * d
    else:
        for j in range(P.size):
            w, d = weight(P[j], lse, rest, natural), T[j] - tlse
            first, second = score_gradients(unit * w, dts[j], ds[j], d, b, c)
            ds[j] = zero if w == zero else first
            dts[j] = zero if w == zero else second
            P[j] = w
            T[j] = zero if w == zero else w * d


@inner(fastmath=STRICT)
def scaled_dx(ds, dts, tx, y, scale):
    """Replace dS and dS' by ``scale dX`` and ``scale dX'``.

    Where both are 0 they stay 0: under a masked pair y and x' may be those of a key that is NaN.
    """
    unit, zero = ds.dtype.type(scale), ds.dtype.type(0)
    if y.size:
        for j in range(ds.size):
            dx, dtx = curved_by_softcap(ds[j], dts[j], tx[j], y[j])
            none = ds[j] == zero and dts[j] == zero
            ds[j] = zero if none else dx * unit
            dts[j] = zero if none else dtx * unit
    else:
        for j in range(ds.size):
            ds[j] *= unit
            dts[j] *= unit


@inner
def add_to_keys(call, seq, place, part, whole, head, tile, like):
    """Add a tile's part to dK, dK', dV and dV'; ``whole``: all rows are finite."""
    d, value_d, on = call.d_padded, call.value_d_padded, (seq, place, part, whole, like)
    if call.dv.address:
        down_columns(tile.t, call.dtout, head.dv, value_d, *on)
        down_columns(tile.s, call.dout, head.dv, value_d, *on)
    if call.dtv.address:
        down_columns(tile.s, call.dtout, head.dtv, value_d, *on)
    if call.dk.address:
        down_columns(tile.gamma, call.q, head.dk, d, *on)
        down_columns(tile.beta, call.tq, head.dk, d, *on)
    if call.dtk.address:
        down_columns(tile.beta, call.q, head.dtk, d, *on)


@inner
def down_columns(weights, rows, to, d, seq, place, part, whole, like):
    """Add ``W^T X`` of a tile of weights and the caller's rows of its queries, if there are any."""
    if not rows.address:
        return
    at, n, width = row_address(rows, seq, place, like), place.n, part.width
    to += like.itemsize * d * part.j0
    if whole:
        from_columns(like, width, d, n, to, d, weights, TILE_K, at, rows.n, 1)
    else:
        sparse_product(to, d, width, (weights, 1, TILE_K), n, at, rows.n, d, 0, like)


@inner
def add_to_queries(call, seq, place, part, whole, tile, like):
    """Add a tile's part to dQ and dQ'; ``whole``: all rows are finite."""
    on = call, seq, place, part, whole, like
    if call.dq.address:
        along_rows(tile.gamma, call.k, tile.dq, *on)
        along_rows(tile.beta, call.tk, tile.dq, *on)
    if call.dtq.address:
        along_rows(tile.beta, call.k, tile.dtq, *on)


@inner
def along_rows(weights, rows, to, call, seq, place, part, whole, like):
    """Add ``W X`` of a tile of weights and the caller's rows of its keys, if there are any."""
    if not rows.address:
        return
    at = row_at(rows, place.s, seq.key + part.j0, place.h // call.group)
    at, d, n, keys = rows.address + like.itemsize * at, call.d_padded, place.n, part.keys
    if whole:
        from_rows(like, n, d, keys, to, d, weights, at, rows.n)
    else:
        sparse_product(to, d, n, (weights, TILE_K, 1), keys, at, rows.n, d, 0, like)
