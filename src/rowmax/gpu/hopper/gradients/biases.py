"""How a bias comes in, and what makes its gradient: both by its shape.

tile     a number for each pair        tile by tile, by the copy engine
row      one row for all queries       a number a key (terms.line_bias)
column   one column for all keys       a number a query (terms.line_bias)
"""

from __future__ import annotations

from torch import Tensor

from ....call.problem import Problem
from .tiles import TILES, sizes_of


def kind_of(p: Problem) -> str:
    """How it comes in; "" where there is none, or it does not."""
    if p.bias is None:
        return ""
    if p.bias[2:] == (p.nq, p.nk) and refused_tile(p) is None:
        return "tile"
    if p.bias[3] == 1:
        return "column"
    return "row" if p.bias[2] == 1 else ""


def refused_tile(p: Problem) -> str | None:
    """Why not tile by tile."""
    if p.varlen:
        return "its backward takes no bias with a number for each pair of packed sequences"
    if p.bias_dtype != p.dtype:
        return f"its backward takes such a bias of {p.dtype}, this one is {p.bias_dtype}"
    if p.nk % 8:
        return f"its backward takes such a bias for a multiple of 8 keys, these are {p.nk}"
    return None


def gradient_by(p: Problem) -> str:
    """What makes it: "stored" by the launch for dq (it is dS, if nothing is summed over); a launch
    of its own, "shared"; "row", sums over queries by the launch for dk; or "column", by the one
    before. Not for one that ``refused_gradient`` refuses."""
    kind = kind_of(p)
    assert p.bias is not None
    if kind == "tile":
        if p.bias[:2] == (p.batch, p.hq) and p.softcap == 0:
            return "stored"
        return "shared"
    return kind


def refused_gradient(p: Problem) -> str | None:
    """Why the gradient of a bias that comes in is not made here, or None."""
    if kind_of(p) != "row":
        return None
    assert p.bias is not None
    if p.bias[1] > 1 and p.group > 1:
        # the sums over queries are of all heads of a group at once
        return (
            "it makes dbias of a row of keys only where query heads of a kv head share the row, "
            f"here {p.group} have rows of their own"
        )
    if p.softcap > 0 and sizes_of(p.d, p.dv) not in TILES:
        # the launch for dk of wide heads makes dX, and not dS
        return (
            "it makes dbias of a row of keys with a softcap for head sizes up to "
            f"{max(map(max, TILES))}, these are {p.d} and {p.dv}"
        )
    return None


def without_repeats(p: Problem, bias: Tensor) -> tuple[Problem, Tensor]:
    """The bias with size 1 where its stride is 0, for a call that wants no gradient of it."""
    for n, (size, stride) in enumerate(zip(bias.shape, bias.stride(), strict=True)):
        if size > 1 and stride == 0:
            bias = bias.narrow(n, 0, 1)
    return p._replace(bias=tuple(bias.shape)), bias


def room_for(by: str, p: Problem, bias: Tensor, lse: Tensor) -> Tensor | None:
    """What the launches fill: dbias, or sums in float32 of every sequence and head."""
    if by == "stored":
        new = bias.new_zeros if p.masked else bias.new_empty  # tiles that none visits
        return new(bias.shape)
    if by == "shared":
        return bias.new_empty(bias.shape)
    new = lse.new_zeros if p.varlen else lse.new_empty  # what lies past a sequence
    if by == "row":
        return new(p.batch, p.hk, 1, p.nk)
    return new(p.batch, p.hq, p.nq, 1) if by == "column" else None


def made_of(room: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """dbias of what was filled: summed over what shares the bias."""
    if room is None or bias is None:
        return None
    over = [n for n, size in enumerate(bias.shape) if size < room.shape[n]]
    return (room.sum(over, keepdim=True) if over else room).to(bias.dtype)
