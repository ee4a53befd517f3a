"""The recurrence, in plain loops, and the merge of finished parts.

Softmax over a row splits over blocks of it. Keep the running maximum m and the running sum l of
``exp(x - m)``. When m becomes m', multiply the sums under m by ``exp(m - m')``: l and the average
O are linear in the exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import bad, check_device, wrong_type


def online_softmax(x: Sequence[float]) -> list[float]:
    """Return the softmax of a row in two passes instead of three (Milakov and Gimelshein).

    >>> [round(p, 3) for p in online_softmax([3.0, 2.0, 5.0, 1.0])]
    [0.112, 0.041, 0.831, 0.015]
    """
    m, l = -math.inf, 0.0
    for x_j in x:
        m_new = max(m, x_j)
        if m_new == -math.inf:
            continue  # empty so far
        l = l * math.exp(m - m_new) + math.exp(x_j - m_new)
        m = m_new
    return [math.exp(x_j - m) / l if l else 0.0 for x_j in x]


def block_softmax(x: Tensor, block: int) -> Tensor:
    """Return the row softmax of ``[rows, N]`` by blocks, renormalised as m and z change.

    This is the tiled softmax of Composable Kernel's mathematical basis: when a block arrives,
    the blocks before it are rescaled by ``z exp(m - m') / z'``.
    """
    y = torch.zeros_like(x)
    m = x.new_full((x.shape[0], 1), -torch.inf)
    z = x.new_zeros(x.shape[0], 1)
    for j in range(0, x.shape[1], block):
        x_j = x[:, j : j + block]
        m_j = x_j.amax(1, keepdim=True)
        m_new = torch.maximum(m, m_j)
        finite = m_new.masked_fill(m_new == -torch.inf, 0.0)  # rows that have seen nothing so far
        p = torch.exp(x_j - finite)
        delta = torch.exp(m - finite)
        z_new = delta * z + p.sum(1, keepdim=True)
        divisor = z_new.masked_fill(z_new == 0, 1.0)
        y[:, :j] *= delta * z / divisor
        y[:, j : j + block] = p / divisor
        m, z = m_new, z_new
    return y


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one head by tiles, of q ``[Nq, D]``, k ``[Nk, D]``, v ``[Nk, Dv]``.

    The outer loop is parallel over tiles of queries, the inner one runs over tiles of keys.
    """
    out = q.new_zeros(q.shape[0], v.shape[1])
    lse = q.new_zeros(q.shape[0])
    for i in range(0, q.shape[0], block):
        q_i = q[i : i + block]
        m = q.new_full((q_i.shape[0],), -torch.inf)
        l = q.new_zeros(q_i.shape[0])
        O = q.new_zeros(q_i.shape[0], v.shape[1])
        for j in range(0, k.shape[0], block):
            S = scale * q_i @ k[j : j + block].T
            m_new = torch.maximum(m, S.amax(1))
            P = torch.exp(S - m_new[:, None])
            delta = torch.exp(m - m_new)
            l = delta * l + P.sum(1)
            O = delta[:, None] * O + P @ v[j : j + block]
            m = m_new
        out[i : i + block] = O / l[:, None]
        lse[i : i + block] = m + torch.log(l)
    return out, lse


def merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over all keys from its (out, lse) over disjoint parts of them.

    ``lse = logaddexp(lse_a, lse_b)``, ``out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b``,
    associative and commutative. Split caches, shared prefixes and rings of devices use it. It is
    differentiable in every part. A row that sees nothing in a part (lse -inf) adds nothing.

    Args:
        parts: pairs of out ``[B, Nq, Hq, Dv]`` and lse ``[B, Hq, Nq]`` (packed: without B),
            as ``attention(..., return_lse=True)`` gives them. At least one.

    Returns:
        (out, lse) in the dtypes of the first part.

    Raises:
        TypeError, ValueError: no parts, or parts whose shapes, dtypes or devices differ.

    >>> import torch, rowmax
    >>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    >>> a = rowmax.attention(q, k[:, :3], v[:, :3], return_lse=True)
    >>> b = rowmax.attention(q, k[:, 3:], v[:, 3:], return_lse=True)
    >>> torch.allclose(rowmax.merge(a, b)[0], rowmax.attention(q, k, v), atol=1e-5)
    True
    """
    _check_parts(parts)
    outs, lses = [out for out, _ in parts], torch.stack([lse for _, lse in parts])
    m = lses.detach().amax(0)
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = torch.exp(lses - m)  # the weight of each part, before division by their sum
    l = weights.sum(0)
    empty = l == 0
    l = l.masked_fill(empty, 1.0)
    lse = (m + torch.log(l)).masked_fill(empty, -torch.inf)
    shares = (weights / l).transpose(-1, -2).unsqueeze(-1)  # [parts, ..., Nq, Hq, 1]
    out = sum(share * out.to(share.dtype) for share, out in zip(shares, outs, strict=True))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), lse


def _check_parts(parts: tuple[tuple[Tensor, Tensor], ...]) -> None:
    if not parts:
        raise bad("parts", "none", "at least one (out, lse)")
    for n, part in enumerate(parts):
        if not (
            isinstance(part, (tuple, list))
            and len(part) == 2
            and all(isinstance(t, Tensor) for t in part)
        ):
            want = "a pair of tensors (out, lse)"
            if isinstance(part, (tuple, list)) and any(isinstance(p, (tuple, list)) for p in part):
                want += "; a list of pairs goes in as merge(*parts)"
            raise wrong_type(f"parts[{n}]", type(part).__name__, want)
        out, lse = part
        rows = (*out.shape[:-3], out.shape[-2], out.shape[-3]) if out.dim() in (3, 4) else None
        if rows is None or lse.shape != rows:
            got = f"out {list(out.shape)} and lse {list(lse.shape)}"
            raise bad(f"parts[{n}]", got, "out [B, Nq, Hq, Dv] and lse [B, Hq, Nq]")
        for name, t, first in (("out", out, parts[0][0]), ("lse", lse, parts[0][1])):
            check_device(f"parts[{n}] {name}", t, first)
            if t.shape != first.shape or t.dtype != first.dtype:
                got, want = f"{t.dtype} {list(t.shape)}", f"{first.dtype} {list(first.shape)}"
                raise bad(f"parts[{n}] {name}", got, f"{want}, as in parts[0]")
