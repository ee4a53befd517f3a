"""The errors of public functions, and the checks that several of them share.

An error names the argument, what it got and what it accepts. A check raises one or returns None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

#: an argument of another library -> the argument here with the same meaning
_ELSEWHERE = {
    "is_causal": "causal=True (aligned bottom-right: the last query sees every key)",
    "attn_mask": "mask= for a boolean tensor, bias= for one that is added",
    "key_padding_mask": "mask=KeyPadding(key_padding_mask), or mask=PrefixLengths(lengths)",
    "enable_gqa": "no argument: q may have a multiple of the heads of k and v",
    "dropout": "dropout_p=",
    "softmax_scale": "scale=",
    "window_size": "mask=Window(left, right), None for no limit",
    "alibi_slopes": "alibi=",
    "attn_bias": "bias= for a tensor that is added, mask= for a mask such as Documents",
    "score_mod": "bias=, alibi= or softcap=",
    "block_mask": "mask=from_block_mask(block_mask)",
    "cache_seqlens": 'mask=PrefixLengths(cache_seqlens, align="lengths")',
    "return_attn_probs": "return_lse=True",
    "return_softmax_lse": "return_lse=True",
}


def bad(argument: str, got: Any, want: str) -> ValueError:
    """Return the ValueError of an argument."""
    return ValueError(f"{argument}: got {got}; want {want}")


def wrong_type(argument: str, got: Any, want: str) -> TypeError:
    """Return the TypeError of an argument."""
    return TypeError(f"{argument}: got {got}; want {want}")


def refuse_unexpected(
    function: str, more: tuple[Any, ...], unexpected: Mapping[str, Any]
) -> NoReturn:
    """Raise a TypeError for arguments that the function does not have; name those it has."""
    for name in unexpected:
        want = _ELSEWHERE.get(name)
        hint = f"; want {want}" if want else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
    if isinstance(more[0], Tensor):
        got, hint = "a tensor", ", such as mask= or bias= (attention_varlen takes packed sequences)"
    else:
        got, hint = repr(more[0]), f", such as causal={more[0]}" * isinstance(more[0], bool)
    raise TypeError(f"{function}(): got {got} by position; want it by keyword{hint}")


def check_dense(name: str, t: Tensor) -> None:
    """Raise for a nested or sparse tensor."""
    if t.layout != torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise wrong_type(name, kind, "a dense (strided) tensor")


def check_integers(name: str, t: object, dims: tuple[int, ...]) -> None:
    """Raise unless t is a dense tensor of int32 or int64 with one of these numbers of axes."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
        got = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise wrong_type(name, got, "a tensor of int32 or int64")
    check_dense(name, t)
    if t.dim() not in dims:
        want = " or ".join(f"{n}-D" for n in dims)
        raise bad(name, f"shape {list(t.shape)}", f"a {want} tensor")


def check_booleans(name: str, t: object) -> None:
    """Raise unless t is a dense boolean tensor."""
    if not isinstance(t, Tensor):
        raise wrong_type(name, type(t).__name__, "a boolean tensor")
    if t.dtype != torch.bool:
        want = "torch.bool, True where a query may attend (an additive mask goes to bias=)"
        raise wrong_type(name, f"a tensor of {t.dtype}", want)
    check_dense(name, t)


def check_device(name: str, t: Tensor, q: Tensor) -> None:
    """Raise unless t is on q's device."""
    if t.device != q.device:
        raise bad(name, f"a tensor on {t.device}", f"one on {q.device}, as q is")


def check_flag(name: str, x: Any) -> None:
    """Raise unless x is True or False."""
    if not isinstance(x, bool):
        raise wrong_type(name, repr(x), "True or False")
