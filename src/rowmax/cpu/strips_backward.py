"""The backward's tiles for tile instructions: 32 queries at a time give P and dS.

P and dS are pairs of neighbouring queries for ``dV^T = dO^T P`` and ``dK^T = Q^T dS``, so neither
is transposed; dS is rows of bfloat16 as well, for ``dQ = dS K``. dK and dV gather transposed, in
panels ``[keys / 32, d, 32]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .amx import STRIP, product
from .functions import array, inner
from .gradient_rows import (
    add_far_rows,
    any_far,
    finish_far_rows,
    row_gradients,
    rows_of,
    write_rows,
)
from .operands import HALF_K, copy_rows, memory_of, pack_neighbours, pack_transposed, rescale
from .rows import hide, score_row
from .strips import covered, part_of_strip, score_factor, strip_of, strip_scores
from .tiles import columns, key_range, row_address, tile_range
from .vector import TILE_K, TILE_Q
from .wide import LANES, bfloat_gradients, pair_gradients, transpose


class StripMemory(NamedTuple):
    """Addresses of a tile's operands and sums, in a thread's scratch memory."""

    queries: int  # [TILE_Q, d], bfloat16
    douts: int  # [TILE_Q, value_d], bfloat16
    queries_t: int  # [d, TILE_Q], bfloat16
    douts_t: int  # [value_d, TILE_Q], bfloat16
    s: int  # [32, TILE_K], float32, then P R
    dp: int  # [32, TILE_K], float32, then dS
    p_pairs: int  # [TILE_K / 32, TILE_Q / 2, 32], pairs of queries
    ds_pairs: int  # [TILE_K / 32, TILE_Q / 2, 32]
    ds: int  # [TILE_Q, TILE_K], bfloat16
    dq: int  # [TILE_Q, d], float32
    terms: int  # [2, 32], lse and Delta of a strip
    room: int  # [TILE_Q / 2, the greater of d and value_d], float32


def strip_memory(call, like, operand_like):
    """Return (the array that owns it, the memory of a tile): a choice of ``tile_memory``."""
    d, value_d = call.d_operand, call.value_d_operand
    half, strip = TILE_Q // 2, STRIP * TILE_K  # a float32 has the size of two bfloat16
    operands = half * d, half * value_d, half * d, half * value_d
    pairs = half * TILE_K, half * TILE_K, half * TILE_K
    rest = TILE_Q * d, 2 * STRIP, half * max(d, value_d)
    owner, at = memory_of(like, 1, (*operands, strip, strip, *pairs, *rest))
    return owner, StripMemory(*at)


@inner
def pack_tile(rows, seq, place, to, to_t, room, d, like):
    """Write a tile of queries or of dO as contiguous rows and as their transpose."""
    at = row_address(rows, seq, place, like)
    copy_rows(like, to, at, 2 * rows.n, place.n, TILE_Q, d)
    pack_neighbours(like, room, to, 2 * d, TILE_Q, d)
    pack_transposed(to_t, room, TILE_Q, d)


def backward_strips(call, seq, finite, place, p, head, tile, buffers, like, operand_like):
    """Compute a tile of queries over its keys: a choice of ``backward_tile``."""
    n, d, value_d = place.n, call.d_operand, call.value_d_operand
    q, dout = (tile.queries, tile.queries_t), (tile.douts, tile.douts_t)
    pack_tile(call.q, seq, place, *q, tile.room, d, operand_like)
    pack_tile(call.dout, seq, place, *dout, tile.room, value_d, operand_like)
    array(tile.dq, TILE_Q * d, like)[:] = np.float32(0)
    if call.natural:
        sum_far_strips(call, seq, place, head, tile, buffers, like, operand_like)
    low, high = key_range(call, seq, place)
    for tile_k in tile_range(low, high):
        part = columns(call, place, low, high, tile_k, operand_like)
        if part.width <= 0:
            continue
        for r in range(0, n, STRIP):
            strip = strip_of(place, r)
            own = part_of_strip(call, seq, strip, tile_k, operand_like)
            if own.j0 > part.j0 or own.width < part.width:
                clear_pairs(tile, r)
            if own.width > 0:
                strip_gradients(
                    call, seq, strip, r, own, p, head, tile, buffers, like, operand_like
                )
        add_strip_products(call, place, part, head, tile)
    if call.dq.address:
        to = row_address(call.dq, seq, place, operand_like)
        write_rows(to, call.dq.n, tile.dq, n, call.d, d, like, operand_like)


@inner
def clear_pairs(tile, r):
    """Write zeros to P and dS of the strip from row r on."""
    words = np.empty(0, np.uint32)
    for j in range(0, TILE_K, STRIP):
        for pairs in (tile.p_pairs, tile.ds_pairs):
            at = pairs + 2 * TILE_Q * j + 64 * r
            array(at, STRIP * STRIP // 2, words)[:] = np.uint32(0)
    array(tile.ds + 2 * TILE_K * r, STRIP * TILE_K // 2, words)[:] = np.uint32(0)


@inner
def strip_gradients(call, seq, strip, r, part, p, head, tile, buffers, like, operand_like):
    """Write P R and dS of the strip from row r on, in both layouts; add to dbias and dheads."""
    d, value_d, width = call.d_operand, call.value_d_operand, part.width
    strip_scores(tile.s, tile.queries + 2 * d * r, head.k_panels, part, d)
    strip_scores(tile.dp, tile.douts + 2 * value_d * r, head.v_panels, part, value_d)
    rows = rows_of(call, seq, strip, like, operand_like)
    tiles = tile.s, tile.dp
    first = part.j0 - TILE_K * part.tile
    place = 2 * TILE_Q * first + 64 * r
    p_pairs, ds_pairs = tile.p_pairs + place, tile.ds_pairs + place
    ds = tile.ds + 2 * TILE_K * r + 2 * first
    if call.dbias.address or call.bent or call.dheads.address or call.threshold or call.natural:
        for i in range(strip.n):
            row_gradients(call, seq, strip, i, part, p, rows, tiles, buffers, like, operand_like)
        for i in range(strip.n, STRIP):  # sums over queries read them
            for at in tiles:
                array(at + 4 * TILE_K * i, width, like)[:] = np.float32(0)
        for i in range(0, STRIP, 2):
            s, dp, to = tile.s + 4 * TILE_K * i, tile.dp + 4 * TILE_K * i, 64 * i
            pair_gradients(s, dp, p_pairs + to, ds_pairs + to, ds + 2 * TILE_K * i, width)
        return
    factor = prepare_scores(call, seq, strip, part, tile, rows, like, operand_like)
    unit = np.float32(call.scale)
    for i in range(0, STRIP, 2):
        s, dp, to = tile.s + 4 * TILE_K * i, tile.dp + 4 * TILE_K * i, 64 * i
        lse, delta = tile.terms + 4 * i, tile.terms + 4 * (STRIP + i)
        pairs = p_pairs + to, ds_pairs + to
        bfloat_gradients(s, dp, *pairs, ds + 2 * TILE_K * i, width, lse, delta, factor, unit)


@inner
def prepare_scores(call, seq, strip, part, tile, rows, like, operand_like):
    """Write lse and Delta of a strip to ``terms``; hide pairs; return the factor of the scores.

    Rows past the last have an lse of +inf, as those that see nothing: their weights are 0.
    """
    terms = array(tile.terms, 2 * STRIP, like)
    for i in range(STRIP):
        terms[i] = rows.lse[i] if i < strip.n else np.float32(np.inf)
        terms[STRIP + i] = rows.delta[i] if i < strip.n else np.float32(0)
    apart, factor = score_factor(call)
    if not apart and covered(call, seq, strip, part):
        return factor
    s, h, i0, n = strip
    for i in range(n):
        row = array(tile.s + 4 * TILE_K * i, part.width, like)
        if apart:
            rescale(operand_like, row, factor)
            score_row(row, row[:0], call, seq, s, h, i0 + i, part)
        else:
            hide(row, np.float32(-np.inf), call, seq, s, h, i0 + i, part)
    return np.float32(1) if apart else factor


@inner
def add_strip_products(call, place, part, head, tile):
    """Add ``dO^T P`` to dV^T, ``Q^T dS`` to dK^T and ``dS K`` to dQ, over a part of a tile."""
    d, value_d = call.d_operand, call.value_d_operand
    first, steps, row = part.j0 - TILE_K * part.tile, (place.n + STRIP - 1) // STRIP, 4 * STRIP
    for j in range(first, first + part.width, STRIP):
        p_pairs, ds_pairs = tile.p_pairs + 2 * TILE_Q * j, tile.ds_pairs + 2 * TILE_Q * j
        dv = head.dv + 4 * value_d * (TILE_K * part.tile + j)
        dk = head.dk + 4 * d * (TILE_K * part.tile + j)
        for c in range(0, value_d, STRIP):
            a = tile.douts_t + 2 * TILE_Q * c
            product(dv + row * c, row, a, 2 * TILE_Q, p_pairs, row, steps, 1)
        for c in range(0, d, STRIP):
            a = tile.queries_t + 2 * TILE_Q * c
            product(dk + row * c, row, a, 2 * TILE_Q, ds_pairs, row, steps, 1)
    keys = head.k_rows + 4 * d * (HALF_K * part.tile + first // 2)
    for c in range(0, d, STRIP):
        for r in range(0, place.n, STRIP):
            a, to = tile.ds + 2 * (TILE_K * r + first), tile.dq + 4 * (d * r + c)
            product(to, 4 * d, a, 2 * TILE_K, keys + 4 * c, 4 * d, part.width // STRIP, 1)


@inner
def sum_far_strips(call, seq, place, head, tile, buffers, like, operand_like):
    """Write the log of the sum of ``exp(s - lse)``, which rounding took from lse, to rest."""
    d = call.d_operand
    for r in range(0, place.n, STRIP):
        strip = strip_of(place, r)
        rows = rows_of(call, seq, strip, like, operand_like)
        if not any_far(rows, strip.n):
            continue
        low, high = key_range(call, seq, strip)
        for tile_k in tile_range(low, high):
            part = columns(call, strip, low, high, tile_k, operand_like)
            if part.width <= 0:
                continue
            strip_scores(tile.s, tile.queries + 2 * d * r, head.k_panels, part, d)
            add_far_rows(call, seq, strip, part, rows, tile.s, buffers, like, operand_like)
        finish_far_rows(call, strip, rows, like)


@inner
def turn_sums(rows, keys, d, room, like):
    """Replace panels ``[d, 32]`` of sums by rows ``[keys, d]``."""
    for j0 in range(0, keys, STRIP):
        panel = rows + 4 * d * j0
        for j in range(0, STRIP, LANES):
            for c in range(0, d, LANES):
                transpose(room + 4 * (d * j + c), 4 * d, panel + 4 * (STRIP * c + j), 4 * STRIP)
        to, done = array(panel, STRIP * d, like), array(room, STRIP * d, like)
        for x in range(STRIP * d):
            to[x] = done[x]
