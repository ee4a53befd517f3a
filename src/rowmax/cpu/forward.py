"""The forward: a task is a tile of queries of one head, which walks the tiles of keys."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..call.flops import forward_flops
from ..call.problem import Problem, Tensors
from ..rules.mask import FULL, SKIP
from .call import Call, query_tasks
from .kernel import kernel, launch
from .operands import (
    HALF_K,
    aligned,
    fold_row,
    pack_columns,
    pack_pairs,
    pack_panels,
    paired,
    rescale,
    row_size,
    rows_are_finite,
    sparse_product,
    steps,
    store,
)
from .products import from_rows
from .scores import (
    array,
    exponentials,
    hide,
    keep_row,
    log_unit,
    number,
    power,
    query_scale,
    row_max,
    score_row,
)
from .tiles import columns, key_range, score_tile, tile_row
from .vector import TILE_K, TILE_Q, fetch_add

PACK, PACKED, NEXT = 0, 1, 2  # counters: tiles of keys begun, and finished; tasks begun


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    call = Call(problem, tensors)
    out = torch.empty(problem.out_shape, dtype=call.row_dtype)
    lse = torch.empty(problem.lse_shape, dtype=call.dtype)
    set_outputs(call, out, lse)
    firsts = _firsts(call)
    tiles, rows, pair_rows = (problem.hk * int(n) for n in firsts[-1])
    finite = np.empty(tiles, np.bool_)
    call.room("panels", rows * problem.d)
    if call.paired:
        call.room("pairs", pair_rows * int(call.record["dv_wide"][0]))
    tasks = query_tasks(call)
    arguments = (call.record, call.sequences, call.states, tasks, firsts, finite)
    flops = forward_flops(problem)
    launch(forward_worker, *arguments, call.like, call.of, tasks=len(tasks), flops=flops)
    return out.to(problem.dtype), lse


def _firsts(call: Call) -> np.ndarray:
    """int64 ``[sequences + 1, 3]``: where each sequence's tiles of keys, rows of panels and rows of
    pairs begin, of one kv head. Short sequences take no more rows than a step is wide."""
    nk = call.sequences[:, 3]
    rows = -(-nk // call.span) * call.span
    pair_rows = nk // TILE_K * HALF_K + np.minimum(nk % TILE_K, HALF_K)
    counts = np.stack([-(-nk // TILE_K), rows, pair_rows], 1)
    return np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(counts, 0)])


def set_outputs(call: Call, out: Tensor, lse: Tensor) -> None:
    """The steps of out and lse, made contiguous."""
    call.set(out=call.keep(out))
    call.steps("out", out.stride())
    b, h, _ = lse.stride()
    call.set(lse=call.keep(lse), lse_b=0 if call.problem.varlen else b, lse_h=h)


@kernel
def forward_worker(calls, sequences, states, tasks, firsts, finite, like, of, counters):
    call = calls[0]
    pack_keys(call, sequences, firsts, finite, of, counters.ctypes.data)
    owner, scratch = aligned(TILE_Q * (call.d_whole + TILE_K + call.dv_wide + 2), like)
    none = np.empty(0, like.dtype)
    next_task = counters.ctypes.data + 8 * NEXT
    while True:
        t = fetch_add(next_task, 1)
        if t >= len(tasks):
            break
        s, h, tile = tasks[t]
        head, keys, pairs = packed_head(call, firsts, s, h // call.group, of)
        state = tile_row(states, s, h, tile)
        place, memory = (s, h, tile), (keys, pairs, scratch)
        forward_tile(call, sequences[s], state, finite[head:], place, memory, none, like, of)
    return owner.size


@njit
def packed_head(call, firsts, s, h, of):
    """Of sequence s and kv head h: the number of its first tile, where its panels and pairs are."""
    at, all_of = firsts[s], firsts[-1]
    keys = call.panels + of.itemsize * (h * all_of[1] + at[1]) * call.d
    pairs = call.pairs + 4 * (h * all_of[2] + at[2]) * call.dv_wide
    return h * all_of[0] + at[0], keys, pairs


@njit
def pack_keys(call, sequences, firsts, finite, of, counters):
    """Every head's keys as panels, shared out by tiles; returns when all of them are done."""
    row, first_tile = row_size(of), firsts[:, 0]
    per_head = first_tile[-1]
    count = call.hk * per_head
    while True:
        t = fetch_add(counters + 8 * PACK, 1)
        if t >= count:
            break
        h, tile = t // per_head, t % per_head
        s = np.searchsorted(first_tile, tile, side="right") - 1
        first, nk = sequences[s, 2], sequences[s, 3]
        start = (tile - first_tile[s]) * TILE_K
        n = min(nk - start, TILE_K)
        keys = call.k + row * (call.k_b * s + call.k_n * first + call.k_h * h)
        _, panels, pairs = packed_head(call, firsts, s, h, of)
        pack_panels(of, panels, keys, row * call.k_n, start, nk, call.d_whole)
        values = call.v + row * (call.v_b * s + call.v_n * (first + start) + call.v_h * h)
        finite[t] = rows_are_finite(of, values, row * call.v_n, n, call.dv_size)
        pairs += 4 * (tile - first_tile[s]) * HALF_K * call.dv_wide
        pack_pairs(of, pairs, call.dv_wide, values, row * call.v_n, n, HALF_K, call.dv_size)
        fetch_add(counters + 8 * PACKED, 1)
    while fetch_add(counters + 8 * PACKED, 0) < count:
        pass


@njit
def forward_tile(call, seq, state, finite, place, memory, none, like, of):
    s, h, tile = place
    keys, pairs, scratch = memory
    size, row_bytes, w = like.itemsize, row_size(of), call.dv_wide
    i0 = tile * TILE_Q
    n = min(TILE_Q, seq[1] - i0)
    queries = scratch
    S = queries + size * TILE_Q * call.d_whole
    O = S + size * TILE_Q * TILE_K
    sums = array(O + size * TILE_Q * w, 2 * TILE_Q, like)
    m, l = sums[:TILE_Q], sums[TILE_Q:]
    m[:] = -np.inf
    l[:] = like.dtype.type(0)
    array(O, TILE_Q * w, like)[:] = like.dtype.type(0)
    q = call.q + row_bytes * (call.q_b * s + call.q_n * (seq[0] + i0) + call.q_h * h)
    factor = query_scale(call)
    pack_columns(of, queries, q, row_bytes * call.q_n, n, call.d_whole, factor)
    head = call.v_b * s + call.v_n * seq[2] + call.v_h * (h // call.group)
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)

    low, high = key_range(call, seq, s, i0, i0 + n)
    for tile_k in range(low // TILE_K, (high + TILE_K - 1) // TILE_K):
        if state.size and state[tile_k] == SKIP:
            continue
        partial = state.size > 0 and state[tile_k] != FULL
        j0, width = columns(of, low, high, tile_k)
        score_tile(of, S, queries, keys, j0, width, n, call.d_whole)
        for r in range(n):
            row = array(S + size * r * TILE_K, width, like)
            rescale(of, row, factor)
            score_row(row, none, partial, call, seq, s, h, i0 + r, j0)
            softmax_step(row, m, l, r, array(O + size * r * w, w, like), call.natural)
            if call.threshold:
                kept_row = keep_row(kept, width, call, s, h, i0 + r, j0)
                for j in range(width):
                    row[j] *= kept_row[j]
            fold_row(of, S + size * r * TILE_K, row)
        count = min(width, high - j0)
        values, step = call.v + size * (head + call.v_n * j0), call.v_n
        if paired(of):
            values, step = pairs + 4 * tile_k * HALF_K * w, w
        if finite[tile_k]:
            from_rows(of, n, w, steps(of, count, HALF_K), O, w, S, values, step, 1)
        else:
            unseen = like.dtype.type(-1)  # which no weight is
            for r in range(n):
                row = array(S + size * r * TILE_K, width, like)
                hide(row, unseen, partial, call, seq, s, h, i0 + r, j0)
            sparse_product(O, w, n, S, TILE_K, 1, count, values, step, w, unseen, like)
    finish_rows(call, seq, s, h, i0, n, O, m, l, like, of)


@njit
def softmax_step(row, m, l, r, average, natural):
    """The recurrence: scores become exponentials under the new maximum, what was summed before
    is rescaled by ``delta = exp(m - m')``."""
    m_new = max(m[r], row_max(row))
    if m_new == -np.inf:  # a row of nothing so far: its weights are 0, its NaN stays
        m_new = number(0, m_new)
    elif m_new != m[r]:
        delta = power(m[r] - m_new, natural)
        l[r] *= delta
        for x in range(average.size):
            average[x] *= delta
        m[r] = m_new
    l[r] += exponentials(row, m_new, natural)


@njit
def finish_rows(call, seq, s, h, i0, n, O, m, l, like, of):
    """Adds the sink, divides by l, and writes out and ``LSE = m + log l`` in natural units."""
    size, zero, one = like.itemsize, like.dtype.type(0), like.dtype.type(1)
    lse_at = call.lse_b * s + call.lse_h * h + seq[0] + i0
    lse = array(call.lse + size * lse_at, n, like)
    for r in range(n):
        top = m[r] / log_unit(call)
        if call.sink:
            # in natural units, for the sink may be as large as its dtype goes
            sigma = array(call.sink, call.hq, like)[h]
            if sigma > top:
                delta = like.dtype.type(power(top - sigma, True))
                l[r] *= delta
                average = array(O + size * r * call.dv_wide, call.dv_wide, like)
                for x in range(call.dv_size):
                    average[x] *= delta
                top = np.float64(sigma)
            if sigma > -np.inf:
                l[r] += like.dtype.type(power(sigma - top, True))
        empty = l[r] == zero
        share = one if empty else one * like.dtype.type(call.keep_scale) / l[r]
        at = call.out_b * s + call.out_n * (seq[0] + i0 + r) + call.out_h * h
        average = array(O + size * r * call.dv_wide, call.dv_size, like)
        store(of, call.out + row_size(of) * at, average, share)
        lse[r] = -np.inf if empty else top + math.log(l[r])
