"""Random calls of ``scaled_dot_product_attention``, judged against torch's MATH in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from rowmax.attention import arguments
from rowmax.call.normalize import normalized
from rowmax.call.problem import problem_of
from rowmax.integrations.sdpa import dense
from rowmax.reference import dense as definition
from rowmax.reference import tolerance

MASKS = (None, "causal", "bool", "float")
BATCHES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((),),
    3: ((),),
    4: ((1,), (2,), (3,)),
    5: ((2, 3), (1, 2)),
}


@dataclass(frozen=True)
class Drawn:
    """A call without its numbers."""

    seed: int
    dtype: torch.dtype
    axes: int
    batch: tuple[int, ...]
    hq: int
    hk: int
    nq: int
    nk: int
    d: int
    dv: int
    layout: str  # bhnd, bnhd or padded memory
    mask: str | None
    mask_sizes: tuple[int, ...]
    mask_dtype: torch.dtype
    scale: float | None
    grad_mask: bool


def draw(seed: int, dtypes: tuple[torch.dtype, ...], longest: int, most_d: int) -> Drawn:
    """Return the call of a seed."""
    rng = random.Random(seed)
    axes = rng.choice((2, 3, 4, 4, 4, 4, 5))
    batch = rng.choice(BATCHES[axes])
    hk, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4))
    hk, group = (1, 1) if axes == 2 else (hk, group)
    nq = rng.randint(1, longest)
    nk = nq if rng.random() < 0.4 else rng.randint(1, longest)
    d = rng.choice((1, 8, 16, 24, 32, 40, 64, most_d))
    dtype = rng.choice(dtypes)
    full = (*batch, *([hk * group] if axes > 2 else []), nq, nk)
    sizes = tuple(1 if rng.random() < 0.4 else n for n in full)
    sizes = sizes[rng.randint(0, len(sizes) - 1) :] if rng.random() < 0.4 else sizes
    return Drawn(
        seed, dtype, axes, batch, hk * group, hk, nq, nk, d,
        dv=rng.choice((d, d, 16, 48)),
        layout=rng.choice(("bhnd", "bnhd", "padded")),
        mask=rng.choice(MASKS),
        mask_sizes=sizes,
        mask_dtype=rng.choice((dtype, torch.float32)),
        scale=rng.choice((None, None, 0.3, 1.0)),
        grad_mask=rng.random() < 0.7,
    )  # fmt: skip


def make(drawn: Drawn, device: str, grad: bool = True) -> dense.Call:
    """Return the arguments of a call. The numbers are the same on every device."""
    rng = torch.Generator().manual_seed(drawn.seed)

    def tensor(heads: int, n: int, d: int) -> Tensor:
        sizes = (*drawn.batch, *([heads] if drawn.axes > 2 else []), n, d)
        t = torch.randn(sizes, generator=rng).to(device, drawn.dtype)
        if drawn.layout == "bnhd" and drawn.axes > 2:
            t = t.transpose(-2, -3).contiguous().transpose(-2, -3)
        elif drawn.layout == "padded":
            t = torch.nn.functional.pad(t, (0, 3))[..., :d]
        return t.detach().requires_grad_(grad)

    query = tensor(drawn.hq, drawn.nq, drawn.d)
    key, value = tensor(drawn.hk, drawn.nk, drawn.d), tensor(drawn.hk, drawn.nk, drawn.dv)
    mask = None
    if drawn.mask in ("bool", "float"):
        seen = torch.rand(drawn.mask_sizes, generator=rng) < 0.7
        if len(seen.shape):
            seen[..., 0] = True  # a key for every row
        mask = seen
    if drawn.mask == "float":
        bias = torch.randn(drawn.mask_sizes, generator=rng)
        mask = bias.masked_fill(~seen, -torch.inf) if drawn.seed % 3 == 0 else bias
        mask = mask.to(device, drawn.mask_dtype).requires_grad_(drawn.grad_mask and grad)
    elif mask is not None:
        mask = mask.to(device)
    causal = drawn.mask == "causal"
    return dense.Call(query, key, value, mask, 0.0, causal, drawn.scale, drawn.hq != drawn.hk)


def wrong(call: dense.Call, compute: Callable[..., Tensor] = dense.fallback) -> list[str]:
    """Return a sentence for each result of a function that breaks the rule, forward or backward."""
    dtype = call.query.dtype
    got, dout = _results(call, compute)
    with sdpa_kernel(SDPBackend.MATH):
        ref, _ = _results(_cast(call, torch.float64), torch_sdpa, dout)
    less = torch.float32 if dtype == torch.float64 else dtype
    std, _ = _results(_cast(call, less), _standard, dout)
    noise = _noise(call, dout)
    leaves = {"dq": call.query, "dk": call.key, "dv": call.value, "dbias": call.attn_mask}
    found = []
    for name, x in got.items():
        leaf, rule = leaves.get(name), dtype
        if leaf is not None and x.dtype != leaf.dtype:
            found.append(f"{name}: {x.dtype}, want {leaf.dtype}")
        if dtype == torch.float64:  # the gradient of a float32 mask is rounded
            rule = x.dtype
        factor = tolerance.OUTPUT if name == "out" else tolerance.GRADIENT
        text = tolerance.complaint(x, ref[name], std[name], rule, factor, noise[name])
        found += [] if text is None else [f"{name}: {text}"]
    return found


def _standard(query: Tensor, key: Tensor, value: Tensor, *options: Any, **more: Any) -> Tensor:
    """Return standard attention with every step in the dtype: torch's MATH uses a wider one."""
    mask, _, causal = options
    if more["enable_gqa"]:
        group = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if more["scale"] is None else more["scale"]
    scores = query @ key.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    elif mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value


def _results(
    call: dense.Call, compute: Callable[..., Tensor], dout: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return (out and gradients by name, dout)."""
    out = compute(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
    if dout is None:
        rng = torch.Generator().manual_seed(1)
        dout = torch.randn(out.shape, generator=rng).to(out.device, out.dtype)
    leaves = {"dq": call.query, "dk": call.key, "dv": call.value, "dbias": call.attn_mask}
    leaves = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    found = {"out": out.detach()}
    if leaves:
        got = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        found.update(zip(leaves, got, strict=True))
    return found, dout


def _cast(call: dense.Call, dtype: torch.dtype) -> dense.Call:
    def cast(t: Tensor | None) -> Tensor | None:
        if t is None or t.dtype == torch.bool:
            return t
        return t.detach().to(dtype).requires_grad_(t.requires_grad)

    query, key, value, mask = map(cast, call[:4])
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def _noise(call: dense.Call, dout: Tensor) -> dict[str, tolerance.Noise]:
    """Return the noise of each result by the project's rule."""
    given = dense.arguments(call._replace(dropout_p=0.0))
    fixed = {name: x.detach() if isinstance(x, Tensor) else x for name, x in given.items()}
    tensors, options, _ = normalized(arguments(**fixed))
    problem = problem_of(tensors, options)
    out, lse = definition.attention(problem, tensors)
    if call.query.dim() == 4:
        dout = dout.transpose(1, 2)
    elif call.query.dim() > 4:
        dout = dout.flatten(0, -4).transpose(1, 2)
    else:
        dout = dout.transpose(0, 1).reshape(out.shape) if out.shape[0] == 1 else dout.unsqueeze(2)
        if call.query.dim() == 3 and out.shape[0] == 1 and out.shape[2] == 1:
            dout = dout.reshape(out.shape)
    return tolerance.noise(problem, tensors, out, lse, dout, None)


# --- varlen_attn ---------------------------------------------------------------------------------


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _band(nq: int, nk: int, window: tuple[int, int]) -> Tensor:
    """Return which keys a query sees, aligned bottom-right."""
    distance = torch.arange(nk)[None] - (torch.arange(nq)[:, None] + nk - nq)
    left, right = (n if n >= 0 else nq + nk for n in window)
    return (distance >= -left) & (distance <= right)


def _by_sequence(
    tensors: list[Tensor],
    lengths: list[list[int]],
    used: list[int] | None,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Return the results of the sequences, one after the other."""
    outs = []
    q, k, v = tensors
    for b, (one_q, one_k, one_v) in enumerate(
        zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    ):
        n = one_k.shape[0] if used is None else used[b]
        parts = [t.transpose(0, 1) for t in (one_q, one_k[:n], one_v[:n])]
        group = q.shape[1] // k.shape[1]
        parts[1:] = [t.repeat_interleave(group, 0) for t in parts[1:]]
        mask = _band(one_q.shape[0], n, window).to(q.device)
        outs.append(torch_sdpa(*parts, attn_mask=mask, scale=scale).transpose(0, 1))
    return torch.cat(outs)


def wrong_varlen(
    seed: int, dtype: torch.dtype, device: str, compute: Callable[..., Any], longest: int = 20
) -> list[str]:
    """Return a sentence for each result of a packed call that breaks the rule."""
    from torch.nn.attention.varlen import AuxRequest

    rng, numbers = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=numbers).to(device, dtype)

    lengths_k = [rng.randint(1, longest) for _ in range(rng.randint(1, 4))]
    lengths_q = lengths_k
    if rng.random() < 0.5:
        lengths_q = [rng.randint(1, longest) for _ in lengths_k]
    used = [rng.randint(1, n) for n in lengths_k] if rng.random() < 0.3 else None
    hk, group, d = rng.choice((1, 2)), rng.choice((1, 3)), rng.choice((16, 40, 64))
    window = rng.choice(((-1, -1), (-1, 0), (5, 0), (3, 4)))
    scale = rng.choice((None, 0.2))
    sizes = (sum(lengths_q), hk * group, d), *[(sum(lengths_k), hk, d)] * 2
    leaves = [normal(*size).requires_grad_() for size in sizes]
    out, lse = compute(
        *leaves,
        *(_offsets(lengths).to(device) for lengths in (lengths_q, lengths_k)),
        max(lengths_q),
        max(lengths_k),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=window,
        enable_gqa=group > 1,
        seqused_k=None if used is None else torch.tensor(used, dtype=torch.int32, device=device),
    )
    found = []
    if (lse.shape, lse.dtype) != ((hk * group, sum(lengths_q)), torch.float32):
        found.append(f"lse: {lse.dtype} {list(lse.shape)}")
    dout = normal(*out.shape)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def dense_results(wide: torch.dtype) -> list[Tensor]:
        copies = [t.detach().to(wide).requires_grad_() for t in leaves]
        want = _by_sequence(copies, [lengths_q, lengths_k], used, window, scale)
        return [want.detach(), *torch.autograd.grad(want, copies, dout.to(wide))]

    ref, std = dense_results(torch.float64), dense_results(dtype)
    u = torch.finfo(torch.float32).eps * (40 if device == "cpu" else 400)
    for n, (x, r, s) in enumerate(zip(got, ref, std, strict=True)):
        factor = tolerance.GRADIENT if n else tolerance.OUTPUT
        size = u * max(1.0, r.abs().max().item())  # rows of one key cancel
        noise = tolerance.Noise(size, size * r.numel() ** 0.5)
        text = tolerance.complaint(x, r, s, dtype, factor, noise)
        found += [] if text is None else [f"{('out', 'dq', 'dk', 'dv')[n]}: {text}"]
    return found


# --- what tests share ----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = k = v = x.unflatten(-1, (2, 16)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = out.transpose(1, 2).flatten(2)
        return self.mha(x, x, x, need_weights=False)[0]


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that gets the name of each operator of rowmax that runs below autograd."""
    from rowmax.call import dispatch

    calls: list[str] = []
    names = {
        "forward": "forward",
        "backward": "backward",
        "repeated": "forward",
        "repeated_backward": "backward",
    }
    real = {name: getattr(dispatch.Prepared, name) for name in names}

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            found = function(*args, **keywords)
            if found is not None:  # else no call like it was before, and another computes it
                calls.append(name)
            return found

        return call

    for name, function in real.items():
        setattr(dispatch.Prepared, name, counting(names[name], function))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(dispatch.Prepared, name, function)
