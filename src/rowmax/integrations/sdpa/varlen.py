"""``varlen_attn`` with torch's arguments, and which calls of it rowmax takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention import attention_varlen
from ...call.check import MAX_HEAD_DIM
from ...masks import Mask, PrefixLengths, Window
from ...torch_compat import stands_for_numbers
from .. import parallel
from .dense import scale_refusal, tensors_refusal

#: torch's function, once its module is imported: it computes the other calls
fallback: Any = None


class Call(NamedTuple):
    """The arguments of ``varlen_attn``."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    max_q: int
    max_k: int
    return_aux: Any = None
    scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    enable_gqa: bool = False
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute ``torch.nn.attention.varlen.varlen_attn`` with rowmax.

    Arguments and results are those of torch 2.13, with these additions, whatever torch is
    installed: CPUs, float32 and float64, head sizes to 576, a value size of its own, and
    gradients with seqused_k. A lse is ``[H, total_q]``, as torch's is. Calls that rowmax does not
    take go to torch: pages (block_table) and num_splits. ``explain_varlen`` returns the reason.

    >>> import torch
    >>> from rowmax.integrations import sdpa
    >>> q, cu = torch.randn(10, 2, 16), torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> sdpa.varlen_attn(q, q, q, cu, cu, 7, 7, window_size=(-1, 0)).shape
    torch.Size([10, 2, 16])
    """
    call = Call(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size,
        enable_gqa, seqused_k, block_table, num_splits,
    )  # fmt: skip
    reason = refusal(call)
    if reason is None:
        return by_rowmax(call)
    parallel.check_refusal("varlen_attn", reason)
    return by_torch(call)


def by_torch(call: Call) -> Any:
    """Compute a call with torch's function. Older ones lack some of the keywords."""
    global fallback
    if fallback is None:
        from torch.nn.attention.varlen import varlen_attn as fallback
    keywords = {
        name: getattr(call, name)
        for name, default in Call._field_defaults.items()
        if getattr(call, name) is not default and getattr(call, name) != default
    }
    return fallback(*call[:7], **keywords)


def by_rowmax(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a call that ``refusal`` accepts."""
    positional, keywords = arguments(call)
    if call.return_aux is not None and call.return_aux.lse:
        return attention_varlen(*positional, **keywords, return_lse=True)
    return attention_varlen(*positional, **keywords)


def arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``rowmax.attention_varlen`` for a call that ``refusal`` accepts."""
    left, right = (None if limit == -1 else limit for limit in call.window_size)
    mask: Mask | None = None
    if left is not None or right is not None:
        mask = Window(left, right)
    if call.seqused_k is not None:
        used = PrefixLengths(call.seqused_k, align="lengths")
        mask = used if mask is None else mask & used
    return call[:7], {"mask": mask, "scale": call.scale}


def refusal(call: Call) -> str | None:
    """Return why a call goes to torch, a sentence, or None: rowmax takes it."""
    if call.block_table is not None:
        return "block_table is given; rowmax takes keys that are one after the other"
    if call.num_splits is not None:
        return f"num_splits is {call.num_splits!r}; rowmax takes None"
    found = tensors_refusal(call.query, call.key, call.value)
    if found is None:
        found = _shape_refusal(call)
    if found is None:
        found = _offsets_refusal(call)
    if found is None and call.scale is not None:
        found = scale_refusal(call.scale)
    return found


def _shape_refusal(call: Call) -> str | None:
    q, k, v = call.query.shape, call.key.shape, call.value.shape
    if not len(q) == len(k) == len(v) == 3:
        return f"the shapes {list(q)}, {list(k)}, {list(v)} are not [total, heads, head size]"
    if k[2] != q[2] or v[:2] != k[:2]:
        return f"the shapes {list(q)}, {list(k)}, {list(v)} do not fit together"
    for name, size in (("query", q[2]), ("value", v[2])):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{name} has head size {size}; rowmax takes 1 to {MAX_HEAD_DIM}"
    if k[1] == 0 or q[1] % k[1] or (q[1] != k[1] and not call.enable_gqa):
        return f"query has {q[1]} heads, key {k[1]}, and enable_gqa is {call.enable_gqa}"
    return None


def _offsets_refusal(call: Call) -> str | None:
    size = None
    for name in ("cu_seq_q", "cu_seq_k", "seqused_k"):
        t = getattr(call, name)
        if t is None and name == "seqused_k":
            continue
        if not isinstance(t, Tensor) or not stands_for_numbers(t):
            return f"{name} is a {type(t).__name__}; rowmax takes plain tensors"
        if t.dtype not in (torch.int32, torch.int64) or t.dim() != 1:
            return f"{name} is {t.dtype} {list(t.shape)}; rowmax takes integers on one axis"
        if t.device != call.query.device:
            return f"{name} is on {t.device}, query on {call.query.device}"
        length = t.shape[0] + (name == "seqused_k")
        if size is not None and length != size:
            return f"cu_seq_q has {size} offsets, {name} {t.shape[0]}"
        size = length
    for name in ("max_q", "max_k"):
        if not isinstance(getattr(call, name), (int, torch.SymInt)):
            return f"{name} is {getattr(call, name)!r}, which is not an int"
    window = call.window_size
    if len(window) != 2 or any(not isinstance(n, int) or n < -1 for n in window):
        return f"window_size is {window!r}; rowmax takes two ints, -1 for no limit"
    return None
