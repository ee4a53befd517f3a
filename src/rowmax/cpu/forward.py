"""The forward: a task is a tile of queries of one head, which walks the tiles of keys."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..flops import forward_flops
from ..mask import FULL, SKIP
from ..problem import Problem, Tensors
from .call import LOG2E, UNLIMITED, Call, query_tasks
from .kernel import kernel, launch
from .pack import aligned, pack_columns, pack_panels, rows_are_finite, sparse_product
from .products import from_columns, from_rows, panel, span
from .scores import (
    array,
    exp2,
    exponentials,
    keep_row,
    number,
    query_scale,
    row_max,
    score_row,
)
from .vector import TILE_K, TILE_Q, fetch_add

PACK, PACKED, NEXT = 0, 1, 2  # counters: tiles of keys begun, and finished; tasks begun


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    call = Call(problem, tensors)
    out = torch.empty(problem.out_shape, dtype=call.dtype)
    lse = torch.empty(problem.lse_shape, dtype=call.dtype)
    set_outputs(call, out, lse)
    key_tiles = -(-call.sequences[:, 3] // TILE_K)
    first_tile = np.concatenate([[0], np.cumsum(key_tiles)]).astype(np.int64)
    panels = torch.empty(problem.hk * int(first_tile[-1]) * TILE_K * problem.d, dtype=call.dtype)
    finite = np.empty(problem.hk * int(first_tile[-1]), np.bool_)
    call.set(panels=call.keep(panels))
    tasks = query_tasks(call)
    arguments = (call.record, call.sequences, call.states, tasks, first_tile, finite, call.like)
    flops = forward_flops(problem)
    launch(forward_worker, *arguments, tasks=len(tasks), flops=flops)
    return out.to(problem.dtype), lse


def set_outputs(call: Call, out: Tensor, lse: Tensor) -> None:
    """The steps of out and lse, made contiguous."""
    call.set(out=call.keep(out))
    call.steps("out", out.stride())
    b, h, _ = lse.stride()
    call.set(lse=call.keep(lse), lse_b=0 if call.problem.varlen else b, lse_h=h)


@kernel
def forward_worker(calls, sequences, states, tasks, first_tile, finite, like, counters):
    call = calls[0]
    size = like.itemsize
    pack_keys(call, sequences, first_tile, finite, like, counters.ctypes.data)
    owner, scratch = aligned(scratch_size(call), like)
    none = np.empty(0, like.dtype)
    next_task = counters.ctypes.data + 8 * NEXT
    while True:
        t = fetch_add(next_task, 1)
        if t >= len(tasks):
            break
        s, h, tile = tasks[t]
        seq = sequences[s]
        head = (h // call.group) * first_tile[-1] + first_tile[s]
        keys = call.panels + size * head * TILE_K * call.d
        state = tile_row(states, s, h, tile)
        forward_tile(call, seq, state, finite[head:], s, h, tile, keys, scratch, none, like)
    return owner.size


@njit
def scratch_size(call):
    return TILE_Q * (call.d + TILE_K + call.dv_wide + 2)


@njit
def pack_keys(call, sequences, first_tile, finite, like, counters):
    """Every head's keys as panels, shared out by tiles; returns when all of them are done."""
    size = like.itemsize
    per_head = first_tile[-1]
    n = call.hk * per_head
    while True:
        t = fetch_add(counters + 8 * PACK, 1)
        if t >= n:
            break
        h, tile = t // per_head, t % per_head
        s = np.searchsorted(first_tile, tile, side="right") - 1
        local = tile - first_tile[s]
        nk = sequences[s, 3]
        start, stop = local * TILE_K, min(nk, (local + 1) * TILE_K)
        rows = call.k + size * (call.k_b * s + call.k_n * sequences[s, 2] + call.k_h * h)
        head = call.panels + size * (h * per_head + first_tile[s]) * TILE_K * call.d
        pack_panels(head, rows, call.k_n, start, start + TILE_K, nk, call.d, like)
        values = call.v + size * (
            call.v_b * s + call.v_n * (sequences[s, 2] + start) + call.v_h * h
        )
        finite[t] = rows_are_finite(values, call.v_n, stop - start, call.dv_size, like)
        fetch_add(counters + 8 * PACKED, 1)
    while fetch_add(counters + 8 * PACKED, 0) < n:
        pass


@njit
def tile_row(states, s, h, tile):
    """The states of the tiles of keys for one tile of queries; empty when there is no map."""
    if states.size == 0:
        return states.reshape(0)
    return states[min(s, states.shape[0] - 1), min(h, states.shape[1] - 1), tile]


@njit
def key_range(call, seq, s, i0, i1):
    """Keys [low, high) that band and lengths let any of queries [i0, i1) see."""
    offset = seq[3] - seq[1]
    high = min(seq[3], i1 + offset + call.right) if call.right < UNLIMITED else seq[3]
    if call.lengths:
        high = min(high, array(call.lengths, s + 1, np.empty(0, np.int32))[s])
    low = max(0, i0 + offset - call.left) if call.left < UNLIMITED else 0
    return low, max(low, high)


@njit
def columns(low, high, tile, step):
    """(first key, width) of the part of a tile that holds keys [low, high), in whole steps."""
    first = tile * TILE_K
    start = max(low - first, 0)
    start -= start % step
    stop = min(high - first, TILE_K)
    return first + start, (stop - start + step - 1) // step * step


@njit
def score_tile(to, queries, keys, j0, width, n, d, like):
    """``Q K^T`` of n queries and ``width`` keys from j0 on, from packed operands."""
    size, step = like.itemsize, panel(like)
    for j in range(0, width, step):
        b = keys + size * (j0 + j) * d
        from_columns(like, n, step, d, to + size * j, TILE_K, queries, TILE_Q, b, step, 0)


@njit
def forward_tile(call, seq, state, finite, s, h, tile, keys, scratch, none, like):
    size, step, zero = like.itemsize, span(like), like.dtype.type(0)
    i0 = tile * TILE_Q
    n = min(TILE_Q, seq[1] - i0)
    queries = scratch
    S = queries + size * TILE_Q * call.d
    O = S + size * TILE_Q * TILE_K
    sums = array(O + size * TILE_Q * call.dv_wide, 2 * TILE_Q, like)
    m, l = sums[:TILE_Q], sums[TILE_Q:]
    m[:] = -np.inf
    l[:] = zero
    array(O, TILE_Q * call.dv_wide, like)[:] = zero
    rows = call.q + size * (call.q_b * s + call.q_n * (seq[0] + i0) + call.q_h * h)
    pack_columns(queries, TILE_Q, rows, call.q_n, n, call.d, query_scale(call), like)
    values = call.v + size * (call.v_b * s + call.v_n * seq[2] + call.v_h * (h // call.group))
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)

    low, high = key_range(call, seq, s, i0, i0 + n)
    for tile_k in range(low // TILE_K, (high + TILE_K - 1) // TILE_K):
        if state.size and state[tile_k] == SKIP:
            continue
        partial = state.size > 0 and state[tile_k] != FULL
        j0, width = columns(low, high, tile_k, step)
        score_tile(S, queries, keys, j0, width, n, call.d, like)
        for r in range(n):
            row = array(S + size * r * TILE_K, width, like)
            score_row(row, none, partial, call, seq, s, h, i0 + r, j0)
            average = array(O + size * r * call.dv_wide, call.dv_wide, like)
            softmax_step(row, m, l, r, average)
            if call.threshold:
                kept_row = keep_row(kept, width, call, s, h, i0 + r, j0)
                for j in range(width):
                    row[j] *= kept_row[j]
        count, v = min(width, high - j0), values + size * call.v_n * j0
        if finite[tile_k]:
            from_rows(like, n, call.dv_wide, count, O, call.dv_wide, S, v, call.v_n, 1)
        else:
            w = call.dv_wide
            sparse_product(O, w, n, S, TILE_K, 1, count, v, call.v_n, w, like)
    finish_rows(call, seq, s, h, i0, n, O, m, l, like)


@njit
def softmax_step(row, m, l, r, average):
    """The recurrence: scores become exponentials under the new maximum, what was summed before
    is rescaled by ``delta = 2^(m - m')``."""
    m_new = max(m[r], row_max(row))
    if m_new == -np.inf:  # a row of nothing so far: its weights are 0, its NaN stays
        m_new = number(0, m_new)
    elif m_new != m[r]:
        delta = exp2(m[r] - m_new)
        l[r] *= delta
        for x in range(average.size):
            average[x] *= delta
        m[r] = m_new
    l[r] += exponentials(row, m_new)


@njit
def finish_rows(call, seq, s, h, i0, n, O, m, l, like):
    """Adds the sink, divides by l, and writes out and ``LSE = m + log l`` in natural units."""
    size, zero, one = like.itemsize, like.dtype.type(0), like.dtype.type(1)
    lse_at = call.lse_b * s + call.lse_h * h + seq[0] + i0
    lse = array(call.lse + size * lse_at, n, like)
    for r in range(n):
        if call.sink:
            sigma = array(call.sink, call.hq, like)[h] * like.dtype.type(LOG2E)
            if sigma > m[r]:
                delta = exp2(m[r] - sigma)
                l[r] *= delta
                average = array(O + size * r * call.dv_wide, call.dv_wide, like)
                for x in range(call.dv_size):
                    average[x] *= delta
                m[r] = sigma
            if sigma > -np.inf:
                l[r] += exp2(sigma - m[r])
        empty = l[r] == zero
        share = zero if empty else one * like.dtype.type(call.keep_scale) / l[r]
        at = call.out_b * s + call.out_n * (seq[0] + i0 + r) + call.out_h * h
        to = array(call.out + size * at, call.dv_size, like)
        average = array(O + size * r * call.dv_wide, call.dv_size, like)
        for x in range(call.dv_size):
            to[x] = zero if empty else average[x] * share
        lse[r] = -np.inf if empty else (m[r] + math.log2(l[r])) / LOG2E
