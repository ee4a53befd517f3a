"""The masks of FlexAttention as masks of rowmax.

A ``mask_mod`` is called once with symbols in place of its indices. Comparisons of symbols return
masks, which ``&``, ``|`` and ``~`` combine, so that what it returns is the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import check_flag, wrong_type
from .masks import Dilated, Documents, KeyPadding, LeftPadding, Mask, PrefixLengths, Window, as_int


class UnknownMaskError(Exception):
    """The function has no form that a mask expresses."""


class Sizes(NamedTuple):
    """The shape of a block mask, and its device."""

    batch: int
    heads: int
    nq: int
    nk: int
    device: torch.device

    def count(self, side: str) -> int:
        return self.nq if side == "q" else self.nk


def from_block_mask(block_mask: Any, *, dense: bool = False) -> Mask:
    """Return the mask of a FlexAttention ``BlockMask``, as a value where it has one.

    Values are bands (causal, windows, dilated), documents and chunks, padding, prefixes, and what
    ``&``, ``|`` and ``~`` make of them. Positions are those of FlexAttention: query i stands at key
    i, whatever the lengths. Its blocks are compared with its function, in strips of rows.

    Args:
        block_mask: of ``torch.nn.attention.flex_attention.create_block_mask``.
        dense: return a boolean tensor ``[B, H, Nq, Nk]`` where there is no value.

    Raises:
        TypeError: no ``BlockMask``, or one without a value unless ``dense``.

    >>> import rowmax
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> def window(b, h, q, k):
    ...     return (q >= k) & (q - k < 64)
    >>> rowmax.from_block_mask(create_block_mask(window, None, None, 256, 256, device="cpu"))
    Mask(left=63, right=0)
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    check_flag("dense", dense)
    if not isinstance(block_mask, BlockMask):
        raise wrong_type("block_mask", type(block_mask).__name__, "a BlockMask of FlexAttention")
    batch, heads, nq, nk = block_mask.shape
    sizes = Sizes(batch, heads, nq, nk, block_mask.kv_num_blocks.device)
    try:
        if not _blocks_agree(block_mask, sizes):
            raise UnknownMaskError("its blocks hide or show other pairs than its mask_mod")
        return _value(block_mask.mask_mod, sizes)
    except UnknownMaskError as error:
        if not dense:
            raise TypeError(
                f"block_mask: got one without a value ({error}); want from_block_mask(block_mask, "
                "dense=True), a boolean tensor of all pairs"
            ) from None
    pairs = create_mask(block_mask.mask_mod, *sizes)
    some, full = (_pairs_of(blocks, block_mask, sizes) for blocks in _blocks(block_mask))
    return Mask(allowed=(pairs & some) | full)


def _value(mask_mod: Callable[..., Any], sizes: Sizes) -> Mask:
    symbols = _Batch(sizes), _Symbol(), _Index(sizes, "q"), _Index(sizes, "k")
    try:
        with _ReadTables(sizes):
            found = _mask_of(mask_mod(*symbols))
    except UnknownMaskError:
        raise
    except Exception as error:  # a function of a user may raise anything if given symbols
        raise UnknownMaskError(f"{type(error).__name__}: {error}") from error
    return found


def _mask_of(x: Any) -> Mask:
    if isinstance(x, Mask):
        return x
    if isinstance(x, _Entry) and x.side == "k" and x.table.dtype == torch.bool:
        return KeyPadding(keep=x.table)
    raise UnknownMaskError(f"its result is a {type(x).__name__}")


# --- blocks ------------------------------------------------------------------------------------


def _blocks(block_mask: Any) -> tuple[Tensor, Tensor]:
    """Return the blocks that the function decides, and the full ones: ``[B, H, rows, columns]``."""

    def listed(count: Tensor | None, order: Tensor | None) -> Tensor:
        if count is None or order is None:
            return torch.zeros_like(block_mask.kv_indices, dtype=torch.bool)
        there = torch.arange(order.shape[-1], device=order.device) < count[..., None]
        return torch.zeros_like(there).scatter(-1, order.to(torch.int64), there)

    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    return partial, listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _pairs_of(blocks: Tensor, block_mask: Any, sizes: Sizes) -> Tensor:
    """Return True at the pairs of these blocks, ``[B, H, Nq, Nk]``."""
    rows, cols = block_mask.BLOCK_SIZE
    wide = blocks.repeat_interleave(rows, -2).repeat_interleave(cols, -1)
    return wide[..., : sizes.nq, : sizes.nk]


def _blocks_agree(block_mask: Any, sizes: Sizes) -> bool:
    """Return True if blocks that are not listed hold no pair of the function, full ones all."""
    from torch.nn.attention.flex_attention import create_mask

    step = block_mask.BLOCK_SIZE[0]
    some, full = _blocks(block_mask)
    for n, i in enumerate(range(0, sizes.nq, step)):
        here = sizes._replace(nq=min(step, sizes.nq - i))

        def at(b: Any, h: Any, q: Any, k: Any, i: int = i) -> Any:
            return block_mask.mask_mod(b, h, q + i, k)

        pairs = create_mask(at, *here)
        partial, whole = (
            _pairs_of(blocks[..., n : n + 1, :], block_mask, here) for blocks in (some, full)
        )
        if not torch.equal(pairs, (pairs & partial) | whole):
            return False
    return True


# --- symbols -----------------------------------------------------------------------------------


class _ReadTables(TorchFunctionMode):
    """Read ``table[index]``, ``table[b, index]`` and ``table[b]`` of symbols."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(x, _Symbol) for x in index):
                return _read(table, index, self.sizes)
        return func(*args, **(kwargs or {}))


def _read(table: Tensor, index: tuple[Any, ...], sizes: Sizes) -> _Symbol:
    first = index[0]
    if len(index) != table.dim():
        raise UnknownMaskError("a table that is read in part")
    if isinstance(first, _Batch) and len(index) == 1:
        return _PerSequence(table[: sizes.batch])
    rows = table[None] if len(index) == 1 else table[: sizes.batch]
    if len(index) == 2 and not isinstance(first, _Batch):
        raise UnknownMaskError("a table that is not read by sequence")
    place = index[-1]
    if not isinstance(place, (_Index, _Entry)):
        raise UnknownMaskError("a table that is not read by query or key")
    places = place.table[0] if isinstance(place, _Entry) else place.places()
    if bool(((places < 0) | (places >= rows.shape[1])).any()):
        raise UnknownMaskError("a table that is read past its end")
    return _Entry(place.side, rows[:, places])


class _Symbol:
    """An index that is known by its meaning alone; also that of the head."""

    __hash__ = None  # pyright: ignore

    def _unknown(self, *_: Any) -> NoReturn:
        raise UnknownMaskError(f"an operation of {type(self).__name__.strip('_').lower()}")

    __bool__ = __index__ = __int__ = __float__ = __invert__ = __neg__ = __abs__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _unknown
    __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __eq__ = __ne__ = _unknown  # pyright: ignore

    def __and__(self, other: Any) -> Mask:
        return _mask_of(self) & _mask_of(other)

    def __or__(self, other: Any) -> Mask:
        return _mask_of(self) | _mask_of(other)

    __rand__, __ror__ = __and__, __or__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnknownMaskError(f"torch's {getattr(func, '__name__', func)}")


class _Batch(_Symbol):
    """The index of the sequence."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @property
    def device(self) -> torch.device:
        return self.sizes.device

    def new_ones(self, *_: Any, **__: Any) -> Mask:
        return Mask()

    def new_zeros(self, *_: Any, **__: Any) -> Mask:
        return Window(-1, -1)


class _PerSequence(_Symbol):
    """A number for each sequence."""

    def __init__(self, table: Tensor) -> None:
        self.table = table


class _Entry(_Symbol):
    """A number for each query or key, ``[B|1, N]``."""

    def __init__(self, side: str, table: Tensor) -> None:
        self.side, self.table = side, table

    def __invert__(self) -> _Entry:
        if self.table.dtype != torch.bool:
            self._unknown()
        return _Entry(self.side, ~self.table)

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, _Entry) and {self.side, other.side} == {"q", "k"}:
            query, key = (self, other) if self.side == "q" else (other, self)
            return Documents(key.table.to(torch.int64), q_ids=query.table.to(torch.int64))
        return _Entry(self.side, self.table == _whole(other))

    def __ne__(self, other: Any) -> Any:
        return ~_Entry(self.side, self.table == _whole(other))


class _Index(_Symbol):
    """The index of the query or key, plus a constant."""

    def __init__(self, sizes: Sizes, side: str, shift: int = 0) -> None:
        self.sizes, self.side, self.shift = sizes, side, shift

    def places(self) -> Tensor:
        return torch.arange(self.sizes.count(self.side), device=self.sizes.device) + self.shift

    def __add__(self, n: Any) -> _Index:
        return _Index(self.sizes, self.side, self.shift + _whole(n))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if not isinstance(other, _Index):
            return self + -_whole(other)
        if self.side == other.side:
            self._unknown()
        return _Distance(self.sizes, self.shift - other.shift, self.side == "k")

    def __floordiv__(self, size: Any) -> _Entry:
        return _Entry(self.side, (self.places() // _whole(size))[None])

    def __mod__(self, size: Any) -> _Entry:
        return _Entry(self.side, (self.places() % _whole(size))[None])

    def __le__(self, other: Any) -> Mask:
        if isinstance(other, _Index):
            return self - other <= 0
        return self < (other if isinstance(other, _PerSequence) else _whole(other)) + 1

    def __lt__(self, other: Any) -> Mask:
        if isinstance(other, _Index):
            return self - other <= -1
        if isinstance(other, _PerSequence) and self.side == "k":
            return PrefixLengths((other.table - self.shift).clamp(min=0))
        return self._entry(self.places() < _whole(other))

    def __ge__(self, other: Any) -> Mask:
        if isinstance(other, _Index):
            return self - other >= 0
        if isinstance(other, _PerSequence) and self.side == "k":
            return LeftPadding((other.table - self.shift).clamp(min=0))
        return self._entry(self.places() >= _whole(other))

    def __gt__(self, other: Any) -> Mask:
        if isinstance(other, _Index):
            return self - other >= 1
        return self >= _whole(other) + 1

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, _Index):
            return (self - other <= 0) & (self - other >= 0)
        return self._entry(self.places() == _whole(other))

    def _entry(self, there: Tensor) -> Mask:
        return _mask_of(_Entry(self.side, there[None]))


class _Distance(_Symbol):
    """``key - query + shift``, or ``query - key + shift`` unless the key is first."""

    def __init__(self, sizes: Sizes, shift: int, key_first: bool) -> None:
        self.sizes, self.shift, self.key_first = sizes, shift, key_first

    def __add__(self, n: Any) -> _Distance:
        return _Distance(self.sizes, self.shift + _whole(n), self.key_first)

    __radd__ = __add__

    def __sub__(self, n: Any) -> _Distance:
        return self + -_whole(n)

    def __abs__(self) -> _Absolute:
        return _Absolute(self)

    abs = __abs__

    def __mod__(self, step: Any) -> _Remainder:
        return _Remainder(self, _whole(step))

    def __le__(self, n: Any) -> Mask:
        offset, most = self.sizes.nk - self.sizes.nq, _whole(n) - self.shift
        return Window(None, most - offset) if self.key_first else Window(most + offset, None)

    def __ge__(self, n: Any) -> Mask:
        return _Distance(self.sizes, -self.shift, not self.key_first) <= -_whole(n)

    def __lt__(self, n: Any) -> Mask:
        return self <= _whole(n) - 1

    def __gt__(self, n: Any) -> Mask:
        return self >= _whole(n) + 1

    def __eq__(self, n: Any) -> Any:
        return (self <= n) & (self >= n)


class _Absolute(_Symbol):
    """The absolute value of a distance."""

    def __init__(self, distance: _Distance) -> None:
        self.distance = distance

    def __le__(self, n: Any) -> Mask:
        return (self.distance <= n) & (self.distance >= -_whole(n))

    def __lt__(self, n: Any) -> Mask:
        return self <= _whole(n) - 1


class _Remainder(_Symbol):
    """A distance modulo a step."""

    def __init__(self, distance: _Distance, step: int) -> None:
        self.distance, self.step = distance, step

    def __eq__(self, n: Any) -> Any:
        sizes = self.distance.sizes
        if _whole(n) != 0 or self.distance.shift or (sizes.nk - sizes.nq) % self.step:
            self._unknown()
        return Dilated(self.step)


def _whole(n: Any) -> int:
    whole = as_int(n)
    if whole is None:
        raise UnknownMaskError(f"a constant of {type(n).__name__}")
    return whole
