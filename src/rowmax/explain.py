"""Explain a call without computing it: backends, tiles, work and memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .attention import CallOptions, arguments, attention
from .call import dispatch as backends
from .call.dispatch import Job
from .call.inputs import Tensors
from .call.normalize import keys_of, normalized, without_documents
from .call.problem import Problem, each_sequence, problem_of
from .errors import check_flag, refuse_unexpected, wrong_type
from .rules.mask import FULL, PARTIAL, SKIP, tile_states

if TYPE_CHECKING:
    from typing_extensions import Unpack

TILE = 128


class Choice(NamedTuple):
    """The backends that compute the results of a call, and why the others compute none.

    Attributes:
        jobs: each has a ``backend`` and the names of its ``results``. Empty if the named backend
            refuses: then the call would raise.
        others: the name of each other backend, with the reason why it computes nothing.
        notes: sentences of each job's backend, such as the tile or the assembler.
    """

    jobs: tuple[Job, ...]
    others: Mapping[str, str]
    notes: tuple[tuple[str, ...], ...] = ()

    @property
    def backend(self) -> str | None:
        """The backend of the first job, of dq in a backward; None if the call would raise."""
        return self.jobs[0].backend if self.jobs else None


class Tiles(NamedTuple):
    """Tiles of 128 by 128 pairs, over all sequences and query heads.

    Attributes:
        skipped: tiles of which no pair may attend; they are not computed.
        partial: tiles of which some pairs may attend.
        full: tiles of which every pair may attend; they need no mask.
        pairs: the pairs in partial and full tiles.
    """

    skipped: int
    partial: int
    full: int
    pairs: int


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``; ``str`` of it is a text to read.

    Attributes:
        problem: shapes, dtypes and features, as backends see them.
        forward: the jobs with their backends, and why other backends have none.
        backward: those of the backward.
        tangent: those of forward mode.
        tangent_backward: those of the backward of forward mode: with ``tangent`` they compute every
            second derivative.
        tiles: skipped, partial and full tiles of 128 by 128, and the pairs in visited tiles.
        forward_flops: operations of the matrix products in visited tiles.
        backward_flops: those of the backward.
        output_bytes: the size of out and lse.
        dense_bytes: the size of the whole score matrix in q's dtype, which is never allocated.
    """

    problem: Problem
    forward: Choice
    backward: Choice
    tangent: Choice
    tangent_backward: Choice
    tiles: Tiles
    forward_flops: int
    backward_flops: int
    output_bytes: int
    dense_bytes: int

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {text}".rstrip() for name, text in _lines(self))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> Explanation:
    """Return the backends of a call and why, the tiles that it visits, its work and its memory.

    Takes the arguments of ``attention``, or those of ``attention_varlen``, and computes no
    attention. Reads masks and packed offsets, which waits for a GPU.

    Returns:
        An ``Explanation``, to print or to read by its attributes.

    Raises:
        TypeError, ValueError: as the call itself would. A backend that refuses does not raise.

    >>> import torch, rowmax
    >>> q = torch.randn(1, 256, 4, 64)
    >>> rowmax.explain(q, q, q, causal=True).tiles
    Tiles(skipped=4, partial=8, full=4, pairs=196608)
    """
    cu_seqlens = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens = cu_seqlens_q, cu_seqlens_k
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise wrong_type(missing, "None", "a tensor: packed calls have both offsets")
    check_flag("return_lse", return_lse)
    unexpected = {name: x for name, x in options.items() if name not in CallOptions.__annotations__}
    if unexpected:
        refuse_unexpected("explain", (), unexpected)
    if options.get("seed") is None:
        options["seed"] = 0  # does not advance torch's generator
    given = arguments(q, k, v, cu_seqlens, (max_seqlen_q, max_seqlen_k), **options)
    keys = keys_of(given.mask, q, k, given.backend)
    tensors, found, _ = normalized(without_documents(given, keys))
    problem = problem_of(tensors, found)
    tiles = _tiles(problem, tensors)
    size = problem.dtype.itemsize
    rows = problem.out_shape[0] * problem.total_q * problem.hq
    return Explanation(
        problem=problem,
        forward=_choice(problem, "forward", given.backend),
        backward=_choice(problem, "backward", given.backend),
        tangent=_choice(problem, "tangent", given.backend),
        tangent_backward=_choice(problem, "tangent_backward", given.backend),
        tiles=tiles,
        forward_flops=2 * tiles.pairs * (problem.d + problem.dv),
        backward_flops=2 * tiles.pairs * (3 * problem.d + 2 * problem.dv),
        output_bytes=rows * (problem.dv * size + problem.accumulator.itemsize),
        dense_bytes=sum(p.batch * p.hq * p.nq * p.nk for p, _ in _dense(problem, tensors)) * size,
    )


def _show_keywords() -> None:
    """Show the keywords of the calls in the signature of ``explain``."""
    ours, theirs = inspect.signature(explain), inspect.signature(attention)
    keyword, place = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [p for p in ours.parameters.values() if p.kind is place]
    rest = [p for p in theirs.parameters.values() if p.kind is keyword]
    explain.__signature__ = ours.replace(parameters=[*first, *rest])  # pyright: ignore


_show_keywords()


def _choice(problem: Problem, call: backends.Call, name: str | None) -> Choice:
    """Return the plan of a call, with a reason for every backend that is not in it."""
    try:
        jobs = backends.choose(problem, call, name).jobs
    except ValueError:
        jobs = ()
    chosen = [job.backend for job in jobs]
    first = (
        f"backend={name!r} is asked for" if name else f"{chosen[0] if jobs else None} comes first"
    )
    others = {}
    for other in backends.NAMES:
        if other in chosen:
            continue
        by_name = other in backends._BY_NAME_ONLY and other != name
        reason = "taken only by name: it holds the score matrix" if by_name else None
        reason = reason or backends.refusal(other, problem, call)
        if reason is None and name is None:
            reason = backends.deferral(other, problem, call)
        others[other] = reason or f"able, but {first}"
    return Choice(jobs, others, tuple(backends.notes(problem, job) for job in jobs))


def _dense(problem: Problem, tensors: Tensors) -> Iterator[tuple[Problem, Tensors]]:
    if not problem.varlen:
        yield problem, tensors
        return
    for _, _, one, parts in each_sequence(problem, tensors):
        yield one, parts


def _tiles(problem: Problem, tensors: Tensors) -> Tiles:
    totals = [0, 0, 0, 0]
    for one, parts in _dense(problem, tensors):
        if 0 in (one.batch, one.nq, one.nk):
            continue
        states = tile_states(one, parts, TILE, TILE)
        times = one.batch * one.hq // (states.shape[0] * states.shape[1])  # a 1 broadcasts
        rows = _extents(one.nq, states)[:, None]
        cols = _extents(one.nk, states)[None, :]
        for state in (SKIP, PARTIAL, FULL):
            totals[state] += times * int((states == state).sum())
        totals[3] += times * int(((states != SKIP) * rows * cols).sum())
    return Tiles(*totals)


def _extents(n: int, like: Tensor) -> Tensor:
    """Return how many of n positions each tile along a dimension holds."""
    starts = torch.arange(0, n, TILE, device=like.device)
    return (n - starts).clamp(max=TILE)


# --- the text ----------------------------------------------------------------------------------


def _lines(e: Explanation) -> Iterator[tuple[str, str]]:
    p = e.problem
    yield "call", f"{p.device}, {str(p.dtype).removeprefix('torch.')}, {_shapes(p)}"
    yield "features", ", ".join(_features(p)) or "none"
    for call, choice in (("forward", e.forward), ("backward", e.backward)):
        yield call, ", ".join(_made(choice)) or "no backend: the call would raise"
        for text in (text for notes in choice.notes for text in notes):
            yield "", f"  {text}"
        if call == "forward" or _choices(choice) != _choices(e.forward):
            for other, reason in choice.others.items():
                yield "", f"  not {other}: {reason}"
    yield "tangent", ", ".join(_tangents(e))
    t = e.tiles
    yield (
        "tiles",
        f"of {TILE} x {TILE}: {t.skipped:,} skipped, {t.partial:,} partial, {t.full:,} full",
    )
    yield (
        "work",
        f"forward {scaled(e.forward_flops, 1000, 'FLOP')}, "
        f"backward {scaled(e.backward_flops, 1000, 'FLOP')}, in the tiles visited",
    )
    yield (
        "memory",
        f"out and lse {scaled(e.output_bytes, 1024, 'B')}; "
        f"a dense score matrix would be {scaled(e.dense_bytes, 1024, 'B')}",
    )


def _tangents(e: Explanation) -> Iterator[str]:
    """Yield the backends of forward mode and of second derivatives, or why there is none."""
    whole = {"forward mode": e.tangent, "second derivatives": e.tangent_backward}
    if e.tangent.backend is not None and e.tangent.backend == e.tangent_backward.backend:
        whole = {"forward mode and second derivatives": e.tangent}
    elif e.tangent.backend is None and e.tangent_backward.backend is None:
        named = e.forward.backend
        yield f"no backend: {e.tangent.others.get(named or '', 'the call would raise')}"
        return
    for name, choice in whole.items():
        yield f"{choice.backend or 'no backend'} ({name})"


def _made(choice: Choice) -> Iterator[str]:
    """Yield a text for each job; for a single job only its backend."""
    for job in choice.jobs:
        reason = f": {job.reason}" if job.reason else ""
        if job.backend is None:
            yield f"no backend ({', '.join(job.results)}{reason}; the call raises if it is wanted)"
        elif len(choice.jobs) == 1:
            yield job.backend
        else:
            yield f"{job.backend} ({', '.join(job.results)}{reason})"


def _choices(choice: Choice) -> tuple[Any, ...]:
    return [job.backend for job in choice.jobs], choice.others


def _shapes(p: Problem) -> str:
    first, packed = [p.batch], ""
    if p.varlen:
        first = []
        packed = f", {p.batch} packed sequences of at most {p.nq} queries and {p.nk} keys"
    rows = ([p.total_q, p.hq, p.d], [p.total_k, p.hk, p.d], [p.total_k, p.hk, p.dv])
    q, k, v = (first + sizes for sizes in rows)
    return f"q {q}, k {k}, v {v}{packed}"


def _features(p: Problem) -> Iterator[str]:
    if p.left is None and p.right == 0:
        yield "causal"
    elif p.left is not None or p.right is not None:
        yield f"window (left {p.left}, right {p.right})"
    if p.bidirectional:
        yield "bidirectional prefix"
    for name in ("documents", "prefix"):
        if getattr(p, name):
            aligned = ", aligned to them" if p.align == "lengths" else ""
            yield f"prefix lengths{aligned}" if name == "prefix" else name
    yield from p.heads
    for name in ("sink", "deterministic"):
        if getattr(p, name):
            yield name
    if p.allowed is not None:
        yield f"boolean mask {list(p.allowed)}"
    if p.bias is not None:
        yield f"bias {list(p.bias)} {str(p.bias_dtype).removeprefix('torch.')}"
    if p.softcap:
        yield f"softcap {p.softcap:g}"
    if p.dropout_p:
        yield f"dropout {p.dropout_p:g}"
    if p.group > 1:
        yield f"{p.group} query heads a kv head"


def scaled(n: int, base: int, unit: str) -> str:
    """Return a number with a unit: 5_000_000 FLOP -> 5 MFLOP, 2048 B -> 2 KiB."""
    value, prefixes = float(n), iter("KMGTPE" if base == 1024 else "kMGTPE")
    prefix = ""
    while value >= base and prefix != "E":
        value, prefix = value / base, next(prefixes)
    return f"{value:.3g} {prefix}{'i' if base == 1024 and prefix else ''}{unit}"
