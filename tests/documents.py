"""Random calls of one sequence of documents, given by offsets."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import rowmax


def offsets_of(rng: random.Random, n: int) -> Tensor:
    """Return the offsets of up to 8 documents of n positions in all; some may be empty."""
    inner = sorted(rng.randint(0, n) for _ in range(rng.randrange(8)))
    return torch.tensor([0, *inner, n], dtype=rng.choice((torch.int32, torch.int64)))


def drawn(rng: random.Random, n: int, d: int, dtype: str, device: str) -> dict[str, Any]:
    """Return the arguments of a random call of n positions and heads of size d, with its terms."""
    hk, group = rng.choice((1, 2)), rng.choice((1, 3))
    torch.manual_seed(rng.randrange(1000))
    shapes = {"q": (hk * group, d), "k": (hk, d), "v": (hk, d)}
    kind = getattr(torch, dtype)
    found: dict[str, Any] = {
        name: torch.randn(1, n, *shape).to(device, kind).requires_grad_()
        for name, shape in shapes.items()
    }
    for name in ("alibi", "sink"):
        if rng.random() < 0.3:
            found[name] = torch.rand(hk * group).to(device).requires_grad_()
    return found | {"softcap": rng.choice((0.0, 0.0, 2.0))}


def band_of(rng: random.Random) -> rowmax.Mask:
    """Return a mask that documents of offsets may have besides."""
    masks = rowmax.Mask(), rowmax.Causal(), rowmax.Window(30, 4), rowmax.Window(9, -2)
    return rng.choice(masks)


def answer(call: dict[str, Any], out: Tensor, lse: Tensor) -> list[Tensor]:
    """Return out, lse and the gradients of all inputs."""
    leaves = [x for x in call.values() if isinstance(x, Tensor)]
    loss = out.float().square().sum() + lse[lse.isfinite()].sin().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def check(seed: int, dtype: str, backend: str, device: str) -> list[str]:
    """Return what differs in any bit from the packed call of the same documents.

    On a GPU, and by backends that compute packed sequences one by one, documents have ids instead.
    """
    rng = random.Random(seed)
    n, d = rng.choice((1, 40, 200, 300, 2500)), rng.choice((8, 32, 33, 64, 96, 128))
    call, cu, band = drawn(rng, n, d, dtype, device), offsets_of(rng, n).to(device), band_of(rng)
    options = {"return_lse": True, "deterministic": True, "backend": backend}
    mask = rowmax.Documents(cu_seqlens=cu) & band
    packed = backend == "cpu"
    if rowmax.explain(**call, mask=mask, **options).problem.varlen != packed:
        return ["not packed" if packed else "packed"]
    try:
        got = answer(call, *rowmax.attention(**call, mask=mask, **options))
    except ValueError as error:
        if not str(error).startswith("backend: got"):
            raise
        return [f"refused: {error}"]
    if not packed:
        ids = torch.bucketize(torch.arange(n, device=device), cu[1:], right=True)
        want = rowmax.attention(**call, mask=rowmax.Documents(ids) & band, **options)
    else:
        rows = [call[name].squeeze(0) for name in "qkv"]
        terms = {name: x for name, x in call.items() if name not in "qkv"} | options
        want = [t[None] for t in rowmax.attention_varlen(*rows, cu, cu, mask=band, **terms)]
    names = ["out", "lse", *(f"d{name}" for name, x in call.items() if isinstance(x, Tensor))]
    return [
        f"{name} differs"
        for name, a, b in zip(names, got, answer(call, *want), strict=True)
        if not torch.equal(a, b)
    ]
