"""Symbols: the arguments of a mask function that is called once to find its rule.

A mask function takes the indices of a sequence, a head, a query and a key. The operators of a
symbol return the rule of a comparison: a band around the diagonal, equal ids, keys in use. So
closures and partial functions of any depth need no inspection. An operation without a symbolic
meaning raises. ``block_masks`` and ``integrations/transformers/pattern`` define their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .masks import as_int


class UnknownRuleError(Exception):
    """The function has no form that symbols express."""


def called(
    function: Callable[..., Any], symbols: Sequence[Symbol], read: Callable[..., Any]
) -> Any:
    """Return the result of a function of symbols; ``read(table, index)`` is ``table[index]``.

    Raises:
        UnknownRuleError: the function does what no symbol expresses.
    """
    try:
        with _ReadTables(read):
            return function(*symbols)
    except UnknownRuleError:
        raise
    except Exception as error:  # a function of a user may raise anything if given symbols
        raise UnknownRuleError(f"{type(error).__name__}: {error}") from error


class _ReadTables(TorchFunctionMode):
    """Read the tables that symbols index."""

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(x, Symbol) for x in index):
                return self.read(table, index)
        return func(*args, **(kwargs or {}))


class Symbol:
    """A value that is known by its meaning alone; itself the index of the head."""

    __hash__ = None  # pyright: ignore

    def _unknown(self, *_: Any) -> NoReturn:
        raise UnknownRuleError(f"an operation of {type(self).__name__.strip('_').lower()}")

    __bool__ = __index__ = __int__ = __float__ = __invert__ = __neg__ = __abs__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _unknown
    __or__ = __ror__ = __xor__ = __rxor__ = __and__ = __rand__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __eq__ = __ne__ = _unknown  # pyright: ignore

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnknownRuleError(f"torch's {getattr(func, '__name__', func)}")


class PerSequence(Symbol):
    """A number for each sequence."""

    def __init__(self, table: Tensor) -> None:
        self.table = table


class Index(Symbol):
    """The index of a query or key. The difference of two is a ``Distance``."""

    def __le__(self, other: Any) -> Any:
        return self - other <= 0 if isinstance(other, Index) else self._before(whole(other) + 1)

    def __lt__(self, other: Any) -> Any:
        return self - other <= -1 if isinstance(other, Index) else self._before(other)

    def __ge__(self, other: Any) -> Any:
        return self - other >= 0 if isinstance(other, Index) else self._from(other)

    def __gt__(self, other: Any) -> Any:
        return self - other >= 1 if isinstance(other, Index) else self._from(whole(other) + 1)

    #: the rules of an index that is less than a constant, or a number for each sequence; or not
    _before = _from = Symbol._unknown


class Distance(Symbol):
    """``key - query + shift``, or ``query - key + shift`` unless the key is first.

    ``of.band(left, right)`` returns the rule ``-left <= key - query <= right``.
    """

    def __init__(self, of: Any, shift: int, key_first: bool) -> None:
        self.of, self.shift, self.key_first = of, shift, key_first

    def __add__(self, n: Any) -> Any:
        return type(self)(self.of, self.shift + whole(n), self.key_first)

    __radd__ = __add__

    def __sub__(self, n: Any) -> Any:
        return self + -whole(n)

    def __abs__(self) -> _Absolute:
        return _Absolute(self)

    abs = __abs__

    def __le__(self, n: Any) -> Any:
        most = whole(n) - self.shift
        return self.of.band(None, most) if self.key_first else self.of.band(most, None)

    def __ge__(self, n: Any) -> Any:
        most = self.shift - whole(n)
        return self.of.band(most, None) if self.key_first else self.of.band(None, most)

    def __lt__(self, n: Any) -> Any:
        return self <= whole(n) - 1

    def __gt__(self, n: Any) -> Any:
        return self >= whole(n) + 1

    def __eq__(self, n: Any) -> Any:
        return (self <= n) & (self >= n)


class _Absolute(Symbol):
    """The absolute value of a distance."""

    def __init__(self, distance: Distance) -> None:
        self.distance = distance

    def __le__(self, n: Any) -> Any:
        return (self.distance <= n) & (self.distance >= -whole(n))

    def __lt__(self, n: Any) -> Any:
        return self <= whole(n) - 1


def whole(n: Any) -> int:
    """Return an integer, or a symbolic size; raise for anything else."""
    found = as_int(n)
    if found is None:
        raise UnknownRuleError(f"a constant of {type(n).__name__}")
    return found
