"""Masks: values that define which keys a query may see.

Every mask is one record: a band around the diagonal, documents, lengths and a boolean tensor. A
pair may attend if all of them allow it. Each class fills in one part, ``&`` intersects records: a
backend has one form to compute.

Positions are aligned bottom-right: query ``i`` of ``Nq`` stands at key position
``i + Nk - Nq`` or, aligned to the lengths, at ``i + min(lengths[b], Nk) - Nq``: the rule is
``rules.mask.offset``.
"""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import bad, check_booleans, check_integers, wrong_type
from .mask_algebra import (
    Band,
    Ids,
    UnionError,
    both_bands,
    both_tensors,
    complement,
    one_alignment,
    union,
)
from .torch_compat import values_are_readable

#: the values of ``align``
ALIGNMENTS = ("keys", "lengths")
#: types of limits that are numbers: a symbolic one has no hash
WHOLE = frozenset((int, type(None)))

_INTERSECTIONS = ("and_", "bitwise_and", "iand", "__and__", "__rand__", "__iand__")
_UNIONS = ("or_", "bitwise_or", "ior", "__or__", "__ror__", "__ior__")
_OTHERS = ("xor", "bitwise_xor", "ixor", "__xor__", "__rxor__", "__ixor__")
_INSTEAD_OF_UNIONS = (
    "rowmax: masks have no ^, and no | or ~ whose result is no mask; combine boolean tensors "
    "(mask=m1 | m2), or make a call for each part of the keys and merge the parts: "
    "merge((out1, lse1), (out2, lse2))"
)
_MOST = 2**32  # the distance of two positions is always less


class Mask:
    """The pairs (query, key) that may attend. Immutable; composed with ``&``.

    ``|`` and ``~`` exist where the result is a mask: bands that overlap or touch
    (``Window(9, 0) | Window(0, 9)``), the complement of a band with one limit (``~Causal()``),
    ``Causal() | PrefixLengths(p)``, which is ``Prefix(p)``, padding and boolean tensors, masks that
    differ in one such part, and masks of which one contains the other.

    Args:
        left, right: the band ``-left <= j - (i + offset) <= right``; see ``Window``.
        prefix: integers ``[B]``; ``right``, which it needs, limits no key ``j < prefix[b]``.
        documents: each an ``Ids``; a pair has equal ids in all of them. Ids of offsets are made
            where the number of keys is known, with the other arguments of a call.
        lengths: integers ``[B]``, key ``j < lengths[b]``.
        allowed: bool, broadcast to ``[B, Hq, Nq, Nk]``; True may attend.
        align: the last query stands at the last key ("keys") or at the last key in use
            ("lengths", which needs lengths).

    ``None`` forbids nothing.

    Raises:
        TypeError, ValueError: naming the field, what it got and what it accepts.

    >>> import torch, rowmax
    >>> lengths = torch.tensor([3, 5])
    >>> rowmax.Mask(right=0, lengths=lengths)
    Mask(right=0, lengths=[2])
    >>> rowmax.Causal() & rowmax.PrefixLengths(lengths)
    Mask(right=0, lengths=[2])
    >>> rowmax.Window(9, 0) | rowmax.Window(0, 9)
    Mask(left=9, right=9)
    """

    __slots__ = ("align", "allowed", "documents", "left", "lengths", "prefix", "right")

    left: int | None
    right: int | None
    prefix: Tensor | None
    documents: tuple[Ids, ...]
    lengths: Tensor | None
    align: str
    allowed: Tensor | None

    def __init__(
        self,
        left: int | None = None,
        right: int | None = None,
        documents: tuple[Ids, ...] = (),
        lengths: Tensor | None = None,
        allowed: Tensor | None = None,
        align: str = "keys",
        prefix: Tensor | None = None,
    ) -> None:
        name = type(self).__name__
        if left is not None:
            left = _limit(f"{name}(left=)", left)
        if right is not None:
            right = _limit(f"{name}(right=)", right)
        _want_documents(name, documents)
        if lengths is not None:
            check_integers(f"{name}(lengths=)", lengths, (1,))
        if prefix is not None:
            check_integers(f"{name}(prefix=)", prefix, (1,))
            if right is None:
                raise ValueError(f"{name}(prefix=): got no right; want right, such as 0")
        if allowed is not None:
            check_booleans(f"{name}(allowed=)", allowed)
        _want_alignment(type(self), align, lengths)
        values = align, allowed, documents, left, lengths, prefix, right  # as ``__slots__``
        for field, value in zip(Mask.__slots__, values, strict=True):
            object.__setattr__(self, field, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a mask cannot be changed; make another and combine with &")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: a mask cannot be changed; make another")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Fill a copied or unpickled mask: ``__init__`` has checked its fields."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "rowmax: a mask is neither true nor false; combine masks with & (not with `and`), "
            "and ask `mask is None` to find out whether there is one"
        )

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other)
        lengths = self.lengths, other.lengths, torch.minimum
        allowed = self.allowed, other.allowed, torch.logical_and
        return Mask(
            **both_bands(self.band, other.band)._asdict(),
            documents=self.documents + other.documents,
            lengths=both_tensors("PrefixLengths & PrefixLengths", *lengths),
            allowed=both_tensors("mask & mask", *allowed),
            align=one_alignment(self, other),
        )

    __rand__ = __and__

    def __or__(self, other: Mask | Tensor) -> Mask:
        try:
            return Mask(**union(self, as_mask(other)))
        except UnionError:
            raise TypeError(_INSTEAD_OF_UNIONS) from None

    __ror__ = __or__

    def __xor__(self, other: object) -> NoReturn:
        raise TypeError(_INSTEAD_OF_UNIONS)

    __rxor__ = __xor__

    def __invert__(self) -> Mask:
        try:
            return Mask(**complement(self))
        except UnionError:
            raise TypeError(_INSTEAD_OF_UNIONS) from None

    @property
    def band(self) -> Band:
        """The limits, with the prefix that ``right`` does not limit."""
        return Band(self.left, self.right, self.prefix)

    def fields(self) -> dict[str, Any]:
        """Return the arguments of ``Mask`` that make this mask."""
        return {name: getattr(self, name) for name in Mask.__slots__}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle ``tensor & mask``, which a compiler traces as this call; refuse the rest."""
        name = getattr(func, "__name__", None)
        if name in _OTHERS:
            raise TypeError(_INSTEAD_OF_UNIONS)
        if name not in (*_INTERSECTIONS, *_UNIONS):
            return NotImplemented
        a, b = args
        mask, other = (a, b) if isinstance(a, Mask) else (b, a)
        # not by an operator: a compiler traces one of a tensor as this call again
        return mask.__or__(other) if name in _UNIONS else mask.__and__(other)

    def __repr__(self) -> str:
        fields = [("left", self.left), ("right", self.right), ("prefix", self.prefix)]
        fields += [field for one in self.documents for field in one._asdict().items()]
        align = None if self.align == "keys" else repr(self.align)
        fields += [("lengths", self.lengths), ("align", align), ("allowed", self.allowed)]
        texts = (
            f"{name}={list(x.shape) if isinstance(x, Tensor) else x}"
            for name, x in fields
            if x is not None
        )
        return f"Mask({', '.join(texts)})"


class Causal(Mask):
    """A query sees its own position and those before it: ``j <= i + offset``.

    The offset is ``Nk - Nq``, or that of ``PrefixLengths(align="lengths")``.

    >>> import torch, rowmax
    >>> q = torch.randn(1, 8, 2, 16)
    >>> rowmax.attention(q, q, q, mask=rowmax.Causal()).shape
    torch.Size([1, 8, 2, 16])
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(right=0)


class Window(Mask):
    """A band: ``i + offset - left <= j <= i + offset + right``; ``None`` is no limit.

    The offset is ``Nk - Nq``, or that of ``PrefixLengths(align="lengths")``.

    Args:
        left: keys before the query's position that it sees, or None for all. Negative: not even
            its own position; -1 begins with the key after it.
        right: keys after it. 0 makes the window causal, -1 strictly causal: a query sees
            the positions before its own alone.

    A band may be empty (``Window(-1, -1)``): then out is 0 and lse -inf in every row.

    Raises:
        TypeError: a limit that is not an int.

    >>> import rowmax
    >>> rowmax.Window(left=128, right=0)
    Mask(left=128, right=0)
    """

    __slots__ = ()

    def __init__(self, left: int | None = None, right: int | None = None) -> None:
        super().__init__(left=left, right=right)


class Documents(Mask):
    """Only positions of the same document attend to each other.

    Args:
        ids: integers ``[N]`` or ``[B, N]``, the document of each key position (in any order).
            Without q_ids a query has the id of the key position ``i + Nk - Nq``.
        cu_seqlens: instead of ids, ``[documents + 1]`` offsets, 0 first, never falling, N last.
            On a GPU its values are not checked, because reading them waits for the device.
        q_ids: the documents of the queries, ``[Nq]`` or ``[B, Nq]``.
            ``PrefixLengths(align="lengths")`` needs them.

    Documents of one sequence, with as many queries as keys, are computed as packed sequences where
    that is faster: by offsets, and on a CPU by ids. Calls with dropout, a bias, a transform or
    another mask than a band are not.

    Raises:
        TypeError, ValueError: ids or offsets that are no integers, of another rank, or that fall.

    >>> import torch, rowmax
    >>> rowmax.Documents(torch.tensor([0, 0, 1, 1, 1]))
    Mask(ids=[5])
    """

    __slots__ = ()

    def __init__(
        self,
        ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        q_ids: Tensor | None = None,
    ) -> None:
        if (ids is None) == (cu_seqlens is None):
            raise TypeError(_ONE_OF_TWO)
        super().__init__(documents=(Ids(ids, cu_seqlens, q_ids),))


class PrefixLengths(Mask):
    """Sequence b of the batch has ``lengths[b]`` keys; those after are padding.

    Args:
        lengths: integers ``[B]``. A length past Nk counts as Nk.
        align: where queries stand among the keys, for causal, ``Window`` and ALiBi.
            "keys": query i at ``i + Nk - Nq``, whatever the lengths. It suits a batch padded on
            the right, whose queries have the same padding.
            "lengths": query i of sequence b at ``i + lengths[b] - Nq``, so that the last query
            stands at the last key in use. It suits a preallocated key-value cache: the result is
            that of the call with ``k[b, :lengths[b]]`` and ``v[b, :lengths[b]]``. Queries before
            position 0 see nothing under causal.

    Raises:
        TypeError, ValueError: lengths that are not integers ``[B]``, another align.

    >>> import torch, rowmax
    >>> rowmax.PrefixLengths(torch.tensor([3, 5]))
    Mask(lengths=[2])
    >>> q, cache = torch.randn(1, 4, 2, 8), torch.randn(1, 16, 2, 8)
    >>> mask = rowmax.PrefixLengths(torch.tensor([10]), align="lengths")
    >>> out = rowmax.attention(q, cache, cache, causal=True, mask=mask)
    >>> want = rowmax.attention(q, cache[:, :10], cache[:, :10], causal=True)
    >>> torch.allclose(out, want, atol=1e-6)
    True
    """

    __slots__ = ()

    def __init__(self, lengths: Tensor, *, align: str = "keys") -> None:
        if lengths is None:
            raise TypeError("PrefixLengths(lengths=): got None; want a tensor of int32 or int64")
        super().__init__(lengths=lengths, align=align)


class KeyPadding(Mask):
    """Keys of a padding mask are seen by no query: padding on the left, on the right, anywhere.

    Args:
        padding: bool ``[B, Nk]``, True at padding, as ``nn.MultiheadAttention`` has it.
        keep: instead of padding, True at the keys that are seen, as tokenizers return it
            (``attention_mask.bool()``).

    The value has the size of the mask, and tiles of padding alone are skipped. Where padding is
    only on the right, ``PrefixLengths`` is smaller; only on the left, ``LeftPadding``.

    Raises:
        TypeError, ValueError: a mask that is not bool ``[B, Nk]``, both masks or none.

    >>> import torch, rowmax
    >>> rowmax.KeyPadding(torch.tensor([[True, False, False], [False, False, True]]))
    Mask(ids=[2, 3], q_id=0)
    """

    __slots__ = ()

    def __init__(self, padding: Tensor | None = None, *, keep: Tensor | None = None) -> None:
        if (padding is None) == (keep is None):
            raise TypeError("KeyPadding: want either padding or keep, got both or neither")
        name, given = ("padding", padding) if keep is None else ("keep", keep)
        check_booleans(f"KeyPadding({name}=)", given)
        assert given is not None
        if given.dim() != 2:
            raise bad(f"KeyPadding({name}=)", f"shape {list(given.shape)}", "[B, Nk]")
        hidden = given if keep is None else ~given
        super().__init__(documents=(Ids(hidden.to(torch.int32), q_id=0),))


class Dilated(Mask):
    """A query sees the keys at multiples of ``step``: ``(i + offset - j) % step == 0``.

    It combines with ``Causal``, ``Window`` and ``PrefixLengths(align="lengths")``, whose offset it
    has. The value holds an id for each position; every tile that the band leaves is computed.

    Raises:
        TypeError, ValueError: a step that is no int of at least 1.

    >>> import rowmax
    >>> rowmax.Dilated(4) & rowmax.Causal()
    Mask(right=0, step=4)
    """

    __slots__ = ()

    def __init__(self, step: int) -> None:
        whole = as_int(step)
        if whole is None:
            raise wrong_type("Dilated(step=)", repr(step), "an int")
        if not 1 <= whole < 2**31:
            raise bad("Dilated(step=)", whole, "1 or more, of 32 bits")
        super().__init__(documents=() if whole == 1 else (Ids(step=whole),))


class LeftPadding(Mask):
    """Sequence b of the batch has its keys from ``starts[b]`` on; those before are padding.

    Batches of prompts of several lengths are padded so. The last query of each stands at the last
    key, as causal masks and windows have it. On the right, ``PrefixLengths`` pads.

    Args:
        starts: integers ``[B]``, the number of keys of padding; Nk or more leaves no key.

    Raises:
        TypeError, ValueError: starts that are not integers ``[B]``.

    >>> import torch, rowmax
    >>> q = torch.randn(2, 8, 2, 16)
    >>> mask = rowmax.LeftPadding(torch.tensor([0, 3]))
    >>> out = rowmax.attention(q, q, q, causal=True, mask=mask)
    >>> want = rowmax.attention(q[1:, 3:], q[1:, 3:], q[1:, 3:], causal=True)
    >>> torch.allclose(out[1:, 3:], want, atol=1e-6)
    True
    """

    __slots__ = ()

    def __init__(self, starts: Tensor) -> None:
        check_integers("LeftPadding(starts=)", starts, (1,))
        super().__init__(documents=(Ids(starts=starts, q_id=0),))


class Prefix(Mask):
    """A prefix that all queries see, then causal: ``j <= i + offset`` or ``j < lengths[b]``.

    Also called a prefix language model: an image or a prompt attends in both directions. Key tiles
    of the prefix need no mask; tiles above the diagonal and after it are skipped.

    Args:
        lengths: integers ``[B]``, the keys of each sequence's prefix; more than Nk means Nk.

    ``&`` intersects: with ``Window(left)`` a query loses the keys before its window, those of the
    prefix, too. With ``Causal()`` or ``causal=True`` what remains is causal. After
    ``PrefixLengths`` no padding is seen, and with ``align="lengths"`` the offset is its.

    Raises:
        TypeError, ValueError: lengths that are not integers ``[B]``; ``&`` with a window whose
            right limit is above 0.

    >>> import torch, rowmax
    >>> q = torch.randn(2, 8, 2, 16)
    >>> rowmax.attention(q, q, q, mask=rowmax.Prefix(torch.tensor([3, 5]))).shape
    torch.Size([2, 8, 2, 16])
    """

    __slots__ = ()

    def __init__(self, lengths: Tensor) -> None:
        check_integers("Prefix(lengths=)", lengths, (1,))
        super().__init__(right=0, prefix=lengths)


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Return the record of a mask, of a boolean tensor, or of None."""
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        raise TypeError(
            f"mask: got {got}; want a rowmax mask or a boolean tensor{_mask_hint(mask)}"
        )
    check_booleans("mask", mask)
    return Mask(allowed=mask)


# --- building records --------------------------------------------------------------------------


_ONE_OF_TWO = "Documents: want either ids or cu_seqlens, got both or neither"


def as_int(n: object) -> int | None:
    """Return n as a Python int, a symbolic integer unchanged, or None if n is no whole number.

    NumPy's integers are whole numbers. Booleans and tensors are not.
    """
    if isinstance(n, bool):
        return None
    if isinstance(n, (int, torch.SymInt)):
        return n  # pyright: ignore
    return operator.index(n) if isinstance(n, Integral) else None


def _limit(name: str, n: object) -> int | None:
    whole = as_int(n)
    if whole is None:
        raise TypeError(f"{name}: got {n!r}; want an int, or None for no limit")
    if whole >= _MOST:  # excludes no key, and its sum with a position may not fit in 64 bits
        return None
    return -_MOST if whole < -_MOST else whole


def _want_documents(name: str, documents: object) -> None:
    if type(documents) is not tuple or not all(isinstance(one, Ids) for one in documents):
        raise TypeError(
            f"{name}(documents=): got {type(documents).__name__}; want a tuple of Ids, as "
            "Documents(ids).documents is"
        )
    for ids, cu_seqlens, q_ids, q_id, step, starts in documents:
        others = any(x is not None for x in (ids, cu_seqlens, q_ids))
        if step is not None:
            if as_int(step) is None or step < 1 or others or q_id is not None:
                raise wrong_type("Documents(step=)", repr(step), "an int above 0, and no ids")
            continue
        if starts is not None:
            check_integers("LeftPadding(starts=)", starts, (1,))
            if others or q_id != 0:
                raise wrong_type("Documents(starts=)", "ids", "a q_id of 0, and no ids")
            continue
        if (ids is None) == (cu_seqlens is None):
            raise TypeError(_ONE_OF_TWO)
        if q_id is not None and (q_ids is not None or as_int(q_id) is None):
            raise wrong_type("Documents(q_id=)", repr(q_id), "an int, and no q_ids")
        if cu_seqlens is not None:
            check_integers("Documents(cu_seqlens=)", cu_seqlens, (1,))
            _want_offsets(cu_seqlens)
        else:
            check_integers("Documents(ids=)", ids, (1, 2))
        if q_ids is not None:
            check_integers("Documents(q_ids=)", q_ids, (1, 2))


def _mask_hint(x: object) -> str:
    """Return the end of an error: the mask that may have been meant."""
    if isinstance(x, type) and issubclass(x, Mask):
        return f", such as {x.__name__}({'' if x is Causal else '...'})"
    if isinstance(x, (tuple, list)) and len(x) == 2:
        return f", such as Window({x[0]!r}, {x[1]!r})"
    return ""


def _want_offsets(cu_seqlens: Tensor) -> None:
    if cu_seqlens.shape[0] < 2:
        got = f"{cu_seqlens.shape[0]} offsets"
        raise ValueError(f"Documents(cu_seqlens=): got {got}; want one more than documents")
    if not values_are_readable(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values[0] != 0 or values != sorted(values):
        raise ValueError(
            f"Documents(cu_seqlens=): got {values}; want offsets that start at 0 and never fall"
        )


def _want_alignment(of: type[Mask], align: object, lengths: Tensor | None) -> None:
    if not isinstance(align, str) or align not in ALIGNMENTS:
        error = ValueError if isinstance(align, str) else TypeError
        raise error(f"{of.__name__}(align=): got {align!r}; want 'keys' or 'lengths'")
    if align == "lengths" and lengths is None:
        raise ValueError(f"{of.__name__}(align=): got 'lengths' and no lengths; want lengths, too")
