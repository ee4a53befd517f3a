"""Plain calls that were made before, found by one check in C.

A plain call has q, k and v, perhaps a bias, a sink, slopes, a boolean mask, lengths, ids or offsets
of documents, a band or none, and numbers.
``normalize`` reads twenty attributes of the tensors to know that a call passed the checks; here
torch compares them all at once. A call that is not found takes the usual way. Backwards of calls
with q, k and v alone are found likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..masks import WHOLE, Mask
from ..torch_compat import are_strided, is_observed, likeness_of

if TYPE_CHECKING:
    from .dispatch import Prepared

#: key of a call: (causal, scale, softcap, backend, deterministic, torch's deterministic mode), and
#: which terms there are
Key = tuple[Any, ...]
Found = TypeVar("Found")


class _Kind(NamedTuple):
    """Tensors of one kind, and what was found for them."""

    alike: Callable[..., bool]  # True for tensors like these
    begins: list[int]  # where each begins after a boundary of 16 bytes
    found: Any


class Recent(Generic[Found]):
    """Keep what was found for tensors of some kinds, by keys; the oldest are dropped."""

    __slots__ = ("_kinds",)
    MOST_KEYS, MOST_KINDS = 64, 8

    def __init__(self) -> None:
        self._kinds: dict[Key, list[_Kind]] = {}

    def recall(self, key: Key, *tensors: Tensor) -> Found | None:
        """Return what was remembered for tensors like these, unless the call is observed."""
        kinds = self._kinds.get(key)
        if kinds is None or not are_strided(tensors):
            return None
        for kind in kinds:  # a tensor of ``torch.func`` is like none of them, and has no address
            if kind.alike(*tensors) and _begins(tensors) == kind.begins:
                return None if is_observed() else kind.found
        return None

    def remember(self, key: Key, found: Found, *tensors: Tensor) -> None:
        """Keep what was found for tensors that passed the checks."""
        alike = likeness_of(*tensors) if are_strided(tensors) else None
        if alike is None:
            return
        if len(self._kinds) >= self.MOST_KEYS:
            self._kinds.clear()
        kinds = self._kinds.get(key, [])
        kind = _Kind(alike, _begins(tensors), found)
        self._kinds[key] = [kind, *kinds[: self.MOST_KINDS - 1]]


def _begins(tensors: tuple[Tensor, ...]) -> list[int]:
    """Return where the tensors begin: an operand off the boundary is copied, or has own kernels."""
    return [x.data_ptr() & 15 for x in tensors]


#: plain calls, with what they have prepared; those of packed sequences
calls: Recent[Prepared] = Recent()
packed_calls: Recent[Prepared] = Recent()


def key_of(
    causal: object,
    scale: object,
    softcap: object,
    dropout_p: object,
    backend: object,
    deterministic: object,
) -> Key | None:
    """Return the key of a call with these arguments, or None if a type is not the usual one.

    True equals 1 as a key, so types are compared.
    """
    if (
        type(causal) is not bool
        or type(deterministic) is not bool
        or type(softcap) is not float
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or not (scale is None or type(scale) is float)
        or not (backend is None or type(backend) is str)
        or torch.compiler.is_compiling()
    ):
        return None
    ordered = torch.are_deterministic_algorithms_enabled()
    return causal, scale, softcap, backend, deterministic, ordered


def limits_of(mask: object, documents: Tensor | None = None) -> Key | None:
    """Return the part of a key that a mask decides, or None if it has more than a band and tensors.

    The tensors are of the call: lengths, and those of ``documents_of``.
    """
    if not isinstance(mask, Mask):
        return None
    left, right = mask.left, mask.right
    if (
        (mask.documents and documents is None)
        or mask.prefix is not None
        or mask.allowed is not None
        or type(left) not in WHOLE
        or type(right) not in WHOLE
    ):
        return None
    by_ids = bool(mask.documents) and mask.documents[0].ids is not None
    return left, right, mask.align, by_ids


def documents_of(mask: object) -> Tensor | None:
    """Return the ids, or offsets, of the mask's documents on a GPU, if they have nothing else.

    On a CPU their values decide more: they are checked, and the longest document is found.
    """
    if not isinstance(mask, Mask) or len(mask.documents) != 1:
        return None
    ids, cu_seqlens, *others = mask.documents[0]
    found = cu_seqlens if ids is None else ids
    alone = all(x is None for x in others)
    return found if alone and found is not None and found.is_cuda else None


def with_terms(
    key: Key, rows: tuple[Tensor, ...], *terms: Tensor | None
) -> tuple[Key, tuple[Tensor, ...]]:
    """Return the key of a call with a bias, sink, slopes or tensors of a mask, and its tensors."""
    given = tuple(t for t in terms if t is not None)
    return (*key, *(t is None for t in terms)), (*rows, *given)


def of_packed(
    key: Key,
    rows: tuple[Tensor, ...],
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
) -> tuple[Key | None, tuple[Tensor, ...]]:
    """Return the key of a call of packed sequences, and its tensors.

    None where the longest sequence is read from offsets.
    """
    cu_q, cu_k = offsets
    max_q, max_k = longest
    if type(max_q) not in WHOLE or type(max_k) not in WHOLE or not isinstance(cu_q, Tensor):
        return None, rows
    if (max_q is None or max_k is None) and not cu_q.is_cuda:
        return None, rows
    # torch's check takes no tensor twice
    given = (cu_q,) if cu_k is cu_q else offsets
    return (*key, max_q, max_k, len(given)), (*rows, *given)
