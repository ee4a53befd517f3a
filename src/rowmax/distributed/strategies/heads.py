"""Heads are distributed: a rank computes the whole sequence for some of the query heads.

All-to-all copies exchange rows for heads and back (DeepSpeed Ulysses, Jacobs et al.,
arXiv:2309.14509). A rank has whole groups of query heads, or some heads of one group: then several
ranks hold the group's kv head, and its gradient is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.blocks import Block, block_of
from ...call.dispatch import prepared
from ...call.inputs import Gradients, Options, Tensors, Wanted, part_of
from ..calls import ShardedCall
from ..collectives import all_to_all
from ..exchange import in_order
from ..groups import Group
from ..layout import Layout
from .shares import reduced

Heads = tuple[range, ...]


class Exchange(NamedTuple):
    """The ranks that exchange rows for heads."""

    group: Group
    queries: Layout  # the rows of each, among those of all of them
    keys: Layout
    q: Heads
    kv: Heads


def _everyone(call: ShardedCall) -> Exchange:
    """Return the exchange of all ranks, inside of which each call is that of one device."""
    return exchange_of(call, call.group, call.queries, call.keys)


def forward(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, n, Hq, Dv]``, lse ``[B, Hq, n]``) of this rank's queries."""

    def inside(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
        return prepared(tensors, options).forward(tensors)

    return exchanged_forward(call, _everyone(call), inside)


def exchanged_forward(
    call: ShardedCall,
    ranks: Exchange,
    inside: Callable[[Tensors, Options], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries.

    ``inside`` computes the call of own heads, with the rows of all ranks of the exchange.
    """
    tensors, options = _part(call, ranks)
    if tensors.q.shape[2]:
        out, lse = inside(tensors, options)
    else:
        b, n, _, _ = tensors.q.shape
        out = tensors.q.new_empty((b, n, 0, tensors.v.shape[3]))
        lse = tensors.q.new_empty((b, 0, n), dtype=call.accumulator)
    out = _to_rows(out, ranks, ranks.queries, ranks.q, call.tensors.q.shape[2])
    rows = _to_rows(lse.transpose(1, 2)[..., None], ranks, ranks.queries, ranks.q, out.shape[2])
    return out, rows[..., 0].transpose(1, 2)


def backward(
    call: ShardedCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the wanted gradients: of own rows, and this rank's share of replicated inputs."""
    # ranks that share a kv head have parts of its gradient
    wide = call.tensors.k.shape[2] < call.group.size

    def inside(tensors: Tensors, options: Options, *given: Tensor) -> Gradients:
        return prepared(tensors, options).backward(tensors, *given, wanted, wide)  # pyright: ignore

    return exchanged_backward(call, _everyone(call), inside, (out, lse, dout, dlse), wanted)


def exchanged_backward(
    call: ShardedCall,
    ranks: Exchange,
    inside: Callable[..., Gradients],
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    wanted: Wanted,
) -> Gradients:
    """Return the wanted gradients of (out, lse, dout, dlse).

    ``inside`` takes the tensors and options of own heads, and these four for them.
    """
    out, lse, dout, dlse = given
    tensors, options = _part(call, ranks)
    out, dout = (_to_heads(t, ranks, ranks.queries, ranks.q) for t in (out, dout))
    # a cotangent of zeros on ranks without one: all take part in the exchange
    lses = (lse, torch.zeros_like(lse) if dlse is None else dlse)
    lse, dlse = (
        _to_heads(t.transpose(1, 2)[..., None], ranks, ranks.queries, ranks.q)[..., 0]
        .transpose(1, 2)
        .contiguous()
        for t in lses
    )
    found = Gradients()
    if tensors.q.shape[2]:
        found = inside(tensors, options, out, lse, dout, dlse)
    return _returned(call, ranks, tensors, found, wanted)


def _returned(
    call: ShardedCall, ranks: Exchange, here: Tensors, found: Gradients, wanted: Wanted
) -> Gradients:
    """Return the gradients of own rows from those of own heads."""
    own, wide = call.tensors, call.accumulator
    rows = {}
    for name, layout, mine, dtype in (
        ("q", ranks.queries, ranks.q, own.q.dtype),
        ("k", ranks.keys, ranks.kv, wide),
        ("v", ranks.keys, ranks.kv, wide),
    ):
        if getattr(wanted, name):
            t, g = getattr(here, name), getattr(found, name)
            g = torch.zeros_like(t) if g is None else g
            total = getattr(own, name)
            back = _to_rows(g.to(dtype), ranks, layout, mine, total.shape[2])
            rows[name] = back.to(total.dtype)
    q_heads = slice(*_ends(ranks.q[ranks.group.rank]))
    bias = sink = terms = None
    if wanted.bias and own.bias is not None and here.bias is not None:
        bias = _bias_gradient(call, ranks, here.bias, found.bias, q_heads)
    if wanted.sink and own.sink is not None:
        sink = torch.zeros_like(own.sink)
        if found.sink is not None:
            sink[q_heads] = found.sink
    if wanted.heads and own.heads is not None:
        terms = torch.zeros_like(own.heads)
        if found.heads is not None:
            terms[:, q_heads] = found.heads
    bias, sink, terms = reduced(call, bias, sink, terms)
    return Gradients(**rows, bias=bias, sink=sink, heads=terms)


def _bias_gradient(
    call: ShardedCall, ranks: Exchange, here: Tensor, found: Tensor | None, mine: slice
) -> Tensor:
    """Return the gradient of bias: complete for own rows, a share of one row for all queries."""
    own = call.tensors.bias
    assert own is not None
    found = torch.zeros_like(here) if found is None else found
    found = found.to(call.accumulator)
    if call.bias_rows == "one":
        total = torch.zeros(own.shape, dtype=call.accumulator, device=own.device)
        place = part_of("bias", total, h=mine)
        assert place is not None
        place += found
        return total
    split = shared_heads(own, ranks.q)
    return _to_rows(found.transpose(1, 2), ranks, ranks.queries, split, own.shape[1]).transpose(
        1, 2
    )


# --- the heads of each rank --------------------------------------------------------------------


class _Split(NamedTuple):
    """The heads of each rank."""

    q: Heads
    kv: Heads


def exchange_of(call: ShardedCall, group: Group, queries: Layout, keys: Layout) -> Exchange:
    """Return the exchange of a group, whose ranks have these rows."""
    hq, hk = call.tensors.q.shape[2], call.tensors.k.shape[2]
    return Exchange(group, queries, keys, *split_heads(hq, hk, group.size))


@lru_cache(maxsize=64)
def split_heads(hq: int, hk: int, ranks: int) -> _Split:
    """Return the heads of each rank, as equal as they can be.

    >>> split_heads(8, 2, 3)
    _Split(q=(range(0, 4), range(4, 6), range(6, 8)), kv=(range(0, 1), range(1, 2), range(1, 2)))
    """
    group = hq // hk
    if hk >= ranks:
        kv = [range(hk * r // ranks, hk * (r + 1) // ranks) for r in range(ranks)]
        return _Split(tuple(range(group * g.start, group * g.stop) for g in kv), tuple(kv))
    q, kv = [], []
    for g in range(hk):
        sharing = ranks * (g + 1) // hk - ranks * g // hk
        for part in range(sharing):
            first, end = group * part // sharing, group * (part + 1) // sharing
            q.append(range(group * g + first, group * g + end))
            kv.append(range(g, g + (first < end)))
    return _Split(tuple(q), tuple(kv))


def shared_heads(t: Tensor, heads: Heads) -> Heads:
    """Return the heads of a bias or mask that each rank reads; one may serve all."""
    if t.shape[1] != 1:
        return heads
    return tuple(range(int(len(one) > 0)) for one in heads)


def _part(call: ShardedCall, ranks: Exchange) -> tuple[Tensors, Options]:
    """Return the call of own heads, with the rows of all ranks of the exchange."""
    own = call.tensors
    q = _to_heads(own.q, ranks, ranks.queries, ranks.q)
    k, v = (_to_heads(t, ranks, ranks.keys, ranks.kv) for t in (own.k, own.v))
    pairs = call.pairs.items()
    terms = {name: _term_of_heads(name, t, rows, ranks) for name, (t, rows) in pairs}
    mine = ranks.q[ranks.group.rank]
    if not mine:
        return own._replace(q=q, k=k, v=v, **terms), call.options
    tensors, options = block_of(call.whole(), call.options, Block(h=slice(*_ends(mine))))
    return tensors._replace(q=q, k=k, v=v, **terms), options


def _term_of_heads(name: str, t: Tensor, rows: str, ranks: Exchange) -> Tensor | None:
    """Return a bias or boolean mask of own heads, with all rows."""
    if rows == "one":
        return part_of(name, t, h=slice(*_ends(ranks.q[ranks.group.rank])))
    split = shared_heads(t, ranks.q)
    return _to_heads(t.transpose(1, 2), ranks, ranks.queries, split).transpose(1, 2)


# --- rows for heads, and back ------------------------------------------------------------------


def _to_heads(t: Tensor, ranks: Exchange, layout: Layout, heads: Heads) -> Tensor:
    """Return ``[B, N, h, X]``, all rows of own heads, of ``[B, n, H, X]``, own rows of all."""
    rank = ranks.group.rank
    b, _, _, x = t.shape
    rows_first = t.transpose(0, 1)
    pieces = [rows_first[:, :, slice(*_ends(one))].flatten() for one in heads]
    mine = len(heads[rank])
    received = [n * b * mine * x for n in layout.lengths]
    flat = all_to_all(torch.cat(pieces), [p.numel() for p in pieces], received, ranks.group)
    parts = zip(layout.lengths, flat.split(received), strict=True)
    return in_order([t.view(n, b, mine, x) for n, t in parts], layout.owned).transpose(0, 1)


def _to_rows(t: Tensor, ranks: Exchange, layout: Layout, heads: Heads, total: int) -> Tensor:
    """Return own rows of all heads, the inverse. Ranks that share a head are added in order."""
    rank = ranks.group.rank
    b, x = t.shape[0], t.shape[3]
    rows_first = t.transpose(0, 1)
    pieces = [
        torch.cat([rows_first[start:stop] for start, stop in ranges] or [rows_first[:0]]).flatten()
        for ranges in layout.owned
    ]
    n = layout.lengths[rank]
    received = [n * b * len(one) * x for one in heads]
    flat = all_to_all(torch.cat(pieces), [p.numel() for p in pieces], received, ranks.group)
    found = t.new_zeros((n, b, total, x))
    for one, piece in zip(heads, flat.split(received), strict=True):
        found[:, :, slice(*_ends(one))] += piece.view(n, b, len(one), x)
    return found.transpose(0, 1)


def _ends(heads: range) -> Sequence[int]:
    return heads.start, heads.stop
