"""The checks of a call: each raises, or returns None. Nothing is checked twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import bad, check_dense, check_device, check_flag, check_integers, wrong_type
from ..masks import Ids, Mask, as_int
from ..torch_compat import assert_later, is_transformed, values_are_readable
from .dispatch import NAMES
from .inputs import HEAD_TERMS, Options, Positions, Tensors
from .problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 576  # keys of latent attention: 512 and 64 rotated
LARGEST = 1e30  # the largest scale and softcap: times a score, or divided, they stay within float32
LENGTHS = "mask: PrefixLengths(lengths=)"
IDS = "mask: Documents(ids=)"
STARTS = "mask: LeftPadding(starts=)"
#: the end of an error where ``[B, H, N, D]`` would have passed
HEADS_FIRST = "; the layout is [B, N, H, D]: pass transpose(1, 2) of q, k, v [B, H, N, D]"


class Arguments(NamedTuple):
    """The arguments of ``attention`` or, with ``cu_seqlens``, of ``attention_varlen``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Tensor | None = None
    heads: Mapping[str, Any] = MappingProxyType({})  # the head terms that are given
    scale: float | None = None
    softcap: float = 0.0
    sink: Tensor | None = None
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    deterministic: bool = False
    backend: str | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    max_seqlens: tuple[int | None, int | None] = (None, None)


def head_names(name: str) -> list[str]:
    """Return the names of the tensors of a head term, for errors."""
    parameters = HEAD_TERMS[name].parameters
    return [name] if len(parameters) == 1 else [f"{name} ({one})" for one in parameters]


def head_tensors(name: str, given: Any) -> tuple[Any, ...]:
    """Return the parameters of a head term: one is given alone, several as a tuple."""
    parameters = HEAD_TERMS[name].parameters
    if len(parameters) == 1:
        return (given,)
    if not isinstance(given, (tuple, list)) or len(given) != len(parameters):
        raise wrong_type(
            name, type(given).__name__, f"a tuple ({', '.join(parameters)}) of tensors"
        )
    return tuple(given)


class Shape(NamedTuple):
    """The sizes ``[B, Hq, Nq, Nk]`` of the scores of a call."""

    batch: int
    hq: int
    nq: int
    nk: int


def check(a: Arguments, shape: Shape) -> None:
    """Raise a TypeError or ValueError for the first argument that is wrong.

    Call ``check_tensors`` and ``check_packed`` first: ``shape`` is made of checked tensors.
    """
    q, mask = a.q, a.mask
    swapped = heads_first(a, shape)
    check_documents(a, shape, swapped)
    p = number("dropout_p", a.dropout_p)
    if not 0.0 <= p < 1.0:
        raise bad("dropout_p", p, "a probability in [0, 1)")
    check_flag("deterministic", a.deterministic)
    if a.scale is not None:
        scale = number("scale", a.scale)
        if not 0.0 <= scale <= LARGEST:  # only comparisons: traced sizes may be symbolic
            want = f"a finite number from 0 to {LARGEST:g}, or None for 1/sqrt(D)"
            raise bad("scale", scale, want)
    softcap = number("softcap", a.softcap)
    if not (softcap == 0.0 or 1 / LARGEST <= softcap <= LARGEST):
        want = f"0 (which turns it off) or a finite number from {1 / LARGEST:g} to {LARGEST:g}"
        raise bad("softcap", softcap, want)
    if a.backend is not None and a.backend not in NAMES:
        raise bad("backend", repr(a.backend), "None, or one of " + ", ".join(map(repr, NAMES)))
    _check_bias(q, a.bias, shape, swapped)
    _check_per_head("sink", a.sink, q)
    for name, given in a.heads.items():
        for one, t in zip(head_names(name), head_tensors(name, given), strict=True):
            _check_per_head(one, t, q)
    if mask.allowed is not None:
        check_device("mask", mask.allowed, q)
        _check_broadcast("mask", mask.allowed, shape, swapped)
    _check_lengths(LENGTHS, mask.lengths, shape, q)
    _check_lengths("mask: Prefix(lengths=)", mask.prefix, shape, q)
    check_seed(a.seed, q.device)


def heads_first(a: Arguments, shape: Shape) -> Shape | None:
    """Return the sizes of the scores if q and k were ``[B, H, N, D]``; None for a packed call.

    The call of such tensors is often valid: heads attend to heads. A mask, a bias or a sink of the
    intended sizes then fails, and its error can name the reason.
    """
    if a.cu_seqlens is not None:
        return None
    return Shape(shape.batch, shape.nq, shape.hq, a.k.shape[2])


# --- q, k, v -----------------------------------------------------------------------------------


def check_tensors(a: Arguments) -> None:
    """Raise unless q, k and v are tensors of matching shapes, dtypes and devices."""
    packed = a.cu_seqlens is not None
    want = "[total, H, D]" if packed else "[B, N, H, D]"
    for name, t in (("q", a.q), ("k", a.k), ("v", a.v)):
        _check_tensor(name, t, 3 if packed else 4, want)
    for name, t in (("k", a.k), ("v", a.v)):
        if t.dtype != a.q.dtype:
            raise wrong_type(name, t.dtype, f"the dtype of q, {a.q.dtype}")
        check_device(name, t, a.q)
    if packed:
        _check_heads(a.q[None], a.k[None], a.v[None], True)
    else:
        _check_heads(a.q, a.k, a.v, False)


def _check_tensor(name: str, t: object, dims: int, want: str) -> None:
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, f"a tensor {want}")
    if t.is_nested:
        want = "a dense (strided) tensor, or attention of jagged q, k and v [B, j, H, D]"
        raise wrong_type(name, "a nested tensor", want)
    check_dense(name, t)
    if t.dim() != dims:
        hint = f"; {name}[None] is a batch of one, attention_varlen takes packed sequences"
        raise bad(
            name,
            f"shape {list(t.shape)}",
            f"a {dims}-D tensor {want}" + hint * (dims == 4 and t.dim() == 3),
        )
    if t.dtype not in DTYPES:
        raise wrong_type(name, t.dtype, "float32, float16, bfloat16 or float64")


def _check_heads(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    b, nq, hq, d = q.shape
    bk, nk, hk, dk = k.shape
    bv, nv, hv, dv = v.shape
    if bk != b:
        raise bad("k", f"batch {bk}", f"the batch of q, {b}")
    if dk != d:
        raise bad("k", f"head size {dk}", f"the head size of q, {d}")
    if bv != bk or nv != nk or hv != hk:
        axes = "[total, H, D]" if packed else "[B, N, H, D]"
        got, want = list(v.shape[packed:]), list(k.shape[packed:-1])
        raise bad("v", f"shape {got}", f"{axes} with the leading sizes of k, {want}")
    if hk == 0 or hq == 0 or hq % hk:
        want = f"a multiple of the {hk} heads of k and v, at least one"
        # the lengths would be valid numbers of heads
        hint = HEADS_FIRST if not packed and 0 < nk <= nq and nq % nk == 0 else ""
        raise bad("q", f"{hq} heads", want + hint)
    for name, size in (("q", d), ("v", dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise bad(name, f"head size {size}", f"1 to {MAX_HEAD_DIM}")


# --- packed sequences --------------------------------------------------------------------------


def check_packed(a: Arguments) -> None:
    """Raise unless offsets and longest lengths fit q and k. Reads no values from a GPU."""
    assert a.cu_seqlens is not None
    cu_q, cu_k = a.cu_seqlens
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_integers(name, cu, (1,))
        check_device(name, cu, a.q)
        if cu.shape[0] < 1:
            raise bad(name, "no offsets", "one more than there are sequences")
    if cu_q.shape != cu_k.shape:
        want = f"as many offsets as cu_seqlens_q, {cu_q.shape[0]}"
        raise bad("cu_seqlens_k", f"{cu_k.shape[0]} offsets", want)
    if values_are_readable(cu_q):
        _check_offset_values("cu_seqlens_q", cu_q, "the packed length", a.q.shape[0])
        _check_offset_values("cu_seqlens_k", cu_k, "the packed length", a.k.shape[0])
    check_longest(a.max_seqlens, a.cu_seqlens)


def check_longest(max_seqlens: tuple[Any, Any], cu_seqlens: tuple[Tensor, Tensor]) -> None:
    """Raise unless the longest lengths are bounds of the sequences, or None."""
    for axis, given, cu in zip("qk", max_seqlens, cu_seqlens, strict=True):
        if given is not None:
            _check_longest(f"max_seqlen_{axis}", given, cu)


def check_packed_values(tensors: Tensors, options: Options) -> None:
    """Check the offsets of a traced call when it runs on a CPU: kernels index memory by them."""
    for axis, rows, cu, longest in (
        ("q", tensors.q, tensors.cu_seqlens_q, options.max_q),
        ("k", tensors.k, tensors.cu_seqlens_k, options.max_k),
    ):
        if cu is not None and cu.device.type == "cpu":
            _check_offset_values(f"cu_seqlens_{axis}", cu, "the packed length", rows.shape[1])
            _check_bound(f"max_seqlen_{axis}", longest, cu)


def longest_of(cu: Tensor) -> int:
    """Return the length of the longest sequence; reads the offsets."""
    return int(cu.diff().max()) if cu.shape[0] > 1 else 0


def _check_offset_values(name: str, cu: Tensor, what: str, last: int) -> None:
    check_offsets(name, cu.tolist(), what, last)


def check_offsets(name: str, values: Sequence[int], what: str, last: int) -> None:
    """Raise unless offsets begin with 0, never fall and end with ``last``."""
    if values[0] != 0:
        raise bad(name, f"first offset {values[0]}", "0")
    if any(a > b for a, b in pairwise(values)):
        n, (a, b) = next((n, pair) for n, pair in enumerate(pairwise(values)) if pair[1] < pair[0])
        raise bad(name, f"{b} after {a} at {n + 1}", "offsets that never fall")
    if values[-1] != last:
        raise bad(name, f"last offset {values[-1]}", f"{what}, {last}")


def _check_longest(name: str, given: int, cu: Tensor) -> None:
    bound = as_int(given)
    if bound is None:
        raise wrong_type(name, repr(given), "an int, or None")
    if bound < 0:
        raise bad(name, bound, "0 or more")
    if values_are_readable(cu):
        _check_bound(name, bound, cu)


def _check_bound(name: str, given: int, cu: Tensor) -> None:
    longest = longest_of(cu)
    if given < longest:
        raise bad(name, given, f"at least the longest sequence, {longest}")


# --- masks -------------------------------------------------------------------------------------


def check_documents(a: Arguments, shape: Shape, swapped: Shape | None) -> None:
    """Raise unless the documents of the mask, if any, fit the call."""
    if not a.mask.documents:
        return
    if a.cu_seqlens is not None:
        if any(one.step is not None for one in a.mask.documents):
            raise bad("mask", "Dilated in a packed call", "a padded batch, or a boolean tensor")
        if any(one.q_id is not None for one in a.mask.documents):
            raise bad("mask", "padding in a packed call", "none: packed keys have no padding")
        raise bad("mask", "Documents in a packed call", "none: cu_seqlens already separates")
    shared = (one.q_ids is one.q_id is one.step is None for one in a.mask.documents)
    if a.mask.align == "lengths" and any(shared):
        got = 'Documents without q_ids and PrefixLengths(align="lengths")'
        raise bad("mask", got, "q_ids as well: the id of each query")
    for one in a.mask.documents:
        _check_ids(one, shape, swapped, a.q)


def _check_ids(given: Ids, shape: Shape, swapped: Shape | None, q: Tensor) -> None:
    batch, _, nq, nk = shape
    if given.step is not None:
        return
    if given.starts is not None:
        _check_lengths(STARTS, given.starts, shape, q)
        return
    if given.q_id is not None and given.ids is not None:
        check_device("mask: KeyPadding", given.ids, q)
        if given.ids.shape not in ((batch, nk), (1, nk)):
            got = f"shape {list(given.ids.shape)}"
            hint = _layout_hint(swapped is not None and given.ids.shape[1] == swapped.nk)
            raise bad("mask: KeyPadding", got, f"[B, Nk] = [{batch}, {nk}]{hint}")
        return
    if given.ids is not None:
        other = None if swapped is None else swapped.nk
        _check_each_id(IDS, given.ids, (batch, nk), "keys", q, other)
    else:
        assert given.cu_seqlens is not None
        _check_document_offsets("mask: Documents(cu_seqlens=)", given.cu_seqlens, nk, q)
    if given.q_ids is not None:
        other = None if swapped is None else swapped.nq
        _check_each_id("mask: Documents(q_ids=)", given.q_ids, (batch, nq), "queries", q, other)
    elif nq > nk:
        raise bad("mask", f"Documents without q_ids, {nq} queries, {nk} keys", "q_ids as well")


def _check_document_offsets(name: str, cu: Tensor, nk: int, q: Tensor) -> None:
    check_device(name, cu, q)
    if values_are_readable(cu):
        _check_offset_values(name, cu, "the number of keys", nk)
    elif cu.device.type == "cpu" and not is_transformed():
        good = (cu[0] == 0) & (cu.diff() >= 0).all() & (cu[-1] == nk)
        assert_later(good, f"{name}: want offsets from 0 to the number of keys")


def _check_each_id(
    name: str, ids: Tensor, shape: tuple[int, int], of: str, q: Tensor, other: int | None
) -> None:
    """Check ids of B sequences of N positions; ``other`` is N of the layout ``[B, H, N, D]``."""
    batch, n = shape
    check_device(name, ids, q)
    sizes = (1, *ids.shape) if ids.dim() == 1 else ids.shape
    if sizes[0] not in (1, batch) or sizes[1] != n:
        hint = _layout_hint(sizes[0] in (1, batch) and sizes[1] == other)
        want = f"[{n}] or [{batch}, {n}], one id for all {of}{hint}"
        raise bad(name, f"shape {list(sizes)}", want)
    check_id_values(name, ids)


def check_id_values(name: str, ids: Tensor) -> None:
    """Raise unless ids fit in 32 bits. Where the host cannot read them the device checks."""
    if ids.dtype != torch.int64 or not ids.numel():
        return
    if values_are_readable(ids):
        low, high = (int(x) for x in ids.aminmax())
        if low < -(2**31) or high >= 2**31:
            raise bad(name, f"ids from {low} to {high}", "ids of 32 bits")
    elif not is_transformed():
        # checked on the device when it runs, because the host cannot read the values now
        short = ids.to(torch.int32)
        assert_later((ids == short).all(), f"{name}: want ids of 32 bits")


def _check_lengths(name: str, lengths: Tensor | None, shape: Shape, q: Tensor) -> None:
    if lengths is None:
        return
    check_device(name, lengths, q)
    if lengths.shape[0] != shape.batch:
        raise bad(name, f"{lengths.shape[0]} lengths", f"one for each of {shape.batch} sequences")
    check_length_values(name, lengths)


def check_length_values(name: str, lengths: Tensor) -> None:
    """Raise if a length is negative, where its value can be read without a wait."""
    if not values_are_readable(lengths):
        return
    # a list of a few takes a fifth of the time; of no elements a minimum raises
    few = lengths.numel() <= 64
    if min(lengths.tolist(), default=0) < 0 if few else int(lengths.min()) < 0:
        raise bad(name, lengths.tolist(), "lengths of 0 or more")


# --- score terms and numbers -------------------------------------------------------------------


def _check_bias(q: Tensor, bias: Tensor | None, shape: Shape, swapped: Shape | None) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise wrong_type("bias", type(bias).__name__, "a tensor, or None")
    check_dense("bias", bias)
    if bias.dtype == torch.bool:
        raise wrong_type("bias", "torch.bool", "numbers to add to the scores (mask= takes bools)")
    if bias.dtype not in (q.dtype, torch.float32):
        raise wrong_type("bias", bias.dtype, f"the dtype of q, {q.dtype}, or float32")
    check_device("bias", bias, q)
    _check_broadcast("bias", bias, shape, swapped)


def _check_per_head(name: str, t: Tensor | None, q: Tensor) -> None:
    if t is None:
        return
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, "a tensor [Hq], or None")
    check_dense(name, t)
    if not t.is_floating_point():
        raise wrong_type(name, t.dtype, "floating-point numbers")
    check_device(name, t, q)
    if t.shape != (q.shape[-2],):
        hint = _layout_hint(q.dim() == 4 and t.shape == (q.shape[1],))
        raise bad(name, f"shape {list(t.shape)}", f"[Hq] = [{q.shape[-2]}]{hint}")


def _layout_hint(fits: bool) -> str:
    """Return the end of an error whose tensor fits q, k and v of the layout ``[B, H, N, D]``."""
    return HEADS_FIRST if fits else ""


def _check_broadcast(name: str, t: Tensor, shape: Shape, swapped: Shape | None) -> None:
    if t.dim() > 4:
        raise bad(name, f"shape {list(t.shape)}", f"one that broadcasts to {list(shape)}")
    if not _broadcasts(t, shape):
        want = f"one that broadcasts to [B, Hq, Nq, Nk] = {list(shape)}"
        if name == "mask" and t.shape == (shape[0], shape[3]):
            want += (
                "; a padding mask [B, Nk] is KeyPadding(key_padding_mask), True at padding, or "
                "KeyPadding(keep=mask), True at the keys that are seen"
            )
        want += _layout_hint(swapped is not None and _broadcasts(t, swapped))
        raise bad(name, f"shape {list(t.shape)}", want)


def _broadcasts(t: Tensor, shape: Sequence[int]) -> bool:
    sizes = (1,) * (4 - t.dim()) + tuple(t.shape)
    return all(a in (1, b) for a, b in zip(sizes, shape, strict=True))


def check_seed(seed: Any, device: torch.device) -> None:
    """Raise unless seed is an integer of 64 bits, an int64 scalar on the device, or None."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise bad("seed", f"{seed.dtype} {list(seed.shape)}", "an int, or an int64 scalar")
        if seed.device != device:
            raise bad("seed", f"a tensor on {seed.device}", f"one on {device}, as q is")
    elif seed is not None:
        whole = as_int(seed)
        if whole is None:
            raise wrong_type("seed", type(seed).__name__, "an int, an int64 scalar, or None")
        if not -(2**63) <= whole < 2**63:
            raise bad("seed", whole, "an integer of 64 bits")


def check_positions(positions: Positions, problem: Problem) -> None:
    """Raise unless every position of the longer call is an integer that 32 bits hold."""
    lengths = {"query": problem.nq, "key": problem.nk, "head": problem.hq}
    lengths["sequence"] = problem.batch
    for name, given in positions._asdict().items():
        whole = as_int(given)
        if whole is None:
            raise wrong_type(name, repr(given), "an int")
        most = 2**31 - lengths.get(name, problem.nq + problem.nk)
        least = -most if name == "shift" else 0
        if not least <= whole <= most:
            raise bad(name, whole, f"{least} to {most}: 32 bits hold every position")


def number(name: str, x: Any) -> float:
    """Return a real number as a float, NumPy's too.

    Raises:
        TypeError: x is a boolean, or no number.
    """
    if isinstance(x, bool) or not isinstance(x, (int, float, Real)):
        hint = " (multiply q by a tensor)" if name == "scale" and isinstance(x, Tensor) else ""
        raise wrong_type(name, type(x).__name__, f"a Python number{hint}")
    try:
        return float(x)
    except OverflowError:  # an int too large for a float is refused like an infinite number
        return float("inf") if x > 0 else -float("inf")  # pyright: ignore[reportOperatorIssue]
