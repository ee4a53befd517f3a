"""The kinds of biases: the shape decides how a bias is loaded and its gradient computed.

tile     a number for each pair      copied tile by tile
row      one row for all queries     a number for each key (backward_lib.line_bias)
column   one column for all keys     a number for each query (backward_lib.line_bias)
"""

from __future__ import annotations

from torch import Tensor

from ...call.problem import Problem
from .backward_tiles import FLOAT32_BIAS, TILES, FusedConfig, float32_bias, sizes_of


def kind_of(p: Problem) -> str:
    """Return the kind of a bias: tile, row or column; "" for no bias or a refused one."""
    if p.bias is None:
        return ""
    if p.bias[2:] == (p.nq, p.nk) and refused_tile(p) is None:
        return "tile"
    if p.bias[3] == 1:
        return "column"
    return "row" if p.bias[2] == 1 else ""


def refused_tile(p: Problem) -> str | None:
    """Return the reason why a bias cannot be copied tile by tile, or None."""
    if p.varlen:
        return "its backward takes no bias with a number for each pair of packed sequences"
    if float32_bias(p) and sizes_of(p.d, p.dv) not in FLOAT32_BIAS:
        return (
            f"its backward takes such a bias of {p.bias_dtype} for head sizes up to "
            f"{max(map(max, FLOAT32_BIAS))}, these are {p.d} and {p.dv}"
        )
    if p.nk % 8:
        return f"its backward takes such a bias for a multiple of 8 keys, these are {p.nk}"
    return None


def gradient_by(p: Problem) -> str:
    """Return how dbias is computed, for a bias that ``refused_gradient`` accepts.

    "stored": dbias is dS, from the kernel for dq, where nothing is summed over and q has the dtype
    of the bias; "shared": by ``backward_dbias``; "row": sums over queries by the kernel for dk;
    "column": by ``prepare``, from out and lse of all keys.
    """
    kind = kind_of(p)
    assert p.bias is not None
    if kind == "tile":
        if p.bias[:2] == (p.batch, p.hq) and p.softcap == 0 and not float32_bias(p):
            return "stored"
        return "shared"
    return kind


def refused_gradient(p: Problem) -> str | None:
    """Return the reason why no kernel here computes dbias, or None."""
    kind = kind_of(p)
    if kind == "column" and p.part:
        return "it makes dbias of a column from all keys, these are a part of them"
    if kind != "row":
        return None
    assert p.bias is not None
    if p.bias[1] > 1 and p.group > 1:
        # the kernel sums over the queries of all heads of a group at once
        return (
            "it makes dbias of a row of keys only where query heads of a kv head share the row, "
            f"here {p.group} have rows of their own"
        )
    fused = [size for size, tiles in TILES.items() if isinstance(tiles[0], FusedConfig)]
    if p.softcap > 0 and sizes_of(p.d, p.dv) not in fused:
        # the kernel for dk of wide heads computes dX, not dS
        return (
            "it makes dbias of a row of keys with a softcap for head sizes up to "
            f"{max(map(max, fused))}, these are {p.d} and {p.dv}"
        )
    return None


def new_dbias(by: str, p: Problem, bias: Tensor, lse: Tensor) -> Tensor | None:
    """Return the tensor that kernels fill: dbias, or float32 sums for every sequence and head."""
    if by == "stored":
        new = bias.new_zeros if p.masked else bias.new_empty  # for tiles that no kernel visits
        return new(bias.shape)
    if by == "shared":
        return bias.new_empty(bias.shape)
    new = lse.new_zeros if p.varlen else lse.new_empty  # for positions past a sequence
    if by == "row":
        return new(p.batch, p.hk, 1, p.nk)
    return new(p.batch, p.hq, p.nq, 1) if by == "column" else None


def sum_dbias(filled: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return dbias from ``new_dbias`` filled: summed over the dimensions that share the bias."""
    if filled is None or bias is None:
        return None
    over = [n for n, size in enumerate(bias.shape) if size < filled.shape[n]]
    return (filled.sum(over, keepdim=True) if over else filled).to(bias.dtype)
