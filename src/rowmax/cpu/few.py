"""Few queries: a task is some kv heads of a sequence, whose rows are read in place, each once.

The query heads of a kv head share every tile of keys that is read. Nothing is packed, converted or
kept but the scores of a tile. Rules of masks and scores are those of tiles. A task has several kv
heads, of one row each, where memory is read in its order only so (``few_calls.heads_of_task``).

Packed sequences have tasks for the longest one, and shorter ones leave some of them empty.

Many keys are divided into chunks of tiles, a task each (``few_calls.chunk_of``). The sums of a
chunk are its part of the result; the task that ends last adds the parts up, in the order of chunks.
So results have the same bits for any number of threads.

A result that is not finite is computed again by tiles: there a masked NaN or inf stays out of sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .call import CALL, word_of
from .few_vector import (
    LANES,
    add_rows,
    add_rows_of_heads,
    dots,
    dots_of_heads,
    narrow,
    widen,
    write_sums,
)
from .forward import finish_rows, softmax_step
from .functions import SUMS, array, choice, inner
from .gradient_rows import (
    Rows,
    buffers_of,
    keep_deltas,
    product_of_rows,
    rests_of,
    row_gradients,
)
from .kernel import kernel
from .operands import memory_of, rows_are_finite
from .rows import any_allowed, keep_row, log_unit, power, query_scale, score_row
from .rules import moved, without_weights
from .tiles import Place, all_sequences, columns, key_range, numbers_at, row_at, tile_range
from .vector import TILE_K, address, ends, fetch_add

#: bytes from the record of a call to what its threads count
NEXT, INFINITE = 8 * word_of("next"), 8 * word_of("infinite")
#: the word after the record, of the chunks that are done of each task's heads
DONE = CALL.itemsize // 8
#: tiles of keys of a chunk, at most
CHUNK = max(1, 512 // TILE_K)


class Scratch(NamedTuple):
    """Addresses of a task's rows, in a thread's scratch memory: float32, contiguous."""

    room: int  # sums of several kv heads
    q: int  # [rows, d], scaled as scores are; rows: queries of each query head of each kv head
    S: int  # [rows, TILE_K], then P


class Part(NamedTuple):
    """Addresses of the rows of a result, over a chunk of keys: float32, contiguous."""

    O: int  # [rows, value_d]
    m: int  # [rows]
    l: int  # [rows]


class Task(NamedTuple):
    """Kv heads of a sequence, and a chunk of its keys."""

    s: int
    hk: int  # the first
    heads: int
    chunk: int
    group: int  # place of the heads among those of all sequences


@inner
def task_of(call, t):
    """Return task t."""
    heads, chunks = call.task_heads, call.chunks
    group, blocks = t // chunks, call.hk // heads
    return Task(group // blocks, group % blocks * heads, heads, t % chunks, group)


@inner
def tiles_of(task, call, low, high):
    """Return the tiles of a task's chunk that hold keys [low, high)."""
    tiles = tile_range(low, high)
    if call.chunks == 1:
        return tiles
    first = task.chunk * call.chunk
    return range(max(first, tiles.start), min(first + call.chunk, tiles.stop))


@inner
def most_rows(call):
    """Return the rows of a task of the longest sequence."""
    return call.task_heads * call.group * call.longest_q


@inner
def chunks_of(call, seq):
    """Return the chunks that hold keys of a sequence, at least one."""
    keys = call.chunk * TILE_K
    return max(1, (seq.keys + keys - 1) // keys)


@inner
def number_of(call, seq, task):
    """Return the number of a task's part of a result.

    A packed sequence whose first key is n has parts from ``n // keys of a chunk + s`` on for each
    of its heads: no sequence before it reaches them (``few_calls.parts_of``).
    """
    first = seq.key // (call.chunk * TILE_K) + task.s * call.part_step
    blocks = call.hk // task.heads
    return first * blocks + task.hk // task.heads * chunks_of(call, seq) + task.chunk


@inner
def part_at(call, number):
    """Return the part of a result with a number."""
    rows = most_rows(call)
    first = call.chunk_parts + 4 * number * rows * (call.value_d + 2)
    return Part(*ends(first, 4 * rows, (call.value_d, 1, 1))[:-1])


@inner
def is_last(data, chunks, task):
    """Return True if all other chunks of the heads of a task are done, and count this one."""
    return fetch_add(data + 8 * (DONE + task.group), 1) == chunks - 1


@choice
def kind_of(pointer) -> Any:
    """Return an empty array of the dtype of a call's rows, by that of a pointer; uint32: pairs."""
    dtypes = {types.uint16: np.uint16, types.uint32: np.uint16, types.int16: np.int16}
    kind = dtypes.get(pointer.dtype, np.float32)
    return lambda pointer: array(0, 0, kind)


@choice
def operands_of(pointer) -> Any:
    """Return an empty array of the dtype of operands, by that of a pointer: float32 or pairs."""
    dtype = np.uint32 if pointer.dtype == types.uint32 else np.float32
    return lambda pointer: array(0, 0, dtype)


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
def hidden(call, place, part):
    """Return True if no pair of n queries and a tile of keys may attend; there may be no query.

    The host makes no map of a boolean tensor alone (``call.py``).
    """
    if part.width <= 0 or place.n == 0:
        return True
    if call.k_ids.address or not call.allowed.address:
        return False
    return not any_allowed(call, place.s, place.h, place.n, part)


@inner
def are_alike(call, task):
    """Return True if the tiles of all query heads of a task have the same state."""
    return task.heads > 1 or call.states.h == 0


class HeadRows(NamedTuple):
    """Rows of keys or values of a tile."""

    first: int  # address of the first row
    step: int  # bytes to the next
    head: int  # bytes to the next head's


@inner
def head_rows(kind, tensor, s, key, h):
    """Return the rows of keys or values of a head, from a key on."""
    size = kind.itemsize
    first = tensor.address + size * row_at(tensor, s, key, h)
    return HeadRows(first, size * tensor.n, size * tensor.h)


@inner
def products(kind, to, room, q, rows, keys, d, heads, m):
    """Write the products of rows of q and HeadRows: m rows of one kv head, or one of each."""
    if heads > 1:
        dots_of_heads(kind, to, room, q, rows.first, rows.step, keys, d, heads, rows.head)
    else:
        dots(kind, to, q, rows.first, rows.step, keys, d, m)


@inner
def add_products(kind, to, room, weights, rows, keys, d, heads, m):
    """Add the products of weights and HeadRows: to m rows of one kv head, or to one of each."""
    if heads > 1:
        add_rows_of_heads(kind, to, room, weights, rows.first, rows.step, keys, d, heads, rows.head)
    else:
        add_rows(kind, to, weights, rows.first, rows.step, keys, d, m)


@inner
def room_of(call, heads):
    """Return the numbers of memory that a row needs where tasks have several kv heads."""
    return max(LANES * LANES, 2 * max(call.d, call.value_d)) if heads > 1 else 0


@kernel
def few_forward(pointer):
    """Compute tasks of a forward until none is left; the pointer is that of its record."""
    data, kind, like = address(pointer), kind_of(pointer), array(0, 0, np.float32)
    call = array(data, 1, CALL)[0]
    sequences = all_sequences(call)
    each = room_of(call, call.task_heads)
    owner, at = memory_of(like, most_rows(call), (each, call.d, TILE_K, call.value_d, 1, 1))
    scratch, own = Scratch(*at[:3]), Part(*at[3:])
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)
    while True:
        t = fetch_add(data + NEXT, 1)
        if t >= call.tasks:
            break
        task = task_of(call, t)
        seq, part = sequences[task.s], own
        rows = task.heads * call.group * seq.queries
        number = number_of(call, seq, task)
        if call.chunks > 1:
            part = part_at(call, number)
        if task.chunk < chunks_of(call, seq):
            forward_heads(call, seq, task, part, scratch, kept, like, kind)
        if call.chunks > 1:
            if not is_last(data, call.chunks, task):
                continue
            number -= task.chunk
            part = part_at(call, number)
            for chunk in range(1, chunks_of(call, seq)):
                other = part_at(call, number + chunk)
                add_part(part, other, rows, call.value_d, like, call.natural)
        if not write_rows(call, seq, task, part, rows, like, kind):
            fetch_add(data + INFINITE, 1)
    return owner.size + kept.size


@inner
def forward_heads(call, seq, task, part, rows, kept, like, kind):
    """Compute the part of a task: O, m and l of the queries of its heads."""
    n, d, count = seq.queries, call.d, task.heads * call.group
    array(part.m, count * n, like)[:] = -np.inf
    array(part.l, count * n, like)[:] = np.float32(0)
    array(part.O, count * n * call.value_d, like)[:] = np.float32(0)
    first = task.hk * call.group
    for g in range(count):
        to, h = rows.q + 4 * g * n * d, first + g
        read_rows(kind, to, call.q, task.s, seq.query, n, h, d, query_scale(call), like)
    low, high = key_range(call, seq, Place(task.s, first, 0, n))
    for tile in tiles_of(task, call, low, high):
        limits = low, high, tile
        forward_tile(call, seq, task, limits, part, rows, kept, like, kind)


@inner
def forward_tile(call, seq, task, limits, part, rows, kept, like, kind):
    """Add a tile of keys to the rows of a task; ``limits`` are (low, high, tile)."""
    n, d, value_d, heads = seq.queries, call.d, call.value_d, task.heads
    s, hk, count, shared = task.s, task.hk, heads * call.group, call.group * n
    low, high, tile = limits
    m, l = array(part.m, count * n, like), array(part.l, count * n, like)
    first = Place(s, hk * call.group, 0, n)
    inside = columns(call, first, low, high, tile, like)
    k = head_rows(kind, call.k, s, seq.key + inside.j0, hk)
    v = head_rows(kind, call.v, s, seq.key + inside.j0, hk)
    together = are_alike(call, task)
    if together:
        if hidden(call, first, inside):
            return
        products(kind, rows.S, rows.room, rows.q, k, inside.keys, d, heads, shared)
    for g in range(count):
        h = hk * call.group + g
        place, S, O = Place(s, h, 0, n), rows.S + 4 * g * n * TILE_K, part.O + 4 * g * n * value_d
        inside = columns(call, place, low, high, tile, like)
        if not together:
            if hidden(call, place, inside):
                continue
            products(kind, S, 0, rows.q + 4 * g * n * d, k, inside.keys, d, 1, n)
        for i in range(n):
            r = g * n + i
            at, average = S + 4 * i * TILE_K, O + 4 * i * value_d
            row = array(at, inside.width, like)
            score_row(row, like, call, seq, s, h, i, inside)
            softmax_step(row, m, l, r, array(average, value_d, like), call.natural)
            if call.threshold:
                kept_row = keep_row(kept, inside.width, call, s, h, i, inside.j0)
                for j in range(inside.width):
                    row[j] *= kept_row[j]
        if not together:
            add_products(kind, O, 0, S, v, inside.keys, value_d, 1, n)
    if together:
        add_products(kind, part.O, rows.room, rows.S, v, inside.keys, value_d, heads, shared)


@inner(fastmath=SUMS)
def scale_and_add(row, factor, other, share):
    """Replace a row by ``factor row + share other``."""
    for c in range(row.size):
        row[c] = row.dtype.type(factor) * row[c] + row.dtype.type(share) * other[c]


@inner
def add_part(part, other, rows, value_d, like, natural):
    """Add the part of the next chunk: sums over disjoint keys, each with its own maximum."""
    m, l = array(part.m, rows, like), array(part.l, rows, like)
    m_other, l_other = array(other.m, rows, like), array(other.l, rows, like)
    for r in range(rows):
        m_new, base = moved(m[r], m_other[r])
        alpha, beta = power(m[r] - base, natural), power(m_other[r] - base, natural)
        l[r] = alpha * l[r] + beta * l_other[r]
        m[r] = m_new
        at = 4 * r * value_d
        row, more = array(part.O + at, value_d, like), array(other.O + at, value_d, like)
        scale_and_add(row, alpha, more, beta)


@inner
def write_rows(call, seq, task, part, rows, like, kind):
    """Write out and lse of the heads of a task; return False if they are not finite."""
    n, value_d = seq.queries, call.value_d
    m, l = array(part.m, rows, like), array(part.l, rows, like)
    finite = rows_are_finite(like, part.O, 4 * value_d, rows, value_d)
    for g in range(task.heads * call.group):
        place, at = Place(task.s, task.hk * call.group + g, 0, n), g * n
        finish_rows(call, seq, place, part.O + 4 * at * value_d, m[at:], l[at:], like, kind)
    return finite


class Sums(NamedTuple):
    """Addresses of a task's rows of a backward, in a thread's scratch memory."""

    dq: int  # [rows, d]
    room: int  # sums of several kv heads
    scaled: int  # [rows, d]: q as of scores
    q: int  # [rows, d]
    dout: int  # [rows, value_d]
    S: int  # [rows, TILE_K], then P R
    dp: int  # [rows, TILE_K], then dS; at first a row of out
    lse: int  # [rows]
    delta: int  # [rows]


@kernel
def few_backward(pointer):
    """Compute tasks of a backward until none is left; the pointer is that of its record."""
    data, kind, like = address(pointer), kind_of(pointer), array(0, 0, np.float32)
    call = array(data, 1, CALL)[0]
    sequences = all_sequences(call)
    d, value_d = call.d, call.value_d
    most, each = most_rows(call), room_of(call, call.task_heads)
    tile = max(TILE_K, value_d)  # a row of out is read into that of dp
    owner, at = memory_of(like, most, (d, each, d, d, value_d, TILE_K, tile, 1, 1))
    buffers_owner, buffers = buffers_of(call, call.dheads.address, like)
    while True:
        t = fetch_add(data + NEXT, 1)
        if t >= call.tasks:
            break
        task, to = task_of(call, t), Sums(*at).dq
        seq = sequences[task.s]
        rows = task.heads * call.group * seq.queries
        if call.chunks > 1:
            to = call.chunk_parts + 4 * number_of(call, seq, task) * most * d
        finite = True
        if task.chunk < chunks_of(call, seq):
            sums = Sums(to, *at[1:])
            finite = backward_heads(call, seq, task, sums, buffers, like, kind)
        if call.chunks > 1 and finite:
            if not is_last(data, call.chunks, task):
                continue
            to -= 4 * task.chunk * most * d
            total = array(to, rows * d, like)
            for chunk in range(1, chunks_of(call, seq)):
                more = array(to + 4 * chunk * most * d, rows * d, like)
                scale_and_add(total, 1.0, more, 1.0)
        if not (finite and write_queries(call, seq, task, to, rows, like, kind)):
            fetch_add(data + INFINITE, 1)
    return owner.size + buffers_owner.size


@inner
def read_lse(call, seq, place, lse, like):
    """Write lse of a tile of queries in the units of scores, +inf for a row without weights."""
    at = numbers_at(call.lse, 4, place.s, place.h, seq.query + place.i0)
    given = array(at, place.n, like)
    for i in range(place.n):
        lse[i] = without_weights(given[i] * np.float32(log_unit(call)))


@inner
def read_numbers(call, seq, place, places, like, kind):
    """Write lse, in the units of scores, and ``Delta - dLSE`` of a tile of queries.

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
        delta[i] = total
    keep_deltas(call, seq, place, delta, like)


@inner
def backward_heads(call, seq, task, rows, buffers, like, kind):
    """Write dk and dv of a task, and its part of dq; return False if an input is not finite."""
    n, d, value_d, count = seq.queries, call.d, call.value_d, task.heads * call.group
    s = task.s
    for g in range(count):
        h, r = task.hk * call.group + g, g * n
        scale = query_scale(call)
        read_rows(kind, rows.scaled + 4 * r * d, call.q, s, seq.query, n, h, d, scale, like)
        read_rows(kind, rows.q + 4 * r * d, call.q, s, seq.query, n, h, d, 1.0, like)
        to = rows.dout + 4 * r * value_d
        read_rows(kind, to, call.dout, s, seq.query, n, h, value_d, 1.0, like)
        numbers = rows.lse + 4 * r, rows.delta + 4 * r, to, rows.dp
        read_numbers(call, seq, Place(s, h, 0, n), numbers, like, kind)
    array(rows.dq, count * n * d, like)[:] = np.float32(0)
    for tile in tiles_of(task, call, 0, seq.keys):
        tile_gradients(call, seq, task, tile, rows, buffers, like, kind)
        write_keys(call.dk, call, seq, task, tile, (rows.dp, rows.q, d), like, kind)
        write_keys(call.dv, call, seq, task, tile, (rows.S, rows.dout, value_d), like, kind)
    finite = rows_are_finite(like, rows.q, 4 * d, count * n, d)
    return finite & rows_are_finite(like, rows.dout, 4 * value_d, count * n, value_d)


@inner
def write_queries(call, seq, task, dq, rows, like, kind):
    """Write dq of the heads of a task, if wanted; return False if it is not finite."""
    n, d = seq.queries, call.d
    if call.dq.address:
        for r in range(rows):
            h, i = task.hk * call.group + r // n, r % n
            to = row_at(call.dq, task.s, seq.query + i, h)
            narrow(kind, call.dq.address + kind.itemsize * to, dq + 4 * r * d, d)
    return rows_are_finite(like, dq, 4 * d, rows, d)


@inner
def write_keys(to, call, seq, task, tile, rows, like, kind):
    """Write dK or dV of a tile of keys, if wanted, in the dtype of rows or of sums."""
    if not to.address:
        return
    if call.wide:
        write_tile(to, call, seq, task, tile, rows, like)
    else:
        write_tile(to, call, seq, task, tile, rows, kind)


@inner
def write_tile(to, call, seq, task, tile, rows, kind):
    """Write a tile of keys: sums of rows of (weights, others, d)."""
    weights, others, d = rows
    j0, m, heads = tile * TILE_K, call.group * seq.queries, task.heads
    keys = min(TILE_K, seq.keys - j0)
    at = head_rows(kind, to, task.s, seq.key + j0, task.hk)
    if m == 0:
        clear_keys(at, keys, heads, d, kind)
    else:
        write_sums(kind, at.first, at.step, keys, weights, others, m, d, heads, at.head)


@inner
def clear_keys(at, keys, heads, d, kind):
    """Write zeros: no query sees these keys of a packed sequence."""
    for j in range(keys):
        for h in range(heads):
            row = array(at.first + at.step * j + at.head * h, d, kind)
            for c in range(d):
                row[c] = kind.dtype.type(0)


@inner
def tile_gradients(call, seq, task, tile, rows, buffers, like, kind):
    """Write P R and dS of a tile of keys, 0 where masked; add to dq."""
    n, d, value_d, heads = seq.queries, call.d, call.value_d, task.heads
    s, hk, first, shared = task.s, task.hk, task.hk * call.group, call.group * n
    count = heads * call.group
    place = Place(s, first, 0, n)
    low, high = key_range(call, seq, place)
    for at in (rows.S, rows.dp):
        array(at, count * n * TILE_K, like)[:] = np.float32(0)
    if tile * TILE_K >= high or (tile + 1) * TILE_K <= low:
        return
    inside = columns(call, place, low, high, tile, like)
    column = 4 * (inside.j0 - tile * TILE_K)
    k = head_rows(kind, call.k, s, seq.key + inside.j0, hk)
    v = head_rows(kind, call.v, s, seq.key + inside.j0, hk)
    together = are_alike(call, task)
    if together:
        if hidden(call, place, inside):
            return
        S, dp, room = rows.S + column, rows.dp + column, rows.room
        products(kind, S, room, rows.scaled, k, inside.keys, d, heads, shared)
        products(kind, dp, room, rows.dout, v, inside.keys, value_d, heads, shared)
    for g in range(count):
        limits = low, high, tile
        head_gradients(call, seq, task, g, limits, rows, buffers, like, kind)
    if together:
        to = rows.dq, rows.room, rows.dp + column
        add_products(kind, *to, k, inside.keys, d, heads, shared)


@inner
def head_gradients(call, seq, task, g, limits, rows, buffers, like, kind):
    """Write P R and dS of query head g of a task and a tile, and their products if it is alone."""
    n, d, value_d = seq.queries, call.d, call.value_d
    low, high, tile = limits
    s, h, first = task.s, task.hk * call.group + g, g * n
    place = Place(s, h, 0, n)
    part = columns(call, place, low, high, tile, like)
    together = are_alike(call, task)
    if not together and hidden(call, place, part):
        return
    column = 4 * (part.j0 - tile * TILE_K)
    k = head_rows(kind, call.k, s, seq.key + part.j0, task.hk)
    v = head_rows(kind, call.v, s, seq.key + part.j0, task.hk)
    numbers = Rows(
        array(rows.delta + 4 * first, n, like),
        array(rows.lse + 4 * first, n, like),
        rests_of(call, seq, place, like),
    )
    tiles = rows.S + 4 * first * TILE_K + column, rows.dp + 4 * first * TILE_K + column
    if not together:
        scaled, dout = rows.scaled + 4 * first * d, rows.dout + 4 * first * value_d
        products(kind, tiles[0], 0, scaled, k, part.keys, d, 1, n)
        products(kind, tiles[1], 0, dout, v, part.keys, value_d, 1, n)
    for i in range(n):
        row_gradients(call, seq, place, i, part, task.chunk, numbers, tiles, buffers, like, like)
    if not together:
        add_products(kind, rows.dq + 4 * first * d, 0, tiles[1], k, part.keys, d, 1, n)
