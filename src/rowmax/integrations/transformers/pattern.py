"""Read the rule of a transformers mask function by calling it with symbols.

A mask function takes the indices of a sequence, a head, a query and a key, and returns whether the
pair may attend. ``terms_of`` calls it once with symbols for the indices. The operators of a symbol
record a comparison as a term: a band around the diagonal, equal ids, or keys in use. So closures
and partial functions of any depth need no inspection, and the same code is traced by
``torch.compile``. Any operation without a symbolic meaning raises, and the function is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class UnknownPatternError(Exception):
    """The mask function has no form that a mask value expresses."""


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
        UnknownPatternError: the function does anything else.
    """
    symbols = _Batch(), _Head(), _Index(Place("q")), _Index(Place("k"))
    try:
        with _ReadTables():
            rule = _rule(mask_function(*symbols))
    except UnknownPatternError:
        raise
    except Exception as error:  # a function of a user may raise anything if given symbols
        raise UnknownPatternError(str(error)) from error
    return rule.terms


class _ReadTables(TorchFunctionMode):
    """Record ``table[batch, index]`` and ``starts[batch]`` as symbols."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            if isinstance(index, _Batch):
                return _PerSequence(table)
            if isinstance(index, tuple) and any(isinstance(x, _Symbol) for x in index):
                return _entry(table, index)
        return func(*args, **(kwargs or {}))


def _entry(table: Tensor, index: tuple[Any, ...]) -> _Index:
    if len(index) != 2 or table.dim() != 2 or not isinstance(index[0], _Batch):
        raise UnknownPatternError("a table that is not read by sequence and place")
    place = index[1].place if isinstance(index[1], _Index) else None
    if place is None or place.table is not None:
        raise UnknownPatternError("a table that is not read by sequence and place")
    if place.shift != 0:
        raise UnknownPatternError("a table that is read at another place")
    return _Index(Place(place.side, table))


class _Symbol:
    """A value that is known by its meaning alone."""

    __hash__ = None  # pyright: ignore

    def _unknown(self, *_: Any) -> NoReturn:
        raise UnknownPatternError(f"an operation of {type(self).__name__}")

    __bool__ = __index__ = __int__ = __float__ = __invert__ = __neg__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __abs__ = _unknown
    __or__ = __ror__ = __xor__ = __rxor__ = __and__ = __rand__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __eq__ = __ne__ = _unknown  # pyright: ignore

    @property
    def device(self) -> None:
        """The device, which a symbol does not have: transformers moves results to it."""
        return

    def to(self, *_: Any, **__: Any) -> _Symbol:
        return self

    def new_ones(self, *_: Any, **__: Any) -> _Rule:
        return _Rule(())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnknownPatternError(f"torch's {getattr(func, '__name__', func)}")


class _Batch(_Symbol):
    """The index of the sequence."""


class _Head(_Symbol):
    """The index of the head, which no known pattern reads."""


class _PerSequence(_Symbol):
    """A number for each sequence."""

    def __init__(self, table: Tensor) -> None:
        self.table = table


class _Rule(_Symbol):
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
    raise UnknownPatternError(f"a result of {type(x).__name__}")


class _Index(_Symbol):
    """An index, or an entry of a table."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __add__(self, n: Any) -> _Index:
        place = self.place
        return _Index(Place(place.side, place.table, place.shift + _whole(n)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, _PerSequence):
            return _FromStart(self.place, other.table)
        if isinstance(other, _Index):
            key_first = self.place.side == "k"
            key, query = (self, other) if key_first else (other, self)
            shift, table = _compared(key.place, query.place)
            return _Distance(shift if key_first else -shift, table, key_first)
        return self + -_whole(other)

    def __floordiv__(self, size: Any) -> _ChunkIndex:
        return _ChunkIndex(Chunks(self.place, None, _whole(size)))

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Index):
            self._unknown()
        query, key = _by_side(self.place, other.place)
        if query.table is None and key.table is None:
            shift, _ = _compared(key, query)
            return _Rule((Band(shift, -shift),))
        if query.shift or key.shift or query.table is None or key.table is None:
            self._unknown()
        return _Rule((Same(query, key),))

    def __le__(self, other: Any) -> _Rule:
        return self._at_most(other, 0)

    def __lt__(self, other: Any) -> _Rule:
        return self._at_most(other, 1)

    def __ge__(self, other: Any) -> _Rule:
        if not isinstance(other, _Index):  # every index is at least 0
            if self.place.table is None and _whole(other) <= self.place.shift:
                return _Rule(())
            self._unknown()
        return other._at_most(self, 0)

    def __gt__(self, other: Any) -> _Rule:
        return other._at_most(self, 1) if isinstance(other, _Index) else self >= _whole(other) + 1

    def _at_most(self, other: Any, strict: int) -> _Rule:
        """Return the rule ``self + strict <= other``."""
        if not isinstance(other, _Index):
            self._unknown()
        query, key = _by_side(self.place, other.place)
        shift, table = _compared(key, query)
        if self.place.side == "k":
            return _Rule((Band(None, -shift - strict, table),))
        return _Rule((Band(shift - strict, None, table),))


class _Distance(_Symbol):
    """``key - query + shift``, or ``query - key + shift`` if the query is first."""

    def __init__(self, shift: int, table: Tensor | None, key_first: bool) -> None:
        self.shift, self.table, self.key_first = shift, table, key_first

    def __abs__(self) -> _AbsoluteDistance:
        return _AbsoluteDistance(self)

    def __add__(self, n: Any) -> _Distance:
        return _Distance(self.shift + _whole(n), self.table, self.key_first)

    __radd__ = __add__

    def __sub__(self, n: Any) -> _Distance:
        return self + -_whole(n)

    def __le__(self, n: Any) -> _Rule:
        most = _whole(n) - self.shift
        band = Band(None, most, self.table) if self.key_first else Band(most, None, self.table)
        return _Rule((band,))

    def __ge__(self, n: Any) -> _Rule:
        most = self.shift - _whole(n)
        band = Band(most, None, self.table) if self.key_first else Band(None, most, self.table)
        return _Rule((band,))

    def __lt__(self, n: Any) -> _Rule:
        return self <= _whole(n) - 1

    def __gt__(self, n: Any) -> _Rule:
        return self >= _whole(n) + 1


class _AbsoluteDistance(_Symbol):
    """The absolute value of a distance."""

    def __init__(self, distance: _Distance) -> None:
        self.distance = distance

    def __le__(self, n: Any) -> _Rule:
        return (self.distance <= n) & (self.distance >= -_whole(n))

    def __lt__(self, n: Any) -> _Rule:
        return self <= _whole(n) - 1


class _FromStart(_Symbol):
    """``place - starts[b]``."""

    def __init__(self, place: Place, starts: Tensor) -> None:
        self.place, self.starts = place, starts

    def __floordiv__(self, size: Any) -> _ChunkIndex:
        return _ChunkIndex(Chunks(self.place, self.starts, _whole(size)))


class _ChunkIndex(_Symbol):
    """The chunk of a place."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _ChunkIndex):
            self._unknown()
        a, b = self.chunks, other.chunks
        if (a.place.side, b.place.side) == ("q", "k"):
            return _Rule((Same(a, b),))
        if (a.place.side, b.place.side) == ("k", "q"):
            return _Rule((Same(b, a),))
        return self._unknown()


def _whole(n: Any) -> Any:
    """Return an integer, or a symbolic size; raise for anything else."""
    if isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool):
        return n
    raise UnknownPatternError(f"a constant of {type(n).__name__}")


def _by_side(a: Place, b: Place) -> tuple[Place, Place]:
    """Return (query, key) of two places on two sides."""
    if (a.side, b.side) == ("q", "k"):
        return a, b
    if (a.side, b.side) == ("k", "q"):
        return b, a
    raise UnknownPatternError("a comparison of one side with itself")


def _compared(key: Place, query: Place) -> tuple[int, Tensor | None]:
    """Return (shift, table) of ``key - query``: ``entry(key) - entry(query) + shift``."""
    _by_side(query, key)
    if key.table is not query.table:
        raise UnknownPatternError("a comparison of two tables")
    return key.shift - query.shift, key.table
