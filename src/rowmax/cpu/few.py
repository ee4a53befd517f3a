"""Few queries: a task is a kv head of a sequence, whose rows are read in place, each once.

The query heads of a kv head share every tile of keys that is read. Nothing is packed, converted or
kept but the scores of a tile. Rules of masks and scores are those of tiles.

A result that is not finite is computed again by tiles: there a masked NaN or inf stays out of sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from ..rules.softmax import LOG2E
from .call import CALL, SEQUENCE
from .few_vector import add_rows, dots, narrow, widen, write_sums
from .forward import finish_rows, softmax_step
from .functions import SUMS, array, choice, inner
from .gradient_rows import Rows, buffers_of, product_of_rows, row_gradients
from .kernel import kernel
from .operands import aligned, rows_are_finite
from .rows import keep_row, query_scale, score_row
from .rules import without_weights
from .tiles import Place, columns, key_range, numbers_at, row_at, skipped, tile_range, tile_row
from .vector import TILE_K, address, fetch_add

#: words of 8 bytes before the record of a call: what its threads share
HEADER = 16
NEXT, INFINITE, TASKS, QUERIES, SEQUENCES, COUNT, STATES, KEYS, SHAPE = 0, 1, 2, 3, 4, 5, 6, 7, 8


class Scratch(NamedTuple):
    """Addresses of a task's rows, in a thread's scratch memory: float32, contiguous."""

    q: int  # [group n, d], scaled as scores are
    S: int  # [group n, TILE_K], then P
    O: int  # [group n, value_d]
    m: int  # [group n]
    l: int  # [group n]


@choice
def kind_of(pointer) -> Any:
    """Return an empty array of the dtype of a call's rows, by that of a pointer; uint32: pairs."""
    dtypes = {types.uint16: np.uint16, types.uint32: np.uint16, types.int16: np.int16}
    kind = dtypes.get(pointer.dtype, np.float32)
    return lambda pointer: np.empty(0, kind)


@choice
def operands_of(pointer) -> Any:
    """Return an empty array of the dtype of operands, by that of a pointer: float32 or pairs."""
    dtype = np.uint32 if pointer.dtype == types.uint32 else np.float32
    return lambda pointer: np.empty(0, dtype)


@inner
def opened(data):
    """Return (header, the record in an array, sequences, states of tiles) of a header's address."""
    header = array(data, HEADER, np.int64)
    calls = array(data + 8 * HEADER, 1, CALL)
    sequences = array(header[SEQUENCES], header[COUNT], SEQUENCE)
    a, b, c, d = header[SHAPE], header[SHAPE + 1], header[SHAPE + 2], header[SHAPE + 3]
    states = array(header[STATES], a * b * c * d, np.uint8).reshape((a, b, c, d))
    return header, calls, sequences, states


@inner(fastmath=SUMS)
def scale_row(row, factor):
    """Multiply a row by a number."""
    for c in range(row.size):
        row[c] *= row.dtype.type(factor)


@inner
def read_rows(kind, to, tensor, s, first, n, h, d, factor, like):
    """Write n rows of a head as contiguous float32, times factor."""
    for i in range(n):
        row = to + 4 * d * i
        widen(kind, row, tensor.address + kind.itemsize * row_at(tensor, s, first + i, h), d)
        if factor != 1.0:
            scale_row(array(row, d, like), factor)


@inner
def head_rows(kind, tensor, s, key, h):
    """Return the address of a row of keys or values, and the bytes to the next."""
    size = kind.itemsize
    return tensor.address + size * row_at(tensor, s, key, h), size * tensor.n


@kernel
def few_forward(pointer):
    """Compute tasks of a forward until none is left; the pointer is that of a header."""
    data, kind, like = address(pointer), kind_of(pointer), np.empty(0, np.float32)
    header, calls, sequences, states = opened(data)
    call = calls[0]
    most = call.group * header[QUERIES]
    owner, q = aligned(most * (call.d + TILE_K + call.value_d + 2), like)
    S = q + 4 * most * call.d
    O = S + 4 * most * TILE_K
    m = O + 4 * most * call.value_d
    rows = Scratch(q, S, O, m, m + 4 * most)
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)
    while True:
        t = fetch_add(data + 8 * NEXT, 1)
        if t >= header[TASKS]:
            break
        s, hk = t // call.hk, t % call.hk
        if not forward_head(call, sequences[s], states, s, hk, rows, kept, like, kind):
            fetch_add(data + 8 * INFINITE, 1)
    return owner.size + kept.size + like.size + kind.size


@inner
def forward_head(call, seq, states, s, hk, rows, kept, like, kind):
    """Compute out and lse of the queries that share a kv head; return False if not finite."""
    n, d, value_d, group = seq.queries, call.d, call.value_d, call.group
    m, l = array(rows.m, group * n, like), array(rows.l, group * n, like)
    m[:] = -np.inf
    l[:] = np.float32(0)
    array(rows.O, group * n * value_d, like)[:] = np.float32(0)
    for g in range(group):
        h, to = hk * group + g, rows.q + 4 * g * n * d
        read_rows(kind, to, call.q, s, seq.query, n, h, d, query_scale(call), like)
    low, high = key_range(call, seq, Place(s, hk * group, 0, n))
    for tile in tile_range(low, high):
        for g in range(group):
            h = hk * group + g
            state = tile_row(states, s, h, 0)
            if skipped(state, tile):
                continue
            part = columns(like, low, high, tile, state)
            k, k_bytes = head_rows(kind, call.k, s, seq.key + part.j0, hk)
            v, v_bytes = head_rows(kind, call.v, s, seq.key + part.j0, hk)
            for i in range(n):
                r = g * n + i
                at, average = rows.S + 4 * r * TILE_K, rows.O + 4 * r * value_d
                dots(kind, at, rows.q + 4 * r * d, k, k_bytes, part.keys, d)
                row = array(at, part.width, like)
                score_row(row, like, call, seq, s, h, i, part)
                softmax_step(row, m, l, r, array(average, value_d, like), call.natural)
                if call.threshold:
                    kept_row = keep_row(kept, part.width, call, s, h, i, part.j0)
                    for j in range(part.width):
                        row[j] *= kept_row[j]
                add_rows(kind, average, at, v, v_bytes, part.keys, value_d)
    finite = rows_are_finite(like, rows.O, 4 * value_d, group * n, value_d)
    for g in range(group):
        place, first = Place(s, hk * group + g, 0, n), g * n
        O = rows.O + 4 * first * value_d
        finish_rows(call, seq, place, O, m[first:], l[first:], like, kind)
    return finite


class Sums(NamedTuple):
    """Addresses of a task's rows of a backward, in a thread's scratch memory."""

    scaled: int  # [group n, d]: q as of scores
    q: int  # [group n, d]
    dout: int  # [group n, value_d]
    S: int  # [group n, TILE_K], then P R
    dp: int  # [group n, TILE_K], then dS
    dq: int  # [group n, d]
    lse: int  # [group n]
    delta: int  # [group n]


@kernel
def few_backward(pointer):
    """Compute tasks of a backward until none is left; the pointer is that of a header."""
    data, kind, like = address(pointer), kind_of(pointer), np.empty(0, np.float32)
    header, calls, sequences, states = opened(data)
    call = calls[0]
    most, d, value_d = call.group * header[QUERIES], call.d, call.value_d
    owner, scaled = aligned(most * (3 * d + value_d + 2 * TILE_K + 2), like)
    q = scaled + 4 * most * d
    dout = q + 4 * most * d
    S = dout + 4 * most * value_d
    dP = S + 4 * most * TILE_K
    dq = dP + 4 * most * TILE_K
    lse = dq + 4 * most * d
    rows = Sums(scaled, q, dout, S, dP, dq, lse, lse + 4 * most)
    buffers = buffers_of(call, like)
    while True:
        t = fetch_add(data + 8 * NEXT, 1)
        if t >= header[TASKS]:
            break
        s, hk = t // call.hk, t % call.hk
        if not backward_head(call, sequences[s], states, s, hk, rows, buffers, like, kind):
            fetch_add(data + 8 * INFINITE, 1)
    in_use = buffers.y.size + buffers.x.size + buffers.kept.size
    return in_use + owner.size + like.size + kind.size


@inner
def read_lse(call, seq, place, lse, like):
    """Write lse of a tile of queries in base 2, +inf for a row without weights."""
    at = numbers_at(call.lse, 4, place.s, place.h, seq.query + place.i0)
    given = array(at, place.n, like)
    for i in range(place.n):
        lse[i] = without_weights(given[i] * np.float32(LOG2E))


@inner
def read_numbers(call, seq, place, places, like, kind):
    """Write lse in base 2 and ``Delta - dLSE`` of a tile of queries.

    ``places`` are the addresses of both, of rows of dO and of memory for a row.
    """
    lse_at, delta_at, douts, room = places
    s, h, i0, n = place
    value_d, first = call.value_d, seq.query + i0
    lse, delta, out = array(lse_at, n, like), array(delta_at, n, like), array(room, value_d, like)
    read_lse(call, seq, place, lse, like)
    for i in range(n):
        at = row_at(call.out, s, first + i, h)
        widen(kind, room, call.out.address + kind.itemsize * at, value_d)
        total = product_of_rows(out, array(douts + 4 * i * value_d, value_d, like))
        if call.dlse.address:
            total -= array(numbers_at(call.dlse, 4, s, h, first + i), 1, like)[0]
        delta[i] = np.float32(0) if lse[i] == np.inf else total


@inner
def backward_head(call, seq, states, s, hk, rows, buffers, like, kind):
    """Write dq, dk and dv of a kv head and its queries; return False if they are not finite."""
    n, d, value_d, group = seq.queries, call.d, call.value_d, call.group
    for g in range(group):
        h, r = hk * group + g, g * n
        scale = query_scale(call)
        read_rows(kind, rows.scaled + 4 * r * d, call.q, s, seq.query, n, h, d, scale, like)
        read_rows(kind, rows.q + 4 * r * d, call.q, s, seq.query, n, h, d, 1.0, like)
        to = rows.dout + 4 * r * value_d
        read_rows(kind, to, call.dout, s, seq.query, n, h, value_d, 1.0, like)
        numbers = rows.lse + 4 * r, rows.delta + 4 * r, to, rows.dp
        read_numbers(call, seq, Place(s, h, 0, n), numbers, like, kind)
    array(rows.dq, group * n * d, like)[:] = np.float32(0)
    for tile in tile_range(0, seq.keys):
        for g in range(group):
            head_gradients(call, seq, states, s, hk, g, tile, rows, buffers, like, kind)
        j0 = tile * TILE_K
        keys = min(TILE_K, seq.keys - j0)
        m, k_rows = group * n, (rows.dp, rows.q, d)
        write_keys(call.dk, call, seq, s, hk, j0, keys, m, k_rows, like, kind)
        v_rows = rows.S, rows.dout, value_d
        write_keys(call.dv, call, seq, s, hk, j0, keys, m, v_rows, like, kind)
    if call.dq.address:
        for g in range(group):
            for i in range(n):
                to = row_at(call.dq, s, seq.query + i, hk * group + g)
                row = rows.dq + 4 * (g * n + i) * d
                narrow(kind, call.dq.address + kind.itemsize * to, row, d)
    finite = rows_are_finite(like, rows.dq, 4 * d, group * n, d)
    finite &= rows_are_finite(like, rows.q, 4 * d, group * n, d)
    return finite & rows_are_finite(like, rows.dout, 4 * value_d, group * n, value_d)


@inner
def write_keys(to, call, seq, s, hk, j0, keys, m, rows, like, kind):
    """Write dK or dV of a tile of keys, if wanted: sums of m rows of (weights, others, d)."""
    if not to.address:
        return
    weights, others, d = rows
    if call.wide:
        at, step = head_rows(like, to, s, seq.key + j0, hk)
        write_sums(like, at, step, keys, weights, 4 * TILE_K, others, m, d)
    else:
        at, step = head_rows(kind, to, s, seq.key + j0, hk)
        write_sums(kind, at, step, keys, weights, 4 * TILE_K, others, m, d)


@inner
def head_gradients(call, seq, states, s, hk, g, tile, rows, buffers, like, kind):
    """Write P R and dS of a head's queries and a tile of keys, 0 where masked; add to dq."""
    n, d, value_d = seq.queries, call.d, call.value_d
    h, first = hk * call.group + g, g * n
    place = Place(s, h, 0, n)
    low, high = key_range(call, seq, place)
    state = tile_row(states, s, h, 0)
    S, dP = rows.S + 4 * first * TILE_K, rows.dp + 4 * first * TILE_K
    for at in (S, dP):
        array(at, n * TILE_K, like)[:] = np.float32(0)
    if tile * TILE_K >= high or (tile + 1) * TILE_K <= low or skipped(state, tile):
        return
    part = columns(like, low, high, tile, state)
    column = 4 * (part.j0 - tile * TILE_K)
    k, k_bytes = head_rows(kind, call.k, s, seq.key + part.j0, hk)
    v, v_bytes = head_rows(kind, call.v, s, seq.key + part.j0, hk)
    numbers = Rows(
        array(rows.delta + 4 * first, n, like),
        array(rows.lse + 4 * first, n, like),
        array(rows.lse + 4 * first, 0, like),
    )
    tiles = S + column, dP + column
    for i in range(n):
        at, inside = first + i, 4 * i * TILE_K
        dots(kind, tiles[0] + inside, rows.scaled + 4 * at * d, k, k_bytes, part.keys, d)
        dout = rows.dout + 4 * at * value_d
        dots(kind, tiles[1] + inside, dout, v, v_bytes, part.keys, value_d)
        row_gradients(call, seq, place, i, part, 0, numbers, tiles, buffers, like, like)
        add_rows(kind, rows.dq + 4 * at * d, tiles[1] + inside, k, k_bytes, part.keys, d)
