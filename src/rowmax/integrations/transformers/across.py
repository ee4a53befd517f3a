"""Masks of a model in ``rowmax.distributed.context_parallel``.

A model reads lengths, padding and positions of own rows. Here they become those of the whole
sequence, and masks without such a form raise.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

import rowmax

from ...symbols import UnknownRuleError
from .. import parallel
from .pattern import Band, Chunks, Place, Same, Term

_DOCUMENTS = "context_parallel(..., mask=rowmax.Documents(...))"


def whole_padding(
    context: Any, sizes: Any, padding: Tensor | None
) -> tuple[tuple[int, int], Tensor | None]:
    """Return (queries, keys) and the padding mask of the whole sequence, of those of own rows.

    Raises:
        NotImplementedError: a cache, or another number of keys.
    """
    queries, keys = context.layouts
    own = queries.lengths[context.group.rank]
    fresh = all(isinstance(x, int) and x == 0 for x in (sizes.q_offset, sizes.kv_offset))
    if not fresh or sizes.nq != own or sizes.nk not in (own, keys.n) or queries != keys:
        got = f"a mask of {sizes.nq} queries and {sizes.nk} keys, or a cache"
        _refuse(context, "attention_mask", got, f"own rows, {own}, of queries and of keys")
    if padding is None or padding.shape[-1] == keys.n or padding.dim() != 2:
        return (queries.n, keys.n), padding
    return (queries.n, keys.n), context.unshard(padding)


def of_whole(terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], bool]:
    """Return the terms that need no table of own rows, and True if there were packed sequences.

    Raises:
        UnknownRuleError: a table that is not of positions.
    """
    kept: list[Term] = []
    packs = False
    for term in terms:
        if isinstance(term, Same) and isinstance(term.key, Place):
            packs = True
        elif isinstance(term, Band):
            kept.append(term._replace(table=None))
        elif isinstance(term, Same) and isinstance(term.key, Chunks) and _is_index(term.key):
            kept.append(term)
        else:
            raise UnknownRuleError("a table of own rows")
    if packs and any(isinstance(term, Same) for term in kept):
        raise UnknownRuleError("chunks of packed sequences")
    return tuple(kept), packs


def _is_index(chunks: Chunks) -> bool:
    return chunks.starts is None and chunks.place.table is None


def refuse_pattern(context: Any, error: UnknownRuleError) -> None:
    """Raise for a mask function without a form of the whole sequence, if there is a context."""
    if context is not None:
        got = f"a mask function in context_parallel: {error}"
        want = f"bands, padding and packed sequences, or {_DOCUMENTS}"
        _refuse(context, "attention_mask", got, want)


#: (the position ids, their version, the context) of the last call, and its documents
_last: tuple[Any, ...] | None = None


@torch.compiler.disable  # it reads values: the graph breaks here
def documents(context: Any, positions: Any, packs: bool) -> rowmax.Mask | None:
    """Return the documents of the position ids of own rows, or None for one sequence.

    transformers finds packed sequences where position ids do not rise by one. Own rows also jump
    from chunk to chunk, so the position ids of all ranks are joined, once for all layers.

    Args:
        positions: ``[B or 1, n]`` of own rows, or None if the model does not pass them.
        packs: True if transformers found packed sequences in own rows.

    Raises:
        NotImplementedError: position ids of own rows that count from 0, and packed sequences that
            transformers does not separate.
    """
    global _last
    if context.mask is not None and context.mask.documents:
        return None
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        if packs or positions is not None:
            got = "none" if positions is None else f"{list(getattr(positions, 'shape', []))}"
            want = f"[B, n] in every layer, or an attention_mask of ones, or {_DOCUMENTS}"
            _refuse(context, "position_ids", got, want)
        return None
    version = -1 if positions.is_inference() else positions._version
    if _last is not None:
        seen, *rest, found = _last
        if seen() is positions and rest == [version, context]:  # on every rank alike
            return found
    found = _documents(context, positions, packs)
    _last = (weakref.ref(positions), version, context, found)
    return found


def _documents(context: Any, positions: Tensor, packs: bool) -> rowmax.Mask | None:
    # the last bit is ``packs``, which may differ between ranks
    both = context.unshard(positions.long() * 2 + packs)
    at, any_packs = both >> 1, bool((both & 1).any())
    begins = at.diff(prepend=at[:, :1] - 1) != 1
    jumps = begins.nonzero()
    if not len(jumps):
        return None
    if not any_packs and context.group.size == 1:
        return None  # as without a context
    row, j = jumps[0].tolist()
    if not any_packs or bool(at[begins].any()):
        got = f"{int(at[row, j])} at position {j} of the sequence, after {int(at[row, j - 1])}"
        want = (
            "layout.positions(rank); for packed sequences position ids that count from 0 in each, "
            f"with use_cache=False and no attention_mask, or {_DOCUMENTS}"
        )
        _refuse(context, "position_ids", got, want)
    if len(both) == 1:  # offsets, because the host can plan by them
        offsets = functional.pad(functional.pad(jumps[:, 1], (1, 0)), (0, 1), value=both.shape[1])
        return rowmax.Documents(cu_seqlens=offsets.to(torch.int32))
    return rowmax.Documents(begins.cumsum(1).to(torch.int32))


def check_mask(mask: Any, query: Tensor, key: Tensor) -> None:
    """Raise unless a mask value is of the lengths of a layer.

    Raises:
        ValueError: naming both lengths.
    """
    nq, nk = parallel.lengths(query.shape[2], key.shape[2])
    if (mask.sizes.nq, mask.sizes.nk) != (nq, nk):
        raise ValueError(
            f"attention_mask: got one of {mask.sizes.nq} queries and {mask.sizes.nk} keys; want "
            f"one of {nq} queries and {nk} keys, as this layer has"
        )


def _refuse(context: Any, name: str, got: str, want: str) -> NoReturn:
    error = NotImplementedError(f"{name}: got {got}; want {want}")
    context.refuse(error)
    raise error
