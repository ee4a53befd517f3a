"""The forward: a task is a tile of queries of one head and passes over the tiles of keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from ..call.flops import forward_flops
from ..call.problem import Problem, Tensors
from .call import Call, leave_out, query_tasks
from .functions import array, choice, inner
from .kernel import INFINITE, kernel, launch
from .operands import (
    HALF_K,
    begin_tiles,
    bfloats,
    count_infinite,
    end_tiles,
    fold_row,
    memory_of,
    pack_columns,
    pack_panels,
    pack_rows,
    rescale,
    row_size,
    rows_are_finite,
    sparse_product,
    store,
    sum_size,
    tile_depth,
    tile_rows,
    unowned,
)
from .products import from_rows
from .rows import exponentials, hide, keep_row, log_unit, power, query_scale, row_max, score_row
from .rules import moved, with_sink
from .strips import add_strips
from .tiles import (
    all_sequences,
    columns,
    key_range,
    keys_of,
    numbers_at,
    packed_row,
    place_of,
    row_address,
    row_at,
    score_tile,
    tile_range,
)
from .vector import TILE_K, TILE_Q, fetch_add

PACK, PACKED, NEXT = 0, 1, 2  # counters: tiles of keys begun, and finished; tasks begun

#: the first tile of keys of a sequence, row of panels and row of pairs, within a kv head
FIRSTS = np.dtype([("tile", np.int64), ("row", np.int64), ("pair_row", np.int64)])


class PackedHead(NamedTuple):
    """A kv head's keys as panels and its values as rows or pairs, by address.

    ``tangent_keys`` are panels of the tangents of its keys.
    """

    first_tile: int
    keys: int
    values: int
    tangent_keys: int


class Scratch(NamedTuple):
    """Addresses in a thread's scratch memory."""

    queries: int  # [d, TILE_Q]
    S: int  # [TILE_Q, TILE_K], then P
    O: int  # [TILE_Q, value_d_padded]
    m: int  # [TILE_Q]
    l: int  # [TILE_Q]


def forward(
    problem: Problem, tensors: Tensors, bfloats: bool = True, hidden: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); ``bfloats``: products of bfloat16 where the processor has them.

    Rows of ``hidden`` sequences are not computed.
    """
    call = Call(problem, tensors, bfloats=bfloats)
    if hidden is not None:
        leave_out(call.sequences, hidden)
    out = torch.empty(problem.out_shape, dtype=call.row_dtype)
    lse = torch.empty(problem.lse_shape, dtype=call.dtype)
    call.tensor("out", out)
    call.tensor("lse", lse)
    firsts = firsts_of(call)
    tiles, rows, pair_rows = (problem.hk * int(n) for n in firsts[-1])
    finite = np.empty(tiles, np.bool_)
    call.memory("panels", rows * int(call.record["d_operand"][0]))
    padded = int(call.record["value_d_padded"][0])
    if call.paired or call.strips:
        call.memory("values", pair_rows * padded)
    elif problem.nq > TILE_Q and tensors.v.stride(1) != padded:
        call.memory("values", rows * padded)
    tasks = query_tasks(call)
    arguments = (call.record, tasks, firsts, finite)
    flops = forward_flops(problem)
    arguments = (*arguments, call.like, call.operand_like)
    if not launch(forward_worker, *arguments, tasks=len(tasks), flops=flops):
        return forward(problem, tensors, False, hidden)
    return out.to(problem.dtype), lse


def firsts_of(call: Call) -> np.ndarray:
    """Return ``FIRSTS [sequences + 1]``; the last holds the totals."""
    nk = call.sequences["keys"]
    firsts = np.zeros(len(nk) + 1, FIRSTS)
    firsts["tile"][1:] = np.cumsum(-(-nk // TILE_K))
    firsts["row"][1:] = np.cumsum(-(-nk // call.span) * call.span)
    if call.strips:
        firsts["pair_row"] = firsts["row"] // 2
    else:
        firsts["pair_row"][1:] = np.cumsum(nk // TILE_K * HALF_K + np.minimum(nk % TILE_K, HALF_K))
    return firsts


@kernel
def forward_worker(calls, tasks, firsts, finite, like, operand_like, counters):
    """Pack keys and values with the other threads, then compute tiles of queries."""
    call = calls[0]
    sequences = all_sequences(call)
    like, operand_like = unowned(like), unowned(operand_like)
    pack_keys(call, sequences, firsts, finite, operand_like, counters.ctypes.data)
    owner, scratch = scratch_of(call, like)
    begin_tiles(operand_like)
    next_task = counters.ctypes.data + 8 * NEXT
    while True:
        t = fetch_add(next_task, 1)
        if t >= len(tasks):
            break
        task = tasks[t]
        seq = sequences[task.s]
        place = place_of(seq, task.s, task.h, task.tile)
        head = packed_head(call, firsts, task.s, task.h // call.group, operand_like)
        ok, infinite = finite[head.first_tile :], counters.ctypes.data + 8 * INFINITE
        forward_tile(call, seq, ok, place, head, scratch, infinite, like, operand_like)
    end_tiles(operand_like)
    return owner.size


@inner
def scratch_of(call, like):
    """Return (the array that owns it, the Scratch of a thread)."""
    columns = call.d_operand, TILE_K, call.value_d_padded, 1, 1
    owner, at = memory_of(like, TILE_Q, columns)
    return owner, Scratch(*at)


@inner
def packed_head(call, firsts, s, h, operand_like):
    """Return the packed kv head h of sequence s."""
    at, total = firsts[s], firsts[-1]
    keys = call.panels + operand_like.itemsize * (h * total.row + at.row) * call.d_operand
    row = h * total.pair_row + at.pair_row
    if not bfloats(operand_like):
        row = h * total.row + at.row
    values = call.values + sum_size(operand_like) * row * call.value_d_padded
    tangent_keys = call.tangent_panels + keys - call.panels
    return PackedHead(h * total.tile + at.tile, keys, values, tangent_keys)


@inner
def tile_values(call, head, tile, operand_like):
    """Return the address of the packed values of a tile of keys."""
    rows = tile * tile_rows(operand_like, HALF_K)
    return head.values + sum_size(operand_like) * rows * call.value_d_padded


@inner
def pack_keys(call, sequences, firsts, finite, operand_like, counters):
    """Write every head's keys as panels; threads share the tiles. Return when all are done.

    Tangents of keys are written as well; ``finite`` is of values and of their tangents.
    """
    row = row_size(operand_like)
    first_tile = firsts.tile
    per_head = first_tile[-1]
    count = call.hk * per_head
    while True:
        t = fetch_add(counters + 8 * PACK, 1)
        if t >= count:
            break
        h, tile = t // per_head, t % per_head
        s = sequence_of(first_tile, tile)
        seq, tile = sequences[s], tile - first_tile[s]
        j0 = tile * TILE_K
        n = min(seq.keys - j0, TILE_K)
        keys = call.k.address + row * row_at(call.k, s, seq.key, h)
        values = call.v.address + row * row_at(call.v, s, seq.key + j0, h)
        k_bytes, v_bytes = row * call.k.n, row * call.v.n
        head = packed_head(call, firsts, s, h, operand_like)
        pack_panels(operand_like, head.keys, keys, k_bytes, j0, seq.keys, call.d_operand)
        finite[t] = rows_are_finite(operand_like, values, v_bytes, n, call.value_d)
        infinite = counters + 8 * INFINITE
        count_infinite(operand_like, keys + k_bytes * j0, k_bytes, n, call.d, infinite)
        count_infinite(operand_like, values, v_bytes, n, call.value_d, infinite)
        if call.tk.address:
            keys, k_bytes = call.tk.address + row * row_at(call.tk, s, seq.key, h), row * call.tk.n
            to = head.tangent_keys
            pack_panels(operand_like, to, keys, k_bytes, j0, seq.keys, call.d_operand)
        if call.tv.address:
            more, t_bytes = row * row_at(call.tv, s, seq.key + j0, h), row * call.tv.n
            more += call.tv.address
            finite[t] &= rows_are_finite(operand_like, more, t_bytes, n, call.value_d)
        if call.values:
            to, padded = tile_values(call, head, tile, operand_like), call.value_d_padded
            pack_rows(operand_like, to, padded, values, v_bytes, n, call.value_d)
        fetch_add(counters + 8 * PACKED, 1)
    while fetch_add(counters + 8 * PACKED, 0) < count:
        pass


@inner
def sequence_of(first_tile, tile):
    """Return the last sequence whose first tile is at or before a tile, by bisection."""
    low, high = 0, first_tile.size
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile[middle] <= tile:
            low = middle
        else:
            high = middle
    return low


@inner
def forward_tile(call, seq, finite, place, head, scratch, infinite, like, operand_like):
    """Compute out and lse of a tile of queries."""
    rows = row_address(call.q, seq, place, operand_like), row_size(operand_like) * call.q.n
    count_infinite(operand_like, *rows, place.n, call.d, infinite)
    m, l = begin_rows(call, place.n, scratch, like)
    add_keys(call, seq, finite, place, head, scratch, m, l, like, operand_like)
    finish_rows(call, seq, place, scratch.O, m, l, like, operand_like)


@inner
def begin_rows(call, n, scratch, like):
    """Set m, l and O of n queries to those of no keys; return m and l."""
    m, l = array(scratch.m, TILE_Q, like), array(scratch.l, TILE_Q, like)
    m[:] = -np.inf
    l[:] = like.dtype.type(0)
    array(scratch.O, n * call.value_d_padded, like)[:] = like.dtype.type(0)
    return m, l


@choice
def add_keys(call, seq, finite, place, head, scratch, m, l, like, operand_like) -> Any:
    """Add the keys that a tile of queries sees to m, l and O."""
    return add_strips if operand_like.dtype == types.uint16 else _add_tiles


def _add_tiles(call, seq, finite, place, head, scratch, m, l, like, operand_like):
    q, q_bytes = row_address(call.q, seq, place, operand_like), row_size(operand_like) * call.q.n
    d, factor = call.d_operand, query_scale(call)
    pack_columns(operand_like, scratch.queries, q, q_bytes, place.n, d, factor)
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)

    low, high = key_range(call, seq, place)
    for tile in tile_range(low, high):
        part = columns(call, place, low, high, tile, operand_like)
        if part.width <= 0:
            continue
        write_weights(call, seq, place, part, head.keys, scratch, m, l, kept, like, operand_like)
        add_values(call, seq, place, part, finite, head, scratch, like, operand_like)


@inner
def write_weights(call, seq, place, part, keys, scratch, m, l, kept, like, operand_like):
    """Write the weights of a part of a tile to S as products read them; scale the sums so far.

    ``keys`` is the address of panels, ``kept`` memory for a row of dropout's draws.
    """
    size, padded, none, factor = like.itemsize, call.value_d_padded, like, query_scale(call)
    s, h, i0, n = place
    score_tile(operand_like, scratch.S, scratch.queries, keys, part, n, call.d_operand, 0)
    for r in range(n):
        at = scratch.S + size * r * TILE_K
        row = array(at, part.width, like)
        rescale(operand_like, row, factor)
        score_row(row, none, call, seq, s, h, i0 + r, part)
        average = array(scratch.O + size * r * padded, padded, like)
        softmax_step(row, m, l, r, average, call.natural)
        if call.threshold:
            kept_row = keep_row(kept, part.width, call, s, h, i0 + r, part.j0)
            for j in range(part.width):
                row[j] *= kept_row[j]
        fold_row(operand_like, at, row, keys_of(seq, part.tile))


@inner
def add_values(call, seq, place, part, finite, head, scratch, like, operand_like):
    """Add ``P V`` of a part of a tile of keys to O."""
    padded, n = call.value_d_padded, place.n
    at = row_at(call.v, place.s, seq.key + part.j0, place.h // call.group)
    values, stride = call.v.address + like.itemsize * at, call.v.n
    if call.values:
        values = head.values + like.itemsize * padded * packed_row(operand_like, part)
        stride = padded
    if finite[part.tile]:
        k = tile_depth(operand_like, part.keys, keys_of(seq, part.tile))
        from_rows(operand_like, n, padded, k, scratch.O, padded, scratch.S, values, stride)
        return
    unseen = like.dtype.type(-1)  # no weight is -1
    for r in range(n):
        row = array(scratch.S + like.itemsize * r * TILE_K, part.width, like)
        hide(row, unseen, call, seq, place.s, place.h, place.i0 + r, part)
    P, k = (scratch.S, TILE_K, 1), part.keys
    sparse_product(scratch.O, padded, n, P, k, values, stride, padded, unseen, like)


@inner
def softmax_step(row, m, l, r, average, natural):
    """Replace scores by exponentials under the new maximum; scale sums by ``alpha = exp(m - m')``.

    Return alpha. A row that has seen nothing so far has weights of 0; NaN stays NaN.
    """
    m_new, base = moved(m[r], row_max(row))
    alpha = row.dtype.type(1)
    if m_new != m[r] and m_new != -np.inf:
        alpha = row.dtype.type(0)
        if m[r] != -np.inf:  # else both sums are 0
            alpha = power(m[r] - base, natural)
            l[r] *= alpha
            for x in range(average.size):
                average[x] *= alpha
        m[r] = m_new
    l[r] += exponentials(row, base, natural)
    return alpha


@inner
def finish_rows(call, seq, place, O, m, l, like, operand_like):
    """Add the sink, divide by l, and write out and ``LSE = m + log l`` in natural units."""
    size, row_bytes = like.itemsize, row_size(operand_like)
    lse = array(numbers_at(call.lse, size, place.s, place.h, seq.query + place.i0), place.n, like)
    for r in range(place.n):
        top, total, alpha = m[r] / log_unit(call), np.float64(l[r]), 1.0
        if call.sink.address:
            sink = np.float64(array(call.sink.address, call.hq, like)[place.h])
            top, total, alpha = with_sink(top, total, sink)
        empty = total == 0
        share = like.dtype.type(1.0 if empty else alpha * call.keep_scale / total)
        at = row_at(call.out, place.s, seq.query + place.i0 + r, place.h)
        average = array(O + size * r * call.value_d_padded, call.value_d, like)
        store(operand_like, call.out.address + row_bytes * at, average, share)
        lse[r] = -np.inf if empty else top + math.log(total)
