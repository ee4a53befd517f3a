"""Intersections, unions and complements of masks, part by part.

The parts of a mask are its band (left, right, prefix), its documents, its lengths and its boolean
tensor. An intersection intersects each part. A union is a mask where all parts but one agree and
that part has a union, or where one mask contains the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .masks import Mask


class Ids(NamedTuple):
    """The arguments of one ``Documents``: ids or offsets of the keys, and ids of the queries."""

    ids: Tensor | None = None  # [N] or [B, N]
    cu_seqlens: Tensor | None = None  # [documents + 1]
    q_ids: Tensor | None = None  # [Nq] or [B, Nq]; None: the id at the query's key position
    q_id: int | None = None  # the id of every query, instead of q_ids
    step: int | None = None  # instead of all others: ids are positions modulo step
    starts: Tensor | None = None  # [B], with a q_id of 0: the id of earlier keys is 1, of others 0


class Band(NamedTuple):
    """Keys from ``-left`` on, up to ``right`` or before ``prefix``, counted from the position."""

    left: int | None
    right: int | None
    prefix: Tensor | None = None

    @property
    def whole(self) -> bool:
        return self.left is None and self.right is None

    @property
    def empty(self) -> bool:
        """True if no position has a key in it."""
        if self.left is None or self.right is None or self.prefix is not None:
            return False
        return self.left + self.right < 0


class UnionError(Exception):
    """The union or complement of these masks is no mask."""


def both_bands(a: Band, b: Band) -> Band:
    """Return the intersection of two bands.

    A limit before or at that of a prefix removes the prefix: its keys lie within the limit's own.
    """
    left = _least(a.left, b.left)
    if a.prefix is None or b.prefix is None:
        one, other = (b, a) if a.prefix is None else (a, b)
        if one.prefix is None or one.right is None or other.right is None:
            return Band(left, _least(a.right, b.right), one.prefix)
        if other.right <= one.right:
            return Band(left, other.right)
        first = "Prefix" if one.right == 0 else f"Mask(right={one.right}, prefix=)"
        raise ValueError(
            f"{first} & Window(right={other.right}): got a right limit above {one.right}; want at "
            f"most {one.right}, or a boolean tensor"
        )
    if a.right != b.right:
        raise ValueError(
            f"Prefix & Prefix: got right={a.right} and right={b.right}; want the same in both"
        )
    return Band(left, a.right, both_tensors("Prefix & Prefix", a.prefix, b.prefix, torch.minimum))


def one_alignment(a: Mask, b: Mask) -> str:
    """Return the alignment of an intersection."""
    if a.lengths is None or b.lengths is None:
        return b.align if a.lengths is None else a.align
    if a.align != b.align:
        raise ValueError(
            f"PrefixLengths & PrefixLengths: got align={a.align!r} and align={b.align!r}; want "
            "the same in both"
        )
    return a.align


def both_tensors(
    name: str, a: Tensor | None, b: Tensor | None, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Return two tensors combined; the one that there is, of one and None.

    Only tensors of pairs broadcast: a single length belongs to a batch of one.
    """
    if a is None or b is None:
        return b if a is None else a
    sizes = zip(reversed(a.shape), reversed(b.shape), strict=False)
    pairs = a.dtype == torch.bool
    fit = all(m == n or 1 in (m, n) for m, n in sizes) if pairs else a.shape == b.shape
    if not fit or a.device != b.device:
        one, other = (f"{list(t.shape)} on {t.device}" for t in (a, b))
        raise ValueError(f"{name}: got {one} and {other}; want what fits together")
    return combine(a, b)


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


# --- unions ------------------------------------------------------------------------------------


def union(a: Mask, b: Mask) -> dict[str, Any]:
    """Return the fields of the mask that allows what a or b allows.

    Raises:
        UnionError: it is no mask.
    """
    for one, other in ((a, b), (b, a)):
        if _contains(one, other):
            return one.fields()
    band, documents, lengths, allowed = (
        not same for same in (_same_band(a.band, b.band), *_same_parts(a, b))
    )
    if lengths and "lengths" in (a.align, b.align):
        raise UnionError  # their positions differ
    fields = a.fields()
    if (band, documents, lengths, allowed) == (True, False, True, False):
        one, other = (a, b) if a.lengths is None else (b, a)
        if one.lengths is not None or not other.band.whole:
            raise UnionError
        found = union_of_bands(one.band, Band(None, None, other.lengths))
        return fields | {"lengths": None, "align": "keys"} | found._asdict()
    if band + documents + lengths + allowed != 1:
        raise UnionError
    if band:
        return fields | union_of_bands(a.band, b.band)._asdict()
    if documents:
        return fields | {"documents": _union_of_documents(a.documents, b.documents)}
    if lengths:
        name = "PrefixLengths | PrefixLengths"
        return fields | {"lengths": both_tensors(name, a.lengths, b.lengths, torch.maximum)}
    return fields | {"allowed": both_tensors("mask | mask", a.allowed, b.allowed, torch.logical_or)}


def _same_band(a: Band, b: Band) -> bool:
    return a[:2] == b[:2] and a.prefix is b.prefix


def _same_parts(a: Mask, b: Mask) -> tuple[bool, bool, bool]:
    """Return True for documents, lengths and the boolean tensor where both masks share them."""
    documents = len(a.documents) == len(b.documents) and _holds(a.documents, b.documents)
    lengths = a.lengths is b.lengths and a.align == b.align
    return documents, lengths, a.allowed is b.allowed


def _contains(a: Mask, b: Mask) -> bool:
    """Return True if a allows every pair that b allows."""
    if b.band.empty:
        return True
    documents, lengths, allowed = _same_parts(a, b)
    placed = a.align == b.align or a.band.whole  # else bands count from other positions
    return (
        placed
        and (a.align == "keys" or lengths)
        and _holds_band(a.band, b.band)
        and (documents or _holds(a.documents, b.documents))
        and (a.lengths is None or lengths)
        and (a.allowed is None or allowed)
    )


def _holds_band(a: Band, b: Band) -> bool:
    before = a.left is None or (b.left is not None and a.left >= b.left)
    if a.right is None:
        return before
    after = b.right is not None and a.right >= b.right
    return before and after and (b.prefix is None or a.prefix is b.prefix)


def _holds(few: tuple[Ids, ...], many: tuple[Ids, ...]) -> bool:
    """Return True if all of few are among many, each the same tensors."""
    return all(any(_same_ids(one, other) for other in many) for one in few)


def _same_ids(a: Ids, b: Ids) -> bool:
    return all(
        x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y)
        for x, y in zip(a, b, strict=True)
    )


def union_of_bands(a: Band, b: Band) -> Band:
    """Return the union of two bands that overlap or touch.

    ``Band(None, None, prefix)`` stands for the prefix alone.

    Raises:
        UnionError: they leave keys between them.
    """
    if a.left is not None and (b.left is None or b.left > a.left):
        a, b = b, a  # a begins first
    alone = next((x for x in (a, b) if x.right is None and x.prefix is not None), None)
    if alone is not None:
        a, b = alone, b if alone is a else a
        if b.left is not None or b.right is None:
            raise UnionError
        return Band(None, b.right, _longer(a.prefix, b.prefix))
    if a.right is not None and b.left is not None and a.right + 1 < -b.left:
        raise UnionError
    if a.right is None or b.right is None:
        return Band(a.left, None)
    return Band(a.left, max(a.right, b.right), _longer(a.prefix, b.prefix))


def _longer(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return both_tensors("Prefix | Prefix", a, b, torch.maximum)


def _union_of_documents(a: tuple[Ids, ...], b: tuple[Ids, ...]) -> tuple[Ids, ...]:
    """Return the union of two paddings, the only documents that have one."""
    if len(a) != 1 or len(b) != 1:
        raise UnionError
    hidden = both_tensors(
        "KeyPadding | KeyPadding", _hidden(a[0]), _hidden(b[0]), torch.logical_and
    )
    assert hidden is not None
    return (a[0]._replace(ids=hidden.to(torch.int32), q_id=0),)


def _hidden(one: Ids) -> Tensor:
    """Return True at the keys that no query sees, ``[B, N]``."""
    if one.q_id is None or one.ids is None:
        raise UnionError
    return one.ids != one.q_id


# --- complements -------------------------------------------------------------------------------


def complement(a: Mask) -> dict[str, Any]:
    """Return the fields of the mask that allows what a forbids.

    Raises:
        UnionError: it is no mask.
    """
    band, parts = a.band, (bool(a.documents), a.lengths is not None, a.allowed is not None)
    if band.empty:
        return {}
    if not any(parts):
        return _complement_of_band(band)._asdict()
    if sum(parts) > 1 or not band.whole or a.align == "lengths":
        raise UnionError
    if a.lengths is not None:
        return {"documents": (Ids(starts=a.lengths, q_id=0),)}
    if a.allowed is not None:
        return {"allowed": ~a.allowed}
    one, *more = a.documents
    if more:
        raise UnionError
    if one.starts is not None:
        return {"lengths": one.starts}
    return {"documents": (one._replace(ids=(~_hidden(one)).to(torch.int32), q_id=0),)}


def _complement_of_band(band: Band) -> Band:
    if band.whole:
        return Band(-1, -1)
    if band.prefix is not None:
        raise UnionError
    if band.left is None and band.right is not None:
        return Band(-band.right - 1, None)
    if band.right is None and band.left is not None:
        return Band(None, -band.left - 1)
    raise UnionError
