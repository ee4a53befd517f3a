"""Short sequences: a task is a kv head of a sequence, which a thread packs into its own memory.

Nothing of the size of a tensor is converted or packed. Where the processor multiplies pairs of
bfloat16, such rows are packed as pairs; rows of other dtypes are widened to float32. Steps and
their order are those of tiles. A result that is not finite is computed again by tiles, as in
few.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .backward import add_whole_products, head_memory, tile_gradients, tile_memory
from .call import CALL
from .few import (
    INFINITE,
    NEXT,
    head_rows,
    kind_of,
    operands_of,
    read_lse,
    read_numbers,
    read_rows,
)
from .few_vector import narrow
from .forward import begin_rows, finish_rows, scratch_of, write_weights
from .functions import array, choice, inner
from .gradient_rows import Rows, buffers_of, keep_deltas, rests_of, write_deltas
from .kernel import kernel
from .operands import (
    HALF_K,
    HALF_Q,
    count_infinite,
    memory_of,
    pack_columns,
    pack_panels,
    pack_tiles,
    paired,
    rows_are_finite,
    tile_depth,
    unowned,
)
from .products import from_rows
from .rows import query_scale
from .tiles import (
    all_sequences,
    columns,
    key_range,
    keys_of,
    packed_row,
    place_of,
    row_at,
    tile_range,
)
from .vector import TILE_K, TILE_Q, address, fetch, fetch_add


class Room(NamedTuple):
    """Addresses of the count of infinite results, and in a thread's scratch memory of a forward."""

    infinite: int
    k_panels: int  # [keys / panel, d, panel]
    k: int  # [keys, d], widened
    v: int  # [keys, value_d], widened, or pairs [keys / 2, value_d]
    q: int  # [TILE_Q, d], widened


class BackwardRoom(NamedTuple):
    """Addresses of what a backward needs besides the memory of tiles."""

    infinite: int
    v: int  # [keys, value_d], widened
    lse: int  # [TILE_Q], in the units of scores
    delta: int  # [TILE_Q]


@inner
def whole_tiles(keys):
    """Return a number of keys rounded up to whole tiles."""
    return (keys + TILE_K - 1) // TILE_K * TILE_K


@choice
def read_in_place(kind, operand_like, room, tensor, s, first, n, h, d, infinite, like) -> Any:
    """Return the address of n rows of a head whose numbers are operands, and bytes between rows.

    Rows that have to be widened are written to ``room``. Those of pairs are counted if not finite.
    """
    if kind.dtype == types.float32 or operand_like.dtype == types.uint32:

        def in_place(kind, operand_like, room, tensor, s, first, n, h, d, infinite, like):
            at, step, _ = head_rows(kind, tensor, s, first, h)
            count_infinite(operand_like, at, step, n, d, infinite)
            return at, step

        return in_place

    def widened(kind, operand_like, room, tensor, s, first, n, h, d, infinite, like):
        read_rows(kind, room, tensor, s, first, n, h, d, 1.0, like)
        return room, 4 * d

    return widened


@inner
def fetch_rows(kind, tensor, s, first, n, h, d):
    """Fetch n rows of a head into the cache: their stride is too long for a processor to see."""
    at, step, _ = head_rows(kind, tensor, s, first, h)
    for i in range(n):
        for byte in range(0, kind.itemsize * d, 64):
            fetch(at + step * i + byte)


@inner
def fetch_task(call, sequences, t, passes, kind):
    """Fetch what task t reads, if there is one; a thread draws each task one ahead."""
    if t >= call.tasks:
        return
    s, hk = t // call.hk, t % call.hk
    seq = sequences[s]
    fetch_rows(kind, call.k, s, seq.key, seq.keys, hk, call.d)
    fetch_rows(kind, call.v, s, seq.key, seq.keys, hk, call.value_d)
    for h in range(hk * call.group, (hk + 1) * call.group):
        fetch_rows(kind, call.q, s, seq.query, seq.queries, h, call.d)
        if passes == 2:
            fetch_rows(kind, call.dout, s, seq.query, seq.queries, h, call.value_d)


@inner
def forward_room(call, keys, infinite, like):
    """Return (the array that owns it, the Room of a thread)."""
    d, value_d = call.d, call.value_d
    owner, at = memory_of(like, 1, (keys * d, keys * d, keys * value_d, TILE_Q * d))
    return owner, Room(infinite, *at)


@inner
def read_head(call, seq, s, hk, room, kind, like, operand_like):
    """Write a kv head's panels of keys; return the address of its values, and bytes of a row."""
    keys, d, value_d, at = seq.keys, call.d, call.value_d, room.infinite
    k, k_bytes = read_in_place(
        kind, operand_like, room.k, call.k, s, seq.key, keys, hk, d, at, like
    )
    for tile in tile_range(0, keys):
        pack_panels(operand_like, room.k_panels, k, k_bytes, tile * TILE_K, keys, d)
    v, v_bytes = read_in_place(
        kind, operand_like, room.v, call.v, s, seq.key, keys, hk, value_d, at, like
    )
    if paired(operand_like):
        pack_tiles(operand_like, room.v, v, v_bytes, keys, HALF_K, value_d)
        return room.v, 4 * value_d
    return v, v_bytes


@kernel
def short_forward(pointer):
    """Compute tasks of a forward until none is left; the pointer is that of its record."""
    data = address(pointer)
    kind, like, operand_like = kind_of(pointer), array(0, 0, np.float32), operands_of(pointer)
    call = array(data, 1, CALL)[0]
    sequences = all_sequences(call)
    room_owner, room = forward_room(call, whole_tiles(call.longest_k), data + INFINITE, like)
    scratch_owner, scratch = scratch_of(call, like)
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)
    t = fetch_add(data + NEXT, 1)
    while t < call.tasks:
        after = fetch_add(data + NEXT, 1)
        s, hk = t // call.hk, t % call.hk
        seq = sequences[s]
        values = read_head(call, seq, s, hk, room, kind, like, operand_like)
        fetch_task(call, sequences, after, 1, kind)
        finite = True
        for h in range(hk * call.group, (hk + 1) * call.group):
            for n in range((seq.queries + TILE_Q - 1) // TILE_Q):
                place = place_of(seq, s, h, n)
                finite &= forward_part(
                    *(call, seq, place, values, room, scratch, unowned(kept)),
                    *(kind, like, operand_like),
                )
        if not finite:
            fetch_add(room.infinite, 1)
        t = after
    return room_owner.size + scratch_owner.size + kept.size


@inner
def forward_part(call, seq, place, values, room, scratch, kept, kind, like, operand_like):
    """Compute out and lse of a tile of queries; return False if they are not finite."""
    s, h, i0, n = place
    d, value_d, first = call.d, call.value_d, seq.query + i0
    m, l = begin_rows(call, n, scratch, like)
    q, q_bytes = read_in_place(
        kind, operand_like, room.q, call.q, s, first, n, h, d, room.infinite, like
    )
    pack_columns(operand_like, scratch.queries, q, q_bytes, n, d, query_scale(call))
    v, v_bytes = values
    low, high = key_range(call, seq, place)
    for tile in tile_range(low, high):
        part = columns(call, place, low, high, tile, operand_like)
        if part.width <= 0:
            continue
        keys = room.k_panels
        write_weights(call, seq, place, part, keys, scratch, m, l, kept, like, operand_like)
        rows, stride = v + v_bytes * packed_row(operand_like, part), v_bytes // 4
        k = tile_depth(operand_like, part.keys, keys_of(seq, part.tile))
        from_rows(operand_like, n, value_d, k, scratch.O, value_d, scratch.S, rows, stride)
    finish_rows(call, seq, place, scratch.O, m, l, like, written(kind, operand_like))
    return rows_are_finite(like, scratch.O, 4 * value_d, n, value_d)


@choice
def written(kind, operand_like) -> Any:
    """Return the array whose dtype says how ``store`` writes rows: of pairs as tiles do."""
    if operand_like.dtype == types.uint32:
        return lambda kind, operand_like: operand_like
    return lambda kind, operand_like: kind


@inner
def backward_room(call, keys, infinite, like):
    """Return (the array that owns it, the BackwardRoom of a thread)."""
    owner, at = memory_of(like, 1, (keys * call.value_d, TILE_Q, TILE_Q))
    return owner, BackwardRoom(infinite, *at)


@inner
def pack_head(call, seq, s, hk, head, room, kind, like, operand_like):
    """Write a kv head's keys and values as panels, and its keys as rows; set dK and dV to 0."""
    keys, d, value_d, at = seq.keys, call.d, call.value_d, room.infinite
    k, k_bytes = read_in_place(
        kind, operand_like, head.k_rows, call.k, s, seq.key, keys, hk, d, at, like
    )
    v, v_bytes = read_in_place(
        kind, operand_like, room.v, call.v, s, seq.key, keys, hk, value_d, at, like
    )
    for tile in tile_range(0, keys):
        j0 = tile * TILE_K
        pack_panels(operand_like, head.k_panels, k, k_bytes, j0, keys, d)
        pack_panels(operand_like, head.v_panels, v, v_bytes, j0, keys, value_d)
    if k != head.k_rows:
        pack_tiles(operand_like, head.k_rows, k, k_bytes, keys, HALF_K, d)
    array(head.dk, keys * d, like)[:] = np.float32(0)
    array(head.dv, keys * value_d, like)[:] = np.float32(0)


@kernel
def short_backward(pointer):
    """Compute tasks of a backward until none is left; the pointer is that of its record."""
    data = address(pointer)
    kind, like, operand_like = kind_of(pointer), array(0, 0, np.float32), operands_of(pointer)
    call = array(data, 1, CALL)[0]
    sequences = all_sequences(call)
    keys = whole_tiles(call.longest_k)
    head_owner, head = head_memory(call, keys, like)
    tile_owner, tile = tile_memory(call, like, operand_like)
    room_owner, room = backward_room(call, keys, data + INFINITE, like)
    buffers_owner, buffers = buffers_of(call, call.dheads.address, like)
    t = fetch_add(data + NEXT, 1)
    while t < call.tasks:
        after = fetch_add(data + NEXT, 1)
        s, hk = t // call.hk, t % call.hk
        seq = sequences[s]
        pack_head(call, seq, s, hk, head, room, kind, like, operand_like)
        fetch_task(call, sequences, after, 2, kind)
        finite = True
        for h in range(hk * call.group, (hk + 1) * call.group):
            for n in range((seq.queries + TILE_Q - 1) // TILE_Q):
                place = place_of(seq, s, h, n)
                finite &= backward_part(
                    *(call, seq, place, head, tile, room, buffers),
                    *(kind, like, operand_like),
                )
        write_head(call.dk, head.dk, call, seq, s, hk, call.d, like, kind)
        write_head(call.dv, head.dv, call, seq, s, hk, call.value_d, like, kind)
        finite &= rows_are_finite(like, head.dk, 4 * call.d, seq.keys, call.d)
        finite &= rows_are_finite(like, head.dv, 4 * call.value_d, seq.keys, call.value_d)
        if not finite:
            fetch_add(room.infinite, 1)
        t = after
    return head_owner.size + tile_owner.size + room_owner.size + buffers_owner.size


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
def pack_queries(call, seq, place, tile, room, kind, like, operand_like):
    """Write the rows of q and of dO of a tile of queries, and both as columns."""
    s, h, i0, n = place
    d, value_d, first, at = call.d, call.value_d, seq.query + i0, room.infinite
    q, q_bytes = read_in_place(kind, operand_like, tile.q_rows, call.q, s, first, n, h, d, at, like)
    dout, dout_bytes = read_in_place(
        kind, operand_like, tile.dout_rows, call.dout, s, first, n, h, value_d, at, like
    )
    if q != tile.q_rows:
        pack_tiles(operand_like, tile.q_rows, q, q_bytes, n, HALF_Q, d)
        pack_tiles(operand_like, tile.dout_rows, dout, dout_bytes, n, HALF_Q, value_d)
    pack_columns(operand_like, tile.queries, q, q_bytes, n, d, query_scale(call))
    pack_columns(operand_like, tile.douts, dout, dout_bytes, n, value_d, 1.0)


@inner
def read_stats(call, seq, place, tile, room, kind, like, operand_like):
    """Return the Rows of a tile of queries, whose rows of dO are packed."""
    lse, delta = array(room.lse, place.n, like), array(room.delta, place.n, like)
    if paired(operand_like):
        read_lse(call, seq, place, lse, like)
        write_deltas(call, seq, place, delta, like, operand_like)
        keep_deltas(call, seq, place, delta, like)
    else:
        places = room.lse, room.delta, tile.dout_rows, tile.dq
        read_numbers(call, seq, place, places, like, kind)
    return Rows(delta, lse, rests_of(call, seq, place, like))


@inner
def backward_part(call, seq, place, head, tile, room, buffers, kind, like, operand_like):
    """Write dq of a tile of queries, add to dK and dV; return False if dq is not finite."""
    s, h, i0, n = place
    d = call.d
    pack_queries(call, seq, place, tile, room, kind, like, operand_like)
    rows = read_stats(call, seq, place, tile, room, kind, like, operand_like)
    array(tile.dq, n * d, like)[:] = np.float32(0)
    low, high = key_range(call, seq, place)
    for number in tile_range(low, high):
        part = columns(call, place, low, high, number, operand_like)
        if part.width <= 0:
            continue
        tile_gradients(call, seq, place, part, 0, rows, head, tile, buffers, like, operand_like)
        add_whole_products(call, seq, n, part, head, tile, like, operand_like)
    for r in range(n if call.dq.address else 0):
        at = call.dq.address + kind.itemsize * row_at(call.dq, s, seq.query + i0 + r, h)
        narrow(kind, at, tile.dq + 4 * d * r, d)
    return rows_are_finite(like, tile.dq, 4 * d, n, d)
