"""The backward: a task owns kv heads and every n-th tile of queries, so nothing is shared.

P is recomputed from lse, tile by tile; where lse is so large that its rounding matters (``FAR``),
the weights of the row are summed once more before. dK and dV of a head gather in the task's own
scratch; dQ of a tile of queries is finished before the next. Where heads are few, several tasks
(slices) take a head's tiles of queries in turn, and their dK and dV are added at the end: in the
same order each time, so gradients are bitwise equal from run to run.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..call.flops import backward_flops
from ..call.problem import FAR, Gradients, Problem, Tensors, Wanted
from ..rules.mask import FULL, SKIP
from .call import Call
from .forward import set_outputs
from .kernel import kernel, launch
from .operands import (
    HALF_K,
    HALF_Q,
    aligned,
    dot,
    fold_row,
    fold_rows,
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
from .products import from_columns, from_rows
from .scores import (
    LOG2E,
    STRICT,
    SUMS,
    array,
    exp2,
    exponentials,
    keep_row,
    log_unit,
    number,
    power,
    query_scale,
    score_row,
)
from .tiles import columns, key_range, score_tile, tile_row
from .vector import TILE_K, TILE_Q, fetch_add


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    call = Call(problem, tensors, dout)
    call.rows("dout", dout)
    set_outputs(call, out.to(call.row_dtype).contiguous(), lse.to(call.dtype).contiguous())
    if dlse is not None:
        dlse = dlse.to(call.dtype)
        b, h, q = dlse.stride()
        call.set(dlse=call.keep(dlse), dlse_b=0 if problem.varlen else b, dlse_h=h, dlse_q=q)
    rest = torch.zeros(lse.shape, dtype=call.dtype)
    if problem.natural:
        call.set(rest=call.keep(rest))
    groups, order = _owners(problem, wanted.bias)
    slices = _slices(problem, len(groups) - 1)
    grads = _outputs(call, tensors, wanted, slices)
    arguments = (call.record, call.sequences, call.states, groups, order, call.like, call.of)
    tasks = (len(groups) - 1) * slices
    launch(backward_worker, *arguments, tasks=tasks, flops=backward_flops(problem))
    inputs = {name: getattr(tensors, name) for name in Gradients._fields}
    done = {name: _finished(g, inputs[name]) for name, g in grads.items()}
    if wanted.sink:
        done["sink"] = _sink_gradient(tensors, out, lse, rest, dout, dlse)
    return Gradients(**done)


def _owners(problem: Problem, bias_wanted: bool) -> tuple[np.ndarray, np.ndarray]:
    """(where each owner's part of the order starts, the (sequence, kv head) pairs in order).

    Pairs that add to the same elements of dbias have one owner.
    """
    s, h = np.divmod(np.arange(problem.batch * problem.hk), problem.hk)
    owner = np.arange(s.size)
    if bias_wanted and problem.bias is not None:
        owner = (s if problem.bias[0] > 1 else 0 * s) * problem.hk
        owner = owner + (h if problem.bias[1] > 1 else 0)
    sorting = np.argsort(owner, kind="stable")
    order = np.stack([s, h], 1)[sorting].astype(np.int64)
    starts = np.flatnonzero(np.diff(owner[sorting], prepend=-1))
    return np.append(starts, s.size).astype(np.int64), order


def _slices(problem: Problem, owners: int) -> int:
    """Tasks for each owner: as few as keep every thread busy."""
    threads = torch.get_num_threads()
    if owners == 0 or owners % threads == 0 or owners >= 4 * threads:
        return 1
    return max(1, min(-(-threads // owners), -(-problem.nq // TILE_Q)))


def _outputs(call: Call, tensors: Tensors, wanted: Wanted, slices: int) -> dict[str, Tensor]:
    """The accumulator's gradients, a slice of each but dq (whose rows have one writer each)."""
    grads: dict[str, Tensor] = {}
    call.set(slices=slices, packed=call.problem.varlen)
    if wanted.q:
        grads["q"] = torch.empty(1, *tensors.q.shape, dtype=call.row_dtype)
        call.set(dq=call.keep(grads["q"]))
    for name, step in (("k", "slice_k"), ("v", "slice_v")):
        if getattr(wanted, name):
            dtype = call.row_dtype if slices == 1 else call.dtype  # parts are still to be added
            grads[name] = torch.empty(slices, *getattr(tensors, name).shape, dtype=dtype)
            call.set(**{f"d{name}": call.keep(grads[name]), step: grads[name][0].numel()})
    if wanted.bias:
        assert tensors.bias is not None
        shape = tensors.bias.shape
        parts = slices if shape[2] == 1 else 1  # tiles of queries meet only in a shared row
        grads["bias"] = torch.zeros(parts, *shape, dtype=call.dtype)
        call.scores("dbias", grads["bias"][0])
        p = call.problem
        alone = tuple(shape) == (p.batch, p.hq, p.nq, p.nk)
        call.set(slice_bias=grads["bias"][0].numel() if parts > 1 else 0, store_bias=alone)
    return grads


def _finished(parts: Tensor, like: Tensor) -> Tensor:
    whole = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    return whole.to(like.dtype)


def _sink_gradient(
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Tensor:
    """``dsigma_h = sum exp(sigma_h - LSE_i) (dLSE_i - Delta_i)``, LSE being lse and its rest."""
    assert tensors.sink is not None
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    e = -delta if dlse is None else dlse.to(lse.dtype) - delta
    weight = torch.exp(tensors.sink.detach()[:, None].to(lse.dtype) - lse - rest)
    weight = weight.masked_fill(lse == -torch.inf, 0.0)
    return (weight * e).sum((0, 2)).to(tensors.sink.dtype)


@kernel
def backward_worker(calls, sequences, states, groups, order, like, of, counters):
    call = calls[0]
    size = like.itemsize
    x, w = call.d_wide, call.dv_wide
    longest = (call.longest_k + TILE_K - 1) // TILE_K * TILE_K
    heads, k_panels = aligned(longest * (call.d_whole + call.dv_whole + 2 * x + w), like)
    v_panels = k_panels + size * longest * call.d_whole
    dk = v_panels + size * longest * call.dv_whole
    dv = dk + size * longest * x
    k_pairs = dv + size * longest * w
    wide = call.d_whole + call.dv_whole + 3 * TILE_K + 2 * x + w + 3
    tiles, scratch = aligned(TILE_Q * wide, like)
    factor = np.empty(TILE_K if call.softcap > 0 else 0, like.dtype)
    kept = np.empty(TILE_K + 64 if call.threshold else 0, np.uint8)
    finite = np.empty(longest // TILE_K, np.bool_)
    while True:
        t = fetch_add(counters.ctypes.data, 1)
        if t >= (len(groups) - 1) * call.slices:
            break
        group, part = t // call.slices, t % call.slices
        for pair in range(groups[group], groups[group + 1]):
            s, hk = order[pair]
            seq = sequences[s]
            pack_head(call, seq, s, hk, k_panels, v_panels, k_pairs, finite, of)
            array(dk, seq[3] * x, like)[:] = like.dtype.type(0)
            array(dv, seq[3] * w, like)[:] = like.dtype.type(0)
            count = (seq[1] + TILE_Q - 1) // TILE_Q
            for h in range(hk * call.group, (hk + 1) * call.group):
                for tile in range(part, count, call.slices):
                    state = tile_row(states, s, h, tile)
                    place = (s, h, hk, tile, part)
                    memory = (k_panels, v_panels, k_pairs, dk, dv, scratch)
                    backward_tile(call, seq, state, finite, place, memory, factor, kept, like, of)
            first = seq[2] if call.packed else s * seq[3]
            if call.dk:
                write_parts(
                    call.dk, call.slice_k, part, call, hk, first, seq, call.d, dk, x, like, of
                )
            if call.dv:
                size_v = call.dv_size
                write_parts(
                    call.dv, call.slice_v, part, call, hk, first, seq, size_v, dv, w, like, of
                )
    return heads.size + tiles.size


@njit
def pack_head(call, seq, s, h, k_panels, v_panels, k_pairs, finite, of):
    """A kv head's keys and values as panels, and which tiles of keys are finite."""
    size, row, nk = of.itemsize, row_size(of), seq[3]
    k = call.k + row * (call.k_b * s + call.k_n * seq[2] + call.k_h * h)
    v = call.v + row * (call.v_b * s + call.v_n * seq[2] + call.v_h * h)
    step_k, step_v = row * call.k_n, row * call.v_n
    for tile in range((nk + TILE_K - 1) // TILE_K):
        j0 = tile * TILE_K
        n, rows = min(TILE_K, nk - j0), k + step_k * j0
        finite[tile] = rows_are_finite(of, rows, step_k, n, call.d)
        pack_panels(of, k_panels, k, step_k, j0, nk, call.d_whole)
        pack_panels(of, v_panels, v, step_v, j0, nk, call.dv_whole)
        to = k_pairs + size * HALF_K * call.d_wide * tile
        pack_pairs(of, to, call.d_wide, rows, step_k, n, HALF_K, call.d)


@njit
def write_parts(to, step, part, call, h, first, seq, d, rows, wide, like, of):
    """A head's dK or dV: the gradient itself, or one of the parts that are added at the end."""
    if call.slices == 1:
        write_rows(to, call.hk, h, first, seq[3], d, rows, wide, like, of)
    else:
        to += like.itemsize * step * part
        write_rows(to, call.hk, h, first, seq[3], d, rows, wide, like, like)


@njit
def write_rows(to, heads, h, first, n, d, rows, wide, like, of):
    """Scratch rows, padded to whole vectors, to rows [first, ...) of a ``[rows, heads, d]``."""
    one = like.dtype.type(1)
    for j in range(n):
        row = array(rows + like.itemsize * j * wide, d, like)
        store(of, to + row_size(of) * ((first + j) * heads + h) * d, row, one)


@njit
def backward_tile(call, seq, state, finite, place, memory, factor, kept, like, of):
    """One tile of queries against all of its keys: adds to dK and dV, finishes dQ."""
    s, h, hk, tile, part = place
    k_panels, v_panels, k_pairs, dk, dv, scratch = memory
    size, row_bytes, w, x = like.itemsize, row_size(of), call.dv_wide, call.d_wide
    i0 = tile * TILE_Q
    n = min(TILE_Q, seq[1] - i0)
    queries = scratch
    douts = queries + size * TILE_Q * call.d_whole
    S = douts + size * TILE_Q * call.dv_whole
    dP = S + size * TILE_Q * TILE_K
    dS = dP + size * TILE_Q * TILE_K  # of pairs: dS once more, in pairs of keys
    dq = dS + size * TILE_Q * TILE_K
    q_pairs = dq + size * TILE_Q * x
    do_pairs = q_pairs + size * HALF_Q * x
    numbers = array(do_pairs + size * HALF_Q * w, 3 * TILE_Q, like)
    delta, shift, rest = numbers[:TILE_Q], numbers[TILE_Q : 2 * TILE_Q], numbers[2 * TILE_Q :]
    array(dq, TILE_Q * x, like)[:] = like.dtype.type(0)

    q = call.q + row_bytes * (call.q_b * s + call.q_n * (seq[0] + i0) + call.q_h * h)
    do = call.dout + row_bytes * (call.dout_b * s + call.dout_n * (seq[0] + i0) + call.dout_h * h)
    k = call.k + row_bytes * (call.k_b * s + call.k_n * seq[2] + call.k_h * hk)
    step_q, step_do = row_bytes * call.q_n, row_bytes * call.dout_n
    clean = rows_are_finite(of, q, step_q, n, call.d)
    clean &= rows_are_finite(of, do, step_do, n, call.dv_size)
    pack_columns(of, queries, q, step_q, n, call.d_whole, query_scale(call))
    pack_columns(of, douts, do, step_do, n, call.dv_whole, 1.0)
    pack_pairs(of, q_pairs, x, q, step_q, n, HALF_Q, call.d)
    pack_pairs(of, do_pairs, w, do, step_do, n, HALF_Q, call.dv_size)
    row_terms(call, seq, s, h, i0, n, do, delta, shift, like, of)

    # where nothing else is to be done to dS, it is made with the scale in it
    unit = 1.0 if call.dbias or factor.size else call.scale
    low, high = key_range(call, seq, s, i0, i0 + n)
    if call.natural:
        panels, keys = (queries, k_panels, S), (low, high, state)
        sum_far_rows(call, seq, keys, (s, h, i0, n), panels, factor, shift, rest, like, of)
    for tile_k in range(low // TILE_K, (high + TILE_K - 1) // TILE_K):
        if state.size and state[tile_k] == SKIP:
            continue
        partial = state.size > 0 and state[tile_k] != FULL
        j0, width = columns(of, low, high, tile_k)
        score_tile(of, S, queries, k_panels, j0, width, n, call.d_whole)
        score_tile(of, dP, douts, v_panels, j0, width, n, call.dv_whole)
        for r in range(n):
            p = array(S + size * r * TILE_K, width, like)
            ds = array(dP + size * r * TILE_K, width, like)
            f = factor[:width]
            rescale(of, p, query_scale(call))
            score_row(p, f, partial, call, seq, s, h, i0 + r, j0)
            keep = kept
            if call.threshold:
                keep = keep_row(kept, width, call, s, h, i0 + r, j0)
            row = (shift[r], rest[r], delta[r], call.natural)
            gradient_row(p, ds, keep, row, call.keep_scale, unit)
            if call.dbias:
                add_to_bias(call, ds[: seq[3] - j0], s, h, i0 + r, j0, part)
            if unit == 1.0:
                through_cap(ds, f, call.scale)
            fold_row(of, dS + size * r * TILE_K, ds)
        fold_rows(of, S, n, width)
        fold_rows(of, dP, n, width)
        to_v, to_k = dv + size * w * j0, dk + size * x * j0
        count, rows = min(width, high - j0), k + row_bytes * call.k_n * j0
        if paired(of):
            pairs = k_pairs + size * HALF_K * x * tile_k
            from_columns(of, width, w, min(n, HALF_Q), to_v, w, S, TILE_K, do_pairs, w, 1)
            from_columns(of, width, x, min(n, HALF_Q), to_k, x, dP, TILE_K, q_pairs, x, 1)
            from_rows(of, n, x, steps(of, count, HALF_K), dq, x, dS, pairs, x, 1)
        elif clean and finite[tile_k]:
            from_columns(of, width, w, n, to_v, w, S, TILE_K, do, call.dout_n, 1)
            from_columns(of, width, x, n, to_k, x, dP, TILE_K, q, call.q_n, 1)
            from_rows(of, n, x, count, dq, x, dP, rows, call.k_n, 1)
        else:
            sparse_product(to_v, w, width, S, 1, TILE_K, n, do, call.dout_n, w, 0, like)
            sparse_product(to_k, x, width, dP, 1, TILE_K, n, q, call.q_n, x, 0, like)
            sparse_product(dq, x, n, dP, TILE_K, 1, count, rows, call.k_n, x, 0, like)
    if call.dq:
        first = i0 + (seq[0] if call.packed else s * seq[1])
        write_rows(call.dq, call.hq, h, first, n, call.d, dq, x, like, of)


@njit
def row_terms(call, seq, s, h, i0, n, do, delta, shift, like, of):
    """Each row's ``Delta_i - dLSE_i``, and lse in the units of the scores.

    lse is 0 for a row that sees nothing: of -inf, or of a sink that is too low for base 2.
    """
    size, row_bytes = like.itemsize, row_size(of)
    lse = array(call.lse + size * (call.lse_b * s + call.lse_h * h + seq[0] + i0), n, like)
    for r in range(n):
        at = call.out_b * s + call.out_n * (seq[0] + i0 + r) + call.out_h * h
        o, g = call.out + row_bytes * at, do + row_bytes * call.dout_n * r
        delta[r] = dot(of, o, g, call.dv_size)
        if call.dlse:
            at = call.dlse_b * s + call.dlse_h * h + call.dlse_q * (seq[0] + i0 + r)
            delta[r] -= array(call.dlse + size * at, 1, like)[0]
        shift[r] = lse[r] * like.dtype.type(log_unit(call))
        if not shift[r] > -np.inf:
            shift[r] = like.dtype.type(0)


@njit
def sum_far_rows(call, seq, keys, place, panels, factor, shift, rest, like, of):
    """Return the log of the sum of ``exp(s - lse)`` of each row, which rounding took from lse.

    It is made for rows whose lse is far from 0 (``FAR``); of others it is too small to matter.
    """
    low, high, state = keys
    s, h, i0, n = place
    queries, k_panels, S = panels
    zero = like.dtype.type(0)
    far = False
    for r in range(n):
        rest[r] = zero
        far |= FAR <= abs(shift[r]) < np.inf
    if not far:
        return
    for tile_k in range(low // TILE_K, (high + TILE_K - 1) // TILE_K):
        if state.size and state[tile_k] == SKIP:
            continue
        partial = state.size > 0 and state[tile_k] != FULL
        j0, width = columns(of, low, high, tile_k)
        score_tile(of, S, queries, k_panels, j0, width, n, call.d_whole)
        for r in range(n):
            if FAR <= abs(shift[r]) < np.inf:
                row = array(S + like.itemsize * r * TILE_K, width, like)
                rescale(of, row, query_scale(call))
                score_row(row, factor[:width], partial, call, seq, s, h, i0 + r, j0)
                rest[r] += exponentials(row, shift[r], True)
    to = array(call.rest + like.itemsize * (call.lse_b * s + call.lse_h * h + seq[0] + i0), n, like)
    for r in range(n):
        if FAR <= abs(shift[r]) < np.inf:
            if call.sink:
                rest[r] += power(array(call.sink, call.hq, like)[h] - shift[r], True)
            rest[r] = math.log(rest[r]) if rest[r] > zero else zero
            to[r] = rest[r]


@njit(fastmath=STRICT, inline="always")
def weight(x, shift, rest, natural):
    """The weight of a score; ``rest`` is in base 2 and counts in natural units alone."""
    return exp2((x - shift) * number(LOG2E, x) - rest) if natural else exp2(x - shift)


@njit(fastmath=STRICT)
def gradient_row(p, ds, kept, row, keep_scale, unit):
    """On entry scores and ``dO . v``; on exit ``P R`` and ``unit P (R (dO . v) - Delta)``.

    A weight of 0 has no gradient, whatever the value it stands by.
    """
    shift, rest, delta, natural = row
    zero, unit = number(0, shift), number(unit, shift)
    rest = rest * number(LOG2E, shift)
    if kept.size:
        scale = p.dtype.type(keep_scale)
        for j in range(p.size):
            w = weight(p[j], shift, rest, natural)
            keep = scale if kept[j] else zero
            ds[j] = zero if w == zero else unit * w * (ds[j] * keep - delta)
            p[j] = w * keep
    else:
        for j in range(p.size):
            w = weight(p[j], shift, rest, natural)
            ds[j] = zero if w == zero else unit * w * (ds[j] - delta)
            p[j] = w


@njit(fastmath=STRICT)
def through_cap(ds, factor, scale):
    """dS to ``scale dX``: what both dQ and dK are made of.

    A dS of 0 stays 0: under a masked pair the factor may be that of a key that is NaN.
    """
    unit, zero = ds.dtype.type(scale), ds.dtype.type(0)
    if factor.size:
        for j in range(ds.size):
            ds[j] = zero if ds[j] == zero else ds[j] * (factor[j] * unit)
    else:
        for j in range(ds.size):
            ds[j] *= unit


@njit(fastmath=SUMS)
def add_to_bias(call, ds, s, h, i, j0, part):
    """dbias += dS, summed along whatever dimensions the bias broadcasts over."""
    at = call.dbias_b * s + call.dbias_h * h + call.dbias_q * i + call.dbias_k * j0
    address = call.dbias + ds.itemsize * (at + call.slice_bias * part)
    if call.dbias_k == 0:
        total = ds.dtype.type(0)
        for j in range(ds.size):
            total += ds[j]
        array(address, 1, ds)[0] += total
        return
    to = array(address, ds.size, ds)
    if call.store_bias:
        for j in range(ds.size):
            to[j] = ds[j]
    else:
        for j in range(ds.size):
            to[j] += ds[j]
