# ruff: noqa: RET505, SIM102, SIM108, RUF100  (code that is compiled tells its branches apart by else)
"""Scores, masks and dropout of a tile, and the weights that a backward makes of them again.

``row`` and ``col`` are query and key positions within a sequence, shaped to broadcast: a kernel
may hold its tile of scores either way up. Scores are in natural units where ``c.NATURAL``, else in
units of log 2: ``s = log2(e) (...)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .steps import at_pair, vector

# Triton lets a kernel read only globals that are constexpr
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """From the exponential; near 0, where that cancels, by an odd polynomial if need be."""
    y = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if PRECISE:
        z = x * x
        u = -5.70498872745e-3 * z + 2.06390887954e-2
        u = u * z - 5.37397155531e-2
        u = u * z + 1.33314422036e-1
        u = u * z - 3.33332819422e-1
        y = tl.where(tl.abs(x) < 0.625, u * z * x + x, y)
    return y


@triton.jit
def load_bias(t, n, c, b, head, row, col, nq, nk):
    """A tile of the bias, 0 past its end."""
    at = at_pair(t.bias, n.stride.bias, b, head, row, col, c.BIAS_ALIGN)
    if c.RAGGED_K:
        return tl.load(at, mask=(row < nq) & (col < nk), other=0.0)
    elif c.RAGGED_Q:
        return tl.load(at, mask=row < nq, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def scored(x, t, n, c, b, head, row, col, nq, nk, offset, bias=None):
    """(s, y) of ``x = q.k``: every term but the mask; y is ``t / c`` where scores are capped.

    Where ``c.FOLDED`` there are no terms, and s is x as it came, still to be scaled. The tile of
    the bias is loaded unless it is given.
    """
    y = x
    if c.FOLDED:
        s = x
    elif n.cap2 is not None:
        y = tanh(x * n.scale_cap, t.q.dtype.element_ty == tl.float32)
        s = y * n.cap2
    else:
        s = x * n.scale2
    if t.bias is not None:
        if bias is None:
            bias = load_bias(t, n, c, b, head, row, col, nq, nk)
        s += bias.to(tl.float32)
    if t.alibi is not None:
        slope = tl.load(t.alibi + head).to(tl.float32)
        if not c.NATURAL:
            slope *= LOG2E
        s -= slope * tl.abs(row + offset - col).to(tl.float32)
    return s, y


@triton.jit
def power(x, c):
    """``e^x`` of a difference of natural scores, ``2^x`` of one in units of log 2."""
    if c.NATURAL:
        return tl.exp2(x * LOG2E)
    else:
        return tl.exp2(x)


@triton.jit
def to_natural(m, c):
    """A number in the units of the scores in natural ones."""
    if c.NATURAL:
        return m
    else:
        return m * LN2


@triton.jit
def seen(t, n, b, head, row, col, nq, nk, offset):
    """Which pairs of a partial tile may attend; nk counts the keys in use."""
    ok = (row < nq) & (col < nk)
    if n.left is not None:
        ok = ok & (col >= row + offset - n.left)
    if n.right is not None:
        ok = ok & (col <= row + offset + n.right)
    if t.q_ids is not None:
        q_ids = t.q_ids + tl.cast(b, tl.int64) * n.stride.q_ids
        k_ids = t.k_ids + tl.cast(b, tl.int64) * n.stride.k_ids
        q_id = tl.load(q_ids + row, mask=row < nq, other=0)
        ok = ok & (q_id == tl.load(k_ids + col, mask=col < nk, other=0))
    if t.allowed is not None:
        at = at_pair(t.allowed, n.stride.allowed, b, head, row, col, 1)
        ok = ok & (tl.load(at, mask=(row < nq) & (col < nk), other=0) != 0)
    return ok


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32, seven rounds: the four words of each counter."""
    for _ in tl.static_range(7):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def kept(t, n, b, head, row, j0, j, BLOCK: tl.constexpr):
    """Which pairs dropout keeps (``dropout.py``); keys are ``j0 + j``, j shaped to broadcast.

    Written by element. The eight columns that share a call lie in one thread of a tensor core's
    accumulator, where the compiler sees that their counters are equal and makes one call.
    """
    seed = tl.load(t.seed)
    if BLOCK >= 64:
        lane = (j >> 3) & 7
        block = j0 // 64 + (j >> 6)
    else:
        lane = ((j0 >> 3) + (j >> 3)) & 7
        block = j0 // 64 + 0 * j
    c0 = (block * 8 + (j & 7) + row * 0).to(tl.uint32)
    c1 = (row + j * 0).to(tl.uint32)
    c2 = c0 * 0 + tl.cast(head, tl.uint32)
    c3 = c0 * 0 + tl.cast(b + n.first, tl.uint32)
    k0 = c0 * 0 + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = c0 * 0 + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, k0, k1)
    word = lane & 3
    w = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    draw = tl.where(lane < 4, w & 0xFFFF, w >> 16).to(tl.int32)
    return draw >= n.threshold


@triton.jit
def weights(
    x, lse, rest, t, n, c, b, head, row, col, nq, nk, used, offset, partial, KIND: tl.constexpr,
    bias=None,
):  # fmt: skip
    """(P, y) of ``x = q.k`` once LSE is known, in the units of the scores.

    In natural units LSE has a ``rest``, in units of log 2: what it lost when it was rounded.
    """
    s, y = scored(x, t, n, c, b, head, row, col, nq, nk, offset, bias)
    if c.FOLDED:
        p = tl.exp2(s * n.scale2 - lse)
    elif c.NATURAL:
        p = tl.exp2((s - lse) * LOG2E - rest)
    else:
        p = tl.exp2(s - lse)
    if c.EDGES and KIND != "full":
        if partial:
            p = tl.where(seen(t, n, b, head, row, col, nq, used, offset), p, 0.0)
    return p, y


@triton.jit
def only_seen(
    x, t, n, c, b, head, row, col, nq, used, offset, partial, KIND: tl.constexpr
):  # fmt: skip
    """x, with 0 for the pairs of a partial tile that are not seen."""
    if c.EDGES and KIND != "full":
        if partial:
            x = tl.where(seen(t, n, b, head, row, col, nq, used, offset), x, 0.0)
    return x


@triton.jit
def dropped(p, dp, t, n, b, head, row, j0, j, BLOCK: tl.constexpr):
    """(P R, dP) with dropout, but for the factor of what is kept on the first."""
    if t.seed is not None:
        keep = kept(t, n, b, head, row, j0, j, BLOCK)
        return tl.where(keep, p, 0.0), tl.where(keep, dp * n.keep_scale, 0.0)
    else:
        return p, dp


@triton.jit
def load_rest(t, n, c, b, head, q_start, row, nq, PACKED: tl.constexpr, RAGGED: tl.constexpr):
    """The rest of LSE (``row_sums.py``) of rows; 0 where LSE has none."""
    rest = 0.0
    if c.NATURAL:
        base = vector(t.rest, b, head, q_start, n.rows * 16, c.HQ, PACKED)
        rest = load_rows(base, row, nq, 0.0, RAGGED)
    return rest


@triton.jit
def load_rows(x, row, nq, other, RAGGED: tl.constexpr):
    if RAGGED:
        return tl.load(x + row, mask=row < nq, other=other)
    else:
        return tl.load(x + row)
