"""The mask of a model: a value with lengths and ids, made once for all layers of a type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

import rowmax

from ...symbols import UnknownRuleError
from .. import parallel
from . import across
from .pattern import Band, Chunks, InUse, Place, Same, Term, terms_of

_skips_full_masks = True


def skip_full_masks(enabled: bool = True) -> None:
    """Read each padding mask on a GPU once a model call, and drop it if it hides no token.

    It is on at first, as in transformers' own functions. Reading waits for the GPU. Off, nothing
    waits, and a mask without padding costs its ids in every layer. A mask on a CPU is always read.
    Masks are never read in compiled graphs, nor while a CUDA graph is captured.

    Raises:
        TypeError: enabled is not True or False.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: got {enabled!r}; want True or False")
    global _skips_full_masks
    _skips_full_masks = enabled


#: the id of keys that no query sees; no query has it
_NO_ID = -(2**31)


class Sizes(NamedTuple):
    """The sizes and first positions of the queries and keys of a model's call."""

    batch: int
    nq: int
    nk: int
    q_offset: int | Tensor  # a scalar on the device if the cache is static
    kv_offset: int

    def start(self, side: str) -> int | Tensor:
        return self.q_offset if side == "q" else self.kv_offset

    def count(self, side: str) -> int:
        return self.nq if side == "q" else self.nk


@dataclass(eq=False, repr=False)
class MaskValue:
    """The mask of one model call, given to layers instead of a tensor ``[B, 1, Nq, Nk]``.

    It has no element for a pair. ``mask()`` returns rowmax's mask. ``shape``, ``ndim``, ``dtype``,
    ``device``, ``to`` and ``contiguous`` are those of the boolean tensor, for code that reads them.
    An index, a logical operator and ``torch.where`` compute that tensor: ``dense()``. Arithmetic
    raises, because a model that adds its mask to scores does not call attention through rowmax.

    Args:
        sizes: of the call.
        device: of the tensors.
        left, right: the band, aligned bottom-right to the keys in use.
        ids: (k_ids ``[B, keys]``, q_ids ``[B, Nq]`` or ``[Nq]``), each int32; a pair needs equal
            ids in all.
        lengths: int32 ``[B]``, keys in use of a cache with a free end; the last query stands there.
        keys: only the first ``keys`` of Nk keys are read.
        offset: the key at which the first query stands, for ``dense``.
        packed: the ids separate packed sequences and nothing else.
        by_positions: across ranks, True if layers have to find packed sequences by their position
            ids, False if other ranks may, None if there are none.
    """

    sizes: Sizes
    device: torch.device
    left: int | None = None
    right: int | None = None
    ids: tuple[tuple[Tensor, Tensor], ...] = ()
    lengths: Tensor | None = None
    keys: int | None = None
    packed: bool = False
    by_positions: bool | None = None

    def __post_init__(self) -> None:
        # a compiler reads the fields: it would have to guard every field of a second object
        self.built = None if torch.compiler.is_compiling() else self._build()

    def mask(self) -> rowmax.Mask | None:
        """Return rowmax's mask for the first ``keys`` keys, or None if it allows every pair."""
        if torch.compiler.is_compiling():
            return self._build()
        return self.built

    def allows_all(self) -> bool:
        """Return True if no pair is hidden, as far as the host knows."""
        limits = (self.left, self.right, self.lengths, self.keys)
        return len(self.ids) == 0 and all(x is None for x in limits)

    def _build(self) -> rowmax.Mask | None:
        found: rowmax.Mask | None = None
        banded = self.left is not None or self.right is not None
        if banded:
            found = rowmax.Window(self.left, self.right)
        for k_ids, q_ids in self.ids:
            one = rowmax.Documents(k_ids, q_ids=q_ids)
            found = one if found is None else found & one
        if self.lengths is not None:
            one = rowmax.PrefixLengths(self.lengths, align="lengths" if banded else "keys")
            found = one if found is None else found & one
        return found

    def dense(self) -> Tensor:
        """Return the boolean tensor ``[B, 1, Nq, Nk]``, True where a query may attend."""
        batch, nq, nk, _, _ = self.sizes
        keys = nk if self.keys is None else self.keys
        i = torch.arange(nq, device=self.device)[:, None]
        j = torch.arange(nk, device=self.device)
        allowed = (j < keys).expand(batch, 1, nq, nk)
        offset: Any = keys - nq
        if self.lengths is not None:
            lengths = self.lengths[:, None, None, None]
            allowed, offset = allowed & (j < lengths), lengths.clamp(max=nk) - nq
        if self.left is not None:
            allowed = allowed & (j >= i + offset - self.left)
        if self.right is not None:
            allowed = allowed & (j <= i + offset + self.right)
        for k_ids, q_ids in self.ids:
            k_ids = torch.nn.functional.pad(k_ids, (0, nk - keys), value=_NO_ID)
            allowed = allowed & (q_ids[..., :, None] == k_ids[:, None, :])[:, None]
        return allowed

    # --- what code reads of a mask that is a tensor ---------------------------------------------

    ndim = 4
    dtype = torch.bool
    requires_grad = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.sizes.batch, 1, self.sizes.nq, self.sizes.nk))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 4

    def contiguous(self, *_: Any, **__: Any) -> MaskValue:
        return self

    def to(self, *args: Any, **options: Any) -> Any:
        """Return the value on another device. Another dtype is one of the boolean tensor."""
        for x in (*args, *options.values()):
            if isinstance(x, torch.dtype) and x != torch.bool:
                return self.dense().to(*args, **options)
        options.pop("dtype", None)
        args = tuple(x for x in args if not isinstance(x, torch.dtype))

        def moved(t: Any) -> Any:
            return t.to(*args, **options) if isinstance(t, Tensor) else t

        device = moved(torch.empty(0, device=self.device)).device
        if device == self.device:
            return self
        sizes = self.sizes._replace(q_offset=moved(self.sizes.q_offset))
        ids = tuple((moved(k), moved(q)) for k, q in self.ids)
        return replace(self, sizes=sizes, device=device, ids=ids, lengths=moved(self.lengths))

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __and__(self, other: Any) -> Tensor:
        return self.dense() & _as_tensor(other)

    def __or__(self, other: Any) -> Tensor:
        return self.dense() | _as_tensor(other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Tensor:
        return ~self.dense()

    def _arithmetic(self, *_: Any) -> NoReturn:
        _refuse("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = _arithmetic

    def __repr__(self) -> str:
        return f"MaskValue({list(self.shape)}, {self.mask()})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give the boolean tensor to functions that combine masks; refuse arithmetic."""
        name = getattr(func, "__name__", str(func)).strip("_")
        if name not in _COMBINE:
            _refuse(f"torch's {name}")
        args = tuple(_as_tensor(x) for x in args)
        return func(*args, **{key: _as_tensor(x) for key, x in (kwargs or {}).items()})


#: functions that take a boolean mask, by their names without outer underscores
_COMBINE = frozenset(
    ["where", "masked_fill", "cat", "concat", "all", "any", "and", "rand", "or", "ror"]
    + [f"{kind}_{word}" for kind in ("logical", "bitwise") for word in ("and", "or", "not")]
)


def _refuse(function: str) -> NoReturn:
    raise TypeError(
        f"attention_mask: {function} got a mask of rowmax, which is no tensor; this model "
        'computes with its mask itself: use attn_implementation="sdpa" or "eager"'
    )


def _as_tensor(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(_as_tensor(y) for y in x)
    return x.dense() if isinstance(x, MaskValue) else x


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> MaskValue | Tensor | None:
    """Return the mask of a model's call: transformers' mask function of ``"rowmax"``.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: of queries and keys; a static cache
            gives q_offset as a scalar on the device. No value of a GPU is read.
        mask_function: of (sequence, head, query, key), as transformers composes it.
        attention_mask: bool ``[B, keys seen]``, False at padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: False if the model computes with its
            mask: then it gets the boolean tensor.
        use_vmap, device, more: as transformers' other mask functions get them.

    Returns:
        A ``MaskValue``; None if every pair may attend; a boolean tensor ``[B, 1, Nq, Nk]`` for a
        mask function that is no intersection of bands, chunks, packed sequences and padding. In
        ``context_parallel`` the value is of the whole sequence.

    Raises:
        NotImplementedError: in ``context_parallel``, a mask without a form of the whole sequence.
    """
    if isinstance(attention_mask, MaskValue):  # made before, such as by generate()
        return attention_mask
    sizes = Sizes(batch_size, q_length, kv_length, q_offset, kv_offset)
    device = torch.device(device)
    bidirectional = allow_is_bidirectional_skip is not None
    by_positions = None
    context = parallel.context()
    if context is not None:
        if attention_mask is None and not bidirectional:
            by_positions = False
        whole, attention_mask = across.whole_padding(context, sizes, attention_mask)
        sizes = sizes._replace(nq=whole[0], nk=whole[1])
    try:
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UnknownRuleError("a padding mask that is not [B, Nk]")
        terms = terms_of(mask_function)
        if not use_vmap and _is_computed_with(
            terms, sizes, allow_is_bidirectional_skip if bidirectional else allow_is_causal_skip
        ):
            raise UnknownRuleError("the model computes with its mask")
        if context is not None:
            terms, packs = across.of_whole(terms)
            by_positions = packs or by_positions
        full = attention_mask is not None and _hides_nothing(attention_mask, sizes)
        found = value_of(terms, sizes, device, None if full else attention_mask)
    except UnknownRuleError as error:
        across.refuse_pattern(context, error)
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # pyright: ignore
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    found.by_positions = by_positions
    return None if bidirectional and found.allows_all() else found


def _is_computed_with(terms: tuple[Term, ...], sizes: Sizes, skip: bool | None) -> bool:
    """Return True if the model has to get a tensor.

    transformers also forbids the skip where it packs, and where a compiled model decodes.
    """
    packs = any(isinstance(term, Same) and isinstance(term.key, Place) for term in terms)
    return not skip and not packs and sizes.nq > 1


def _hides_nothing(padding: Tensor, sizes: Sizes) -> bool:
    """Return True if a padding mask is read and is True at every key that a query may reach."""
    offset, reach = sizes.q_offset, sizes.kv_offset + sizes.nk
    if type(padding) is not Tensor or is_tracing(padding):
        return False
    if padding.is_meta or not (_skips_full_masks or padding.device.type == "cpu"):
        return False
    if padding.shape[1] < reach or isinstance(offset, Tensor):
        return False
    if padding.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(padding[:, sizes.kv_offset : reach].all())


def value_of(
    terms: tuple[Term, ...], sizes: Sizes, device: torch.device, padding: Tensor | None
) -> MaskValue:
    """Return the value of terms and of a padding mask ``[B, keys seen]``.

    Raises:
        UnknownRuleError: a value cannot express them.
    """
    same = [term for term in terms if isinstance(term, Same)]
    left, right = _band(terms, same, sizes)
    tables = [term.table for term in terms if isinstance(term, InUse)]
    tables += [] if padding is None else [padding.to(device=device, dtype=torch.bool)]
    in_use = None
    for table in tables:
        one = _entries(table, sizes, "k", device)
        in_use = one if in_use is None else in_use & one
    ids = [
        (_ids(term.key, sizes, "k", device), _ids(term.query, sizes, "q", device)) for term in same
    ]
    if in_use is not None and ids:
        k_ids, q_ids = ids[0]
        ids[0] = torch.where(in_use, k_ids, _NO_ID), q_ids
    elif in_use is not None:
        zeros = torch.zeros(sizes.nq, dtype=torch.int32, device=device)
        ids = [((~in_use).to(torch.int32), zeros)]
    packed = not tables and all(isinstance(term.key, Place) for term in same)
    left, right, lengths, keys = _aligned(left, right, sizes, device)
    if keys is not None:
        ids = [(k_ids[:, :keys], q_ids) for k_ids, q_ids in ids]
    return MaskValue(sizes, device, left, right, tuple(ids), lengths, keys, packed)


def _band(terms: tuple[Term, ...], same: list[Same], sizes: Sizes) -> tuple[int | None, int | None]:
    """Return the intersection of all bands, of positions in the longest call."""
    left: int | None = None
    right: int | None = None
    for term in terms:
        if not isinstance(term, Band):
            continue
        if term.table is not None and not _is_packed(term.table, same, sizes):
            raise UnknownRuleError("a band of positions that are not those of packed sequences")
        if term.left is not None:
            left = term.left if left is None else min(left, term.left)
        if term.right is not None:
            right = term.right if right is None else min(right, term.right)
    return left, right


def _is_packed(positions: Tensor, same: list[Same], sizes: Sizes) -> bool:
    """Return True if ids of packed sequences come with the positions.

    transformers makes the ids of the positions: they rise by one within a sequence, so the
    distance of two positions is that of their indices.
    """
    return (
        isinstance(sizes.q_offset, int)
        and sizes.q_offset == 0 == sizes.kv_offset
        and sizes.nq == sizes.nk
        and any(
            isinstance(term.key, Place)
            and term.key.table is not None
            and term.key.table.shape == positions.shape
            for term in same
        )
    )


def _aligned(
    left: int | None, right: int | None, sizes: Sizes, device: torch.device
) -> tuple[int | None, int | None, Tensor | None, int | None]:
    """Return (left, right, lengths, keys) with the band aligned bottom-right to keys in use.

    Query i stands at key ``i + start``. A static cache has free places after the last query.
    """
    batch, nq, nk, q_offset, kv_offset = sizes
    if left is None and right is None:
        return None, None, None, None
    if isinstance(q_offset, Tensor):
        lengths = (q_offset.to(device).reshape(1) + (nq - kv_offset)).to(torch.int32).repeat(batch)
    else:
        last = q_offset - kv_offset + nq  # past the last query's place
        reach = nk if right is None else last + right
        whole = last == nk or right is None or reach < 0
        if whole or nq > 1 or right != 0:
            keys = nk if whole else min(nk, reach)
            # the last query stands at the last of the keys; a limit past all of them hides none
            shift = last - keys
            left = None if left is None or left - shift >= keys - 1 else left - shift
            right = None if right is None or right + shift >= nq - 1 else right + shift
            return left, right, None, keys if keys < nk else None
        lengths = torch.full((batch,), last, dtype=torch.int32, device=device)
    if right != 0:
        raise UnknownRuleError("a band past the last query of a static cache")
    left = None if left is not None and left >= nk - 1 else left
    if nq == 1 and left is None:  # the length alone hides the keys after the query
        right = None
    return left, right, lengths, None


def _entries(table: Tensor, sizes: Sizes, side: str, device: torch.device) -> Tensor:
    """Return a table's entries ``[B, N]`` at the queries or keys; False or 0 past its end."""
    start, n = sizes.start(side), sizes.count(side)
    if isinstance(start, Tensor):
        at = (torch.arange(n, device=device) + start.to(device)).clamp(max=table.shape[1] - 1)
        found = table.to(device).index_select(1, at)
    else:
        found = table.to(device)[:, start : start + n]
        if found.shape[1] < n:
            if side == "q" or table.dtype != torch.bool:
                raise UnknownRuleError("a table that ends before the last index")
            found = torch.nn.functional.pad(found, (0, n - found.shape[1]))
    return found.expand(sizes.batch, n)


def _ids(of: Place | Chunks, sizes: Sizes, side: str, device: torch.device) -> Tensor:
    """Return the ids ``[B, N]``, int32, of the queries or keys."""
    if isinstance(of, Place):
        assert of.table is not None
        return _entries(of.table, sizes, side, device).to(torch.int32).contiguous()
    place = of.place
    if place.table is None:
        at = torch.arange(sizes.count(side), device=device) + sizes.start(side)
    else:
        at = _entries(place.table, sizes, side, device)
    at = at + place.shift
    if of.starts is not None:
        at = at - of.starts.to(device)[:, None]
    ids = (at // of.size).to(torch.int32)
    return ids.expand(sizes.batch, sizes.count(side)).contiguous()
