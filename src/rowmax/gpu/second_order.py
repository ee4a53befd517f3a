# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""Shared parts of the kernels of tangents and of their backward: scores, weights, gradients.

Names are those of ``rules/tangent.py``. Tangents of scores and gradients are natural, whatever the
units of the scores. A tangent or cotangent that is None is 0, and no product of it is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..rules.score import ScoreTerms
from . import lib, rules
from .rules import LN2


class At(NamedTuple):
    """The place of a tile of scores."""

    row: Any
    col: Any
    j0: Any  # keys are j0 + j, as for ``lib.kept``
    j: Any
    partial: Any


class Weights(NamedTuple):
    """The weights of a tile."""

    p: Any
    pr: Any  # P R without the factor ``keep_scale``
    d: Any  # s' - LSE'
    y: Any  # tanh of ``rules.score``, or q.k


@triton.jit
def two_products(a, b, c, d, cfg):
    """Return ``a @ b^T + c @ d^T`` of tiles; a product is 0 if a or d is None."""
    if a is not None:
        first = tl.dot(a, tl.trans(b), input_precision=cfg.PRECISION)
        if d is not None:
            return tl.dot(c, tl.trans(d), first, input_precision=cfg.PRECISION)
        else:
            return first
    elif d is not None:
        return tl.dot(c, tl.trans(d), input_precision=cfg.PRECISION)
    else:
        return tl.zeros([c.shape[0], b.shape[0]], tl.float32)


@triton.jit
def two_times_row(a, b, c, d):
    """Return ``a @ b^T + c @ d^T`` of rows b and d as a column; None makes a product 0."""
    if a is not None:
        first = lib.times_row(a, b)
        if d is not None:
            return first + lib.times_row(c, d)
        else:
            return first
    elif d is not None:
        return lib.times_row(c, d)
    else:
        return tl.zeros([c.shape[0], 1], tl.float32)


@triton.jit
def score_tangent(tx, y, ptr, num, cfg, place, row, col):
    """Return s' of a tile from the tangent of ``q.k`` and y of ``rules.score``."""
    bias = None
    distance = None
    if ptr.tbias is not None:
        at = lib.pair_pointers(ptr.tbias, num.tbias, place, row, col)
        bias = tl.load(at, mask=(row < place.nq) & (col < place.nk), other=0.0).to(tl.float32)
    if cfg.DISTANCE and ptr.theads is not None:
        distance = lib.distances(num, place, row, col)
    at = ptr.theads
    along = [
        (tl.load(at + n * cfg.HQ + place.head) if at is not None and n >= 0 else None)
        for n in cfg.HEAD_ROWS
    ]
    none = [None for n in cfg.HEAD_ROWS]
    cap = None
    if num.cap2 is not None:
        cap = num.cap2
        if not cfg.NATURAL:
            cap = cap * LN2
    terms = ScoreTerms(num.scale, num.scale_cap, cap, None, distance, *none)
    return rules.score_tangent(tx, y, terms, ScoreTerms(None, None, None, bias, None, *along))


@triton.jit
def product_gradients(ds, dts, tx, y, num, cfg):
    """Return (dX, dX') of a tile, without scale; tx is the tangent of its products."""
    none = [None for n in cfg.HEAD_ROWS]
    terms = ScoreTerms(None, num.scale_cap, None, None, None, *none)
    dx = rules.product_curvature(ds, dts, tx, y, terms)
    return dx, rules.product_gradient(dts, y, terms)


@triton.jit
def load_numbers(rows, ptr, num, cfg, place, RAGGED: tl.constexpr):
    """Return (lse2, rest, tlse) of the rows."""
    lse2 = lib.load_vector(ptr.lse2, rows, num, cfg, place, float("inf"), RAGGED)
    rest = lib.load_rest(ptr, num, cfg, place, rows, RAGGED)
    tlse = lib.vector(ptr.tlse, place.b, place.head, place.q_start, num.total_q, cfg.HQ, cfg.PACKED)
    return lse2, rest, lib.load_rows(tlse, rows, place.nq, 0.0, RAGGED)


@triton.jit
def weights(
    x, tx, numbers, at, ptr, num, cfg, place, KIND: tl.constexpr, BLOCK: tl.constexpr, bias=None
):  # fmt: skip
    """Return the Weights of ``x = q.k`` with the tangent tx; BLOCK is the number of its keys.

    ``numbers`` is (lse2, rest, tlse) in shapes that broadcast over the tile.
    """
    lse2, rest, tlse = numbers
    p, y = lib.weights(x, lse2, rest, ptr, num, cfg, place, at.row, at.col, at.partial, KIND, bias)
    d = score_tangent(tx, y, ptr, num, cfg, place, at.row, at.col) - tlse
    pr = p
    if ptr.seed is not None:
        pr = tl.where(lib.kept(ptr, num, place, at.row, at.j0, at.j, BLOCK), p, 0.0)
    return Weights(p, pr, d, y)


@triton.jit
def score_gradients(w, beta, gamma, b, c, ptr, num):
    """Return (dS, dS') of a tile; beta and gamma lack dropout."""
    if ptr.seed is not None:
        keep = w.pr != 0.0  # a pair of weight 0 has the gradient 0 either way
        beta = tl.where(keep, beta * num.keep_scale, 0.0)
        gamma = tl.where(keep, gamma * num.keep_scale, 0.0)
    return rules.score_gradients(w.p, beta, gamma, w.d, b, c)
