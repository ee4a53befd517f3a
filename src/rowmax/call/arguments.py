"""The checks of every public function: what is wrong, in the user's own terms.

Each check names the argument, what came and what is wanted, and runs before any work. What
passes here is never checked again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..masks import Ids, Mask, as_int
from ..rules.mask import both_documents, ids_of_offsets
from ..torch_compat import values_are_readable
from .dispatch import NAMES
from .problem import Options, Problem, Tensors, problem_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 512
LARGEST = 1e30  # of scale and softcap: their quotient and product with a score are to be float32

#: the types of tensors that are nothing but numbers
PLAIN = frozenset((Tensor, torch.nn.Parameter))
#: of other arguments; not bool, for True is equal to 1 and not as good
_USUAL = frozenset((float, int, str, type(None)))
#: of limits: a symbolic one has no hash
_WHOLE = frozenset((int, type(None)))
#: what calls that have passed came to, by their ``_signature``
_passed: dict[Any, tuple[Options, Problem]] = {}
_LIMIT = 4096


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    bias: Tensor | None,
    alibi: Tensor | None,
    scale: float | None,
    softcap: float,
    sink: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    deterministic: bool,
    backend: str | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    max_seqlens: tuple[int | None, int | None] = (None, None),
) -> tuple[Tensors, Options, Problem | None]:
    """The arguments of a call in the form that operators take, or an error.

    With the problem that they pose, if that is known from a call like this one.
    """
    signature = passed = None
    if bias is None and alibi is None and sink is None and cu_seqlens is None:
        numbers = scale, softcap, dropout_p
        signature = _signature(q, k, v, mask, numbers, deterministic, backend)
    if signature is not None:
        try:
            passed = _passed.get(signature)
        except TypeError:  # a size is symbolic, as one of a meta tensor may be, and has no hash
            signature = None
    if passed is not None:
        seed = _checked_seed(seed, passed[0].dropout_p, q.device)
        return Tensors(q, k, v, seed=seed), *passed
    packed = cu_seqlens is not None
    want = "[total, H, D]" if packed else "[B, N, H, D]"
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t, 3 if packed else 4, want)
    check_like_q(q, k, v)
    if packed:
        q, k, v = q[None], k[None], v[None]
    _check_heads(q, k, v, packed)
    batch, nq, nk = q.shape[0], q.shape[1], k.shape[1]
    cu_q = cu_k = None
    max_q = max_k = 0
    if packed:
        cu_q, cu_k = _checked_offsets(q, k, cu_seqlens)
        batch = cu_q.shape[0] - 1
        max_q = nq = _longest("max_seqlen_q", max_seqlens[0], cu_q, nq)
        max_k = nk = _longest("max_seqlen_k", max_seqlens[1], cu_k, nk)
    hq = q.shape[2]
    shape = (batch, hq, nq, nk)
    q_ids, k_ids = _checked_documents(q, mask, shape, packed)
    dropout_p = _number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise bad("dropout_p", dropout_p, "a probability in [0, 1)")
    check_flag("deterministic", deterministic)
    placed = mask.left is not None or mask.right is not None or alibi is not None
    options = Options(
        scale=_checked_scale(scale, q.shape[3]),
        softcap=_checked_softcap(softcap),
        dropout_p=dropout_p,
        left=mask.left,
        right=mask.right,
        align=mask.align if placed else "keys",  # else nothing reads positions
        max_q=max_q,
        max_k=max_k,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        backend=_checked_backend(backend),
    )
    tensors = Tensors(
        q=q,
        k=k,
        v=v,
        bias=_checked_bias(q, bias, shape),
        sink=_per_head("sink", sink, q),
        alibi=_per_head("alibi", alibi, q, gradient=False),
        allowed=_checked_allowed(q, mask.allowed, shape),
        q_ids=q_ids,
        k_ids=k_ids,
        lengths=_checked_lengths(q, mask.lengths, batch, nk),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        # last of all, for it may draw: a call that fails leaves the generator as it was
        seed=_checked_seed(seed, dropout_p, q.device),
    )
    if signature is not None:
        if len(_passed) >= _LIMIT:
            _passed.clear()
        _passed[signature] = options, problem_of(tensors, options)
    return tensors, options, None


def _signature(
    q: Any, k: Any, v: Any, mask: Mask, numbers: tuple[Any, ...], deterministic: Any, backend: Any
) -> tuple[Any, ...] | None:
    """All that the checks read of a call whose only tensors are q, k and v (and the seed's, which
    is looked at each time). None of a call that is traced or transformed, or is not a usual one.
    """
    limits = mask.left, mask.right
    others = *numbers, backend
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        or not _USUAL.issuperset(map(type, others))
        or not _WHOLE.issuperset(map(type, limits))
        or type(deterministic) is not bool
        or mask.documents
        or mask.lengths is not None
        or mask.allowed is not None
        or q.is_nested  # which has no sizes
        or k.is_nested
        or v.is_nested
    ):
        return None
    return (
        q.dtype,
        k.dtype,
        v.dtype,
        q.layout,
        k.layout,
        v.layout,
        q.device,
        k.device,
        v.device,
        q.size(),
        k.size(),
        v.size(),
        deterministic,
        torch.are_deterministic_algorithms_enabled(),
        *limits,
        *others,
    )


#: names of other libraries' arguments -> what says the same here
_ELSEWHERE = {
    "is_causal": "causal=True (aligned bottom-right: the last query sees every key)",
    "attn_mask": "mask= for a boolean tensor, bias= for one that is added",
    "key_padding_mask": "mask=~key_padding_mask[:, None, None, :], or mask=PrefixLengths(lengths)",
    "enable_gqa": "no argument: q may have a multiple of the heads of k and v",
    "dropout": "dropout_p=",
    "softmax_scale": "scale=",
    "window_size": "mask=Window(left, right), None for no limit",
    "alibi_slopes": "alibi=",
    "return_attn_probs": "return_lse=True",
    "return_softmax_lse": "return_lse=True",
}


def refuse_unexpected(
    function: str, more: tuple[Any, ...], unexpected: Mapping[str, Any]
) -> NoReturn:
    """Raise a TypeError for arguments that the call does not have, naming those it has."""
    for name in unexpected:
        want = _ELSEWHERE.get(name)
        hint = f"; want {want}" if want else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    if isinstance(more[0], Tensor):
        got, hint = "a tensor", ", such as mask= or bias= (attention_varlen takes packed sequences)"
    else:
        got, hint = repr(more[0]), f", such as causal={more[0]}" * isinstance(more[0], bool)
    raise TypeError(f"{function}(): got {got} by position; want it by keyword{hint}")


def bad(argument: str, got: Any, want: str) -> ValueError:
    return ValueError(f"{argument}: got {got}; want {want}")


def wrong_type(argument: str, got: Any, want: str) -> TypeError:
    return TypeError(f"{argument}: got {got}; want {want}")


# --- q, k, v -----------------------------------------------------------------------------------


def check_tensor(name: str, t: object, dims: int, want: str) -> None:
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, f"a tensor {want}")
    if t.is_nested:
        packed = "attention_varlen(nt.values(), ..., nt.offsets(), ...) for a jagged one, nt"
        raise wrong_type(name, "a nested tensor", f"a dense (strided) tensor, or {packed}")
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


def check_like_q(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise wrong_type(name, t.dtype, f"the dtype of q, {q.dtype}")
        check_device(name, t, q)


def check_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        raise bad(name, f"a tensor on {t.device}", f"one on {q.device}, as q is")


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
        if not packed and 0 < nk <= nq and nq % nk == 0:  # which would do as numbers of heads
            want += "; the layout is [B, N, H, D]: pass transpose(1, 2) of q, k, v [B, H, N, D]"
        raise bad("q", f"{hq} heads", want)
    for name, size in (("q", d), ("v", dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise bad(name, f"head size {size}", f"1 to {MAX_HEAD_DIM}")


# --- packed sequences --------------------------------------------------------------------------


def _checked_offsets(q: Tensor, k: Tensor, cu_seqlens: Any) -> tuple[Tensor, Tensor]:
    cu_q, cu_k = cu_seqlens
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_integers(name, cu, 1)
        check_device(name, cu, q)
        if cu.shape[0] < 1:
            raise bad(name, "no offsets", "one more than there are sequences")
    if cu_q.shape != cu_k.shape:
        want = f"as many offsets as cu_seqlens_q, {cu_q.shape[0]}"
        raise bad("cu_seqlens_k", f"{cu_k.shape[0]} offsets", want)
    if values_are_readable(cu_q):
        _check_offset_values("cu_seqlens_q", cu_q, "the packed length", q.shape[1])
        _check_offset_values("cu_seqlens_k", cu_k, "the packed length", k.shape[1])
    return cu_q.to(torch.int32).contiguous(), cu_k.to(torch.int32).contiguous()


def _check_offset_values(name: str, cu: Tensor, what: str, last: int) -> None:
    values = cu.tolist()
    if values[0] != 0:
        raise bad(name, f"first offset {values[0]}", "0")
    if values != sorted(values):
        n, (a, b) = next((n, pair) for n, pair in enumerate(pairwise(values)) if pair[1] < pair[0])
        raise bad(name, f"{b} after {a} at {n + 1}", "offsets that never fall")
    if values[-1] != last:
        raise bad(name, f"last offset {values[-1]}", f"{what}, {last}")


def check_packed_values(tensors: Tensors, options: Options) -> None:
    """What a traced call could not look at, once it runs on a CPU: kernels go where offsets say."""
    for axis, rows, cu, longest in (
        ("q", tensors.q, tensors.cu_seqlens_q, options.max_q),
        ("k", tensors.k, tensors.cu_seqlens_k, options.max_k),
    ):
        if cu is not None and cu.device.type == "cpu":
            _check_offset_values(f"cu_seqlens_{axis}", cu, "the packed length", rows.shape[1])
            _check_bound(f"max_seqlen_{axis}", longest, _longest_of(cu))


def _longest(name: str, given: int | None, cu: Tensor, total: int) -> int:
    if given is not None:
        bound = as_int(given)
        if bound is None:
            raise wrong_type(name, repr(given), "an int, or None")
        if bound < 0:
            raise bad(name, bound, "0 or more")
        given = bound
    if not values_are_readable(cu):
        return total if given is None else given
    longest = _longest_of(cu)
    if given is None:
        return longest
    _check_bound(name, given, longest)
    return given


def _longest_of(cu: Tensor) -> int:
    return int(cu.diff().max()) if cu.shape[0] > 1 else 0


def _check_bound(name: str, given: int, longest: int) -> None:
    if given < longest:
        raise bad(name, given, f"at least the longest sequence, {longest}")


# --- masks -------------------------------------------------------------------------------------


def _checked_documents(
    q: Tensor, mask: Mask, shape: Sequence[int], packed: bool
) -> tuple[Tensor | None, Tensor | None]:
    if not mask.documents:
        return None, None
    if packed:
        raise bad("mask", "Documents in a packed call", "none: cu_seqlens already separates")
    batch, _, nq, nk = shape
    if mask.align == "lengths" and any(one.q_ids is None for one in mask.documents):
        got = 'Documents without q_ids and PrefixLengths(align="lengths")'
        raise bad("mask", got, "q_ids as well: the id of each query")
    q_ids, k_ids = _ids_of(mask.documents[0], batch, nq, nk, q)
    for other in mask.documents[1:]:
        q_ids, k_ids = both_documents((q_ids, k_ids), _ids_of(other, batch, nq, nk, q))
    return q_ids, k_ids


def _ids_of(given: Ids, batch: int, nq: int, nk: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """(q_ids ``[B|1, Nq]``, k_ids ``[B|1, Nk]``), int32, of one ``Documents``."""
    if given.ids is not None:
        k_ids = _ids("mask: Documents(ids=)", given.ids, batch, nk, "keys", q)
    else:
        assert given.cu_seqlens is not None
        k_ids = _offset_ids("mask: Documents(cu_seqlens=)", given.cu_seqlens, nk, q)
    if given.q_ids is not None:
        return _ids("mask: Documents(q_ids=)", given.q_ids, batch, nq, "queries", q), k_ids
    if nq > nk:
        raise bad("mask", f"Documents without q_ids, {nq} queries, {nk} keys", "q_ids as well")
    return k_ids[:, nk - nq :], k_ids


def _offset_ids(name: str, cu: Tensor, nk: int, q: Tensor) -> Tensor:
    check_device(name, cu, q)
    if values_are_readable(cu):
        _check_offset_values(name, cu, "the number of keys", nk)
    elif cu.device.type == "cpu" and not torch._C._are_functorch_transforms_active():
        good = (cu[0] == 0) & (cu.diff() >= 0).all() & (cu[-1] == nk)
        torch._assert_async(good, f"{name}: want offsets from 0 to the number of keys")  # pyright: ignore
    return ids_of_offsets(cu, nk)


def _ids(name: str, ids: Tensor, batch: int, n: int, of: str, q: Tensor) -> Tensor:
    check_device(name, ids, q)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.shape[0] not in (1, batch) or ids.shape[1] != n:
        raise bad(name, f"shape {list(ids.shape)}", f"[{n}] or [{batch}, {n}], one id for all {of}")
    short = ids.to(torch.int32)
    if ids.dtype == torch.int64 and ids.numel():
        if values_are_readable(ids):
            low, high = (int(x) for x in ids.aminmax())
            if low < -(2**31) or high >= 2**31:
                raise bad(name, f"ids from {low} to {high}", "ids of 32 bits")
        elif not torch._C._are_functorch_transforms_active():
            # the device itself says so, later, where its values cannot be looked at now
            torch._assert_async((ids == short).all(), f"{name}: want ids of 32 bits")  # pyright: ignore
    return short


def _checked_lengths(q: Tensor, lengths: Tensor | None, batch: int, nk: int) -> Tensor | None:
    if lengths is None:
        return None
    name = "mask: PrefixLengths(lengths=)"
    check_device(name, lengths, q)
    if lengths.shape[0] != batch:
        raise bad(name, f"{lengths.shape[0]} lengths", f"one for each of {batch} sequences")
    if values_are_readable(lengths) and bool((lengths < 0).any()):
        raise bad(name, lengths.tolist(), "lengths of 0 or more")
    if lengths.dtype == torch.int32:
        return lengths
    return lengths.clamp(max=nk).to(torch.int32)  # what is past 32 bits is past every key


def _checked_allowed(q: Tensor, allowed: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    if allowed is None:
        return None
    check_device("mask", allowed, q)
    return _broadcastable("mask", allowed, shape)


def _broadcastable(name: str, t: Tensor, shape: Sequence[int]) -> Tensor:
    """t with leading ones up to four dimensions, each 1 or the size it broadcasts to."""
    if t.dim() > 4:
        raise bad(name, f"shape {list(t.shape)}", f"one that broadcasts to {list(shape)}")
    full = t[(None,) * (4 - t.dim())]
    if any(a not in (1, b) for a, b in zip(full.shape, shape, strict=True)):
        want = f"one that broadcasts to [B, Hq, Nq, Nk] = {list(shape)}"
        if name == "mask" and t.shape == (shape[0], shape[3]):
            want += (
                "; one of padding [B, Nk] is mask[:, None, None, :], which is "
                "~key_padding_mask[:, None, None, :], or PrefixLengths(lengths)"
            )
        raise bad(name, f"shape {list(t.shape)}", want)
    return full


# --- score terms -------------------------------------------------------------------------------


def _checked_bias(q: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise wrong_type("bias", type(bias).__name__, "a tensor, or None")
    check_dense("bias", bias)
    if bias.dtype == torch.bool:
        raise wrong_type("bias", "torch.bool", "numbers to add to the scores (mask= takes bools)")
    if bias.dtype not in (q.dtype, torch.float32):
        raise wrong_type("bias", bias.dtype, f"the dtype of q, {q.dtype}, or float32")
    check_device("bias", bias, q)
    return _broadcastable("bias", bias, shape)


def _per_head(name: str, t: Tensor | None, q: Tensor, gradient: bool = True) -> Tensor | None:
    if t is None:
        return None
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, "a tensor [Hq], or None")
    check_dense(name, t)
    if not t.is_floating_point():
        raise wrong_type(name, t.dtype, "floating-point numbers")
    check_device(name, t, q)
    if t.shape != (q.shape[2],):
        raise bad(name, f"shape {list(t.shape)}", f"[Hq] = [{q.shape[2]}]")
    if not gradient and t.requires_grad:
        raise bad(name, "slopes that require a gradient", "constants (bias= has a gradient)")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return t.to(wide)


def _checked_scale(scale: float | None, d: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d)
    scale = _number("scale", scale)
    if not 0.0 <= scale <= LARGEST:  # comparisons alone: what is traced may be symbolic
        raise bad("scale", scale, f"a finite number from 0 to {LARGEST:g}, or None for 1/sqrt(D)")
    return scale


def _checked_softcap(softcap: float) -> float:
    softcap = _number("softcap", softcap)
    if not (softcap == 0.0 or 1 / LARGEST <= softcap <= LARGEST):
        want = f"0 (which turns it off) or a finite number from {1 / LARGEST:g} to {LARGEST:g}"
        raise bad("softcap", softcap, want)
    return softcap


def _checked_seed(seed: Any, p: float, device: torch.device) -> Tensor | None:
    """The generator's key as an int64 scalar on the device, drawn from torch's own if None."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise bad("seed", f"{seed.dtype} {list(seed.shape)}", "an int, or an int64 scalar")
        if seed.device != device:
            raise bad("seed", f"a tensor on {seed.device}", f"one on {device}, as q is")
    elif seed is not None:
        got, seed = seed, as_int(seed)
        if seed is None:
            raise wrong_type("seed", type(got).__name__, "an int, an int64 scalar, or None")
        if not -(2**63) <= seed < 2**63:
            raise bad("seed", seed, "an integer of 64 bits")
    if p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), seed, dtype=torch.int64, device=device)  # pyright: ignore


def _checked_backend(backend: str | None) -> str | None:
    if backend is None or backend in NAMES:
        return backend
    raise bad("backend", repr(backend), "None, or one of " + ", ".join(map(repr, NAMES)))


# --- small checks ------------------------------------------------------------------------------


def check_dense(name: str, t: Tensor) -> None:
    if t.layout != torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise wrong_type(name, kind, "a dense (strided) tensor")


def check_integers(name: str, t: object, dims: int) -> None:
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, "a tensor of int32 or int64")
    if t.dtype not in (torch.int32, torch.int64):
        raise wrong_type(name, t.dtype, "int32 or int64")
    check_dense(name, t)
    if t.dim() != dims:
        raise bad(name, f"shape {list(t.shape)}", f"a {dims}-D tensor")


def _number(name: str, x: Any) -> float:
    """x as a float; any real number will do (NumPy's are), but for booleans."""
    if isinstance(x, bool) or not isinstance(x, (int, float, Real)):
        hint = " (multiply q by a tensor)" if name == "scale" and isinstance(x, Tensor) else ""
        raise wrong_type(name, type(x).__name__, f"a Python number{hint}")
    try:
        return float(x)
    except OverflowError:
        # refused like any that is not finite
        return math.inf if x > 0 else -math.inf  # pyright: ignore[reportOperatorIssue]


def check_flag(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise wrong_type(name, repr(x), "True or False")
