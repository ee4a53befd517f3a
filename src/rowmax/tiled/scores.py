"""The scores of one tile.

Scores are in base 2, and log2(e) is in the factor of q: a weight is an ``exp2``. Under
``Problem.natural`` they are in natural units, and a weight is an ``exp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.inputs import Tangents, Tensors, parameters_of, part_of
from ..call.problem import Problem
from ..rules import dropout, mask
from ..rules.over_tensors import score, score_tangent
from ..rules.score import ScoreTerms
from ..rules.softmax import LOG2E
from .strips import Strip


def factor(problem: Problem) -> float:
    """Return the factor of q before its product with k."""
    if problem.softcap > 0:
        return problem.scale / problem.softcap
    return problem.scale * log_unit(problem)


def scale_of_factor(problem: Problem) -> float:
    """Return ``scale / factor``."""
    return problem.softcap if problem.softcap > 0 else 1.0 / log_unit(problem)


def log_unit(problem: Problem) -> float:
    """Return the factor from natural units to those of the scores."""
    return 1.0 if problem.natural else LOG2E


def power_(problem: Problem, x: Tensor) -> Tensor:
    """Return ``exp(x)``, in place, of x in the units of the scores."""
    return x.exp_() if problem.natural else x.exp2_()


def scores(strip: Strip, cols: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scores before the mask, y of ``rules.score``), ``[heads, group * rows, cols]``.

    q carries ``factor``.
    """
    problem, x = strip.problem, torch.bmm(q, k.transpose(1, 2))
    bias = None
    if strip.tensors.bias is not None:
        bias = _heads_split(bias_tile(strip.tensors.bias, strip, cols), problem)
    unit = log_unit(problem)
    terms = placed_terms(strip, cols, x, unit)._replace(bias=bias)
    if problem.softcap > 0:
        terms = terms._replace(inner=1, cap=problem.softcap * unit)
    S, y = score(strip.unfolded(x), terms)
    return S.view(x.shape), y.view(x.shape)


def seen_scores(
    strip: Strip, cols: slice, full: bool, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (scores, y, apart); scores are -inf where a pair may not attend, and nowhere if full.

    ``apart`` is True in these pairs where they must be excluded by index; else None.
    """
    S, y = scores(strip, cols, q, k)
    if full:
        return S, y, None
    unseen = hidden(strip, cols)
    if strip.exact:
        apart = strip.folded(unseen)
        return S.masked_fill_(apart, -torch.inf), y, apart
    # 1 - 1 / seen is 0 or -inf. On a CPU this is vector code; filling by a mask is not.
    strip.unfolded(S).add_((~unseen).to(S.dtype).reciprocal_().neg_().add_(1.0))
    return S, y, None


def head_terms(strip: Strip, unit: float = 1.0) -> ScoreTerms:
    """Return the parameters of heads times ``unit``; they broadcast against a tile unfolded."""
    return ScoreTerms(**_by_parameter(strip, strip.tensors.heads, unit))


def placed_terms(strip: Strip, cols: slice, like: Tensor, unit: float = 1.0) -> ScoreTerms:
    """Return ``head_terms``, with the distances of a tile if any term reads them."""
    terms = head_terms(strip, unit)
    if not strip.problem.distance:
        return terms
    return terms._replace(distance=_distances(strip, cols, like))


def _by_parameter(strip: Strip, heads: Tensor | None, unit: float = 1.0) -> dict[str, Tensor]:
    """Return the strip's part of ``Tensors.heads``, or of its tangent, by parameter."""
    if heads is None:
        return {}
    rows = heads.detach().unflatten(1, (-1, strip.problem.group))
    rows = rows[:, strip.heads, :, None, None] * unit
    return dict(zip(parameters_of(strip.problem.heads), rows, strict=True))


def natural_terms(strip: Strip, cols: slice, like: Tensor) -> ScoreTerms:
    """Return the terms of a tile in natural units, for products that carry ``factor``."""
    problem = strip.problem
    terms = placed_terms(strip, cols, like)._replace(scale=scale_of_factor(problem))
    return terms._replace(inner=1, cap=problem.softcap) if problem.softcap > 0 else terms


def product_tangent(q: Tensor, tq: Tensor | None, k: Tensor, tk: Tensor | None) -> Tensor:
    """Return the tangent of ``q k^T``; q and tq carry ``factor``."""
    if tq is None and tk is None:
        return q.new_zeros(q.shape[0], q.shape[1], k.shape[1])
    tx = None if tq is None else torch.bmm(tq, k.transpose(1, 2))
    if tk is None:
        assert tx is not None
        return tx
    t = tk.transpose(1, 2)
    return torch.bmm(q, t) if tx is None else tx.baddbmm_(q, t)


def tangents_of_scores(
    strip: Strip,
    tangents: Tangents,
    cols: slice,
    products: tuple[Tensor, Tensor],
    terms: ScoreTerms,
) -> Tensor:
    """Return s' of a tile, natural, ``[heads, group * rows, cols]``.

    ``products`` is (tx of ``product_tangent``, y of ``scores``).
    """
    problem, bias = strip.problem, None
    if tangents.bias is not None:
        tile = bias_tile(tangents.bias.detach(), strip, cols)
        bias = _heads_split(tile, problem).to(problem.accumulator)
    along = ScoreTerms(bias=bias, **_by_parameter(strip, tangents.heads))
    tx, y = map(strip.unfolded, products)
    return score_tangent(tx, y, terms, along).reshape(products[0].shape)


def _distances(strip: Strip, cols: slice, like: Tensor) -> Tensor:
    """Return ``|i + offset - j|`` of a tile, to broadcast against a tile unfolded."""
    problem = strip.problem
    i = torch.arange(strip.rows.start, strip.rows.stop, device=like.device)[:, None]
    j = torch.arange(cols.start, cols.stop, device=like.device)[None, :]
    shift = 0 if problem.positions is None else problem.positions.shift
    distance = (i[None, None] + (strip.offset + shift) - j).to(like.dtype).abs_()
    return _heads_split(distance, problem)


def hidden(strip: Strip, cols: slice) -> Tensor:
    """Return True where a pair of a tile may not attend; it broadcasts against a tile unfolded.

    It is the mask of a smaller problem whose first row is the first row of the tile.
    """
    problem, tensors = strip.problem, strip.tensors
    part = problem._replace(nq=strip.rows.stop - strip.rows.start, nk=cols.stop - cols.start)
    start = strip.rows.start + strip.offset - cols.start
    ranges = {"b": strip.batch, "h": strip.q_heads, "i": strip.rows, "j": cols}
    masks = {n: part_of(n, getattr(tensors, n), **ranges) for n in ("q_ids", "k_ids", "allowed")}
    for name in ("lengths", "prefix"):  # counted from the first column
        t = getattr(tensors, name)
        masks[name] = None if t is None else t[strip.batch] - cols.start
    return _heads_split(~mask.dense(part, tensors._replace(**masks), start), problem)


def kept(strip: Strip, cols: slice) -> Tensor | None:
    """Return R of the definition on the tile, ``[heads, group * rows, cols]``; None without it."""
    problem = strip.problem
    if not problem.dropout_threshold:
        return None
    slices = (strip.batch, strip.q_heads, strip.rows, cols)
    R = dropout.tile(problem, strip.tensors, *(range(x.start, x.stop) for x in slices))
    return R.view(-1, problem.group * R.shape[2], R.shape[3])


def bias_tile(t: Tensor, strip: Strip, cols: slice) -> Tensor:
    """Return the tile's view of a tensor ``[B|1, Hq|1, Nq|1, Nk|1]``; its axes of 1 stay."""
    part = part_of("bias", t, b=strip.batch, h=strip.q_heads, i=strip.rows, j=cols)
    assert part is not None
    return part


def product(A: Tensor, X: Tensor, unseen: Tensor | None) -> Tensor:
    """Return ``A @ X`` without the pairs (row of A, row of X) where ``unseen`` is True.

    A is 0 there, which suffices while X is finite. Rows of X that hold inf or NaN are added one by
    one: they are rare, and 0 times NaN is NaN.
    """
    if unseen is None:
        return torch.bmm(A, X)
    ill = ~torch.isfinite(X).all(-1)  # [heads, rows of X]
    total = torch.bmm(A, X.masked_fill(ill[..., None], 0.0))
    for row in ill.any(0).nonzero().flatten().tolist():
        term = A[:, :, row, None] * X[:, None, row]
        total += term.masked_fill((unseen[:, :, row] | ~ill[:, row, None])[..., None], 0.0)
    return total


def sink_of(strip: Strip, sink: Tensor, like: Tensor) -> Tensor:
    """Return the sink of each row, ``[heads, group * rows, 1]``."""
    group = strip.problem.group
    sink = sink.detach().unflatten(0, (-1, group))[strip.heads, :, None, None]
    return strip.folded(sink.to(like.dtype))


def tame(problem: Problem, tensors: Tensors, *more: Tensor | None, lse: Any = None) -> bool:
    """Return True if all numbers are finite and no product can overflow (by Cauchy and Schwarz).

    Then 0 times any number is 0, and arithmetic excludes masked keys. Otherwise they are excluded
    pair by pair, which is exact and slow. A bias or lse may hold -inf. ``more`` has to be as q is.
    """
    bounded = [t for t in (tensors.q, tensors.k, tensors.v, *more) if t is not None]
    added = [t for t in (tensors.bias, tensors.heads, lse) if t is not None]
    dtype = problem.accumulator
    norms = [torch.linalg.vector_norm(t, dtype=dtype) for t in bounded]
    sums = [t.sum(dtype=dtype) for t in added]
    below = [torch.stack(norms).amax() < 1e15, *(x < torch.inf for x in sums)]
    return factor(problem) < 1e6 and bool(torch.stack(below).all())


def _heads_split(t: Tensor, problem: Problem) -> Tensor:
    """View ``[b, heads, rows, cols]`` as ``[b, kv heads, group, rows, cols]``; a 1 stays 1, 1."""
    return t.unflatten(1, (-1, problem.group)) if t.shape[1] > 1 else t.unsqueeze(1)
