"""A call as one rank holds it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.inputs import Options, Tensors
from .groups import Group, group_named
from .layout import Layout


class Place(NamedTuple):
    """The numbers of a distributed call that operators carry, before tensors and options."""

    group: str
    layout: str  # the text of a layout
    k_layout: str
    strategy: str
    reduce_replicated: bool
    drawn: bool  # the seed is this rank's own: the call has that of rank 0


class ShardedCall(NamedTuple):
    """A call: own rows of q, k, v, bias and boolean mask; all other inputs are of the whole."""

    place: Place
    tensors: Tensors
    options: Options
    queries: Layout
    keys: Layout
    group: Group
    #: agreed by all ranks: "own", "one" row for all queries, "either" (ranks of one query), "none"
    bias_rows: str = "none"
    mask_rows: str = "none"

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.tensors.q.dtype == torch.float64 else torch.float32

    def whole(self) -> Tensors:
        """Return the inputs of the whole call, with tensors of its sizes for the rows of others."""
        own = self.tensors
        q, k, v = whole_rows(own.q, own.k, own.v, self.queries.n, self.keys.n)
        return own._replace(q=q, k=k, v=v, bias=None, allowed=None)

    def no_results(self) -> tuple[Tensor, Tensor]:
        """Return the (out, lse) of a rank without queries."""
        q, v = self.tensors.q, self.tensors.v
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        return out, q.new_empty((q.shape[0], q.shape[2], 0), dtype=self.accumulator)


def whole_rows(q: Tensor, k: Tensor, v: Tensor, nq: int, nk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the whole call's sizes, of one element each, for checks and places."""
    sizes = ((q, nq), (k, nk), (v, nk))
    rows = [t.new_empty(()).expand(t.shape[0], n, *t.shape[2:]) for t, n in sizes]
    return rows[0], rows[1], rows[2]


@lru_cache(maxsize=512)
def layout_of(text: str) -> Layout:
    """Return the layout of a text."""
    return Layout.parse(text)


def sharded(place: Place, tensors: Tensors, options: Options) -> ShardedCall:
    """Return the call of an operator's arguments."""
    queries, keys = layout_of(place.layout), layout_of(place.k_layout)
    return ShardedCall(place, tensors, options, queries, keys, group_named(place.group))
