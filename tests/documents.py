"""Random calls of one sequence of documents, given by offsets."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import rowmax
from rowmax.call.normalize import SHORT


def offsets_of(rng: random.Random, n: int, *, like: Tensor | None = None) -> Tensor:
    """Return the offsets of up to 8 documents of n positions in all; some may be empty.

    They have the number and dtype of ``like``.
    """
    many = rng.randrange(8) if like is None else len(like) - 2
    inner = sorted(rng.randint(0, n) for _ in range(many))
    dtype = rng.choice((torch.int32, torch.int64)) if like is None else like.dtype
    return torch.tensor([0, *inner, n], dtype=dtype)


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
    """Return what differs in any bit from the packed call of the same documents, or from ids.

    By backends that compute packed sequences one by one, and where they are short on a GPU,
    documents have ids instead, and so do ids on a GPU. There later calls are found, and repeat the
    launches of the second, with other documents; a call with a seed is not found.
    """
    rng = random.Random(seed)
    n, d = rng.choice((1, 40, 200, 300, 2500)), rng.choice((8, 32, 33, 64, 96, 128))
    call, first, band = drawn(rng, n, d, dtype, device), offsets_of(rng, n), band_of(rng)
    options = {"return_lse": True, "deterministic": True, "backend": backend}
    long = device == "cpu" or n >= SHORT * (len(first) - 1)
    packed = long and backend not in ("torch", "reference")
    names = ["out", "lse", *(f"d{name}" for name, x in call.items() if isinstance(x, Tensor))]
    turns = first, *(offsets_of(rng, n, like=first) for _ in range(3))
    found = []
    for turn, cu in enumerate(x.to(device) for x in turns):
        number = torch.bucketize(torch.arange(n, device=device), cu[1:], right=True)
        if device == "cpu":  # in no order: a GPU visits other tiles then
            number = torch.randperm(len(cu))[number]
        ids = number.to(cu.dtype)
        by_ids: dict[str, Any] = {**call, **options, "mask": rowmax.Documents(ids) & band}
        by_offsets: dict[str, Any] = by_ids | {"mask": rowmax.Documents(cu_seqlens=cu) & band}
        if rowmax.explain(**by_offsets).problem.varlen != packed:
            return ["not packed" if packed else "packed"]
        try:
            want = answer(call, *rowmax.attention(**by_ids, seed=0))
        except ValueError as error:
            if not str(error).startswith("backend: got"):
                raise
            return [f"refused: {error}"]
        for how, given in (("ids", by_ids), ("offsets", by_offsets)):
            if packed and (how == "offsets" or device == "cpu"):
                want = answer(call, *_packed(by_offsets, cu, band))
            got = answer(call, *rowmax.attention(**given))
            both = zip(names, got, want, strict=True)
            differ = (name for name, a, b in both if not torch.equal(a, b))
            found += [f"call {turn} by {how}: {name} differs" for name in differ]
    return found


def _packed(given: dict[str, Any], cu: Tensor, band: rowmax.Mask) -> list[Tensor]:
    """Return (out, lse) of the packed call of the same documents."""
    rows = [given[name].squeeze(0) for name in "qkv"]
    terms = {name: x for name, x in given.items() if name not in "qkv"} | {"mask": band}
    results: Any = rowmax.attention_varlen(*rows, cu, cu, **terms)  # pyright: ignore
    return [t[None] for t in results]
