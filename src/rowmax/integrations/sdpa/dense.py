"""``scaled_dot_product_attention`` with torch's arguments, and which calls of it rowmax takes.

torch's tensors are ``[..., H, N, D]``, rowmax's ``[B, N, H, D]``: a view of the same memory.
torch's causal mask is aligned top-left, rowmax's bottom-right.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function

from ...attention import attention
from ...call.check import DTYPES, LARGEST, MAX_HEAD_DIM
from ...masks import Mask, Window
from ...torch_compat import allows_fused_attention, forward_mode_levels, stands_for_numbers
from .. import parallel

_CAST = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes that autocast casts

#: torch's function, or what another library has put in its place: it computes the other calls
fallback: Any = F.scaled_dot_product_attention


class Call(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` with rowmax.

    Arguments and result are torch's, and a float attn_mask has a gradient. Three differences:

    - A row without keys is 0, with gradient 0; torch's backends return 0 or NaN.
    - Under autocast a float32 attn_mask stays float32.
    - Dropout keeps other weights than torch does. Its seed comes from torch's generator.

    Calls that rowmax does not take go to torch. ``explain`` returns the reason. In
    ``rowmax.distributed.context_parallel`` they raise. There is_causal is of the whole sequence,
    and attn_mask has own rows (or one) and all columns.

    >>> import torch
    >>> from rowmax.integrations import sdpa
    >>> q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16)
    >>> sdpa.scaled_dot_product_attention(q, k, k, enable_gqa=True).shape
    torch.Size([1, 4, 3, 16])
    """
    return compute(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))


def compute(call: Call) -> Tensor:
    """Compute a call with rowmax, or with torch if rowmax does not take it.

    Raises:
        NotImplementedError: in a context that distributes calls, rather than give one to torch.
    """
    reason = refusal(call)
    if reason is None:
        return by_rowmax(call)
    parallel.check_refusal("scaled_dot_product_attention", reason)
    return by_torch(call)


def by_torch(call: Call) -> Tensor:
    """Compute a call with torch's function."""
    if _is_causal_bias(call.attn_mask):
        # its class compares the function with the attribute of torch.nn.functional
        function = F.scaled_dot_product_attention
        return handle_torch_function(function, (call.attn_mask,), *call)
    return fallback(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)


def by_rowmax(call: Call) -> Tensor:
    """Compute a call that ``refusal`` accepts."""
    out = attention(**arguments(call))
    axes = call.query.dim()
    if axes == 4:
        return out.transpose(1, 2)
    if axes > 4:
        return out.transpose(1, 2).unflatten(0, call.query.shape[:-3])
    if axes == 2:
        return out[0, :, 0]
    return out[0].transpose(0, 1) if _shares_keys(call) else out.squeeze(2)


# --- the arguments of rowmax -------------------------------------------------------------------


def arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of ``rowmax.attention`` for a call that ``refusal`` accepts."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = call
    if query.dim() == 4:
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    else:
        shared = _shares_keys(call)
        q, k, v = (_four_axes(t, shared) for t in (query, key, value))
    found = {"q": q, "k": k, "v": v, "scale": scale, "dropout_p": dropout_p}
    if attn_mask is None:
        if is_causal:
            nq, nk = parallel.lengths(query.shape[-2], key.shape[-2])
            extra = nq - nk
            if torch.compiler.is_compiling() or extra != 0:
                found["mask"] = Window(right=extra)  # a comparison would tie a graph to its lengths
            else:
                found["causal"] = True
    elif _is_causal_bias(attn_mask):
        found["causal"], found["mask"] = _band(attn_mask)
    elif attn_mask.dtype == torch.bool:
        found["mask"] = _mask(attn_mask, call)
    else:
        found["bias"] = _mask(attn_mask, call)
    return found


def _shares_keys(call: Call) -> bool:
    """Return True if the first of three axes must be heads: it is a batch unless sizes differ.

    As a batch it gives a contiguous result, as torch does.
    """
    return call.query.dim() == 3 and call.query.shape[0] != call.key.shape[0]


def _four_axes(t: Tensor, shared: bool) -> Tensor:
    """Return ``[B, N, H, D]`` of a tensor that has not four axes."""
    axes = t.dim()
    if axes > 4:
        return t.flatten(0, -4).transpose(1, 2)
    if axes == 2:
        return t[None, :, None]
    return t.transpose(0, 1)[None] if shared else t.unsqueeze(2)


def _mask(mask: Tensor, call: Call) -> Tensor:
    """Return a mask that broadcasts to ``[B, H, Nq, Nk]``."""
    axes = call.query.dim()
    if axes == 4 or mask.dim() < 3:
        return mask
    if axes == 3:
        return mask if _shares_keys(call) else mask.unsqueeze(1)
    leading = mask.shape[:-3]
    if all(size == 1 for size in leading):
        return mask.reshape(mask.shape[-3:])
    return mask.expand(*call.query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def _is_causal_bias(mask: Any) -> bool:
    """Return True for a ``torch.nn.attention.bias.CausalBias``.

    Importing its module takes a second, and no such mask exists before.
    """
    if mask is None or type(mask) is Tensor:
        return False
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _band(mask: Any) -> tuple[bool, Mask | None]:
    """Return (causal, mask) of a ``CausalBias``."""
    extra = mask.seq_len_q - mask.seq_len_kv
    if extra == 0 or mask.variant.name == "LOWER_RIGHT":
        return True, None
    return False, Window(right=extra)


# --- the calls that go to torch ----------------------------------------------------------------


def refusal(call: Call) -> str | None:
    """Return why a call goes to torch, a sentence, or None: rowmax takes it."""
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    found = tensors_refusal(query, key, value)
    if found is None:
        found = _shape_refusal(query, key, value, enable_gqa)
    if found is None and attn_mask is not None:
        found = _mask_refusal(attn_mask, query, key, is_causal)
    if found is None and not isinstance(is_causal, bool):
        found = f"is_causal is {is_causal!r}, which is not a bool"
    if found is None and not (_is_number(dropout_p) and 0.0 <= dropout_p < 1.0):
        found = f"dropout_p is {dropout_p!r}; rowmax takes 0 <= dropout_p < 1"
    if found is None and scale is not None:
        found = scale_refusal(scale)
    return found


def tensors_refusal(query: Any, key: Any, value: Any) -> str | None:
    """Return why torch takes query, key and value by their types, or the call by its context."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            return f"{name} is a {type(t).__name__}, not a tensor"
        if not stands_for_numbers(t):
            return f"{name} is a {type(t).__name__}; rowmax takes plain tensors"
        if t.is_nested or t.layout != torch.strided:
            return f"{name} is {'nested' if t.is_nested else t.layout}; rowmax takes dense tensors"
    device, dtype = query.device, query.dtype
    if not (query.is_cuda or query.is_cpu):  # the type of a device takes five times as long
        return f"the tensors are on {device}; rowmax takes cuda and cpu"
    if key.device != device or value.device != device:
        return f"query is on {device}, key on {key.device}, value on {value.device}"
    if dtype not in DTYPES:
        return f"query is {dtype}; rowmax takes float32, float16, bfloat16 and float64"
    if (key.dtype != dtype or value.dtype != dtype) and not _are_cast(query, key, value):
        return f"query is {dtype}, key {key.dtype}, value {value.dtype}"
    if not allows_fused_attention():
        return "sdpa_kernel or torch.backends.cuda allows no fused backend, only MATH"
    if not torch.compiler.is_compiling() and forward_mode_levels() > 1:
        return "levels of forward mode are nested; rowmax has one, and reverse mode over it"
    return None


def scale_refusal(scale: Any) -> str | None:
    """Return why torch takes a call with this scale, or None."""
    if _is_number(scale) and 0.0 <= scale <= LARGEST:
        return None
    return f"scale is {scale!r}; rowmax takes None or a number from 0 to {LARGEST:g}"


def _is_number(x: Any) -> bool:
    return isinstance(x, (float, int)) and not isinstance(x, bool)


def _are_cast(*tensors: Tensor) -> bool:
    """Return True if autocast gives all tensors one dtype."""
    return torch.is_autocast_enabled(tensors[0].device.type) and all(
        t.dtype in _CAST for t in tensors
    )


def _shape_refusal(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    q, k, v = query.shape, key.shape, value.shape
    axes = len(q)
    alike = axes == 4 and k == v and q[:2] == k[:2] and q[3] == k[3]
    if alike and q[1] > 0 and 0 < q[3] <= MAX_HEAD_DIM:
        return None  # the usual call, in half the time of the checks below
    if axes < 2 or len(k) != axes or len(v) != axes:
        return f"query has {axes} axes, key {len(k)}, value {len(v)}; rowmax takes 2 or more, equal"
    if k[-1] != q[-1] or k[-2] != v[-2]:
        return f"the shapes {list(q)}, {list(k)}, {list(v)} do not fit together"
    for name, size in (("query", q[-1]), ("value", v[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            return f"{name} has head size {size}; rowmax takes 1 to {MAX_HEAD_DIM}"
    if axes == 2:
        return None
    if k[:-3] != q[:-3] or v[:-3] != q[:-3] or v[-3] != k[-3]:
        return f"the leading sizes of {list(q)}, {list(k)}, {list(v)} differ: torch broadcasts"
    hq, hk = q[-3], k[-3]
    if axes > 3 and hq == 0:
        return "there are no heads"
    if hq != hk and not (enable_gqa and hk > 0 and hq % hk == 0):
        return f"query has {hq} heads, key {hk}, and enable_gqa is {enable_gqa}"
    return None


def _mask_refusal(mask: Any, query: Tensor, key: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask is given and is_causal is True"
    whole = parallel.lengths(query.shape[-2], key.shape[-2])
    sizes = (*query.shape[:-1], whole[1])  # across ranks, a mask has own rows and all columns
    if _is_causal_bias(mask):
        if (mask.seq_len_q, mask.seq_len_kv) == whole:
            return None
        return f"attn_mask is of {mask.seq_len_q} queries and {mask.seq_len_kv} keys"
    if not isinstance(mask, Tensor) or not stands_for_numbers(mask):
        return f"attn_mask is a {type(mask).__name__}; rowmax takes plain tensors"
    if mask.is_nested or mask.layout != torch.strided:
        return f"attn_mask is {'nested' if mask.is_nested else mask.layout}"
    if mask.device != query.device:
        return f"attn_mask is on {mask.device}, query on {query.device}"
    if mask.dtype not in (torch.bool, query.dtype, torch.float32) and not _are_cast(query, mask):
        return f"attn_mask is {mask.dtype}; rowmax takes bool, {query.dtype} and float32"
    shape = tuple(mask.shape)
    if len(shape) > len(sizes) or any(
        m not in (1, n) for m, n in zip(shape[::-1], sizes[::-1], strict=False)
    ):
        return f"attn_mask of shape {list(shape)} does not broadcast to {list(sizes)}"
    return None
