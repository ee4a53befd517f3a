"""Queries move and keys stay: each rank computes all queries over its own keys.

It suits few queries of many keys: a decode, or a chunk of a long prompt. Partial results return in
the accumulator's dtype, (out, lse) in one all-to-all, and are merged in the order of ranks. The
backward needs no merge: the final out and lse make every rank's part of a gradient exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ...call.blocks import Block, block_of
from ...call.dispatch import prepared
from ...call.inputs import Gradients, Options, Tensors, Wanted, part_of
from ...reference.online import merge
from ..calls import ShardedCall
from ..collectives import all_to_all
from ..exchange import Gather, Return, elements, packed
from ..layout import Layout
from ..routes import Route
from .shares import reduced


def forward(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, n, Hq, Dv]``, lse ``[B, Hq, n]``) of this rank's queries."""
    whole, wide = _whole(call), call.accumulator
    b, nq, hq, _ = whole.q.shape
    parts = []
    for rows, j in _chunks(call):
        tensors, options = _block(call, whole, rows, j)
        out, lse = prepared(tensors, options).forward(tensors)
        parts.append((out.to(wide), lse))
    if not parts:
        out = whole.q.new_zeros((b, nq, hq, whole.v.shape[3]), dtype=wide)
        parts.append((out, whole.q.new_full((b, hq, nq), -torch.inf, dtype=wide)))
    out, lse = merge(*parts) if len(parts) > 1 else parts[0]
    found = _to_owners(torch.cat((out, lse.transpose(1, 2)[..., None]), 3), call)
    each = [(t[..., :-1], t[..., -1].transpose(1, 2)) for t in found]
    out, lse = merge(*each)
    return out.to(whole.q.dtype), lse


def backward(
    call: ShardedCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the wanted gradients: of own rows, and this rank's share of replicated inputs."""
    whole, own, wide = _whole(call), call.tensors, call.accumulator
    out, dout = _gathered([out, dout], call)
    # a cotangent of zeros on ranks without one: all take part in the copies
    lses = [lse, torch.zeros_like(lse) if dlse is None else dlse]
    lses = _gathered([t.transpose(1, 2)[..., None] for t in lses], call)
    lse, dlse = (t[..., 0].transpose(1, 2).contiguous() for t in lses)
    q = torch.zeros_like(whole.q, dtype=wide) if wanted.q else None
    k, v = (
        t.new_empty(t.shape, dtype=wide if call.wide else t.dtype) if want else None
        for t, want in ((own.k, wanted.k), (own.v, wanted.v))
    )
    totals = {
        name: None if t is None or not want else torch.zeros_like(t, dtype=wide)
        for name, t, want in (
            ("bias", whole.bias, wanted.bias),
            ("sink", own.sink, wanted.sink),
            ("heads", own.heads, wanted.heads),
        )
    }
    for rows, j in _chunks(call):
        tensors, options = _block(call, whole, rows, j)
        here = wanted._replace(sink=wanted.sink and tensors.sink is not None)
        job = prepared(tensors, options)
        found = job.backward(tensors, out, lse, dout, dlse, here, wide=call.wide, part=True)
        if q is not None and found.q is not None:
            q += found.q
        for total, t in ((k, found.k), (v, found.v)):
            if total is not None and t is not None:
                total[:, rows] = t
        for name, total in totals.items():
            place, t = part_of(name, total, j=j), getattr(found, name)
            if place is not None and t is not None:
                place += t
    bias = totals["bias"]
    if q is not None:
        (q,) = _returned([q], call)
        q = q.to(own.q.dtype)
    if bias is not None and call.bias_rows != "one":
        (rows_first,) = _returned([bias.transpose(1, 2)], call)
        bias = rows_first.transpose(1, 2)
    bias, sink, heads = reduced(call, bias, totals["sink"], totals["heads"])
    return Gradients(q, k, v, bias, sink, heads)


# --- the calls of own keys ---------------------------------------------------------------------


def _whole(call: ShardedCall) -> Tensors:
    """Return the inputs of the whole call, with all rows of q, bias and boolean mask."""
    (q,) = _gathered([call.tensors.q], call)
    terms = {}
    for name, (t, rows) in call.pairs.items():
        if rows != "one":
            t = _gathered([t.transpose(1, 2)], call)[0].transpose(1, 2)
        terms[name] = t
    return call.whole()._replace(q=q, **terms)


def _chunks(call: ShardedCall) -> Iterator[tuple[slice, slice]]:
    """Yield each chunk of own keys, as own rows and as positions.

    Of a call without keys, the first rank has one of none: its results are those of the sink.
    """
    row = 0
    for chunk in call.keys.chunks(call.group.rank):
        yield slice(row, row + len(chunk)), slice(chunk.start, chunk.stop)
        row += len(chunk)
    if call.keys.n == call.group.rank == 0:
        yield slice(0, 0), slice(0, 0)


def _block(call: ShardedCall, whole: Tensors, rows: slice, j: slice) -> tuple[Tensors, Options]:
    """Return the call of all queries with a chunk of own keys."""
    tensors, options = block_of(whole, call.options, Block(j=j))
    return tensors._replace(k=call.tensors.k[:, rows], v=call.tensors.v[:, rows]), options


# --- rows of queries ---------------------------------------------------------------------------


@lru_cache(maxsize=256)
def every_row(layout: Layout, rank: int) -> Route:
    """Return the route by which each rank has all rows."""
    n = layout.lengths[rank]
    own = ((0, n),) if n else ()
    return Route((), layout.n, (own,) * layout.ranks, layout.owned, True)


def _gathered(tensors: list[Tensor], call: ShardedCall) -> list[Tensor]:
    """Return all rows of tensors ``[B, n, H, X]``."""
    way = every_row(call.queries, call.group.rank)
    return Gather(tensors, way, call.queries, call.group).wait()


def _returned(tensors: list[Tensor], call: ShardedCall) -> list[Tensor]:
    """Return the sums over ranks of own rows, of parts of all rows."""
    way = every_row(call.queries, call.group.rank)
    return Return(tensors, way, call.group).wait().each


def _to_owners(t: Tensor, call: ShardedCall) -> list[Tensor]:
    """Return own rows of the parts of all ranks, of parts ``[B, Nq, H, X]`` of all rows."""
    way, (b, _, h, x) = every_row(call.queries, call.group.rank), t.shape
    n = call.tensors.q.shape[1]
    sent = [elements([t.shape], ranges) for ranges in way.received]
    received = [n * b * h * x] * call.group.size
    flat = all_to_all(packed([t], way.received), sent, received, call.group)
    return [part.view(n, b, h, x).transpose(0, 1) for part in flat.split(received)]
