"""Masks: small values that say which keys a query may see, and which tiles hold any.

Every mask is one record: a band around the diagonal, documents, lengths and a boolean tensor,
all of which must allow a pair. The classes fill in one part each and ``&`` intersects records,
so a backend meets one form only.

Positions are aligned bottom-right: query ``i`` of ``Nq`` stands at key position
``i + Nk - Nq`` or, aligned to the lengths, at ``i + min(lengths[b], Nk) - Nq``. ``offset`` has
this rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

from .problem import Problem, Tensors

# What a backend does with a tile of (queries, keys).
SKIP, PARTIAL, FULL = 0, 1, 2

#: to which the positions of queries can be aligned
ALIGNMENTS = ("keys", "lengths")

_INTERSECTIONS = ("and_", "bitwise_and", "iand", "__and__", "__rand__", "__iand__")
_UNIONS = ("or_", "bitwise_or", "ior", "__or__", "__ror__", "__ior__")
_INSTEAD_OF_UNIONS = (
    "rowmax: masks have no |, ~ or ^; combine boolean tensors (mask=m1 | m2), or make a call for "
    "each part of the keys and merge the parts: merge((out1, lse1), (out2, lse2))"
)
_MOST = 2**32  # no two positions are as far apart as this


class Ids(NamedTuple):
    """The documents of one ``Documents``, as they were given: ids or offsets of the keys."""

    ids: Tensor | None = None  # [N] or [B, N]
    cu_seqlens: Tensor | None = None  # [documents + 1]
    q_ids: Tensor | None = None  # [Nq] or [B, Nq]; None: of the position where a query stands


class Mask:
    """Which pairs (query, key) may attend; immutable, composed with ``&``.

    Args:
        left, right: the band ``-left <= j - (i + offset) <= right``; see ``Window``.
        documents: each an ``Ids``; a pair has equal ids in all of them. Ids of offsets are made
            where the number of keys is known, with the other arguments of a call.
        lengths: integers ``[B]``, key ``j < lengths[b]``.
        allowed: bool, broadcast to ``[B, Hq, Nq, Nk]``; True may attend.
        align: the last query stands at the last key ("keys") or at the last key in use
            ("lengths", which needs lengths).

    ``None`` forbids nothing.

    Raises:
        TypeError, ValueError: naming the field, what came and what is wanted.
    """

    __slots__ = ("align", "allowed", "documents", "left", "lengths", "right")

    left: int | None
    right: int | None
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
    ) -> None:
        name = type(self).__name__
        if left is not None:
            left = _limit(f"{name}(left=)", left)
        if right is not None:
            right = _limit(f"{name}(right=)", right)
        _want_documents(name, documents)
        if lengths is not None:
            _want_integers(f"{name}(lengths=)", lengths, (1,))
        if allowed is not None:
            _want_booleans(f"{name}(allowed=)", allowed)
        _want_alignment(type(self), align, lengths)
        put = object.__setattr__
        put(self, "left", left)
        put(self, "right", right)
        put(self, "documents", documents)
        put(self, "lengths", lengths)
        put(self, "allowed", allowed)
        put(self, "align", align)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a mask cannot be changed; make another and combine with &")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: a mask cannot be changed; make another")

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Fill a copied or unpickled mask, which ``__init__`` has checked before."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "rowmax: a mask is neither true nor false; combine masks with & (not with `and`), "
            "and ask `mask is None` to find out whether there is one"
        )

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other)
        return Mask(
            left=_least(self.left, other.left),
            right=_least(self.right, other.right),
            documents=self.documents + other.documents,
            lengths=_both("PrefixLengths", self.lengths, other.lengths, torch.minimum),
            allowed=_both("mask", self.allowed, other.allowed, torch.logical_and),
            align=_one_alignment(self, other),
        )

    __rand__ = __and__

    def __or__(self, other: object) -> NoReturn:
        raise TypeError(_INSTEAD_OF_UNIONS)

    __ror__ = __xor__ = __rxor__ = __or__

    def __invert__(self) -> NoReturn:
        raise TypeError(_INSTEAD_OF_UNIONS)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``&`` with a tensor comes this way, too, where a compiler traces it; nothing else may."""
        name = getattr(func, "__name__", None)
        if name in _UNIONS:
            raise TypeError(_INSTEAD_OF_UNIONS)
        if name not in _INTERSECTIONS:
            return NotImplemented
        a, b = args
        return a.__and__(b) if isinstance(a, Mask) else b.__and__(a)

    def __repr__(self) -> str:
        fields = [("left", self.left), ("right", self.right)]
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
    """A query sees its own position and what came before: ``j <= i + offset``.

    The offset is ``Nk - Nq``, or what ``PrefixLengths(align="lengths")`` makes it.

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

    The offset is ``Nk - Nq``, or what ``PrefixLengths(align="lengths")`` makes it.

    Args:
        left: keys before the query's position that it sees, or None for all. Negative: not even
            its own position; -1 begins with the key after it.
        right: keys after it. 0 makes the window causal, -1 strictly causal: a query sees what
            came before its own position, which it does not see.

    A band may be empty (``Window(-1, -1)``): every row is then one of nothing, out 0 and lse -inf.

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
            On a GPU its values are not checked (that would wait for the device).
        q_ids: the documents of the queries, ``[Nq]`` or ``[B, Nq]``, where they are their own.
            ``PrefixLengths(align="lengths")`` needs them.

    Raises:
        TypeError, ValueError: what is not integers, of another rank, or falls.

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


def as_mask(mask: Mask | Tensor | None, name: str = "mask") -> Mask:
    """The record of a mask, of a boolean tensor, or of nothing."""
    if mask is None:
        return Mask()
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        raise TypeError(
            f"{name}: got {got}; want a rowmax mask or a boolean tensor{_mask_hint(mask)}"
        )
    _want_booleans(name, mask)
    return Mask(allowed=mask)


# --- the rules ---------------------------------------------------------------------------------


def offset(problem: Problem, tensors: Tensors) -> int | Tensor:
    """Return the key position of query 0; query i stands i further on.

    An int, or ``[B, 1, 1, 1]`` where positions are aligned to the lengths. Not of packed calls,
    whose sequences have offsets of their own.
    """
    if problem.align == "keys":
        return problem.offset
    assert tensors.lengths is not None
    used = tensors.lengths.to(torch.int64).clamp(0, problem.nk)
    return used[:, None, None, None] - problem.nq


def dense(problem: Problem, tensors: Tensors, start: int | Tensor | None = None) -> Tensor:
    """Every pair's permission, bool ``[B|1, Hq|1, Nq, Nk]``: the definition of a mask.

    ``start`` is the key position of query 0; None: as ``offset`` says.
    """
    device = tensors.q.device
    start = offset(problem, tensors) if start is None else start
    i = torch.arange(problem.nq, device=device)[:, None] + start
    j = torch.arange(problem.nk, device=device)[None, :]
    seen = torch.ones(1, 1, problem.nq, problem.nk, dtype=torch.bool, device=device)
    if problem.left is not None:
        seen = seen & (j >= i - problem.left)
    if problem.right is not None:
        seen = seen & (j <= i + problem.right)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        seen = seen & (tensors.q_ids[:, None, :, None] == tensors.k_ids[:, None, None, :])
    if tensors.lengths is not None:
        seen = seen & (j < tensors.lengths[:, None, None, None])
    if tensors.allowed is not None:
        seen = seen & tensors.allowed
    return seen


def tile_states(problem: Problem, tensors: Tensors, block_q: int, block_k: int) -> Tensor:
    """Each tile's state, uint8 ``[B|1, Hq|1, tiles of queries, tiles of keys]``.

    ``SKIP`` holds no allowed pair, ``FULL`` nothing but allowed pairs, ``PARTIAL`` is anything
    else: a tile may be called partial without need, never skipped or full without right.
    The map costs one byte a tile; a boolean tensor is read once to make it.
    """
    nq, nk, device = problem.nq, problem.nk, tensors.q.device
    i0 = torch.arange(0, nq, block_q, device=device)[:, None]
    j0 = torch.arange(0, nk, block_k, device=device)[None, :]
    i1 = (i0 + block_q).clamp(max=nq) - 1  # the last row and column of the tile
    j1 = (j0 + block_k).clamp(max=nk) - 1
    start = offset(problem, tensors)
    low, high = i0 + start, i1 + start
    some = torch.ones(1, 1, i0.shape[0], j0.shape[1], dtype=torch.bool, device=device)
    every = some.clone()
    if problem.left is not None:
        some = some & (j1 >= low - problem.left)
        every = every & (j0 >= high - problem.left)
    if problem.right is not None:
        some = some & (j0 <= high + problem.right)
        every = every & (j1 <= low + problem.right)
    if tensors.lengths is not None:
        lengths = tensors.lengths[:, None, None, None]
        some = some & (j0 < lengths)
        every = every & (j1 < lengths)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        q_low, q_high = _tile_range(tensors.q_ids, block_q)
        k_low, k_high = _tile_range(tensors.k_ids, block_k)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (k_low == q_high)
    if tensors.allowed is not None:
        any_allowed, all_allowed = _tile_any_all(problem, tensors.allowed, block_q, block_k)
        some = some & any_allowed
        every = every & all_allowed
    return some.to(torch.uint8) + (some & every).to(torch.uint8)


def _tile_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest id of each block, ``[B|1, blocks]``."""
    pad = -ids.shape[1] % block
    last = ids[:, -1:].expand(-1, pad)  # repeats an id that the block already has
    blocks = torch.cat([ids, last], 1).unflatten(1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def _tile_any_all(
    problem: Problem, allowed: Tensor, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Whether any and whether all of a boolean tensor's pairs are allowed, tile by tile."""
    allowed = distinct(allowed)
    return (
        _by_blocks(_by_blocks(allowed, 3, block_k, torch.any), 2, block_q, torch.any),
        _by_blocks(_by_blocks(allowed, 3, block_k, torch.all), 2, block_q, torch.all),
    )


def distinct(t: Tensor) -> Tensor:
    """View of a tensor in which every dimension that was expanded has the size 1.

    Maps of tiles are made of this view, so their shapes, and steps into them, follow it.
    """
    return t[tuple(slice(0, 1) if step == 0 else slice(None) for step in t.stride())]


def _by_blocks(t: Tensor, dim: int, block: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Each block along a dimension reduced to one; a dimension of 1 broadcasts and stays."""
    n = t.shape[dim]
    if n == 1:
        return t
    whole = n - n % block
    parts = reduce(t.narrow(dim, 0, whole).unflatten(dim, (-1, block)), dim + 1)
    if whole == n:
        return parts
    return torch.cat([parts, reduce(t.narrow(dim, whole, n - whole), dim, keepdim=True)], dim)


# --- building records --------------------------------------------------------------------------


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _one_alignment(a: Mask, b: Mask) -> str:
    if a.lengths is None or b.lengths is None:
        return b.align if a.lengths is None else a.align
    if a.align != b.align:
        raise ValueError(
            f"PrefixLengths & PrefixLengths: got align={a.align!r} and align={b.align!r}; want "
            "the same in both"
        )
    return a.align


def _both(
    name: str, a: Tensor | None, b: Tensor | None, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    sizes = zip(reversed(a.shape), reversed(b.shape), strict=False)
    fit = all(m == n or 1 in (m, n) for m, n in sizes) if name == "mask" else a.shape == b.shape
    if not fit or a.device != b.device:
        one, other = (f"{list(t.shape)} on {t.device}" for t in (a, b))
        raise ValueError(f"{name} & {name}: got {one} and {other}; want what fits together")
    return combine(a, b)


def ids_of_offsets(cu_seqlens: Tensor, n: int) -> Tensor:
    """The document of each of n positions, ``[1, n]``: [0, 2, 5] -> [0, 0, 1, 1, 1]."""
    starts = cu_seqlens[1:].clamp(0, n).to(torch.int64)
    begun = torch.zeros(n + 1, dtype=torch.int32, device=cu_seqlens.device)
    begun = begun.scatter_add(0, starts, torch.ones_like(starts, dtype=torch.int32))
    return begun.cumsum(0, dtype=torch.int32)[None, :n]


def both_documents(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of two int32 (q_ids, k_ids): ids that are equal exactly where both are.

    A pair's new id is its rank among the pairs of its sequence. Shapes do not depend on values,
    so that it is traced like everything else and waits for no device.
    """
    q_pairs, k_pairs = ((x.to(torch.int64) << 32) + y for x, y in zip(a, b, strict=True))
    batch = max(q_pairs.shape[0], k_pairs.shape[0])
    pairs = torch.cat([t.expand(batch, -1) for t in (q_pairs, k_pairs)], 1)
    values, order = pairs.sort(1)
    rank = torch.nn.functional.pad((values.diff(dim=1) != 0).cumsum(1), (1, 0))
    ids = torch.zeros_like(pairs).scatter(1, order, rank).to(torch.int32)
    nq = q_pairs.shape[1]
    return ids[:, :nq], ids[:, nq:]


def values_are_readable(t: Tensor) -> bool:
    """Whether values can be looked at for free: not on a GPU (a wait), not while tracing."""
    return (
        t.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # make_fx
        and type(t) in (Tensor, torch.nn.Parameter)
    )


def is_batched(t: Tensor | None) -> bool:
    """True inside ``vmap`` for a tensor that has a value for each slice: none can be looked at."""
    while t is not None and is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


_ONE_OF_TWO = "Documents: want either ids or cu_seqlens, got both or neither"


def as_int(n: object) -> int | None:
    """n as a Python int (symbolic ones stay as they are), or None where it is no whole number.

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
    if whole >= _MOST:  # past every key; added to a position it may not fit in 64 bits
        return None
    return -_MOST if whole < -_MOST else whole


def _want_documents(name: str, documents: object) -> None:
    if type(documents) is not tuple or not all(isinstance(one, Ids) for one in documents):
        raise TypeError(
            f"{name}(documents=): got {type(documents).__name__}; want a tuple of Ids, as "
            "Documents(ids).documents is"
        )
    for ids, cu_seqlens, q_ids in documents:
        if (ids is None) == (cu_seqlens is None):
            raise TypeError(_ONE_OF_TWO)
        if cu_seqlens is not None:
            _want_integers("Documents(cu_seqlens=)", cu_seqlens, (1,))
            _want_offsets(cu_seqlens)
        else:
            _want_integers("Documents(ids=)", ids, (1, 2))
        if q_ids is not None:
            _want_integers("Documents(q_ids=)", q_ids, (1, 2))


def _want_booleans(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}; want a boolean tensor")
    if t.dtype != torch.bool:
        raise TypeError(
            f"{name}: got a tensor of {t.dtype}; want torch.bool, True where a query may "
            "attend (an additive mask goes to bias=)"
        )
    if t.layout != torch.strided or t.is_nested:
        raise TypeError(f"{name}: got layout {t.layout}; want a dense (strided) tensor")


def _mask_hint(x: object) -> str:
    """The mask that the caller may have meant, to end an error with."""
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


def _want_integers(name: str, t: object, dims: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
        got = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: got {got}; want a tensor of int32 or int64")
    if t.layout != torch.strided or t.is_nested:
        raise TypeError(f"{name}: got layout {t.layout}; want a dense (strided) tensor")
    if t.dim() not in dims:
        want = " or ".join(f"{n}-D" for n in dims)
        raise ValueError(f"{name}: got shape {list(t.shape)}; want a {want} tensor")
