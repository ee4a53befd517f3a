"""The backward: a task owns kv heads and every n-th tile of queries, so tasks share no sums.

P is recomputed from lse, tile by tile. Where lse is so large that its rounding matters (``FAR``),
the weights of the row are summed again first. dK and dV of a head are summed in the task's own
scratch; dQ of a tile of queries is finished before the next. Where heads are few, several tasks
share a head's tiles of queries. Their dK and dV are added at the end in a fixed order, so gradients
are bitwise equal from run to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from ..call.flops import backward_flops
from ..call.problem import Gradients, Problem, Tensors, Wanted
from ..rules import row_stats
from .amx import STRIP
from .call import Call
from .functions import array, choice, inner
from .gradient_rows import (
    add_far_rows,
    any_far,
    buffers_of,
    finish_far_rows,
    row_gradients,
    rows_of,
    write_rows,
)
from .kernel import INFINITE, kernel, launch
from .operands import (
    HALF_K,
    begin_tiles,
    count_infinite,
    end_tiles,
    fold_row,
    fold_rows,
    in_strips,
    memory_of,
    pack_columns,
    pack_panels,
    pack_rows,
    paired,
    row_size,
    rows_are_finite,
    sparse_product,
    sum_size,
    tile_depth,
    tile_rows,
    unowned,
)
from .products import from_columns, from_rows
from .rows import query_scale
from .strips_backward import backward_strips, strip_memory, turn_sums
from .tiles import (
    all_sequences,
    columns,
    key_range,
    keys_of,
    packed_row,
    place_of,
    row_address,
    row_at,
    score_tile,
    tile_range,
)
from .vector import TILE_K, TILE_Q, fetch_add

HEAD = np.dtype([("s", np.int64), ("h", np.int64)])  # sequence, kv head


class HeadMemory(NamedTuple):
    """Addresses of a kv head's operands and sums, in a thread's scratch memory."""

    k_panels: int  # [keys / panel, d, panel]
    v_panels: int
    dk: int  # [keys, d_padded]
    dv: int  # [keys, value_d_padded]
    k_rows: int  # [keys, d_padded], or pairs [keys / 2, d_padded]


class TileMemory(NamedTuple):
    """Addresses of a tile's operands and sums, in a thread's scratch memory."""

    queries: int  # [d, TILE_Q]
    douts: int  # [value_d, TILE_Q]
    s: int  # [TILE_Q, TILE_K], then P R
    dp: int  # [TILE_Q, TILE_K], then dS
    ds: int  # [TILE_Q, TILE_K / 2], only for pairs: dS in pairs of keys
    dq: int  # [TILE_Q, d_padded]
    q_rows: int  # [TILE_Q, d_padded], or pairs [TILE_Q / 2, d_padded]
    dout_rows: int  # [TILE_Q, value_d_padded], or pairs [TILE_Q / 2, value_d_padded]


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    bfloats: bool = True,
) -> Gradients:
    """Return the gradients; those summed by several tasks are added in a fixed order.

    ``bfloats``: products of bfloat16 where the processor has them.
    """
    call = Call(problem, tensors, dout, bfloats=bfloats)
    lse = lse.to(call.dtype).contiguous()
    rest = torch.zeros_like(lse) if problem.natural else None
    call.tensor("dout", call.rows(dout))
    call.tensor("lse", row_stats.score_lse(lse, problem.natural))
    if not call.strips:
        # summed by the kernel, in the order of short calls (short.py)
        delta = torch.empty_like(lse)
        call.tensor("out", call.rows(out))
        if dlse is not None:
            call.tensor("dlse", dlse.detach().to(call.dtype))
    else:
        delta = row_stats.delta(out, dout, lse, dlse).contiguous()
    call.tensor("delta", delta)
    if rest is not None:
        call.tensor("rest", rest)
    starts, order = owners_of(problem, wanted.bias)
    tasks = len(starts) - 1
    parts = parts_of(problem, tasks)
    sums = outputs(call, tensors, wanted, parts)
    arguments = (call.record, starts, order)
    arguments = (*arguments, call.like, call.operand_like)
    flops = backward_flops(problem)
    if not launch(backward_worker, *arguments, tasks=tasks * parts, flops=flops):
        return backward(problem, tensors, out, lse, dout, dlse, wanted, bfloats=False)
    done = finished(problem, tensors, sums)
    if wanted.sink:
        assert tensors.sink is not None
        delta = row_stats.of_seen_rows(delta, lse)
        done["sink"] = row_stats.dsink(tensors.sink, lse, delta, rest).to(tensors.sink.dtype)
    return Gradients(**done)


def owners_of(problem: Problem, bias_wanted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (the start of each owner's part of the order, ``HEAD [heads]`` in order).

    Heads that add to the same elements of dbias have one owner.
    """
    s, h = np.divmod(np.arange(problem.batch * problem.hk), problem.hk)
    owner = np.arange(s.size)
    if bias_wanted and problem.bias is not None:
        owner = (s if problem.bias[0] > 1 else 0 * s) * problem.hk
        owner = owner + (h if problem.bias[1] > 1 else 0)
    sorting = np.argsort(owner, kind="stable")
    order = np.empty(s.size, HEAD)
    order["s"], order["h"] = s[sorting], h[sorting]
    starts = np.flatnonzero(np.diff(owner[sorting], prepend=-1))
    return np.append(starts, s.size).astype(np.int64), order


def parts_of(problem: Problem, owners: int) -> int:
    """Return the tasks of each owner: as few as keep every thread busy."""
    threads = torch.get_num_threads()
    if owners == 0 or owners % threads == 0 or owners >= 4 * threads:
        return 1
    return max(1, min(-(-threads // owners), -(-problem.nq // TILE_Q)))


def outputs(
    call: Call, tensors: Tensors, wanted: Wanted, parts: int, kind: str = "d", chunks: int = 1
) -> dict[str, Tensor]:
    """Return the tensors that kernels write: sums for each part, except dq.

    ``kind`` begins their names: dt for gradients of tangents. ``chunks`` of keys add to sums of
    their own for the parameters of heads.
    """
    sums: dict[str, Tensor] = {}
    call.set(parts=parts)
    if wanted.q:
        sums["q"] = torch.empty(1, *tensors.q.shape, dtype=call.row_dtype)
        call.tensor(f"{kind}q", sums["q"][0])
    for name in ("k", "v"):
        if getattr(wanted, name):
            # parts are added afterwards
            dtype = call.row_dtype if parts == 1 and not call.problem.wide else call.dtype
            sums[name] = torch.empty(parts, *getattr(tensors, name).shape, dtype=dtype)
            call.tensor(f"{kind}{name}", sums[name])
    if wanted.heads:
        assert tensors.heads is not None
        shape = (parts * chunks, call.problem.batch, *tensors.heads.shape)
        sums["heads"] = torch.zeros(shape, dtype=torch.float64)  # a sum over all pairs of a head
        call.tensor(f"{kind}heads", sums["heads"])
    if wanted.bias:
        assert tensors.bias is not None
        shape = tensors.bias.shape
        parts = parts if shape[2] == 1 else 1  # tiles of queries share only a single row
        sums["bias"] = torch.zeros(parts, *shape, dtype=call.dtype)
        call.tensor(f"{kind}bias", sums["bias"])
        p = call.problem
        call.set(store_bias=tuple(shape) == (p.batch, p.hq, p.nq, p.nk))
    return sums


def finished(problem: Problem, tensors: Tensors, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of the parts, of the inputs' shapes and the gradients' dtypes."""
    done = {}
    for name, parts in sums.items():
        like = getattr(tensors, name)
        parts = parts.flatten(0, parts.dim() - like.dim() - 1)
        whole = parts[0] if parts.shape[0] == 1 else parts.sum(0)
        done[name] = whole.to(problem.gradient_dtype(name, like))
    return done


@kernel
def backward_worker(calls, starts, order, like, operand_like, counters):
    """Compute the tasks of one thread until the counter of owners has passed the last."""
    call = calls[0]
    sequences = all_sequences(call)
    like, operand_like = unowned(like), unowned(operand_like)
    longest = (call.longest_k + TILE_K - 1) // TILE_K * TILE_K
    heads_owner, memory = head_memory(call, longest, like)
    tiles_owner, tile_mem = tile_memory(call, like, operand_like)
    buffers_owner, buffers = buffers_of(call, call.dheads.address, like)
    finite = np.empty(longest // TILE_K, np.bool_)
    begin_tiles(operand_like)
    while True:
        t = fetch_add(counters.ctypes.data, 1)
        if t >= (len(starts) - 1) * call.parts:
            break
        owner, p = t // call.parts, t % call.parts
        for n in range(starts[owner], starts[owner + 1]):
            s, hk = order[n].s, order[n].h
            seq = sequences[s]
            infinite = counters.ctypes.data + 8 * INFINITE
            pack_head(call, seq, s, hk, memory, finite, infinite, operand_like)
            keys = seq.keys
            if in_strips(operand_like):
                keys = (keys + STRIP - 1) // STRIP * STRIP
            array(memory.dk, keys * call.d_padded, like)[:] = like.dtype.type(0)
            array(memory.dv, keys * call.value_d_padded, like)[:] = like.dtype.type(0)
            count = (seq.queries + TILE_Q - 1) // TILE_Q
            for h in range(hk * call.group, (hk + 1) * call.group):
                for tile in range(p, count, call.parts):
                    place = place_of(seq, s, h, tile)
                    for rows, d in ((call.q, call.d), (call.dout, call.value_d)):
                        at = row_address(rows, seq, place, operand_like)
                        row_bytes = row_size(operand_like) * rows.n
                        count_infinite(operand_like, at, row_bytes, place.n, d, infinite)
                    backward_tile(
                        *(call, seq, finite, place, p),
                        *(memory, tile_mem, buffers, like, operand_like),
                    )
            finish_sums(call, seq, memory, tile_mem, like, operand_like)
            write_parts(call.dk, memory.dk, call.d, call, seq, (p, s, hk), like, operand_like)
            write_parts(call.dv, memory.dv, call.value_d, call, seq, (p, s, hk), like, operand_like)
    end_tiles(operand_like)
    return heads_owner.size + tiles_owner.size + buffers_owner.size


@inner
def head_memory(call, longest, like):
    """Return (the array that owns it, the memory of a kv head of up to ``longest`` keys)."""
    d, value_d = call.d_padded, call.value_d_padded
    columns = call.d_operand, call.value_d_operand, d, value_d, d
    owner, at = memory_of(like, longest, columns)
    return owner, HeadMemory(*at)


@choice
def tile_memory(call, like, operand_like) -> Any:
    """Return (the array that owns it, the memory of a tile)."""
    return strip_memory if operand_like.dtype == types.uint16 else plain_memory


def plain_memory(call, like, operand_like):
    """Return (the array that owns it, the memory of a tile), except for tile instructions."""
    d, value_d = call.d_padded, call.value_d_padded
    columns = call.d_operand, call.value_d_operand, TILE_K, TILE_K, TILE_K, d, d, value_d
    owner, at = memory_of(like, TILE_Q, columns)
    return owner, TileMemory(*at)


@inner
def pack_head(call, seq, s, h, memory, finite, infinite, operand_like):
    """Write a kv head's keys and values as panels; note which tiles of keys are finite."""
    row, nk = row_size(operand_like), seq.keys
    k = call.k.address + row * row_at(call.k, s, seq.key, h)
    v = call.v.address + row * row_at(call.v, s, seq.key, h)
    k_bytes, v_bytes = row * call.k.n, row * call.v.n
    for tile in tile_range(0, nk):
        j0 = tile * TILE_K
        n, rows = min(TILE_K, nk - j0), k + k_bytes * j0
        finite[tile] = rows_are_finite(operand_like, rows, k_bytes, n, call.d)
        count_infinite(operand_like, rows, k_bytes, n, call.d, infinite)
        count_infinite(operand_like, v + v_bytes * j0, v_bytes, n, call.value_d, infinite)
        pack_panels(operand_like, memory.k_panels, k, k_bytes, j0, nk, call.d_operand)
        pack_panels(operand_like, memory.v_panels, v, v_bytes, j0, nk, call.value_d_operand)
        first_row = tile_rows(operand_like, HALF_K) * tile
        to = memory.k_rows + sum_size(operand_like) * first_row * call.d_padded
        pack_rows(operand_like, to, call.d_padded, rows, k_bytes, n, call.d)


@inner
def write_parts(to, rows, d, call, seq, at, like, operand_like):
    """Write a head's dK or dV, d wide: the gradient itself, or a part of a sum."""
    if not to.address:
        return
    p, s, h = at
    padded = call.d_padded if d == call.d else call.value_d_padded
    if call.parts == 1 and not call.wide:
        address = to.address + row_size(operand_like) * row_at(to, s, seq.key, h)
        write_rows(address, to.n, rows, seq.keys, d, padded, like, operand_like)
    else:
        address = to.address + like.itemsize * (to.p * p + row_at(to, s, seq.key, h))
        write_rows(address, to.n, rows, seq.keys, d, padded, like, like)


@choice
def finish_sums(call, seq, head, tile, like, operand_like) -> Any:
    """Turn dK and dV into rows where they are gathered transposed."""
    if operand_like.dtype != types.uint16:
        return lambda call, seq, head, tile, like, operand_like: None

    def finish(call, seq, head, tile, like, operand_like):
        turn_sums(head.dk, seq.keys, call.d_padded, tile.room, like)
        turn_sums(head.dv, seq.keys, call.value_d_padded, tile.room, like)

    return finish


@choice
def backward_tile(call, seq, finite, place, p, head, tile, buffers, like, operand_like) -> Any:
    """Compute a tile of queries over its keys: add to dK and dV, write dQ."""
    return backward_strips if operand_like.dtype == types.uint16 else _plain_tile


def _plain_tile(call, seq, finite, place, p, head, tile, buffers, like, operand_like):
    row_bytes, d, value_d = row_size(operand_like), call.d_padded, call.value_d_padded
    n = place.n
    q = row_address(call.q, seq, place, operand_like)
    dout = row_address(call.dout, seq, place, operand_like)
    q_bytes, dout_bytes = row_bytes * call.q.n, row_bytes * call.dout.n
    clean = rows_are_finite(operand_like, q, q_bytes, n, call.d)
    clean &= rows_are_finite(operand_like, dout, dout_bytes, n, call.value_d)
    pack_columns(operand_like, tile.queries, q, q_bytes, n, call.d_operand, query_scale(call))
    pack_columns(operand_like, tile.douts, dout, dout_bytes, n, call.value_d_operand, 1.0)
    pack_rows(operand_like, tile.q_rows, d, q, q_bytes, n, call.d)
    pack_rows(operand_like, tile.dout_rows, value_d, dout, dout_bytes, n, call.value_d)
    array(tile.dq, n * d, like)[:] = like.dtype.type(0)

    low, high = key_range(call, seq, place)
    rows = rows_of(call, seq, place, like, operand_like)
    if call.natural:
        sum_far_rows(call, seq, place, rows, head, tile, buffers, like, operand_like)
    for tile_k in tile_range(low, high):
        part = columns(call, place, low, high, tile_k, operand_like)
        if part.width <= 0:
            continue
        tile_gradients(call, seq, place, part, p, rows, head, tile, buffers, like, operand_like)
        whole = clean and finite[tile_k]
        add_products(call, seq, place, part, whole, q, dout, head, tile, like, operand_like)
    if call.dq.address:
        to = row_address(call.dq, seq, place, operand_like)
        write_rows(to, call.dq.n, tile.dq, n, call.d, d, like, operand_like)


@inner
def tile_gradients(call, seq, place, part, p, rows, head, tile, buffers, like, operand_like):
    """Write P R to S and dS, times scale, to dP, ``[n, part.width]``; add to dbias."""
    size, width, n = like.itemsize, part.width, place.n
    score_tile(operand_like, tile.s, tile.queries, head.k_panels, part, n, call.d_operand, 0)
    score_tile(operand_like, tile.dp, tile.douts, head.v_panels, part, n, call.value_d_operand, 0)
    for r in range(n):
        row_gradients(
            call, seq, place, r, part, p, rows, (tile.s, tile.dp), buffers, like, operand_like
        )
        dS = array(tile.dp + size * r * TILE_K, width, like)
        fold_row(operand_like, tile.ds + size * r * TILE_K, dS, keys_of(seq, part.tile))
    fold_rows(operand_like, tile.s, n, width)
    fold_rows(operand_like, tile.dp, n, width)


@inner
def add_products(call, seq, place, part, whole, q, dout, head, tile, like, operand_like):
    """Add ``(P R)^T dO`` to dV, ``dS^T Q`` to dK and ``dS K`` to dQ; ``whole``: all finite."""
    if paired(operand_like) or whole:
        add_whole_products(call, seq, place.n, part, head, tile, like, operand_like)
        return
    size, d, value_d = like.itemsize, call.d_padded, call.value_d_padded
    n, width, keys = place.n, part.width, part.keys
    dv, dk = head.dv + size * value_d * part.j0, head.dk + size * d * part.j0
    at = row_at(call.k, place.s, seq.key + part.j0, place.h // call.group)
    k = call.k.address + row_size(operand_like) * at
    P_t, dS_t, dS = (tile.s, 1, TILE_K), (tile.dp, 1, TILE_K), (tile.dp, TILE_K, 1)
    sparse_product(dv, value_d, width, P_t, n, dout, call.dout.n, value_d, 0, like)
    sparse_product(dk, d, width, dS_t, n, q, call.q.n, d, 0, like)
    sparse_product(tile.dq, d, n, dS, keys, k, call.k.n, d, 0, like)


@inner
def add_whole_products(call, seq, n, part, head, tile, like, operand_like):
    """Add the products of n queries and a part of a tile of keys; all numbers are finite."""
    size, d, value_d, width = like.itemsize, call.d_padded, call.value_d_padded, part.width
    dv, dk = head.dv + size * value_d * part.j0, head.dk + size * d * part.j0
    k = head.k_rows + size * d * packed_row(operand_like, part)
    dS = tile.ds if paired(operand_like) else tile.dp
    q_depth = tile_depth(operand_like, n, n)
    k_depth = tile_depth(operand_like, part.keys, keys_of(seq, part.tile))
    dv_at, dout_at = (dv, value_d), (tile.dout_rows, value_d, 1)
    from_columns(operand_like, width, value_d, q_depth, *dv_at, tile.s, TILE_K, *dout_at)
    from_columns(operand_like, width, d, q_depth, dk, d, tile.dp, TILE_K, tile.q_rows, d, 1)
    from_rows(operand_like, n, d, k_depth, tile.dq, d, dS, k, d)


@inner
def sum_far_rows(call, seq, place, rows, head, tile, buffers, like, operand_like):
    """Write the log of the sum of ``exp(s - lse)``, which rounding took from lse, to rest."""
    if not any_far(rows, place.n):
        return
    low, high = key_range(call, seq, place)
    for tile_k in tile_range(low, high):
        part = columns(call, place, low, high, tile_k, operand_like)
        if part.width <= 0:
            continue
        score_tile(
            operand_like, tile.s, tile.queries, head.k_panels, part, place.n, call.d_operand, 0
        )
        add_far_rows(call, seq, place, part, rows, tile.s, buffers, like, operand_like)
    finish_far_rows(call, place, rows, like)
