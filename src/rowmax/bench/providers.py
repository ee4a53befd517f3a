"""Providers: rowmax and its peers, each as a function of q, k and v for one cell.

``rowmax[:BACKEND][:deterministic]``; torch's SDPA as ``sdpa`` (torch chooses), ``cudnn``,
``flash``, ``efficient`` or ``math``; ``flex``; ``fa2``, ``fa3``, ``fa4``, ``xformers`` and
``cuequivariance`` where installed; ``none`` returns v. Constants that a peer needs, such as a dense
mask, are computed before timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rowmax

from .cells import Cell, Inputs, allowed
from .timing import free_bytes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS = {
    "sdpa": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FLASH = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
NAMES = ("rowmax", *KERNELS, "flex", *FLASH, "xformers", "cuequivariance", "none")
#: matrices of scores, in float32, that SDPA's math kernel holds forward and backward
MATRICES = 6


class UnsupportedError(RuntimeError):
    """The provider does not compute the cell."""


def installed_providers(device: str) -> tuple[str, ...]:
    """Return rowmax and the peers that this device can run, without those that compile on a CPU."""
    if device == "cpu":
        return ("rowmax", "flash", "math")
    flash = {"fa2": "flash_attn.flash_attn_interface"}  # fa4 alone also has a flash_attn
    found = [name for name, module in FLASH.items() if _is_there(flash.get(name, module))]
    return ("rowmax", "cudnn", "flash", "efficient", "math", "flex", *found)


def _is_there(module: str) -> bool:
    """Return True if a module can be found, without importing it whole."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


class Provider(NamedTuple):
    """A function that prepares attention of a cell, and its layout and gradients."""

    make: Callable[[Cell, Inputs], Attend]
    heads_first: bool = True  # tensors are [B, H, N, D]
    dbias: bool = True


def provider(name: str) -> Provider:
    """Return the provider of a name."""
    if name.partition(":")[0] == "rowmax":
        return Provider(lambda cell, x: of_rowmax(cell, x, name.split(":")[1:]), False)
    if name in KERNELS:
        dbias = name not in ("cudnn", "flash")
        return Provider(lambda cell, x: of_sdpa(cell, x, KERNELS[name]), dbias=dbias)
    if name in FLASH:
        return Provider(lambda cell, x: of_flash(cell, x, FLASH[name]), False, False)
    return {
        "flex": Provider(of_flex),
        "xformers": Provider(of_xformers, False, False),
        "cuequivariance": Provider(of_cuequivariance),
        "none": Provider(lambda cell, x: _Nothing.apply, False, False),  # pyright: ignore
    }[name]


def refuse(cell: Cell, features: str) -> None:
    """Raise an UnsupportedError if the cell has one of the features, named in one text."""
    for feature in features.split():
        if getattr(cell, feature):
            raise UnsupportedError(f"without {feature}")


def of_rowmax(cell: Cell, x: Inputs, words: list[str]) -> Attend:
    """Return rowmax's call; ``words`` may name a backend, and "deterministic"."""
    options = arguments(cell, x)
    options["deterministic"] = "deterministic" in words
    options["backend"] = next((word for word in words if word != "deterministic"), None)
    if x.q_offsets is None or x.offsets is None:
        return lambda q, k, v: rowmax.attention(q, k, v, **options)
    more = x.q_offsets, x.offsets, *longest(cell)
    return lambda q, k, v: rowmax.attention_varlen(q, k, v, *more, **options)


def longest(cell: Cell) -> tuple[int | None, int | None]:
    """Return the most queries and keys of a packed sequence, None if they are not given."""
    if cell.unbounded:
        return None, None
    return cell.nq or max(cell.packed), max(cell.packed)


def arguments(cell: Cell, x: Inputs) -> dict[str, Any]:
    """Return the keywords of rowmax's call."""
    mask = rowmax.Mask()
    if cell.window:
        mask = mask & rowmax.Window(cell.window, 0)
    if cell.offsets:
        mask = mask & rowmax.Documents(cu_seqlens=x.offsets)
    elif x.ids is not None:
        mask = mask & rowmax.Documents(x.ids)
    if x.lengths is not None:
        left, lengths = rowmax.LeftPadding(cell.n - x.lengths), rowmax.PrefixLengths(x.lengths)
        mask = mask & (left if cell.left else lengths)
    found = {"causal": cell.causal, "softcap": cell.softcap, "bias": x.bias, "alibi": x.slopes}
    found |= {"sink": x.sink} if cell.sink else {}
    found |= {"dropout_p": cell.dropout, "seed": 1} if cell.dropout else {}
    if cell.boolean:
        return found | {"causal": False, "mask": allowed(cell, x)}
    plain = not (cell.window or cell.documents or cell.lengths)
    return found if plain else found | {"mask": mask}


class _Nothing(torch.autograd.Function):
    """Return v, with gradients for q and k too: the model around attention runs as usual."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore
        return dout, dout, dout


def of_sdpa(cell: Cell, x: Inputs, kernel: SDPBackend | None) -> Attend:
    """Return torch's SDPA with one of its kernels; None: torch chooses."""
    refuse(cell, "softcap sink")
    if kernel is SDPBackend.MATH:
        _refuse_matrices(cell, x.q.device.type)
    if cell.packed:  # a call for each sequence
        refuse(cell, "bias alibi")
        one = replace(cell, packed=(), unbounded=False)
        each = [of_sdpa(replace(one, n=n), x, kernel) for n in cell.packed]

        of_q = [cell.nq] * len(cell.packed) if cell.nq else list(cell.packed)
        sizes = of_q, list(cell.packed), list(cell.packed)

        def one_by_one(*qkv: Tensor) -> Tensor:
            of_each = (t[None].split(n, -2) for t, n in zip(qkv, sizes, strict=True))
            parts = zip(*of_each, strict=True)
            return torch.cat([f(*part) for f, part in zip(each, parts, strict=True)], -2)[0]

        return one_by_one
    few = cell.nq and cell.causal  # SDPA aligns positions to the first key
    masked = cell.window or cell.lengths or cell.documents or cell.boolean
    plain = not (masked or cell.alibi or cell.bias or few)
    pairs, bias = None if plain else allowed(cell, x), x.bias
    if kernel is SDPBackend.CUDNN_ATTENTION and bias is not None and bias.shape[-1] < cell.n:
        raise UnsupportedError("cuDNN reads past such a bias: a misaligned address")
    if x.slopes is not None:
        refuse(cell, "bias")
        i = torch.arange(cell.n, device=x.q.device)
        bias = (-x.slopes[:, None, None] * (i[-cell.queries :, None] - i).abs()).to(x.q.dtype)[None]

    def joined() -> Tensor | None:
        if bias is None:
            return pairs
        same = bias.to(x.q.dtype)  # SDPA takes no other
        return same if pairs is None else same.masked_fill(~pairs, -torch.inf)

    inside = bias is not None and bias.requires_grad  # then the mask has a gradient
    fixed = None if inside else joined()
    options: dict[str, Any] = {"is_causal": plain and cell.causal, "dropout_p": cell.dropout}
    options |= {"enable_gqa": True} if cell.hq != cell.hk else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = joined() if inside else fixed
        if kernel is None:
            return scaled_dot_product_attention(q, k, v, mask, **options)
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, mask, **options)

    return attend


def _refuse_matrices(cell: Cell, device: str) -> None:
    """Raise an UnsupportedError if the matrices of scores do not fit into free memory."""
    wanted, free = 4 * MATRICES * cell.b * cell.hq * cell.queries * cell.n, free_bytes(device)
    if free is not None and wanted > 0.8 * free:
        sizes = f"about {wanted / 2**30:.1f} GiB of scores, {free / 2**30:.1f} GiB are free"
        raise UnsupportedError(sizes)


def of_flex(cell: Cell, x: Inputs) -> Attend:
    """Return flex_attention, compiled, with the cell's terms and mask as functions."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    refuse(cell, "dropout packed sink left")
    torch._functorch.config.donated_buffer = False  # backward runs often
    torch._dynamo.config.recompile_limit = 256  # beyond it flex_attention holds the matrix
    torch._dynamo.config.accumulated_recompile_limit = 4096
    bias, slopes, ids, lengths = x.bias, x.slopes, x.ids, x.lengths
    offset = cell.n - cell.queries
    pairs = allowed(cell, x) if cell.boolean else None

    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        if pairs is not None:  # one sequence and one head stand for all, or there are lengths
            return pairs[b if lengths is not None else 0, 0, i, j]
        i = i + offset
        ok = i >= j if cell.causal or cell.window else i >= 0
        ok = ok & (i - j <= cell.window) if cell.window else ok
        ok = ok & (ids[i] == ids[j]) if ids is not None else ok
        return ok & (j < lengths[b]) if lengths is not None else ok

    def add(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cell.softcap:
            score = cell.softcap * torch.tanh(score / cell.softcap)
        if slopes is not None:
            score = score - slopes[h] * (i + offset - j).abs()
        if bias is None:
            return score
        b, h, i, j = (
            p if size > 1 else 0 for size, p in zip(bias.shape, (b, h, i, j), strict=True)
        )
        return score + bias[b, h, i, j]

    options: dict[str, Any] = {"enable_gqa": cell.hq != cell.hk}
    if cell.causal or cell.window or cell.documents or cell.lengths:
        sizes = (cell.b if cell.lengths else None, None, cell.queries, cell.n)
        options["block_mask"] = create_block_mask(keep, *sizes, device=x.q.device.type)
    if cell.softcap or cell.bias or cell.alibi:
        options["score_mod"] = add
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **options)


def installed(module: str) -> Any:
    """Return a module that a peer needs; raise an UnsupportedError if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"not installed: {error}") from None


def of_flash(cell: Cell, x: Inputs, name: str) -> Attend:
    """Return flash-attn's call; raise if its release lacks a keyword that the cell needs."""
    refuse(cell, "bias lengths documents boolean")
    module = installed(name)
    function = module.flash_attn_varlen_func if cell.packed else module.flash_attn_func
    options = {
        "causal": cell.causal or None,
        "softcap": cell.softcap or None,
        "dropout_p": cell.dropout or None,
        "alibi_slopes": x.slopes,
        "learnable_sink": x.sink,
        "window_size": (cell.window, 0) if cell.window else None,
        "cu_seqlens_q": x.q_offsets,
        "cu_seqlens_k": x.offsets,
    }
    given: dict[str, Any] = {key: y for key, y in options.items() if y is not None}
    known = set(signature(function).parameters)
    if set(given) - known:
        raise UnsupportedError(f"it lacks {sorted(set(given) - known)}")
    if cell.packed:
        lengths = zip(("max_seqlen_q", "max_seqlen_k"), longest(cell), strict=True)
        given |= {key: n for key, n in lengths if key in known and n is not None}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **given)
        return out[0] if isinstance(out, tuple) else out

    return attend


def of_xformers(cell: Cell, x: Inputs) -> Attend:
    """Return xformers' memory_efficient_attention."""
    refuse(cell, "softcap alibi packed window documents lengths boolean nq sink")
    ops = installed("xformers.ops")
    if cell.hq != cell.hk or (cell.causal and cell.bias):
        raise UnsupportedError("without grouped heads, and without causal beside a bias")
    bias = ops.LowerTriangularMask() if cell.causal else x.bias
    if x.bias is not None:
        bias = x.bias.expand(cell.b, cell.hq, cell.n, cell.n)
    return lambda q, k, v: ops.memory_efficient_attention(q, k, v, bias, p=cell.dropout)


def of_cuequivariance(cell: Cell, x: Inputs) -> Attend:
    """Return triangle_attention, for sequences that share a bias of each pair."""
    refuse(cell, "causal softcap alibi dropout packed window documents nq sink")
    attend = installed("cuequivariance_torch").triangle_attention
    if cell.hq != cell.hk or x.bias is None or x.bias.shape[0] > 1:
        raise UnsupportedError("without a bias that all sequences share, or with grouped heads")
    pairs, bias = allowed(cell, x), x.bias
    mask = None
    if pairs is not None:  # [1, B, 1, 1, N]
        mask = pairs.expand(cell.b, -1, -1, -1)[None, :, :, :1].contiguous()
    return lambda q, k, v: attend(q[None], k[None], v[None], bias[None], mask)[0]
