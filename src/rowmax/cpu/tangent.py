"""The tangent: the forward's pass over tiles of keys, with two more running sums.

Names are those of ``rules/tangent.py``. Operands are of the accumulator's dtype, never pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ..call.flops import tangent_flops
from ..call.inputs import Results, Tangents, Tensors
from ..call.problem import Problem
from .call import Call, query_tasks
from .forward import NEXT, firsts_of, pack_keys, packed_head, softmax_step
from .functions import STRICT, SUMS, array, inner, number
from .gradient_rows import buffers_of
from .kernel import kernel, launch
from .operands import memory_of, pack_columns, rows_are_finite, sparse_product, store
from .products import from_rows
from .rows import hide, keep_row, log_unit, query_scale, score_row, tangent_row
from .rules import out_tangent, sink_in_tangent, tangent_base, with_sink
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

#: stands for a weight of a hidden pair; a sum of rounded products is no such number but by chance
UNSEEN = 1.2345678e-38


class Scratch(NamedTuple):
    """Addresses in a thread's scratch memory."""

    queries: int  # [d, TILE_Q]
    tqueries: int  # [d, TILE_Q]
    S: int  # [TILE_Q, TILE_K], then P
    T: int  # [TILE_Q, TILE_K], x', then s', then P s'
    O: int  # [TILE_Q, 2 value_d_padded], each row of O before that of tO
    sums: int  # [4, TILE_Q], the fields of Sums


class Sums(NamedTuple):
    """Running numbers of the rows of a tile, ``[TILE_Q]``."""

    m: np.ndarray
    l: np.ndarray
    tl: np.ndarray
    base: np.ndarray  # r of the rules, which is subtracted from each s' of a row


def tangent(problem: Problem, tensors: Tensors, tangents: Tangents) -> Results:
    """Return the results and their tangents."""
    call = Call(problem, tensors, bfloats=False)
    call.tangents(tangents)
    out = torch.empty(problem.out_shape, dtype=call.dtype)
    lse = torch.empty(problem.lse_shape, dtype=call.dtype)
    results = Results(out, lse, torch.empty_like(out), torch.empty_like(lse))
    for name, t in results._asdict().items():
        call.tensor(name, t)
    firsts = firsts_of(call)
    tiles, rows = (problem.hk * int(n) for n in (firsts["tile"][-1], firsts["row"][-1]))
    finite = np.empty(tiles, np.bool_)
    call.memory("panels", rows * problem.d)
    if tangents.k is not None:
        call.memory("tangent_panels", rows * problem.d)
    tasks = query_tasks(call)
    arguments = (call.record, tasks, firsts, finite, call.like)
    launch(tangent_worker, *arguments, tasks=len(tasks), flops=tangent_flops(problem))
    return results._replace(out=out.to(problem.dtype), tout=results.tout.to(problem.dtype))


@kernel
def tangent_worker(calls, tasks, firsts, finite, like, counters):
    """Pack keys with the other threads, then compute tiles of queries."""
    call = calls[0]
    sequences = all_sequences(call)
    pack_keys(call, sequences, firsts, finite, like, counters.ctypes.data)
    owner, scratch = scratch_memory(call, like)
    buffers_owner, buffers = buffers_of(call, False, like)
    next_task = counters.ctypes.data + 8 * NEXT
    while True:
        t = fetch_add(next_task, 1)
        if t >= len(tasks):
            break
        task = tasks[t]
        seq = sequences[task.s]
        place = place_of(seq, task.s, task.h, task.tile)
        head = packed_head(call, firsts, task.s, task.h // call.group, like)
        ok = finite[head.first_tile :]
        tangent_tile(call, seq, ok, place, head, scratch, buffers, like)
    return owner.size + buffers_owner.size


@inner
def scratch_memory(call, like):
    """Return (the array that owns it, the scratch memory of a thread)."""
    d, value_d = call.d_operand, call.value_d_padded
    owner, at = memory_of(like, TILE_Q, (d, d, TILE_K, TILE_K, 2 * value_d, 4))
    return owner, Scratch(*at)


@inner
def tangent_tile(call, seq, finite, place, head, scratch, buffers, like):
    """Compute out, lse and their tangents of a tile of queries."""
    size, d, padded = like.itemsize, call.d_operand, 2 * call.value_d_padded
    s, h, i0, n = place
    numbers = array(scratch.sums, 4 * TILE_Q, like).reshape(4, TILE_Q)
    sums = Sums(numbers[0], numbers[1], numbers[2], numbers[3])
    numbers[:] = like.dtype.type(0)
    sums.m[:] = -np.inf
    array(scratch.O, TILE_Q * padded, like)[:] = like.dtype.type(0)
    for rows, to in ((call.q, scratch.queries), (call.tq, scratch.tqueries)):
        pack_queries(rows, to, seq, place, d, query_scale(call), like)

    low, high = key_range(call, seq, place)
    for tile in tile_range(low, high):
        part = columns(call, place, low, high, tile, like)
        if part.width <= 0:
            continue
        score_tile(like, scratch.S, scratch.queries, head.keys, part, n, d, 0)
        first = call.tq, scratch.tqueries, head.keys
        second = call.tk, scratch.queries, head.tangent_keys
        sum_of_products(scratch.T, first, second, part, n, d, like)
        for r in range(n):
            P = array(scratch.S + size * r * TILE_K, part.width, like)
            T = array(scratch.T + size * r * TILE_K, part.width, like)
            y = buffers.y[: part.width]
            score_row(P, y, call, seq, s, h, i0 + r, part)
            tangent_row(T, y, call, seq, s, h, i0 + r, part)
            both = array(scratch.O + size * r * padded, padded, like)
            # tangents of a bias and of slopes may differ much from tile to tile
            moves = call.tbias.address or call.theads.address
            tangent_step(P, T, sums, r, both, call.natural, moves)
            if call.threshold:
                kept = keep_row(buffers.kept, part.width, call, s, h, i0 + r, part.j0)
                for j in range(part.width):
                    P[j] *= kept[j]
                    T[j] *= kept[j]
        add_values(call, seq, place, part, finite[tile], scratch, like)
    finish_rows(call, seq, place, scratch.O, sums, like)


@inner
def pack_queries(rows, to, seq, place, d, factor, like):
    """Write a tile of q or of rows like it as columns, times factor; return True if all are finite.

    Write nothing of an absent tensor.
    """
    if not rows.address:
        return True
    address, row_bytes = row_address(rows, seq, place, like), like.itemsize * rows.n
    pack_columns(like, to, address, row_bytes, place.n, d, factor)
    return rows_are_finite(like, address, row_bytes, place.n, d)


@inner
def sum_of_products(to, first, second, part, n, d, like):
    """Write the sum of two products as ``score_tile`` does; each is (rows, queries, keys).

    A product is 0 if the rows, which its packed queries or keys are made of, are absent.
    """
    rows, queries, keys = first
    if rows.address:
        score_tile(like, to, queries, keys, part, n, d, 0)
    else:
        for r in range(n):
            array(to + like.itemsize * r * TILE_K, part.width, like)[:] = like.dtype.type(0)
    rows, queries, keys = second
    if rows.address:
        score_tile(like, to, queries, keys, part, n, d, 1)


@inner
def tangent_step(P, T, sums, r, both, natural, moves):
    """Replace scores by exponentials and s' by ``P (s' - base)``; scale and add to the sums.

    ``both`` is a row of O and of tO. The base moves with every tile, or stays at the first one's.
    """
    before = sums.l[r]
    alpha = softmax_step(P, sums.m, sums.l, r, both, natural)
    before *= alpha
    sums.tl[r] *= alpha
    if moves or before == 0:
        here = sums.l[r] - before
        base = tangent_base(before, sums.tl[r], here, weighted(P, T), sums.base[r])
        shift = sums.base[r] - base
        if shift != 0:
            sums.base[r] = base
            sums.tl[r] += shift * before
            half = both.size // 2
            for x in range(half if before > 0 else 0):
                both[half + x] += shift * both[x]
    sums.tl[r] += weigh(P, T, sums.base[r])


@inner(fastmath=SUMS)
def weighted(P, T):
    """Return the sum of ``P s'``; a weight of 0 has none, even if its s' is NaN."""
    zero = P.dtype.type(0)
    total = zero
    for j in range(P.size):
        total += zero if P[j] == zero else P[j] * T[j]
    return total


@inner(fastmath=SUMS)
def weigh(P, T, base):
    """Replace s' by ``P (s' - base)`` and return the sum; a weight of 0 has none."""
    zero = number(0, base)
    total = zero
    for j in range(P.size):
        t = zero if P[j] == zero else P[j] * (T[j] - base)
        T[j] = t
        total += t
    return total


@inner
def add_values(call, seq, place, part, finite, scratch, like):
    """Add ``P V`` of a part of a tile of keys to O, ``(P s') V`` and ``P V'`` to tO."""
    size, padded, n, keys = like.itemsize, call.value_d_padded, place.n, part.keys
    at = place.s, seq.key + part.j0, place.h // call.group
    v = call.v.address + size * row_at(call.v, *at)
    tv = call.tv.address + size * row_at(call.tv, *at)
    O, tO, S, T = scratch.O, scratch.O + size * padded, scratch.S, scratch.T
    row = 2 * padded
    if finite:
        from_rows(like, n, padded, keys, O, row, S, v, call.v.n)
        from_rows(like, n, padded, keys, tO, row, T, v, call.v.n)
        if call.tv.address:
            from_rows(like, n, padded, keys, tO, row, S, tv, call.tv.n)
        return
    unseen = like.dtype.type(UNSEEN)
    for r in range(n):
        for tile in (S, T):
            weights = array(tile + size * r * TILE_K, part.width, like)
            hide(weights, unseen, call, seq, place.s, place.h, place.i0 + r, part)
    sparse_product(O, row, n, (S, TILE_K, 1), keys, v, call.v.n, padded, unseen, like)
    sparse_product(tO, row, n, (T, TILE_K, 1), keys, v, call.v.n, padded, unseen, like)
    if call.tv.address:
        sparse_product(tO, row, n, (S, TILE_K, 1), keys, tv, call.tv.n, padded, unseen, like)


@inner(fastmath=STRICT)
def finish_rows(call, seq, place, O, sums, like):
    """Add the sink, divide by l, and write out, lse and their tangents."""
    size, padded, one = like.itemsize, call.value_d_padded, like.dtype.type(1)
    s, h, i0, n = place
    lse = array(numbers_at(call.lse, size, s, h, seq.query + i0), n, like)
    tlse = array(numbers_at(call.tlse, size, s, h, seq.query + i0), n, like)
    for r in range(n):
        top, total, alpha = sums.m[r] / log_unit(call), np.float64(sums.l[r]), 1.0
        tl, base = np.float64(sums.tl[r]), np.float64(sums.base[r])
        along = base + (0.0 if total == 0 else tl / total)
        if call.sink.address:
            sink = np.float64(array(call.sink.address, call.hq, like)[h])
            keys = total
            top, total, alpha = with_sink(top, total, sink)
            tsink = 0.0
            if call.tsink.address:
                tsink = np.float64(array(call.tsink.address, call.hq, like)[h])
            tl, along = sink_in_tangent(tl * alpha, keys * alpha, top, sink, tsink, base)
        empty = total == 0
        share = like.dtype.type(1.0 if empty else alpha * call.keep_scale / total)
        mean = like.dtype.type(0.0 if empty else tl / total)  # LSE' - base
        out = array(O + 2 * size * r * padded, padded, like)
        tout = array(O + 2 * size * r * padded + size * padded, padded, like)
        for x in range(call.value_d):
            tout[x] = out_tangent(tout[x] * share, mean, out[x] * share)
        at = size * row_at(call.out, s, seq.query + i0 + r, h)
        store(like, call.out.address + at, out[: call.value_d], share)
        at = size * row_at(call.tout, s, seq.query + i0 + r, h)
        store(like, call.tout.address + at, tout[: call.value_d], one)
        lse[r] = -np.inf if empty else top + math.log(total)
        tlse[r] = 0.0 if empty else along
