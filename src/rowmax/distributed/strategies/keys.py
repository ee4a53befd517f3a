"""Keys and values are gathered in the order of positions; a call for each chunk of own queries.

A chunk of queries stands at its place of the whole call. So bands, distances, ids and dropout are
those of one device, and no results are merged. The backward gathers again and saves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.blocks import Block, block_of
from ...call.dispatch import prepared
from ...call.inputs import Gradients, Options, Tensors, Wanted, part_of
from ..calls import ShardedCall
from ..exchange import gathered, returned
from ..routes import Part, Route, route, sight_of
from .shares import reduced


def forward(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, n, Hq, Dv]``, lse ``[B, Hq, n]``) of this rank's queries."""
    way = _route(call)
    k, v = gathered((call.tensors.k, call.tensors.v), way, call.keys, call.group)
    results = []
    for part in way.parts:
        tensors, options = _part(call, part, k, v)
        results.append(prepared(tensors, options).forward(tensors))
    if not results:
        return call.no_results()
    outs, lses = zip(*results, strict=True)
    return _one(outs, 1), _one(lses, 2)


def backward(
    call: ShardedCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the wanted gradients: of own rows, and this rank's share of replicated inputs."""
    way = _route(call)
    k, v = gathered((call.tensors.k, call.tensors.v), way, call.keys, call.group)
    sums = _Sums(call, k, v, wanted)
    for part in way.parts:
        tensors, options = _part(call, part, k, v)
        rows = part.rows
        of_lse = None if dlse is None else dlse[..., rows].contiguous()
        of_rows = out[:, rows].contiguous(), lse[..., rows].contiguous()
        given = (*of_rows, dout[:, rows], of_lse)
        sums.add(part, prepared(tensors, options).backward(tensors, *given, wanted))
    return sums.total(way)


def _route(call: ShardedCall) -> Route:
    sight = sight_of(call.tensors, call.options)
    return route(call.queries, call.keys, sight, call.group.rank)


def _part(call: ShardedCall, part: Part, k: Tensor, v: Tensor) -> tuple[Tensors, Options]:
    """Return the call of a part: the inputs of the whole that its queries and keys read."""
    own = call.tensors
    tensors, options = block_of(call.whole(), call.options, Block(i=part.i, j=part.j))
    local = {name: part_of(name, getattr(own, name), i=part.rows, j=part.j) for name in _LOCAL}
    tensors = tensors._replace(
        k=part_of("k", k, j=part.gathered),
        v=part_of("v", v, j=part.gathered),
        sink=own.sink,  # a block without the first key leaves it to another
        **local,
    )
    return tensors, options


#: inputs whose queries are own rows
_LOCAL = ("q", "bias", "allowed")


class _Sums:
    """The gradients of a rank, added up over its parts in the dtype of sums."""

    def __init__(self, call: ShardedCall, k: Tensor, v: Tensor, wanted: Wanted) -> None:
        self.call, self.wanted, self.wide = call, wanted, call.accumulator
        self.q: list[Tensor] = []
        self.k, self.v = (
            torch.zeros_like(t, dtype=self.wide) if want else None
            for t, want in ((k, wanted.k), (v, wanted.v))
        )
        self.sink, self.heads = (
            torch.zeros_like(t) if want and t is not None else None
            for t, want in ((call.tensors.sink, wanted.sink), (call.tensors.heads, wanted.heads))
        )
        bias = call.tensors.bias
        self.bias = None
        if wanted.bias and bias is not None:
            # a row that parts share is a sum; own rows belong to one part
            self.bias = torch.zeros_like(
                bias,
                dtype=self.wide if bias.shape[2] == 1 else bias.dtype,
                memory_format=torch.contiguous_format,
            )

    def add(self, part: Part, found: Gradients) -> None:
        """Add the gradients of a part."""
        if found.q is not None:
            self.q.append(found.q)
        for name, total in (("k", self.k), ("v", self.v)):
            if total is not None:
                total[:, part.gathered] += getattr(found, name)
        for name, total in (("sink", self.sink), ("heads", self.heads)):
            if total is not None:
                total += getattr(found, name)
        if self.bias is not None:
            place = part_of("bias", self.bias, i=part.rows, j=part.j)
            assert place is not None
            assert found.bias is not None
            place += found.bias

    def total(self, way: Route) -> Gradients:
        """Return the gradients, those of keys and values from all ranks."""
        call, own = self.call, self.call.tensors
        dk, dv = self.k, self.v
        if dk is not None or dv is not None:
            sent = [t for t in (dk, dv) if t is not None]
            back = iter(returned(sent, way, own.k.shape[1], call.group))
            dk, dv = (None if t is None else next(back) for t in (dk, dv))
        bias, sink, heads = reduced(call, self.bias, self.sink, self.heads)
        return Gradients(
            q=(_one(self.q, 1) if self.q else torch.zeros_like(own.q)) if self.wanted.q else None,
            k=None if dk is None else dk.to(own.k.dtype),
            v=None if dv is None else dv.to(own.v.dtype),
            bias=bias,
            sink=sink,
            heads=heads,
        )


def _one(parts: list[Tensor] | tuple[Tensor, ...], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
