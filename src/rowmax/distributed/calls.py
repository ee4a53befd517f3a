"""A call as one rank holds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..call.inputs import Options, Tensors
from ..call.problem import reads_distance
from .groups import Group, group_named
from .layout import Layout
from .offsets import ids_on
from .pieces import Sight, few_copies

Planned = TypeVar("Planned")


class Place(NamedTuple):
    """The values of a distributed call that operators carry, before tensors and options."""

    group: str
    layout: str  # the text of a layout
    k_layout: str
    strategy: str
    reduce_replicated: bool
    drawn: bool  # the seed is this rank's own: the call has that of rank 0
    documents: str = ""  # the text of offsets that the host knows: no ids are made of them yet


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
    #: gradients are parts of sums over other ranks: those of keys, values and shared inputs stay
    #: in the accumulator's dtype
    wide: bool = False
    #: plans for calls of this kind on this rank, once ranks have agreed
    plans: dict[Any, Any] | None = None

    def planned(self, key: Any, plan: Callable[[], Planned]) -> Planned:
        """Return what calls of this kind have in common, planned once."""
        if self.plans is None:
            return plan()
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = plan()
        return found

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.tensors.q.dtype == torch.float64 else torch.float32

    @property
    def packs(self) -> bool:
        """True if the rows of a rank are one packed call, whose sequences are its pieces.

        The mask is documents that the host knows, whole or causal, with a window or without.
        Every rank finds the same.
        """
        t, o = self.tensors, self.options
        if not self.place.documents or self.place.strategy != "keys" or t.q.shape[0] != 1:
            return False
        others = (t.bias, t.allowed, t.q_ids, t.k_ids, t.lengths, t.prefix)
        if o.dropout_p or any(one is not None for one in others):
            return False
        terms = tuple(o.head_terms.split(",")) if o.head_terms else ()
        if o.right is None and (o.left is not None or reads_distance(terms)):
            return False  # the keys of a piece end after it, so nothing may read its alignment
        if o.right is not None and o.right > 0:
            return False
        return few_copies(self.queries, Sight(o.left, o.right, self.place.documents))

    @property
    def pairs(self) -> dict[str, tuple[Tensor, str]]:
        """The bias and the boolean mask, of those that are given, each with its rows."""
        bias, allowed = self.tensors.bias, self.tensors.allowed
        found = {"bias": (bias, self.bias_rows), "allowed": (allowed, self.mask_rows)}
        return {name: (t, rows) for name, (t, rows) in found.items() if t is not None}

    def with_ids(self, device: torch.device | None = None) -> ShardedCall:
        """Return the call with ids of documents that the host knows."""
        if not self.place.documents or self.tensors.k_ids is not None:
            return self
        ids = ids_on(self.place.documents, self.keys.n, device or self.tensors.q.device)
        return self._replace(tensors=self.tensors._replace(q_ids=ids, k_ids=ids))

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of q, k and v of the whole call."""
        t, n, nk = self.tensors, self.queries.n, self.keys.n
        return tuple((x.shape[0], m, *x.shape[2:]) for x, m in ((t.q, n), (t.k, nk), (t.v, nk)))

    def whole(self) -> Tensors:
        """Return the inputs of the whole call, with tensors of its sizes for the rows of others."""
        own = self.tensors
        q, k, v = whole_rows(own.q, own.k, own.v, self.queries.n, self.keys.n)
        return own._replace(q=q, k=k, v=v, bias=None, allowed=None)

    def new_results(self) -> tuple[Tensor, Tensor]:
        """Return memory for (out, lse) of own queries."""
        q, v = self.tensors.q, self.tensors.v
        b, n, h, _ = q.shape
        return q.new_empty((b, n, h, v.shape[3])), q.new_empty((b, h, n), dtype=self.accumulator)


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
    call = ShardedCall(place, tensors, options, queries, keys, group_named(place.group))
    return call if call.group.parts or call.packs else call.with_ids()
