"""Biases and sinks as large as their dtype goes, against the definition in float64.

Every finite number is an ordinary input: a row whose biases are all ``finfo.min`` is the mean of
the values it sees, and its gradients are those of that mean. ``checks`` runs every case on a
backend, forward and backward, so that a GPU's script can as well.

The rule of ``tests/tolerance.py`` has no part here. Its noise grows with the size of scores and of
lse, and would allow anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rowmax.call.dispatch import refusal
from rowmax.call.problem import Wanted

from .cases import LEAVES, Call, Case, make
from .tolerance import Answer, answer, cotangents, definition, poisoned

_SHAPE = {"b": 2, "nq": 70, "nk": 96, "hq": 4, "hk": 2, "d": 64}
_PACKED = ((40, 60), (0, 17), (70, 96), (33, 0), (64, 64))
CASES = [
    *(Case(f"full-{bias}", bias=bias, **_SHAPE) for bias in ("bhqk", "1hqk", "b1qk", "11qk")),
    Case("full-causal-sink", bias="bhqk", sink=True, causal=True, **_SHAPE | {"nq": 104}),
    Case("full-window", bias="11qk", left=30, right=9, **_SHAPE),
    Case("full-softcap-alibi", bias="bhqk", softcap=2.0, alibi=True, **_SHAPE),
    Case("full-deep", bias="bhqk", **_SHAPE | {"nq": 150, "nk": 400, "b": 1}),
    Case("full-wide", bias="bhqk", **_SHAPE | {"d": 256, "b": 1}),
    Case("row", bias="b11k", **_SHAPE | {"b": 8}),
    Case("row-heads", bias="bh1k", **_SHAPE | {"b": 8, "hk": 4}),
    Case("row-causal-sink", bias="b11k", sink=True, causal=True, **_SHAPE | {"b": 8, "nq": 104}),
    Case("row-lengths", bias="b11k", lengths=(0.7, 0.2, 0.0), **_SHAPE | {"b": 8}),
    Case("row-wide", bias="b11k", **_SHAPE | {"b": 8, "d": 256}),
    Case("column", bias="bhq1", **_SHAPE),
    Case("column-causal-sink", bias="1hq1", sink=True, causal=True, **_SHAPE | {"nq": 104}),
    Case("column-wide", bias="11q1", **_SHAPE | {"d": 256, "b": 1}),
    Case("sink", sink=True, **_SHAPE),
    Case("sink-causal", sink=True, causal=True, **_SHAPE | {"nq": 104}),
    Case("sink-packed", sink=True, causal=True, sequences=_PACKED, **_SHAPE),
    Case("packed-full", bias="bhqk", causal=True, sequences=_PACKED, **_SHAPE),
    Case("packed-row", bias="b11k", sink=True, sequences=_PACKED, **_SHAPE),
    Case("packed-column", bias="1hq1", causal=True, sequences=_PACKED, **_SHAPE),
    Case("full-mask-dropout", bias="bhqk", allowed="bhqk", dropout=0.2, **_SHAPE),
]
#: dtypes of q and of the bias
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
)
KINDS = 8  # of rows


def biases(kind: Tensor, j: Tensor, random: Tensor) -> Tensor:
    """Biases by the kind of their row (below ``KINDS``) and by key, ``random`` where ordinary."""
    info = torch.finfo(random.dtype)
    big = {torch.float16: 6e4, torch.float64: 1.5e308}.get(random.dtype, 3e38)
    lowest, low, high, nothing = (
        torch.full_like(random, x) for x in (info.min, -big, big, -torch.inf)
    )
    rows = (
        random,
        lowest,
        low,
        torch.where(j % 5 == 2, low, lowest),  # only the former weigh
        torch.where(j == 3, high, random),
        torch.where(j % 7 == 3, high, torch.where(j % 7 == 4, lowest, random)),
        nothing,
        torch.where(j % 2 == 0, nothing, lowest),
    )
    found = torch.zeros_like(random)
    for n, row in enumerate(rows):
        found = torch.where(kind == n, row, found)
    return found


def extreme(case: Case, dtype: torch.dtype, bias_dtype: torch.dtype, device: str) -> Call:
    """A case with such biases, and sinks of every size."""
    call = make(replace(case, bias_float32=bias_dtype != dtype), device, dtype)
    leaves = call.leaves
    bias = leaves.get("bias")
    if bias is not None:
        b, h, i, j = (
            torch.arange(n, device=device).view([-1 if d == e else 1 for e in range(4)])
            for d, n in enumerate(bias.shape)
        )
        # a shape that broadcasts over queries has a kind for each sequence
        kind = (i if bias.shape[2] > 1 else b + 1) + h
        leaves["bias"] = biases(kind % KINDS, j if bias.shape[3] > 1 else j + 3, bias)
    if "sink" in leaves:
        top = torch.finfo(leaves["sink"].dtype).max
        big = 3e38 if top < 1e39 else 1.5e308
        leaves["sink"] = leaves["sink"].new_tensor([big, -big, -top, 0.5])
    return call.with_leaves(leaves)


def limit(dtype: torch.dtype, bias_dtype: torch.dtype) -> float:
    """The relative error that is allowed.

    Five quantities are rounded to a half precision on the way (P, out and with it Delta, dS, the
    result, and dO where its row is divided): 8 u. The largest float16 is no larger than what
    float32 rounds by 2^-9, which is then the noise of the score and of lse.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    found = 8 * torch.finfo(dtype).eps / 2 if half else 1e-5
    noise = 2 * 65504.0 * torch.finfo(torch.float32).eps if bias_dtype == torch.float16 else 0.0
    return found + noise


def complaints(got: Answer, ref: Answer, allowed: float) -> list[str]:
    """A sentence for each tensor that is wrong."""
    found = []
    for (name, x, _), (_, y, _) in zip(got.items(), ref.items(), strict=True):
        x, y = x.double(), y.double()
        finite = y.isfinite()
        if not torch.equal(x.isfinite(), finite) or not torch.equal(x[~finite], y[~finite]):
            found.append(f"{name}: not finite where the definition is, or the other way round")
            continue
        x, y = x[finite], y[finite]
        if name == "lse":
            bad = (x - y).abs() > 1e-6 * y.abs() + 1e-5
            if bad.any():
                found.append(f"lse: {x[bad][0]}, want {y[bad][0]}, and {int(bad.sum())} such")
            continue
        off, size = (x - y).norm().item(), y.norm().item()
        if not off <= allowed * size:
            found.append(f"{name}: error {off:.3g} of {size:.3g}, allowed {allowed:.3g} of it")
    return found


def row_complaints(got: Answer, ref: Answer, allowed: float) -> list[str]:
    """The same of each row of out, since none may hide behind the others."""
    x, y = got.out.double(), ref.out.double()
    bad = (x - y).norm(dim=-1) > allowed * y.norm(dim=-1)
    return (
        [f"out: {int(bad.sum())} rows, the first {bad.nonzero()[0].tolist()}"] if bad.any() else []
    )


def check_backward(
    case: Case, dtype: torch.dtype, bias_dtype: torch.dtype, device: str, backward: Any
) -> list[str]:
    """What a backend's backward gives for the definition's out and lse."""
    call = extreme(case, dtype, bias_dtype, device)
    problem, tensors = call.problem()
    dout, dlse = cotangents(call)
    ref = definition(call, dout, dlse, torch.float64)
    rows = (ref.out.to(dtype), ref.lse.to(problem.accumulator), dout, dlse)
    if case.packed:
        rows = tuple(t[None] for t in rows)
    wanted = Wanted(*(name in call.leaves for name in LEAVES))
    with poisoned():
        got = backward(problem, tensors, *rows, wanted)
    gradients = {name: getattr(got, name).view(x.shape) for name, x in ref.gradients.items()}
    allowed = limit(dtype, bias_dtype)
    return complaints(Answer(ref.out, ref.lse, gradients), ref, allowed)


def check(
    case: Case, dtype: torch.dtype, bias_dtype: torch.dtype, backend: str, device: str
) -> list[str] | None:
    """What is wrong with one case; None if the backend refuses it."""
    call = extreme(case, dtype, bias_dtype, device)
    problem = call.problem()[0]
    if refusal(backend, problem, "forward") or refusal(backend, problem, "backward"):
        return None
    grads = cotangents(call)
    ref = definition(call, *grads, torch.float64)
    with poisoned():
        got = answer(call, *grads, backend=backend)
    allowed = limit(dtype, bias_dtype)
    return complaints(got, ref, allowed) + row_complaints(got, ref, allowed)


def checks(
    backend: str,
    device: str,
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = DTYPES,
    cases: list[Case] | None = None,
) -> list[str]:
    """What is wrong with every case that the backend takes."""
    found, taken = [], 0
    for case in CASES if cases is None else cases:
        for pair in dtypes:
            if not case.bias and pair[0] != pair[1]:
                continue
            wrong = check(case, *pair, backend, device)
            taken += wrong is not None
            found += [f"{case} {pair[0]} {pair[1]}: {text}" for text in wrong or ()]
    return found if taken else ["the backend took none of the cases"]
