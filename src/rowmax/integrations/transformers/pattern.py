"""Read the rule of a transformers mask function by calling it with symbols (``symbols.py``).

``terms_of`` calls it once. Comparisons record terms: a band around the diagonal, equal ids, or keys
in use. ``torch.compile`` traces the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...symbols import Distance, Index, PerSequence, Symbol, UnknownRuleError, called, whole


class Place(NamedTuple):
    """A number for each query or key: an index, or a table's entry there, plus a constant."""

    side: str  # "q" or "k"
    table: Tensor | None = None  # [B|1, L], read at the index; None: the index itself
    shift: int = 0


class Chunks(NamedTuple):
    """The chunk of each place: ``(place - starts[b]) // size``."""

    place: Place
    starts: Tensor | None  # [B]; None: 0
    size: int


class Band(NamedTuple):
    """Keys with ``-left <= key - query <= right``; table: of positions in their place."""

    left: int | None
    right: int | None
    table: Tensor | None = None


class Same(NamedTuple):
    """Pairs with equal ids, of two tables or of chunks."""

    query: Place | Chunks
    key: Place | Chunks


class InUse(NamedTuple):
    """Keys whose entry in a boolean table is True."""

    table: Tensor


Term = Band | Same | InUse


def terms_of(mask_function: Callable[..., Any]) -> tuple[Term, ...]:
    """Return the terms of a mask function: a pair may attend if all allow it.

    Raises:
        UnknownRuleError: the function does anything else.
    """
    symbols = _Batch(), _Head(), _Index(Place("q")), _Index(Place("k"))
    return _rule(called(mask_function, symbols, _read)).terms


def _read(table: Tensor, index: tuple[Any, ...]) -> Symbol:
    """Record ``table[batch, index]`` and ``starts[batch]`` as symbols."""
    if len(index) == 1 and isinstance(index[0], _Batch):
        return PerSequence(table)
    if len(index) != 2 or table.dim() != 2 or not isinstance(index[0], _Batch):
        raise UnknownRuleError("a table that is not read by sequence and place")
    place = index[1].place if isinstance(index[1], _Index) else None
    if place is None or place.table is not None:
        raise UnknownRuleError("a table that is not read by sequence and place")
    if place.shift != 0:
        raise UnknownRuleError("a table that is read at another place")
    return _Index(Place(place.side, table))


class _OfTensors(Symbol):
    """An index or a result, with what mask functions read of these tensors."""

    @property
    def device(self) -> None:
        """The device, which a symbol does not have: transformers moves results to it."""
        return

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def new_ones(self, *_: Any, **__: Any) -> _Rule:
        return _Rule(())


class _Batch(_OfTensors):
    """The index of the sequence."""


class _Head(_OfTensors):
    """The index of the head, which no known pattern reads."""


class _Rule(_OfTensors):
    """Terms: a pair may attend if all allow it."""

    def __init__(self, terms: tuple[Term, ...]) -> None:
        self.terms = terms

    def __and__(self, other: Any) -> _Rule:
        return _Rule(self.terms + _rule(other).terms)

    __rand__ = __and__


def _rule(x: Any) -> _Rule:
    """Return the rule of a result: a boolean table read at the key is one."""
    if isinstance(x, _Rule):
        return x
    if isinstance(x, _Index) and x.place.side == "k":
        table = x.place.table
        if table is not None and table.dtype == torch.bool and x.place.shift == 0:
            return _Rule((InUse(table),))
    raise UnknownRuleError(f"a result of {type(x).__name__}")


class _Positions(NamedTuple):
    """The positions that a distance compares: indices, or entries of a table."""

    table: Tensor | None

    def band(self, left: int | None, right: int | None) -> _Rule:
        return _Rule((Band(left, right, self.table),))


class _Index(_OfTensors, Index):
    """An index, or an entry of a table."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __add__(self, n: Any) -> _Index:
        place = self.place
        return _Index(Place(place.side, place.table, place.shift + whole(n)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, PerSequence):
            return _FromStart(self.place, other.table)
        if not isinstance(other, _Index):
            return self + -whole(other)
        a, b = self.place, other.place
        _by_side(a, b)
        if a.table is not b.table:
            raise UnknownRuleError("a comparison of two tables")
        return Distance(_Positions(a.table), a.shift - b.shift, a.side == "k")

    def __floordiv__(self, size: Any) -> _ChunkIndex:
        return _ChunkIndex(Chunks(self.place, None, whole(size)))

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Index):
            self._unknown()
        query, key = _by_side(self.place, other.place)
        if query.table is None and key.table is None:
            return self - other == 0
        if query.shift or key.shift or query.table is None or key.table is None:
            self._unknown()
        return _Rule((Same(query, key),))

    def _from(self, n: Any) -> _Rule:
        if self.place.table is not None or whole(n) > self.place.shift:
            self._unknown()
        return _Rule(())  # every index is at least 0


class _FromStart(Symbol):
    """``place - starts[b]``."""

    def __init__(self, place: Place, starts: Tensor) -> None:
        self.place, self.starts = place, starts

    def __floordiv__(self, size: Any) -> _ChunkIndex:
        return _ChunkIndex(Chunks(self.place, self.starts, whole(size)))


class _ChunkIndex(Symbol):
    """The chunk of a place."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _ChunkIndex):
            self._unknown()
        return _Rule((Same(*_by_side(self.chunks, other.chunks)),))


def _by_side(a: Any, b: Any) -> tuple[Any, Any]:
    """Return (query, key) of two places, or of two chunks, on two sides."""
    sides = [x.place.side if isinstance(x, Chunks) else x.side for x in (a, b)]
    if sides[0] == sides[1]:
        raise UnknownRuleError("a comparison of one side with itself")
    return (a, b) if sides[0] == "q" else (b, a)
