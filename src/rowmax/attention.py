"""The public calls: check the arguments, then one operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from .call import around, recent
from .call.check import Arguments, check_packed_values
from .call.dispatch import PLAIN_OPERATIONS
from .call.inputs import Tensors
from .call.jagged import jagged, packed
from .call.normalize import (
    checked_lengths,
    keys_of,
    normalized,
    of_sequences,
    with_documents,
    without_documents,
)
from .errors import check_flag, refuse_unexpected
from .masks import Causal, Mask, as_mask
from .operators.autograd import attend, attend_again, prepared_directly

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CallOptions(TypedDict, total=False):
    """The keywords of both calls, except ``return_lse``."""

    causal: bool
    mask: Mask | Tensor | None
    bias: Tensor | None
    alibi: Tensor | None
    scale: float | None
    softcap: float
    sink: Tensor | None
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool
    backend: str | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[CallOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
    causal: bool = False,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unexpected: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact softmax attention, tile by tile: ``softmax(scale q k^T + bias) v``.

    The score matrix is never allocated, forward or backward. Differentiable twice, in forward and
    reverse mode, in q, k, v, bias, sink and alibi, through out and through lse.

    Nested tensors of the layout ``torch.jagged``, ``[B, j, H, D]``, are packed sequences: the call
    is ``attention_varlen`` of their values and offsets, with jagged results (lse ``[B, Hq, j]``). q
    may have other lengths than k and v.

    Args:
        q: ``[B, Nq, Hq, D]``, float32, float16, bfloat16 or float64, any strides, D <= 576.
        k: ``[B, Nk, Hk, D]``. Hq is a multiple of Hk: query head h reads head ``h // (Hq/Hk)``.
        v: ``[B, Nk, Hk, Dv]``.
        causal: query i sees keys ``j <= i + Nk - Nq`` (aligned bottom-right; with
            ``PrefixLengths(lengths, align="lengths")`` ``j <= i + lengths[b] - Nq``).
        mask: which pairs may attend: ``Causal()``, ``Window(left, right)`` (limits of any sign:
            ``right=-1`` hides a query's own position), ``Documents(ids)``,
            ``PrefixLengths(lengths)``, ``LeftPadding(starts)``, ``KeyPadding(mask)``,
            ``Prefix(lengths)``, ``Dilated(step)``, their intersections ``a & b``, or a boolean
            tensor that broadcasts to ``[B, Hq, Nq, Nk]``, True may attend.
        bias: added to the scores; broadcasts to ``[B, Hq, Nq, Nk]``, q's dtype or float32.
        alibi: slopes ``[Hq]``; adds ``-slope |i + Nk - Nq - j|``, from the same positions as
            causal.
        scale: of the scores, ``1/sqrt(D)`` if None.
        softcap: c > 0 bends scores to ``c tanh(score / c)``, before bias; 0 is off.
        sink: ``[Hq]``, a logit a head that takes part in the softmax with value 0.
        dropout_p: the probability of dropping a weight, in [0, 1), to 1/65536.
        seed: of the dropout; drawn from torch's generator if None. The same seed keeps the
            same weights on every device and backend.
        return_lse: also return lse ``[B, Hq, Nq]``, ``log sum exp`` of each row's scores, in
            float32 (float64 for float64 inputs).
        deterministic: gradients that are bitwise equal from run to run;
            ``torch.use_deterministic_algorithms(True)`` selects them too.
        backend: a name, to force one; see ``explain``. ``"reference"`` is dense and has
            derivatives of every order, in both modes.

    Returns:
        out ``[B, Nq, Hq, Dv]`` in q's dtype, or (out, lse). A row that may see no key has
        out 0 and lse -inf (with a sink, lse = sink).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.
        NotImplementedError: third derivatives and forward mode twice, unless of
            ``backend="reference"`` where it is neither compiled nor traced.

    The formulas are those of FlashAttention-2 (Dao, arXiv:2307.08691) over the online softmax
    of Milakov and Gimelshein (arXiv:1805.02867).

    >>> import torch, rowmax
    >>> q, k, v = (torch.randn(1, 128, 4, 64) for _ in range(3))
    >>> rowmax.attention(q, k, v, causal=True).shape
    torch.Size([1, 128, 4, 64])
    """
    if more or unexpected:
        refuse_unexpected("attention", more, unexpected)
    check_flag("return_lse", return_lse)
    if around.used and (context := around.current()) is not None:
        return context.attention(
            q, k, v,
            causal=causal, mask=mask, bias=bias, alibi=alibi, scale=scale, softcap=softcap,
            sink=sink, dropout_p=dropout_p, seed=seed, return_lse=return_lse,
            deterministic=deterministic, backend=backend,
        )  # fmt: skip
    key, rows, limits, documents = None, (q, k, v), (), None
    allowed, lengths = (mask, None) if isinstance(mask, Tensor) else (None, None)
    if mask is not allowed:
        allowed, documents = keys_of(mask, q, k, backend), recent.documents_of(mask)
        limits = recent.limits_of(mask, documents if allowed is None else allowed)
        lengths = None if limits is None else mask.lengths  # pyright: ignore
    if seed is None and limits is not None:
        key = recent.key_of(causal, scale, softcap, dropout_p, backend, deterministic)
        if key is not None and not (bias is sink is mask is alibi is None):
            terms = bias, sink, allowed, lengths, alibi, documents
            key, rows = recent.with_terms(key + limits, rows, *terms)
        found = None if key is None else recent.calls.recall(key, *rows)
        if found is not None:
            tensors: tuple[Any, ...] = rows
            if lengths is not None:
                lengths = checked_lengths(lengths, k.shape[1])
            if len(rows) > 3:
                heads = None if alibi is None else alibi[None]
                tensors = Tensors(q, k, v, bias, sink, heads, lengths=lengths, allowed=allowed)
                if documents is not None:
                    tensors = with_documents(tensors, as_mask(mask), found.problem.varlen)
            out, lse = attend_again(found, tensors)
            return (out, lse) if return_lse else out
    if isinstance(q, Tensor) and q.is_nested:
        pairs = _mask(mask, causal)
        sequences = packed(q, k, v, bias is not None or pairs.allowed is not None)
        out, lse = attention_varlen(
            *sequences, mask=pairs, bias=bias, alibi=alibi, scale=scale, softcap=softcap, sink=sink,
            dropout_p=dropout_p, seed=seed, return_lse=True, deterministic=deterministic,
            backend=backend,
        )  # fmt: skip
        out, lse = jagged(out, lse, q)
        return (out, lse) if return_lse else out
    given = q, k, v, bias, sink, allowed
    q, k, v, bias = _autocast(q, k, v, bias)
    # not by ``arguments``: names take longer
    call = Arguments(
        q, k, v, _mask(mask, causal), bias, _given(alibi=alibi), scale, softcap, sink,
        dropout_p, seed, deterministic, backend,
    )  # fmt: skip
    apart = without_documents(call, allowed) if call.mask.documents else call
    tensors, options, prepared = normalized(apart)
    if apart is not call:
        tensors = tensors._replace(q=q, k=k, v=v)  # not their views, which autograd would repeat
    if key is not None and _are_read(given, tensors, alibi):
        prepared = prepared or prepared_directly(tensors, options)
        if prepared is not None and options.backend not in PLAIN_OPERATIONS:
            recent.calls.remember(key, prepared, *rows)
    out, lse = attend(tensors, options, prepared)
    return (out, lse) if return_lse else out


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: bool,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *more: Any,
    causal: bool = False,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    **unexpected: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within each of S packed sequences, one after the other, unpadded.

    Every argument of ``attention`` has the same meaning for one sequence: b counts sequences,
    positions are within one, and each is aligned bottom-right: to its own keys, or with
    ``PrefixLengths(lengths, align="lengths")`` to its own length.

    Args:
        q: ``[total_q, Hq, D]``; k ``[total_k, Hk, D]``; v ``[total_k, Hk, Dv]``.
        cu_seqlens_q: ``[S + 1]`` int32 or int64, where each sequence's queries start: 0 first,
            never falling, total_q last. Read on the device: on a GPU its values are not
            checked (that would wait for the device), only kept in range. Of a compiled call
            on a CPU they are checked when it runs.
        cu_seqlens_k: the same for keys and values.
        max_seqlen_q, max_seqlen_k: the longest sequence, or a bound; found if None on a CPU,
            total_q and total_k on a GPU.
        mask: bands, ``PrefixLengths`` and ``Prefix`` ``[S]``, or a boolean tensor that broadcasts
            to ``[S, Hq, max_seqlen_q, max_seqlen_k]``, as bias does.

    Returns:
        out ``[total_q, Hq, Dv]``, or (out, lse ``[Hq, total_q]``).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch, rowmax
    >>> q, cu = torch.randn(10, 2, 16), torch.tensor([0, 3, 10])
    >>> rowmax.attention_varlen(q, q, q, cu, cu, causal=True).shape
    torch.Size([10, 2, 16])
    """
    if more or unexpected:
        refuse_unexpected("attention_varlen", more, unexpected)
    check_flag("return_lse", return_lse)
    cu_seqlens, max_seqlens = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    given: CallOptions = {
        "causal": causal, "mask": mask, "bias": bias, "alibi": alibi, "scale": scale,
        "softcap": softcap, "sink": sink, "dropout_p": dropout_p, "seed": seed,
        "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    if around.used and (context := around.current()) is not None:
        return context.attention_varlen(
            q, k, v, *cu_seqlens, max_seqlens=max_seqlens, return_lse=return_lse, **given
        )
    rows = alike = q, k, v
    key, plain = None, True
    lengths: Tensor | None = getattr(mask, "lengths", None)
    limits = () if mask is None else recent.limits_of(mask)
    if limits is not None and seed is None:
        plain = bias is sink is lengths is alibi is None
        key = recent.key_of(causal, scale, softcap, dropout_p, backend, deterministic)
        if key is not None:
            key, alike = recent.of_packed(key + limits, rows, cu_seqlens, max_seqlens)
        if key is not None and not plain:
            key, alike = recent.with_terms(key, alike, bias, sink, None, lengths, alibi)
    prepared = None if key is None else recent.packed_calls.recall(key, *alike)
    if prepared is not None:
        tensors = of_sequences(Tensors(*(t[None] for t in rows)), cu_seqlens)
        options = prepared.options
        check_packed_values(tensors, options)
        if not plain:
            heads = None if alibi is None else alibi[None]
            lengths = None if lengths is None else checked_lengths(lengths, options.max_k)
            tensors = tensors._replace(bias=bias, sink=sink, heads=heads, lengths=lengths)
    else:
        tensors, options, prepared = normalized(arguments(*rows, cu_seqlens, max_seqlens, **given))
        if key is not None and _are_read((*rows, bias, sink, None), tensors, alibi):
            prepared = prepared_directly(tensors, options)
            if prepared is not None:
                recent.packed_calls.remember(key, prepared, *alike)
    out, lse = attend(tensors, options, prepared)
    # a view: the derivative of a selection is a copy among zeros
    out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    max_seqlens: tuple[int | None, int | None] = (None, None),
    *,
    causal: bool = False,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Arguments:
    """Return the record of a call, in autocast's dtype where it is on."""
    q, k, v, bias = _autocast(q, k, v, bias)
    return Arguments(
        *(q, k, v, _mask(mask, causal), bias, _given(alibi=alibi), scale, softcap, sink),
        *(dropout_p, seed, deterministic, backend, cu_seqlens, max_seqlens),
    )


def _are_read(given: tuple[Any, ...], tensors: Tensors, alibi: Tensor | None) -> bool:
    """Return True if q, k, v, bias, sink, mask and slopes of a call are read as they were given.

    Autocast changes dtypes, and other tensors are converted or have other axes. Packed q, k and v
    are views. Lengths and offsets are read again in each call.
    """
    t, heads = tensors, tensors.heads
    if alibi is not None and (heads is None or heads.dtype != alibi.dtype):
        return False
    if any(x.dtype != y.dtype for x, y in zip(given[:3], t[:3], strict=True)):
        return False
    return all(map(is_, given[3:], (t.bias, t.sink, t.allowed)))


def _hide_catches(function: Callable[..., Any]) -> None:
    """Remove the parameters that only refuse unknown arguments from the signature."""
    signature = inspect.signature(function)
    caught = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kept = [p for p in signature.parameters.values() if p.kind not in caught]
    function.__signature__ = signature.replace(parameters=kept)  # pyright: ignore


_hide_catches(attention)
_hide_catches(attention_varlen)


def _given(**heads: Any) -> dict[str, Any]:
    """Return the head terms that are given."""
    return {name: x for name, x in heads.items() if x is not None}


_NOTHING, _CAUSAL = Mask(), Causal()


def _mask(mask: Mask | Tensor | None, causal: bool) -> Mask:
    check_flag("causal", causal)
    if mask is None:
        return _CAUSAL if causal else _NOTHING
    return as_mask(mask) & _CAUSAL if causal else as_mask(mask)


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v and the bias in autocast's dtype where it is on, like torch's attention.

    A wider bias that a call accepts keeps its dtype.
    """
    if not isinstance(q, Tensor) or q.is_meta:
        return q, k, v, bias
    device = "cuda" if q.is_cuda else q.device.type  # torch makes a new string at each access
    if not torch.is_autocast_enabled(device):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(device)
    halves = (torch.float16, torch.bfloat16)

    def cast(t: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.dtype in dtypes else t

    q, k, v = (cast(t, (*halves, torch.float32)) for t in (q, k, v))
    return q, k, v, cast(bias, halves)
