"""The masks of FlexAttention as masks of rowmax.

A ``mask_mod`` is called once with symbols in place of its indices (``symbols.py``). Comparisons
return masks, which ``&``, ``|`` and ``~`` combine, so that what it returns is the value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import check_flag, wrong_type
from .masks import Dilated, Documents, KeyPadding, LeftPadding, Mask, PrefixLengths, Window
from .symbols import Distance, Index, PerSequence, Symbol, UnknownRuleError, called, whole


class Sizes(NamedTuple):
    """The shape of a block mask, and its device."""

    batch: int
    heads: int
    nq: int
    nk: int
    device: torch.device

    def count(self, side: str) -> int:
        return self.nq if side == "q" else self.nk

    def band(self, left: int | None, right: int | None) -> _Rule:
        """Return the keys from ``-left`` to ``right``, counted from the index of the query."""
        offset = self.nk - self.nq
        left = None if left is None else left + offset
        right = None if right is None else right - offset
        return _Rule(Window(left, right))


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
            raise UnknownRuleError("its blocks hide or show other pairs than its mask_mod")
        return _value(block_mask.mask_mod, sizes)
    except UnknownRuleError as error:
        if not dense:
            raise TypeError(
                f"block_mask: got one without a value ({error}); want from_block_mask(block_mask, "
                "dense=True), a boolean tensor of all pairs"
            ) from None
    pairs = create_mask(block_mask.mask_mod, *sizes)
    some, full = (_pairs_of(blocks, block_mask, sizes) for blocks in _blocks(block_mask))
    return Mask(allowed=(pairs & some) | full)


def _value(mask_mod: Callable[..., Any], sizes: Sizes) -> Mask:
    symbols = _Batch(sizes), Symbol(), _Index(sizes, "q"), _Index(sizes, "k")
    return _mask_of(called(mask_mod, symbols, partial(_read, sizes)))


def _mask_of(x: Any) -> Mask:
    if isinstance(x, _Rule):
        return x.mask
    if isinstance(x, _Entry) and x.side == "k" and x.table.dtype == torch.bool:
        return KeyPadding(keep=x.table)
    raise UnknownRuleError(f"its result is a {type(x).__name__}")


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


def _read(sizes: Sizes, table: Tensor, index: tuple[Any, ...]) -> Symbol:
    first = index[0]
    if len(index) != table.dim():
        raise UnknownRuleError("a table that is read in part")
    if isinstance(first, _Batch) and len(index) == 1:
        return PerSequence(table[: sizes.batch])
    rows = table[None] if len(index) == 1 else table[: sizes.batch]
    if len(index) == 2 and not isinstance(first, _Batch):
        raise UnknownRuleError("a table that is not read by sequence")
    place = index[-1]
    if not isinstance(place, (_Index, _Entry)):
        raise UnknownRuleError("a table that is not read by query or key")
    places = place.table[0] if isinstance(place, _Entry) else place.places()
    if bool(((places < 0) | (places >= rows.shape[1])).any()):
        raise UnknownRuleError("a table that is read past its end")
    return _Entry(place.side, rows[:, places])


class _Pairs(Symbol):
    """Something that may be a mask."""

    def __and__(self, other: Any) -> _Rule:
        return _Rule(_mask_of(self) & _mask_of(other))

    def __or__(self, other: Any) -> _Rule:
        return _Rule(_mask_of(self) | _mask_of(other))

    __rand__, __ror__ = __and__, __or__


class _Rule(_Pairs):
    """A mask."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __invert__(self) -> _Rule:
        return _Rule(~self.mask)


class _Batch(Symbol):
    """The index of the sequence."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @property
    def device(self) -> torch.device:
        return self.sizes.device

    def new_ones(self, *_: Any, **__: Any) -> _Rule:
        return _Rule(Mask())

    def new_zeros(self, *_: Any, **__: Any) -> _Rule:
        return _Rule(Window(-1, -1))


class _Entry(_Pairs):
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
            ids, q_ids = (one.table.to(torch.int64) for one in (key, query))
            return _Rule(Documents(ids, q_ids=q_ids))
        return _Entry(self.side, self.table == whole(other))

    def __ne__(self, other: Any) -> Any:
        return ~_Entry(self.side, self.table == whole(other))


class _Index(Index):
    """The index of the query or key, plus a constant."""

    def __init__(self, sizes: Sizes, side: str, shift: int = 0) -> None:
        self.sizes, self.side, self.shift = sizes, side, shift

    def places(self) -> Tensor:
        return torch.arange(self.sizes.count(self.side), device=self.sizes.device) + self.shift

    def __add__(self, n: Any) -> _Index:
        return _Index(self.sizes, self.side, self.shift + whole(n))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if not isinstance(other, _Index):
            return self + -whole(other)
        if self.side == other.side:
            self._unknown()
        return _Distance(self.sizes, self.shift - other.shift, self.side == "k")

    def __floordiv__(self, size: Any) -> _Entry:
        return _Entry(self.side, (self.places() // whole(size))[None])

    def __mod__(self, size: Any) -> _Entry:
        return _Entry(self.side, (self.places() % whole(size))[None])

    def _before(self, n: Any) -> _Rule:
        if isinstance(n, PerSequence) and self.side == "k":
            return _Rule(PrefixLengths((n.table - self.shift).clamp(min=0)))
        return self._entry(self.places() < whole(n))

    def _from(self, n: Any) -> _Rule:
        if isinstance(n, PerSequence) and self.side == "k":
            return _Rule(LeftPadding((n.table - self.shift).clamp(min=0)))
        return self._entry(self.places() >= whole(n))

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, _Index):
            return self - other == 0
        return self._entry(self.places() == whole(other))

    def _entry(self, there: Tensor) -> _Rule:
        return _Rule(_mask_of(_Entry(self.side, there[None])))


class _Distance(Distance):
    """A distance, of which there are remainders."""

    def __mod__(self, step: Any) -> _Remainder:
        return _Remainder(self, whole(step))


class _Remainder(Symbol):
    """A distance modulo a step."""

    def __init__(self, distance: _Distance, step: int) -> None:
        self.distance, self.step = distance, step

    def __eq__(self, n: Any) -> Any:
        sizes = self.distance.of
        if whole(n) != 0 or self.distance.shift or (sizes.nk - sizes.nq) % self.step:
            self._unknown()
        return _Rule(Dilated(self.step))
