"""Short sequences: a task is a kv head of a sequence, which a thread packs into its own memory.

Rows of any dtype become float32 there, so nothing of the size of a tensor is converted or packed.
Rules of masks and scores are those of tiles. A result that is not finite is computed again by
tiles, as in few.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .few import INFINITE, KEYS, NEXT, TASKS, head_rows, kind_of, opened, read_numbers, read_rows
from .few_vector import narrow
from .forward import finish_rows, softmax_step
from .functions import array, choice, inner
from .gradient_rows import Rows, buffers_of, row_gradients
from .kernel import kernel
from .operands import aligned, pack_columns, pack_panels, rows_are_finite
from .products import from_columns, from_rows
from .rows import keep_row, query_scale, score_row
from .tiles import columns, key_range, place_of, row_at, score_tile, skipped, tile_range, tile_row
from .vector import TILE_K, TILE_Q, address, fetch, fetch_add


class Head(NamedTuple):
    """Addresses of a kv head in a thread's scratch memory, float32."""

    k: int  # [keys, d]
    v: int  # [keys, value_d]
    k_panels: int  # [keys / panel, d, panel]
    v_panels: int  # only of a backward, as dk and dv
    dk: int  # [keys, d]
    dv: int  # [keys, value_d]


class Tile(NamedTuple):
    """Addresses of a tile of queries, likewise."""

    q: int  # [n, d]
    dout: int  # [n, value_d]
    queries: int  # [d, TILE_Q], scaled
    douts: int  # [value_d, TILE_Q]
    S: int  # [TILE_Q, TILE_K], then P R
    dp: int  # [TILE_Q, TILE_K], then dS
    O: int  # [TILE_Q, value_d]; of a backward dq, [TILE_Q, d]
    m: int  # [TILE_Q]; of a backward lse
    l: int  # [TILE_Q]; of a backward delta


@inner
def head_of(at, keys, call, passes):
    """Return the Head at an address, and the address after it; ``passes``: 1, or 2 backward."""
    d, value_d, size = call.d, call.value_d, 4 * ((keys + TILE_K - 1) // TILE_K * TILE_K)
    k, v = at, at + size * d
    k_panels = v + size * value_d
    v_panels = k_panels + size * d
    dk = v_panels + (passes - 1) * size * value_d
    dv = dk + (passes - 1) * size * d
    return Head(k, v, k_panels, v_panels, dk, dv), dv + (passes - 1) * size * value_d


@inner
def tile_of(at, call, passes):
    """Return the Tile at an address."""
    d, value_d, size = call.d, call.value_d, 4 * TILE_Q
    dout = at + size * d
    queries = dout + (passes - 1) * size * value_d
    douts = queries + size * d
    S = douts + (passes - 1) * size * value_d
    dP = S + size * TILE_K
    O = dP + (passes - 1) * size * TILE_K
    m = O + size * max(d, value_d)
    return Tile(at, dout, queries, douts, S, dP, O, m, m + size)


@inner
def numbers_of(keys, call):
    """Return how many numbers a Head and a Tile of a backward take at most."""
    d, value_d = call.d, call.value_d
    whole = (keys + TILE_K - 1) // TILE_K * TILE_K
    return 3 * whole * (d + value_d) + TILE_Q * (3 * (d + value_d) + 2 * TILE_K + 2)


@choice
def float_rows(kind, room, tensor, s, first, n, h, d, like) -> Any:
    """Return the address of n rows of a head as float32, and the bytes from row to row.

    Those of other dtypes are written to ``room``.
    """
    if kind.dtype == types.float32:
        return lambda kind, room, tensor, s, first, n, h, d, like: head_rows(
            kind, tensor, s, first, h
        )

    def widened(kind, room, tensor, s, first, n, h, d, like):
        read_rows(kind, room, tensor, s, first, n, h, d, 1.0, like)
        return room, 4 * d

    return widened


@inner
def read_head(call, seq, s, hk, head, passes, like, kind):
    """Write a kv head's panels, and of a backward its keys; return its values and their bytes."""
    keys, d, value_d = seq.keys, call.d, call.value_d
    if passes == 2:
        read_rows(kind, head.k, call.k, s, seq.key, keys, hk, d, 1.0, like)
    k, k_bytes = float_rows(kind, head.k, call.k, s, seq.key, keys, hk, d, like)
    v, v_bytes = float_rows(kind, head.v, call.v, s, seq.key, keys, hk, value_d, like)
    for tile in tile_range(0, keys):
        j0 = tile * TILE_K
        pack_panels(like, head.k_panels, k, k_bytes, j0, keys, d)
        if passes == 2:
            pack_panels(like, head.v_panels, v, v_bytes, j0, keys, value_d)
    return v, v_bytes


@inner
def fetch_rows(kind, tensor, s, first, n, h, d):
    """Fetch n rows of a head into the cache: their stride is too long for a processor to see."""
    at, step = head_rows(kind, tensor, s, first, h)
    for i in range(n):
        for byte in range(0, kind.itemsize * d, 64):
            fetch(at + step * i + byte)


@inner
def fetch_task(header, call, sequences, t, passes, kind):
    """Fetch what task t reads, if there is one; a thread draws each task one ahead."""
    if t >= header[TASKS]:
        return
    s, hk = t // call.hk, t % call.hk
    seq = sequences[s]
    fetch_rows(kind, call.k, s, seq.key, seq.keys, hk, call.d)
    fetch_rows(kind, call.v, s, seq.key, seq.keys, hk, call.value_d)
    for h in range(hk * call.group, (hk + 1) * call.group):
        fetch_rows(kind, call.q, s, seq.query, seq.queries, h, call.d)
        if passes == 2:
            fetch_rows(kind, call.dout, s, seq.query, seq.queries, h, call.value_d)


@kernel
def short_forward(pointer):
    """Compute tasks of a forward until none is left; the pointer is that of a header."""
    data, kind, like = address(pointer), kind_of(pointer), np.empty(0, np.float32)
    header, calls, sequences, states = opened(data)
    call = calls[0]
    owner, at = aligned(numbers_of(header[KEYS], call), like)
    head, at = head_of(at, header[KEYS], call, 1)
    tile = tile_of(at, call, 1)
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)
    t = fetch_add(data + 8 * NEXT, 1)
    while t < header[TASKS]:
        after = fetch_add(data + 8 * NEXT, 1)
        s, hk = t // call.hk, t % call.hk
        seq = sequences[s]
        values = read_head(call, seq, s, hk, head, 1, like, kind)
        fetch_task(header, call, sequences, after, 1, kind)
        finite = True
        for h in range(hk * call.group, (hk + 1) * call.group):
            for n in range((seq.queries + TILE_Q - 1) // TILE_Q):
                place = place_of(seq, s, h, n)
                state = tile_row(states, s, h, n)
                finite &= forward_part(
                    call, seq, state, place, head, values, tile, kept, like, kind
                )
        if not finite:
            fetch_add(data + 8 * INFINITE, 1)
        t = after
    return owner.size + kept.size + like.size + kind.size


@inner
def forward_part(call, seq, state, place, head, values, tile, kept, like, kind):
    """Compute out and lse of a tile of queries; return False if they are not finite."""
    s, h, i0, n = place
    d, value_d = call.d, call.value_d
    m, l = array(tile.m, n, like), array(tile.l, n, like)
    m[:] = -np.inf
    l[:] = np.float32(0)
    array(tile.O, n * value_d, like)[:] = np.float32(0)
    q, q_bytes = float_rows(kind, tile.q, call.q, s, seq.query + i0, n, h, d, like)
    pack_columns(like, tile.queries, q, q_bytes, n, d, query_scale(call))
    v, v_bytes = values
    low, high = key_range(call, seq, place)
    for number in tile_range(low, high):
        if skipped(state, number):
            continue
        part = columns(like, low, high, number, state)
        score_tile(like, tile.S, tile.queries, head.k_panels, part, n, d, 0)
        for r in range(n):
            row = array(tile.S + 4 * r * TILE_K, part.width, like)
            score_row(row, like, call, seq, s, h, i0 + r, part)
            average = array(tile.O + 4 * r * value_d, value_d, like)
            softmax_step(row, m, l, r, average, call.natural)
            if call.threshold:
                kept_row = keep_row(kept, part.width, call, s, h, i0 + r, part.j0)
                for j in range(part.width):
                    row[j] *= kept_row[j]
        rows, stride = v + v_bytes * part.j0, v_bytes // 4
        from_rows(like, n, value_d, part.keys, tile.O, value_d, tile.S, rows, stride, 1)
    finish_rows(call, seq, place, tile.O, m, l, like, kind)
    return rows_are_finite(like, tile.O, 4 * value_d, n, value_d)


@kernel
def short_backward(pointer):
    """Compute tasks of a backward until none is left; the pointer is that of a header."""
    data, kind, like = address(pointer), kind_of(pointer), np.empty(0, np.float32)
    header, calls, sequences, states = opened(data)
    call = calls[0]
    owner, at = aligned(numbers_of(header[KEYS], call), like)
    head, at = head_of(at, header[KEYS], call, 2)
    tile = tile_of(at, call, 2)
    buffers = buffers_of(call, like)
    t = fetch_add(data + 8 * NEXT, 1)
    while t < header[TASKS]:
        after = fetch_add(data + 8 * NEXT, 1)
        s, hk = t // call.hk, t % call.hk
        seq = sequences[s]
        read_head(call, seq, s, hk, head, 2, like, kind)
        fetch_task(header, call, sequences, after, 2, kind)
        array(head.dk, seq.keys * call.d, like)[:] = np.float32(0)
        array(head.dv, seq.keys * call.value_d, like)[:] = np.float32(0)
        finite = True
        for h in range(hk * call.group, (hk + 1) * call.group):
            for n in range((seq.queries + TILE_Q - 1) // TILE_Q):
                place = place_of(seq, s, h, n)
                state = tile_row(states, s, h, n)
                finite &= backward_part(call, seq, state, place, head, tile, buffers, like, kind)
        write_head(call.dk, head.dk, call, seq, s, hk, call.d, like, kind)
        write_head(call.dv, head.dv, call, seq, s, hk, call.value_d, like, kind)
        finite &= rows_are_finite(like, head.dk, 4 * call.d, seq.keys, call.d)
        finite &= rows_are_finite(like, head.dv, 4 * call.value_d, seq.keys, call.value_d)
        if not finite:
            fetch_add(data + 8 * INFINITE, 1)
        t = after
    in_use = buffers.y.size + buffers.x.size + buffers.kept.size
    return in_use + owner.size + like.size + kind.size


@inner
def write_head(to, rows, call, seq, s, hk, d, like, kind):
    """Write dK or dV of a kv head, if it is wanted."""
    for j in range(seq.keys if to.address else 0):
        row = rows + 4 * d * j
        if call.wide:
            narrow(like, head_rows(like, to, s, seq.key + j, hk)[0], row, d)
        else:
            narrow(kind, head_rows(kind, to, s, seq.key + j, hk)[0], row, d)


@inner
def backward_part(call, seq, state, place, head, tile, buffers, like, kind):
    """Write dq of a tile of queries, add to dK and dV; return False if dq is not finite."""
    s, h, i0, n = place
    d, value_d = call.d, call.value_d
    read_rows(kind, tile.q, call.q, s, seq.query + i0, n, h, d, 1.0, like)
    read_rows(kind, tile.dout, call.dout, s, seq.query + i0, n, h, value_d, 1.0, like)
    pack_columns(like, tile.queries, tile.q, 4 * d, n, d, query_scale(call))
    pack_columns(like, tile.douts, tile.dout, 4 * value_d, n, value_d, 1.0)
    read_numbers(call, seq, place, (tile.m, tile.l, tile.dout, tile.O), like, kind)
    lse, delta = array(tile.m, n, like), array(tile.l, n, like)
    rows = Rows(delta, lse, array(tile.m, 0, like))
    array(tile.O, n * d, like)[:] = np.float32(0)
    low, high = key_range(call, seq, place)
    for number in tile_range(low, high):
        if skipped(state, number):
            continue
        part = columns(like, low, high, number, state)
        score_tile(like, tile.S, tile.queries, head.k_panels, part, n, d, 0)
        score_tile(like, tile.dp, tile.douts, head.v_panels, part, n, value_d, 0)
        tiles = tile.S, tile.dp
        for r in range(n):
            row_gradients(call, seq, place, r, part, 0, rows, tiles, buffers, like, like)
        dk, dv = head.dk + 4 * d * part.j0, head.dv + 4 * value_d * part.j0
        w = part.width
        from_columns(like, w, value_d, n, dv, value_d, tile.S, TILE_K, tile.dout, value_d, 1)
        from_columns(like, w, d, n, dk, d, tile.dp, TILE_K, tile.q, d, 1)
        k = head.k + 4 * d * part.j0
        from_rows(like, n, d, part.keys, tile.O, d, tile.dp, k, d, 1)
    for r in range(n if call.dq.address else 0):
        at = call.dq.address + kind.itemsize * row_at(call.dq, s, seq.query + i0 + r, h)
        narrow(kind, at, tile.O + 4 * d * r, d)
    return rows_are_finite(like, tile.O, 4 * d, n, d)
