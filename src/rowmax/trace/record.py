"""The recurrence of a call, tile by tile, with every number that it passes through.

Three passes, by the rules of the backends and over the tiles that they visit:

- forward: a tile of queries is resident, tiles of keys pass; m, l and O of each row stay;
- dq: the same order; P is recomputed from LSE, and dQ of each row is summed;
- dkdv: a tile of keys is resident, tiles of queries pass; dK and dV of each key are summed.

Skipped tiles are no steps. Scores are in natural units. Tiles of the inner loop come in the order
of their numbers; kernels that read a list visit the full ones first. Kernels compute the tiles of
the outer loop in parallel; here they follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..call.inputs import Wanted
from ..reference import dense
from ..rules import mask as mask_rules
from ..rules import row_stats
from ..rules.over_tensors import moved, product_gradient, score, score_gradient
from ..rules.score import ScoreTerms
from .setting import Call, Tile

#: bytes of a number in the counts of what is read: those of float32
NUMBER = 4


class Step(NamedTuple):
    """One step of a pass and the numbers after it.

    ``kind`` is "delta" (all rows), "tile", or "end" of a resident tile.
    """

    kind: str
    i: int | None  # the tile of queries; None where keys are resident and end
    j: int | None
    read: int  # bytes read so far
    done: tuple[int, int]  # full and partial tiles so far
    values: dict[str, Tensor]


class Pass(NamedTuple):
    """The steps of a pass, and the bytes that it would read if no tile was skipped."""

    steps: list[Step]
    unskipped: int


class Dense(NamedTuple):
    """Results of the dense definition and its autograd, which share no code with the rules."""

    P: Tensor  # [Nq, Nk]
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class _Inputs(NamedTuple):
    """The matrices of a call, ``[N, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class _Count:
    """Bytes read and tiles visited so far."""

    def __init__(self) -> None:
        self.read, self.full, self.partial = 0, 0, 0

    def load(self, *tensors: Tensor) -> None:
        self.read += NUMBER * sum(t.numel() for t in tensors)

    def step(self, tile: Tile, **values: Tensor) -> Step:
        self.full += tile.state == mask_rules.FULL
        self.partial += tile.state == mask_rules.PARTIAL
        return Step("tile", tile.i, tile.j, self.read, (self.full, self.partial), values)

    def end(self, i: int | None, j: int | None, **values: Tensor) -> Step:
        return Step("end", i, j, self.read, (self.full, self.partial), values)


def record(call: Call) -> dict[str, Pass]:
    """Return the passes of a call: "forward", "dq" and "dkdv"."""
    steps = list(_forward(call))
    ends = [step.values for step in steps if step.kind == "end"]
    out, lse = (torch.cat([end[name] for end in ends]) for name in ("out", "lse"))
    found = {"forward": Pass(steps, _unskipped(call, "forward"))}
    delta = row_stats.delta(out[None, :, None], call.dout, lse[None, None], None)[0, 0]
    shift = row_stats.score_lse(lse, natural=True)
    for name, steps_of in (("dq", _dq), ("dkdv", _dkdv)):
        steps = list(steps_of(call, out, shift, delta))
        found[name] = Pass(steps, _unskipped(call, name))
    return found


def defined(call: Call) -> Dense:
    """Return the results of the definition."""
    problem, tensors = call.problem, call.tensors
    out, lse = dense.attention(problem, tensors)
    each = torch.eye(problem.nk, dtype=torch.float64)[None, :, None]
    P, _ = dense.attention(problem._replace(dv=problem.nk), tensors._replace(v=each))
    wanted = Wanted(q=True, k=True, v=True, bias=False, sink=False)
    grads = reference.backward(problem, tensors, out, lse, call.dout, None, wanted)
    assert grads.q is not None
    assert grads.k is not None
    assert grads.v is not None
    rows = (t.detach()[0, :, 0] for t in (P, out, lse.transpose(1, 2), grads.q, grads.k, grads.v))
    return Dense(*rows)


def _forward(call: Call) -> Iterator[Step]:
    """Yield the steps of ``rules/softmax.py``: out and lse of each tile of queries."""
    q, k, v, _ = _inputs(call)
    count = _Count()
    for i, rows in enumerate(call.query_tiles):
        count.load(q[rows])
        m = q.new_full((len(q[rows]), 1), -torch.inf)
        l, O = torch.zeros_like(m), torch.zeros_like(q[rows])
        passed: list[Tensor] = []
        for tile in call.tiles_of_queries(i):
            count.load(k[tile.cols], v[tile.cols])
            S, _ = _scores(call, tile)
            passed.append(S)
            peak = S.amax(1, keepdim=True)
            m_new, base = moved(m, peak)
            P, alpha = torch.exp(S - base), torch.exp(m - base)
            added = P.sum(1, keepdim=True)
            l = alpha * l + added
            part = P @ v[tile.cols]
            O = alpha * O + part
            m = m_new
            divisor = l.masked_fill(l == 0, 1.0)
            yield count.step(
                tile, peak=peak[:, 0], m=m[:, 0], alpha=alpha[:, 0], P=P, added=added[:, 0],
                l=l[:, 0], part=part, O=O, now=O / divisor,
                running=torch.exp(torch.cat(passed, 1) - base) / divisor,
            )  # fmt: skip
        empty = m == -torch.inf
        divisor = l.masked_fill(empty, 1.0)
        lse = (m + torch.log(divisor)).masked_fill(empty, -torch.inf)
        yield count.end(i, None, out=O / divisor, lse=lse[:, 0])


def _dq(call: Call, out: Tensor, lse: Tensor, delta: Tensor) -> Iterator[Step]:
    """Yield the steps of dQ; lse is +inf for a row without weights."""
    q, k, v, do = _inputs(call)
    count = _Count()
    yield _delta_step(count, out, do, delta)
    for i, rows in enumerate(call.query_tiles):
        count.load(q[rows], do[rows], lse[rows], delta[rows])
        total = torch.zeros_like(q[rows])
        for tile in call.tiles_of_queries(i):
            count.load(k[tile.cols], v[tile.cols])
            weights = _weights(call, tile, lse, delta)
            part = weights["dX"] @ k[tile.cols]
            total = total + part
            yield count.step(tile, **weights, part=part, sum=total, now=call.problem.scale * total)
        yield count.end(i, None, dq=call.problem.scale * total)


def _dkdv(call: Call, out: Tensor, lse: Tensor, delta: Tensor) -> Iterator[Step]:
    """Yield the steps of dK and dV; lse is +inf for a row without weights."""
    q, k, v, do = _inputs(call)
    scale = call.problem.scale
    count = _Count()
    yield _delta_step(count, out, do, delta)
    for j, cols in enumerate(call.key_tiles):
        count.load(k[cols], v[cols])
        dK, dV = torch.zeros_like(k[cols]), torch.zeros_like(v[cols])
        for tile in call.tiles_of_keys(j):
            count.load(q[tile.rows], do[tile.rows], lse[tile.rows], delta[tile.rows])
            weights = _weights(call, tile, lse, delta)
            part_v, part_k = weights["P"].T @ do[tile.rows], weights["dX"].T @ q[tile.rows]
            dV, dK = dV + part_v, dK + part_k
            yield count.step(
                tile, **weights, part_v=part_v, dv=dV, part=part_k, sum=dK, now=scale * dK
            )
        yield count.end(None, j, dk=scale * dK, dv=dV)


def _delta_step(count: _Count, out: Tensor, do: Tensor, delta: Tensor) -> Step:
    """Return the first step of a backward: Delta of all rows."""
    count.load(out, do)
    return Step("delta", None, None, count.read, (0, 0), {"delta": delta, "out": out})


def _inputs(call: Call) -> _Inputs:
    """Return q, k, v and dout without their batch and head."""
    q, k, v = call.tensors[:3]
    return _Inputs(*(t[0, :, 0] for t in (q, k, v, call.dout)))


def _scores(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return (S, y) of ``rules/score.py``; S is -inf where a pair may not attend."""
    q, k, *_ = _inputs(call)
    S, y = score(q[tile.rows] @ k[tile.cols].T, _terms(call))
    if tile.state != mask_rules.FULL:
        S = S.masked_fill(~call.seen[tile.rows, tile.cols], -torch.inf)
    return S, y


def _terms(call: Call) -> ScoreTerms:
    """Return the terms of the score, in natural units."""
    scale, cap = call.problem.scale, call.problem.softcap
    return ScoreTerms(inner=scale / cap, cap=cap) if cap > 0 else ScoreTerms(scale=scale)


def _weights(call: Call, tile: Tile, lse: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """Return P, recomputed from lse, dP, dS and dX of a tile ``[rows, cols]``."""
    *_, v, do = _inputs(call)
    S, y = _scores(call, tile)
    P = torch.exp(S - lse[tile.rows, None])
    dP = do[tile.rows] @ v[tile.cols].T
    dS = score_gradient(P, dP.clone(), delta[tile.rows, None])
    return {"P": P, "dP": dP, "dS": dS, "dX": product_gradient(dS, y, _terms(call))}


def _unskipped(call: Call, name: str) -> int:
    """Return the bytes that a pass would read if it visited every tile."""
    problem = call.problem
    queries, keys = problem.nq * problem.d, problem.nk * 2 * problem.d
    if name == "forward":
        return NUMBER * (queries + len(call.query_tiles) * keys)
    rows = 2 * queries + 2 * problem.nq  # q, do, lse and delta
    passes = rows + len(call.query_tiles) * keys
    if name == "dkdv":
        passes = keys + len(call.key_tiles) * rows
    return NUMBER * (2 * queries + passes)
