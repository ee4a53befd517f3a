"""The public calls: the arguments of one device, rows of one rank."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..attention import CallOptions, arguments
from ..call.check import Arguments, Shape, check, check_offsets, check_tensors
from ..call.dispatch import check_named
from ..call.inputs import Options, Tensors, Wanted
from ..call.normalize import normalized, signature_of
from ..call.problem import problem_of
from ..errors import bad, check_device, check_flag, refuse_unexpected, wrong_type
from ..masks import Mask
from ..operators.autograd import attend as attend_here
from .agreement import refuse_together
from .calls import Place, ShardedCall, whole_rows
from .groups import Group, group_of
from .layout import Layout
from .offsets import Offsets, offsets_of, text_of
from .operators import attend
from .strategies import chosen, selected

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OPTIONS = frozenset(CallOptions.__annotations__)
_GRADIENTS = Wanted._fields
#: by the signature of a plain call, and everything else that decides: what its checks have found
_passed: dict[Any, tuple[Place, Options]] = {}
_LIMIT = 4096
_DOCUMENTS = "mask: Documents(cu_seqlens=)"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup | None = None,
    layout: Layout,
    k_layout: Layout | None = None,
    strategy: str = "auto",
    reduce_replicated: bool = False,
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over a sequence whose rows are distributed over the ranks of a group.

    The result of each row is that of ``rowmax.attention`` on one device: the same masks, positions
    and kept set of dropout. Every rank makes the call, and every rank runs the backward.

    Args:
        q: own rows ``[B, n, Hq, D]``, ``layout.lengths[rank]`` of them; k and v likewise, of
            ``k_layout``.
        mesh: a DeviceMesh of one dimension, a ProcessGroup, or None for the default group. Of two
            dimensions, the second one distributes heads, within a host, and the first one keys.
        layout: the rows of each rank; equal on all ranks.
        k_layout: those of k and v; None is ``layout``.
        strategy: "keys" gathers keys and values, "heads" exchanges rows for heads, "queries"
            gathers queries. "auto" is "queries" for few queries of many keys, else "keys". With a
            mesh of two dimensions it is that of the first one: not "heads".
        reduce_replicated: sum the gradients of replicated inputs over the ranks. They are sink,
            alibi and a bias with one row for all queries. False leaves each rank its share, as
            any parameter has it: data parallelism adds them.
        return_lse: also return lse ``[B, Hq, n]`` of own rows.
        options: those of ``rowmax.attention``. Masks are of the whole sequence. A boolean mask and
            a bias have own rows (or one row) and all columns: ``shard(bias, layout, mesh, dim=2)``.
            A seed of None is that of rank 0.

    Returns:
        out ``[B, n, Hq, Dv]`` of own rows, or (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts. On the first
            call of a kind ranks compare arguments, and all of them raise.
        NotImplementedError: second derivatives and forward mode, of more than one rank.
    """
    group = group_of(mesh)
    flags = strategy, reduce_replicated, return_lse
    local: dict[str, Any] = dict(options)
    given = (q, k, v), group, (layout, k_layout), flags, local
    try:
        place, tensors, rest = normalized_rows(*given)
    except (TypeError, ValueError) as error:
        refuse_together(group, error)
    if group.size == 1:
        # not ``rowmax.attention``: a context may compute that
        out, lse = attend_here(*normalized(arguments(q, k, v, **options)))
    else:
        out, lse = attend(place, tensors, rest)
    return (out, lse) if return_lse else out


def normalized_rows(
    rows: tuple[Tensor, Tensor, Tensor],
    group: Group,
    layouts: tuple[Layout, Layout | None],
    flags: tuple[str, bool, bool],
    options: dict[str, Any],
) -> tuple[Place, Tensors, Options]:
    """Return the checked inputs of the operator.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
    """
    unexpected = {name: x for name, x in options.items() if name not in _OPTIONS}
    if unexpected:
        refuse_unexpected("attention", (), unexpected)
    strategy, reduce_replicated, return_lse = flags
    check_flag("return_lse", return_lse)
    check_flag("reduce_replicated", reduce_replicated)
    queries, keys = check_layouts(*layouts, group)
    given = arguments(*rows, **options)
    values = _offsets(given, queries, keys)
    if values:
        given = given._replace(mask=_without_documents(given.mask))
    names = group.name, queries.text, keys.text, chosen(strategy)
    key = _plain(given), values, group, names, strategy, reduce_replicated
    passed = None if key[0] is None else _passed.get(key)
    if passed is not None:
        place, rest = passed
        return place, Tensors(given.q, given.k, given.v), rest
    check_tensors(given)
    _check_rows("q", given.q, queries, group.rank)
    _check_rows("k", given.k, keys, group.rank)
    if values:
        check_offsets(_DOCUMENTS, values, "the number of keys", keys.n)
    tensors, rest = _whole(given, queries, keys)
    drawn = tensors.seed is not None and given.seed is None
    place = Place(*names, reduce_replicated, drawn, text_of(values) if values else "")
    call = ShardedCall(place, tensors, rest, queries, keys, group)
    name = selected(strategy, call)
    if rest.backend is not None and not torch.compiler.is_compiling():
        _check_backend(call, rest.backend, name)
    place = place._replace(strategy=name)
    if key[0] is not None:
        if len(_passed) >= _LIMIT:
            _passed.clear()
        _passed[key] = place, rest
    return place, tensors, rest


def _plain(given: Arguments) -> Any:
    """Return all that the checks read of a call with q, k, v and numbers alone, else None."""
    found = signature_of(given)
    if found is None or given.q.is_meta:  # its sizes may be symbolic, and have no hash
        return None
    more = given.backend, given.mask.lengths, given.seed, given.dropout_p or None
    return found if more.count(None) == len(more) else None


def _check_backend(call: ShardedCall, backend: str, strategy: str) -> None:
    """Raise if the named backend refuses the call of all rows, or a gradient that is wanted.

    The calls that ranks make have the same terms and fewer rows. Where heads are distributed, fewer
    query heads may share a kv head, which decides about gradients: the backward checks those.
    """
    own, n, nk = call.tensors, call.queries.n, call.keys.n
    q, k, v = whole_rows(own.q, own.k, own.v, n, nk)
    pairs = {"bias": own.bias, "allowed": own.allowed}
    for name, t in pairs.items():
        if t is not None:
            rows = 1 if t.shape[2] < own.q.shape[1] else n
            pairs[name] = t.new_empty(()).expand(*t.shape[:2], rows, t.shape[3])
    problem = problem_of(own._replace(q=q, k=k, v=v, **pairs), call.options)
    same = strategy != "heads" and not call.group.parts and torch.is_grad_enabled()
    wanted = Wanted(*(same and t is not None and t.requires_grad for t in own[: len(_GRADIENTS)]))
    part = strategy == "queries" and call.group.size > 1
    check_named(problem._replace(part=part), backend, wanted)


def _offsets(given: Arguments, queries: Layout, keys: Layout) -> Offsets | None:
    """Return the offsets of the documents of a mask where the host knows them, else None."""
    mask = given.mask
    if len(mask.documents) != 1 or queries.n != keys.n or mask.align == "lengths":
        return None
    (one,) = mask.documents
    if one.cu_seqlens is None or one.q_ids is not None:
        return None
    if not isinstance(given.q, Tensor):  # the checks of tensors will refuse it
        return None
    check_device(_DOCUMENTS, one.cu_seqlens, given.q)
    return offsets_of(one.cu_seqlens) or None


def _without_documents(mask: Mask) -> Mask:
    """Return a mask without its documents."""
    others = mask.lengths, mask.prefix, mask.allowed
    if all(t is None for t in others) and mask.align == "keys":
        return _band_of(mask.left, mask.right)
    return Mask(**{**mask.fields(), "documents": ()})


@lru_cache(maxsize=64)
def _band_of(left: int | None, right: int | None) -> Mask:
    return Mask(left, right)


def _whole(given: Arguments, queries: Layout, keys: Layout) -> tuple[Tensors, Options]:
    """Return the inputs of the whole call, with own rows of q, k, v, bias and boolean mask."""
    q, k, v = whole_rows(given.q, given.k, given.v, queries.n, keys.n)
    mask, allowed = given.mask, given.mask.allowed
    if allowed is not None:
        mask = Mask(**{**mask.fields(), "allowed": None})
    # a bias and a boolean mask have own rows: they fit a call of own queries with all keys
    part = Arguments(given.q, k, v, Mask(allowed=allowed), given.bias)
    check(part, Shape(q.shape[0], q.shape[2], given.q.shape[1], keys.n))
    tensors, options, _ = normalized(given._replace(q=q, k=k, v=v, mask=mask, bias=None))
    own = {"q": given.q, "k": given.k, "v": given.v}
    own |= {"bias": _four_axes(given.bias), "allowed": _four_axes(allowed)}
    return tensors._replace(**own), options


def _four_axes(t: Tensor | None) -> Tensor | None:
    return None if t is None else t[(None,) * (4 - t.dim())]


def check_layouts(layout: Any, k_layout: Any, group: Group) -> tuple[Layout, Layout]:
    """Return the layouts of queries and of keys.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
    """
    found = []
    for name, one in (("layout", layout), ("k_layout", layout if k_layout is None else k_layout)):
        if not isinstance(one, Layout):
            raise wrong_type(name, type(one).__name__, "a Layout, such as Layout.zigzag(n, ranks)")
        if one.ranks != group.size:
            raise bad(name, f"{one.ranks} ranks", f"those of the group, {group.size}")
        found.append(one)
    return found[0], found[1]


def _check_rows(name: str, t: Tensor, layout: Layout, rank: int) -> None:
    want = layout.lengths[rank]
    if t.shape[1] != want:
        raise bad(name, f"{t.shape[1]} rows on rank {rank}", f"{want}, as the layout has")
