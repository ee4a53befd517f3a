"""From the arguments of a user to the inputs and the problem of a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..masks import WHOLE, Ids, Mask, as_int
from ..rules.mask import both_documents, ids_of_offsets, offsets_of_ids
from ..torch_compat import (
    PLAIN,
    is_observed,
    is_transformed,
    plain_addresses,
    values_are_readable,
)
from .check import (
    IDS,
    LENGTHS,
    MAX_HEAD_DIM,
    STARTS,
    Arguments,
    Shape,
    check,
    check_documents,
    check_id_values,
    check_length_values,
    check_packed,
    check_seed,
    check_tensors,
    head_tensors,
    heads_first,
    longest_of,
    number,
)
from .dispatch import NARROW, Prepared, absence, packs, prepared
from .inputs import HEAD_TERMS, Options, Tensors
from .problem import reads_distance

#: types of the other arguments in a signature. bool is left out: True == 1 would hit the entry of 1
_USUAL = frozenset((float, int, str, type(None)))
#: by the signature of a call that passed the checks
_passed: dict[Any, Prepared] = {}
_LIMIT = 4096
#: the most queries of a sequence for which padding on a CPU is a boolean mask of keys. With 256 it
#: was 0.92 to 1.02 times as fast as ids, which skip tiles of padding
FEW_QUERIES = 128
#: on a GPU documents that are shorter on average have ids: a tile has rows of several
SHORT = 128


def normalized(a: Arguments) -> tuple[Tensors, Options, Prepared | None]:
    """Return the call of these arguments: inputs, options, and what calls like it have prepared.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
    """
    signature = signature_of(a)
    if signature is not None:
        try:
            passed = _passed.get(signature)
        except TypeError:  # a size of a meta tensor may be symbolic, and has no hash
            signature = passed = None
        if passed is not None:
            seed = None
            if a.seed is not None or passed.options.dropout_p:
                check_seed(a.seed, a.q.device)
                seed = _seed(a.seed, passed.options.dropout_p, a.q.device)
            lengths = a.mask.lengths
            if lengths is not None:
                lengths = checked_lengths(lengths, a.k.shape[1])
            return Tensors(a.q, a.k, a.v, seed=seed, lengths=lengths), passed.options, passed
    check_tensors(a)
    if a.cu_seqlens is not None:
        check_packed(a)
    shape = _shape(a)
    check(a, shape)
    options = _options(a, shape)
    tensors = _tensors(a, shape, options)
    if signature is None:
        return tensors, options, None
    if len(_passed) >= _LIMIT:
        _passed.clear()
    passed = _passed[signature] = prepared(tensors, options)
    return tensors, options, passed


def by_sequences(a: Arguments) -> Arguments:
    """Return the call of one sequence's documents as a call of packed sequences.

    That has tiles of each document, and no ids in memory. Documents have offsets, or ids whose
    values are readable, of positions that follow one another. Any other call is returned as it is:
    a bias, a mask and the counter of dropout have indices of the whole, some backends compute
    packed sequences one by one, and a GPU is slower if they are short. Limits and distances are the
    same within a document.

    Raises:
        TypeError, ValueError: q, k, v or the documents are wrong.
    """
    mask = a.mask
    if len(mask.documents) != 1:
        return a
    ids, cu, *more = mask.documents[0]
    others = a.cu_seqlens, a.bias, mask.prefix, mask.lengths, mask.allowed, *more
    if any(x is not None for x in others) or not (cu is not None or _are_readable(ids)):
        return a
    if number("dropout_p", a.dropout_p) != 0:
        return a
    check_tensors(a)
    if a.q.shape[0] != 1 or a.q.shape[1] != a.k.shape[1]:
        return a
    # a branch decides on sizes that are symbolic
    d = MAX_HEAD_DIM if max(a.q.shape[-1], a.v.shape[-1]) > NARROW else NARROW
    # vmap computes packed calls one by one
    if is_transformed() or not packs(a.backend, a.q.device, a.q.dtype, d):
        return a
    shape = _shape(a)
    check_documents(a, shape, heads_first(a, shape))
    if cu is None:
        assert ids is not None
        cu = offsets_of_ids(ids.flatten())
    if cu is None or (a.q.device.type != "cpu" and a.q.shape[1] < SHORT * (cu.shape[0] - 1)):
        return a
    rows = {name: t.squeeze(0) for name, t in zip("qkv", (a.q, a.k, a.v), strict=True)}
    return a._replace(**rows, mask=Mask(mask.left, mask.right), cu_seqlens=(cu, cu))


def keys_of(mask: object, q: object, k: object, backend: object) -> Tensor | None:
    """Return the keys that padding leaves, ``[B|1, 1, 1, Nk]``, for few queries on a CPU; or None.

    Such a boolean mask gives the same bits as ids. Ids have tables of tiles, which the host makes
    in each call.

    Raises:
        ValueError: the first key of a sequence is negative.
    """
    if not isinstance(mask, Mask) or len(mask.documents) != 1 or mask.allowed is not None:
        return None
    one = mask.documents[0]
    given = one.starts if one.ids is None else one.ids
    if one.q_id is None or given is None or not values_are_readable(given):
        return None
    if type(q) not in PLAIN or type(k) not in PLAIN:
        return None
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    few = q.is_cpu and q.dim() == k.dim() == 4 and q.shape[1] <= FEW_QUERIES
    if not few or backend not in (None, "cpu") or absence("cpu") is not None:
        return None
    if one.starts is not None:
        check_length_values(STARTS, one.starts)
    return (_key_ids(one, k.shape[1], k.device) == one.q_id)[:, None, None]


def without_documents(a: Arguments, keys: Tensor | None) -> Arguments:
    """Return a call with documents as one without them, where that is faster, or as it is.

    ``keys`` are those of ``keys_of``.

    Raises:
        TypeError, ValueError: q, k, v or the documents are wrong.
    """
    if keys is None:
        return by_sequences(a)
    check_tensors(a)
    shape = _shape(a)
    check_documents(a, shape, heads_first(a, shape))
    m = a.mask
    return a._replace(mask=Mask(m.left, m.right, (), m.lengths, keys, m.align, m.prefix))


def _are_readable(ids: Tensor | None) -> bool:
    return ids is not None and values_are_readable(ids)


def signature_of(a: Arguments) -> tuple[Any, ...] | None:
    """Return all that checks and launches read of a call with q, k, v, seed and lengths alone.

    None for any other call, for one that something observes, and for tensors that are not plain.
    The seed and the values of lengths are checked each time.
    """
    q, k, v, mask, bias, heads, scale, softcap, sink, dropout_p, seed, flag, backend, cu, _ = a
    left, right, lengths = mask.left, mask.right, mask.lengths
    if (
        bias is not None
        or heads
        or sink is not None
        or cu is not None
        or mask.documents
        or mask.prefix is not None
        or mask.allowed is not None
        or torch.compiler.is_compiling()
        or is_observed()
        or type(left) not in WHOLE
        or type(right) not in WHOLE
        or type(flag) is not bool
        or not (type(scale) in _USUAL and type(softcap) in _USUAL and type(dropout_p) in _USUAL)
        or not (backend is None or type(backend) is str)
        or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
    ):
        return None
    more = [t for t in (seed, lengths) if isinstance(t, Tensor)]
    begins = plain_addresses((q, k, v, *more))
    if begins is None or not all(type(t) in PLAIN for t in more):
        return None
    of_lengths = None
    if lengths is not None:
        of_lengths = lengths.dtype, lengths.device, lengths.size(), lengths.stride(), mask.align
    return (
        q.dtype, q.device, q.size(), q.stride(), k.dtype, k.device, k.size(), k.stride(),
        v.dtype, v.device, v.size(), v.stride(),
        # an operand off the boundary of 16 bytes is copied, or has a kernel of its own
        *[x & 15 for x in begins],
        left, right, of_lengths, scale, softcap, dropout_p, backend, flag,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _shape(a: Arguments) -> Shape:
    if a.cu_seqlens is None:
        return Shape(a.q.shape[0], a.q.shape[2], a.q.shape[1], a.k.shape[1])
    longest = (
        _longest(given, cu, t.shape[0])
        for given, cu, t in zip(a.max_seqlens, a.cu_seqlens, (a.q, a.k), strict=True)
    )
    return Shape(a.cu_seqlens[0].shape[0] - 1, a.q.shape[1], *longest)


def _longest(given: int | None, cu: Tensor, total: int) -> int:
    if given is not None:
        bound = as_int(given)
        assert bound is not None
        return bound
    return longest_of(cu) if values_are_readable(cu) else total


def _options(a: Arguments, shape: Shape) -> Options:
    mask = a.mask
    heads = _given(a)
    placed = mask.left is not None or mask.right is not None or reads_distance(heads)
    return Options(
        scale=1.0 / math.sqrt(a.q.shape[-1]) if a.scale is None else number("scale", a.scale),
        softcap=number("softcap", a.softcap),
        dropout_p=number("dropout_p", a.dropout_p),
        left=mask.left,
        right=mask.right,
        align=mask.align if placed else "keys",  # else nothing reads positions
        max_q=0 if a.cu_seqlens is None else shape.nq,
        max_k=0 if a.cu_seqlens is None else shape.nk,
        deterministic=a.deterministic or torch.are_deterministic_algorithms_enabled(),
        head_terms=",".join(heads),
        backend=a.backend,
    )


def _tensors(a: Arguments, shape: Shape, options: Options) -> Tensors:
    found = Tensors(a.q, a.k, a.v)
    if a.cu_seqlens is not None:
        found = of_sequences(Tensors(*(t[None] for t in found[:3])), a.cu_seqlens)
    lengths = _lengths(a.mask.lengths, shape.nk)
    q_ids, k_ids = _documents(a.mask, shape, lengths, a.q.device)
    accumulator = torch.float64 if a.q.dtype == torch.float64 else torch.float32
    return found._replace(
        bias=_four_axes(a.bias),
        sink=None if a.sink is None else a.sink.to(accumulator),
        heads=_heads(a, accumulator),
        allowed=_four_axes(a.mask.allowed),
        q_ids=q_ids,
        k_ids=k_ids,
        lengths=lengths,
        # after the checks, because it may draw: a call that fails leaves the generator as it was
        seed=_seed(a.seed, options.dropout_p, a.q.device),
        prefix=_lengths(a.mask.prefix, shape.nk),
    )


def with_documents(tensors: Tensors, mask: Mask, varlen: bool) -> Tensors:
    """Return tensors with the documents of ``recent.documents_of``, as ids or as packed sequences.

    The values of ids are checked where the host cannot read them.
    """
    ids, cu, *_ = mask.documents[0]
    if varlen:
        assert cu is not None
        return of_sequences(tensors, (cu, cu))
    if ids is not None:
        check_id_values(IDS, ids)
    shape = Shape(tensors.q.shape[0], tensors.q.shape[2], tensors.q.shape[1], tensors.k.shape[1])
    q_ids, k_ids = _documents(mask, shape, tensors.lengths, tensors.q.device)
    return tensors._replace(q_ids=q_ids, k_ids=k_ids)


def of_sequences(tensors: Tensors, cu_seqlens: tuple[Tensor, Tensor]) -> Tensors:
    """Return the tensors of one sequence as those of packed ones."""
    cu_q, cu_k = (cu.to(torch.int32).contiguous() for cu in cu_seqlens)
    return tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def _given(a: Arguments) -> tuple[str, ...]:
    """Return the names of the head terms of a call, in the order of their rows."""
    return tuple(name for name in HEAD_TERMS if name in a.heads)


def _heads(a: Arguments, dtype: torch.dtype) -> Tensor | None:
    """Return the parameters of all head terms, ``[P, Hq]``; autograd takes the rows apart again."""
    rows = [t.to(dtype) for name in _given(a) for t in head_tensors(name, a.heads[name])]
    if len(rows) < 2:
        return rows[0][None] if rows else None
    return torch.stack(rows)


def _four_axes(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.dim() == 4 else t[(None,) * (4 - t.dim())]


def checked_lengths(lengths: Tensor, nk: int) -> Tensor | None:
    """Return lengths as backends read them.

    Raises:
        ValueError: one is negative, where its value can be read without a wait.
    """
    check_length_values(LENGTHS, lengths)
    return _lengths(lengths, nk)


def _lengths(lengths: Tensor | None, nk: int) -> Tensor | None:
    if lengths is None or lengths.dtype == torch.int32:
        return lengths
    return lengths.clamp(max=nk).to(torch.int32)  # a length above nk means nk


def _documents(
    mask: Mask, shape: Shape, lengths: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return (q_ids ``[B|1, Nq]``, k_ids ``[B|1, Nk]``), int32, of all documents of the mask."""
    if not mask.documents:
        return None, None
    offset: int | Tensor = shape.nk - shape.nq
    if mask.align == "lengths" and lengths is not None:
        offset = lengths.clamp(0, shape.nk)[:, None] - shape.nq
    first, *others = (_ids(one, shape, offset, device) for one in mask.documents)
    for other in others:
        first = both_documents(first, other)
    return first


def _ids(
    given: Ids, shape: Shape, offset: int | Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (q_ids, k_ids); query i stands at the key position ``i + offset``."""
    if given.step is not None:
        i, j = (torch.arange(n, dtype=torch.int32, device=device) for n in (shape.nq, shape.nk))
        return (i[None] + offset) % given.step, j[None] % given.step
    k_ids = _key_ids(given, shape.nk, device)
    if given.q_ids is not None:
        return _two_axes(given.q_ids), k_ids
    if given.q_id is not None:
        return k_ids.new_full((1, shape.nq), given.q_id), k_ids
    return k_ids[:, shape.nk - shape.nq :], k_ids


def _key_ids(given: Ids, nk: int, device: torch.device) -> Tensor:
    """Return the ids of keys, int32 ``[B|1, Nk]``, of documents that are no dilation."""
    if given.starts is not None:
        return (torch.arange(nk, device=device) < given.starts[:, None]).to(torch.int32)
    if given.ids is not None:
        return _two_axes(given.ids)
    assert given.cu_seqlens is not None
    return ids_of_offsets(given.cu_seqlens, nk)


def _two_axes(ids: Tensor) -> Tensor:
    return (ids[None] if ids.dim() == 1 else ids).to(torch.int32)


def _seed(seed: Any, p: float, device: torch.device) -> Tensor | None:
    """Return the generator's key, an int64 scalar on the device, or None without dropout.

    A seed of None is drawn from torch's generator.
    """
    if p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), as_int(seed), dtype=torch.int64, device=device)  # pyright: ignore
