"""A mesh of two dimensions: heads over the second, and keys or queries over the first.

The ranks of a group of the second dimension exchange rows for heads (``heads.py``): each then has
all their rows of some heads. With these it makes a call of the first dimension (``keys.py`` or
``queries.py``). Within a host the exchange is fast, and between hosts only the keys of own heads
move.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from torch import Tensor

from ...call.inputs import Gradients, Options, Tensors, Wanted
from ..calls import ShardedCall
from ..layout import Layout
from ..routes import rows_of
from . import keys as by_keys
from . import queries as by_queries
from .heads import Exchange, exchange_of, exchanged_backward, exchanged_forward

#: strategies of the first dimension
ACROSS: dict[str, ModuleType] = {"keys": by_keys, "queries": by_queries}


def forward(call: ShardedCall) -> tuple[Tensor, Tensor]:
    """Return (out ``[B, n, Hq, Dv]``, lse ``[B, Hq, n]``) of this rank's queries."""
    strategy = ACROSS[call.place.strategy]

    def inside(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
        return strategy.forward(across(call, tensors, options))

    return exchanged_forward(call, exchange_within(call), inside)


def backward(
    call: ShardedCall, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """Return the wanted gradients: of own rows, and this rank's share of replicated inputs."""
    strategy = ACROSS[call.place.strategy]

    def inside(tensors: Tensors, options: Options, *given: Tensor) -> Gradients:
        return strategy.backward(across(call, tensors, options), *given, wanted)

    return exchanged_backward(call, exchange_within(call), inside, (out, lse, dout, dlse), wanted)


def exchange_within(call: ShardedCall) -> Exchange:
    """Return the exchange of this rank's group of heads."""
    of_keys, of_heads = call.group.parts
    rows = (of_heads.size, of_keys.rank)
    queries, keys = rows_within(call.queries, *rows), rows_within(call.keys, *rows)
    return exchange_of(call, of_heads, queries, keys)


def across(call: ShardedCall, tensors: Tensors, options: Options) -> ShardedCall:
    """Return the call of the first dimension, of own heads with the rows of the exchange."""
    of_keys, of_heads = call.group.parts
    layouts = rows_across(call.queries, of_heads.size), rows_across(call.keys, of_heads.size)
    place = call.place._replace(
        group=of_keys.name,
        layout=layouts[0].text,
        k_layout=layouts[1].text,
        reduce_replicated=False,  # sums are those of the whole grid
        drawn=False,
    )
    # ranks with one query each have own rows together
    bias, mask = ("own" if one == "either" else one for one in (call.bias_rows, call.mask_rows))
    found = ShardedCall(
        *(place, tensors, options, *layouts, of_keys), bias_rows=bias, mask_rows=mask, wide=True,
        plans=None if call.plans is None else call.plans.setdefault("across", {}),
    )  # fmt: skip
    return found if found.packs else found.with_ids()


@lru_cache(maxsize=64)
def rows_across(layout: Layout, heads: int) -> Layout:
    """Return the rows of each group of heads, of those of each rank.

    >>> rows_across(Layout.zigzag(64, 4), 2).owned
    (((0, 16), (48, 64)), ((16, 48),))
    """
    each = (layout.owned[n : n + heads] for n in range(0, layout.ranks, heads))
    return Layout(tuple(sum(group, ()) for group in each))


@lru_cache(maxsize=256)
def rows_within(layout: Layout, heads: int, group: int) -> Layout:
    """Return the rows of each rank of a group of heads, among those that the group has.

    >>> rows_within(Layout.zigzag(64, 4), 2, 0).owned
    (((0, 8), (24, 32)), ((8, 24),))
    """
    held = rows_across(layout, heads).owned[group]
    ranks = layout.owned[group * heads :][:heads]
    return Layout(tuple(rows_of(one, held) for one in ranks))
