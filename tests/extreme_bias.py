"""Biases and sinks as large as their dtype allows, compared with the definition in float64.

Every finite number is an ordinary input. A row whose biases are all ``finfo.min`` is the mean of
its values, and its gradients are those of the mean. ``check`` runs a case on a backend of any
device, forward and backward.

The rule of ``rowmax.testing`` is not used: its noise grows with the size of scores and lse, and
would allow any error.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rowmax.call.inputs import Wanted
from rowmax.testing import (
    Answer,
    Call,
    Case,
    answer,
    cotangents,
    definition,
    field_of,
    make,
    poisoned,
    refusal,
    tagged,
)
from rowmax.testing.tolerance import by_definition
from tests.drawn import Drawn, RefusedError, UnpreparedError

CASES = tagged("extreme biases")
#: dtypes of q and of the bias
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
)
KINDS = 8  # kinds of rows
FEW_KEYS = 8  # fewer may leave a row one, whose dS is the difference of two large numbers
LONG, FIRST = 1000, 40  # with more queries than LONG, only the FIRST have extreme biases


def biases(kind: Tensor, j: Tensor, random: Tensor) -> Tensor:
    """Return biases by the kind of their row (below ``KINDS``) and by key; kind 0 is ``random``."""
    info = torch.finfo(random.dtype)
    big = {torch.float16: 6e4, torch.float64: 1.5e308}.get(random.dtype, 3e38)
    lowest, low, high, nothing = (
        torch.full_like(random, x) for x in (info.min, -big, big, -torch.inf)
    )
    rows = (
        random,
        lowest,
        low,
        torch.where(j % 5 == 2, low, lowest),  # only those of ``low`` have weight
        torch.where(j == 3, high, random),
        torch.where(j % 7 == 3, high, torch.where(j % 7 == 4, lowest, random)),
        nothing,
        torch.where(j % 2 == 0, nothing, lowest),
    )
    found = torch.zeros_like(random)
    for n, row in enumerate(rows):
        found = torch.where(kind == n, row, found)
    return found


def extreme(
    case: Case,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    device: str,
    seed: int = 0,
    share: float = 1.0,
) -> Call:
    """Return a case with extreme biases in a share of its rows, and sinks of every size."""
    call = make(replace(case, bias_float32=bias_dtype != dtype), device, dtype, seed)
    leaves = call.leaves
    bias = leaves.get("bias")
    if bias is not None:
        shape = (1,) * (4 - bias.dim()) + bias.shape
        b, h, i, j = (
            torch.arange(n, device=device).view([-1 if d == e else 1 for e in range(4)])
            for d, n in enumerate(shape)
        )
        # a bias that broadcasts over queries has a kind for each sequence
        kind = ((i if shape[2] > 1 else b + 1) + h) % KINDS
        if case.nq > LONG:  # most tiles have no such row
            kind = torch.where(i < FIRST, kind, 0)
        if share < 1.0:
            draw = torch.rand(kind.shape, generator=torch.Generator().manual_seed(seed))
            kind = torch.where(draw.to(device) < share, kind, 0)
        found = biases(kind, j if shape[3] > 1 else j + 3, bias.view(shape))
        leaves["bias"] = found.view(bias.shape)
    if "sink" in leaves:
        top = torch.finfo(leaves["sink"].dtype).max
        big = 3e38 if top < 1e39 else 1.5e308
        sizes = leaves["sink"].new_tensor([big, -big, -top, 0.5])
        leaves["sink"] = sizes.repeat(-(-case.hq // 4))[: case.hq]
    return call.with_leaves(leaves)


@lru_cache(maxsize=256)
def reference(
    case: Case, dtype: torch.dtype, bias_dtype: torch.dtype, device: str
) -> tuple[Call, tuple[Tensor, Tensor], Answer]:
    """Return a case with extreme biases, its cotangents and the definition, once for all backends.

    Checks must not change them.
    """
    call = extreme(case, dtype, bias_dtype, device)
    grads = cotangents(call)
    return call, grads, definition(call, *grads, torch.float64)


def limit(dtype: torch.dtype, bias_dtype: torch.dtype) -> float:
    """Return the relative error that is allowed.

    Five quantities are rounded to half precision: P, out (in Delta, too), dS, the result, and dO
    if its row is divided. They may be off by 8 u. float32 rounds the largest float16 by 2^-9,
    which is then the noise of the score and of lse.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    found = 8 * torch.finfo(dtype).eps / 2 if half else 1e-5
    noise = 2 * 65504.0 * torch.finfo(torch.float32).eps if bias_dtype == torch.float16 else 0.0
    return found + noise


def complaints(got: Answer, ref: Answer, allowed: float) -> list[str]:
    """Return a sentence for each wrong tensor."""
    found = []
    for (name, x, _), (_, y, _) in zip(got.items(), ref.items(), strict=True):
        x, y = x.double(), y.double()
        finite = y.isfinite()
        if not torch.equal(x.isfinite(), finite) or not torch.equal(x[~finite], y[~finite]):
            found.append(f"{name}: not finite exactly where the definition is")
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


def uncancelled(call: Call, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """Return the sizes of the gradients of q, k, v and the bias if no terms of sums cancelled.

    ``dS = P (dP - Delta + dlse)``, where each factor is the sum of the sizes of its terms: those of
    dP are products of dO and V, those of Delta of dO and O. Errors of the factors are relative to
    these. The call is not packed, and has no dropout.
    """
    wide = {name: t.detach().double() for name, t in call.leaves.items()}
    q, k, v = (t.detach().double() for t in call.inputs[:3])
    (b, nk, hk, _), group = k.shape, q.shape[2] // k.shape[2]
    unit = torch.eye(nk, dtype=torch.double, device=k.device)[None, :, None].expand(b, nk, hk, nk)
    weights, _ = by_definition(call, {**wide, "v": unit}, torch.double)
    p, do = weights.transpose(1, 2), dout.double().abs()
    of_heads = [t.abs().repeat_interleave(group, 2) for t in (k, v)]
    out = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2)).abs()
    ds = (
        torch.einsum("bihd,bjhd->bhij", do, of_heads[1])
        + (do * out).sum(-1).transpose(1, 2)[..., None]
    )
    ds = p * (ds if dlse is None else ds + dlse.double().abs()[..., None])
    scale = q.shape[3] ** -0.5 if call.case.scale is None else call.case.scale

    def of_keys(pairs: Tensor, rows: Tensor) -> Tensor:
        return torch.einsum("bhij,bihd->bjhd", pairs, rows).unflatten(2, (hk, group)).sum(3)

    found = {
        "q": scale * torch.einsum("bhij,bjhd->bihd", ds, of_heads[0]),
        "k": scale * of_keys(ds, q.abs()),
        "v": of_keys(p, do),
    }
    if "bias" in call.leaves:
        found["bias"] = ds.sum_to_size((1,) * (4 - wide["bias"].dim()) + wide["bias"].shape)
        found["bias"] = found["bias"].view(wide["bias"].shape)
    return {name: t for name, t in found.items() if name in call.leaves}


def cancelled_complaints(
    got: Answer, ref: Answer, sizes: dict[str, Tensor], allowed: float
) -> list[str]:
    """Return a sentence for each gradient with an element whose error is beyond its terms."""
    found = []
    for name, most in sizes.items():
        x, y = got.gradients[name].double(), ref.gradients[name].double()
        least = torch.finfo(got.gradients[name].dtype).tiny
        bad = ~((x - y).abs() <= allowed * most + least)
        if bad.any():
            at = bad.nonzero()[0].tolist()
            text = f"{x[bad][0]} at {at}, want {y[bad][0]}, terms {most[bad][0]:.3g}"
            found.append(f"{name}: {text}, and {int(bad.sum())} such")
    return found


def row_complaints(got: Answer, ref: Answer, allowed: float) -> list[str]:
    """Return a sentence if one row of out is wrong, which the norm of all rows would hide."""
    x, y = got.out.double(), ref.out.double()
    bad = (x - y).norm(dim=-1) > allowed * y.norm(dim=-1)
    return (
        [f"out: {int(bad.sum())} rows, the first {bad.nonzero()[0].tolist()}"] if bad.any() else []
    )


def check_backward(
    case: Case,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    device: str,
    backward: Any,
    lacked: Container[str] = (),
) -> list[str]:
    """Return what is wrong with a backend's backward from the definition's out and lse.

    The backend makes no gradient that is ``lacked``.
    """
    call, (dout, dlse), ref = reference(case, dtype, bias_dtype, device)
    problem, tensors = call.problem()
    rows = (ref.out.to(dtype), ref.lse.to(problem.accumulator), dout, dlse)
    if case.packed:
        rows = tuple(t[None] for t in rows)
    wanted = Wanted(*(w and f"d{n}" not in lacked for n, w in call.wanted._asdict().items()))
    with poisoned():
        got = backward(problem, tensors, *rows, wanted)
    made = {n: x for n, x in ref.gradients.items() if getattr(wanted, field_of(n))}
    gradients = {n: getattr(got, field_of(n)).view(x.shape) for n, x in made.items()}
    allowed = limit(dtype, bias_dtype)
    want = replace(ref, gradients=made)
    return complaints(Answer(ref.out, ref.lse, gradients), want, allowed)


def check(
    case: Case, dtype: torch.dtype, bias_dtype: torch.dtype, backend: str, device: str
) -> list[str]:
    """Return what is wrong with one case; ["refused: reason"] if the backend does not take it."""
    if reason := refusal(extreme(case, dtype, bias_dtype, device), backend):
        return [f"refused: {reason}"]
    call, grads, ref = reference(case, dtype, bias_dtype, device)
    return wrong(call, grads, ref, backend, limit(dtype, bias_dtype))


def wrong(
    call: Call,
    grads: tuple[Tensor, Tensor],
    ref: Answer,
    backend: str,
    allowed: float,
    by_terms: bool = False,
) -> list[str]:
    """Return what is wrong with a backend's answer of a call with extreme biases.

    ``by_terms``: the terms of a gradient may cancel, and limit the errors of its elements.
    """
    with poisoned():
        got = answer(call, *grads, backend=backend)
    found = row_complaints(got, ref, allowed)
    if by_terms:
        found += cancelled_complaints(got, ref, uncancelled(call, *grads), allowed)
        got, ref = replace(got, gradients={}), replace(ref, gradients={})
    return complaints(got, ref, allowed) + found


def masked(case: Case) -> bool:
    """Return True for masks that may leave a row few keys, however many there are."""
    limits = (case.left, case.right, case.documents, case.prefix, case.allowed, case.lengths)
    return any(x is not None for x in (*limits, case.padding, case.step))


def random_wrong(drawn: Drawn, backend: str, device: str) -> list[str]:
    """Return what is wrong with a random call, some of whose biases and sinks are extreme.

    Raises:
        RefusedError: the backend does not take the call, or it has no bias and no sink.
        UnpreparedError: the call or its reference cannot be made.
    """
    # other scores are of ordinary size: their rounding grows with the scale
    case, dtype = replace(drawn.case, scale=None), getattr(torch, drawn.dtype)
    if not (case.bias or case.sink):
        raise RefusedError("neither bias nor sink")
    keys = [nk for _, nk in case.sequences or ((0, case.nq if case.nk is None else case.nk),)]
    if max(keys, default=0) < FEW_KEYS:
        raise RefusedError("so few keys that dS cancels")
    bias_dtype = torch.float32 if case.bias_float32 else dtype
    share = (1.0, 0.3, 0.02)[drawn.seed % 3]
    try:
        call = extreme(case, dtype, bias_dtype, device, drawn.seed, share)
        grads = cotangents(call, drawn.seed + 1)
        ref = definition(call, *grads, torch.float64)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnpreparedError(f"{type(error).__name__}: {error}") from error
    if reason := refusal(call, backend):
        raise RefusedError(reason)
    by_terms = masked(case) and not case.packed  # a row may see one key
    return wrong(call, grads, ref, backend, limit(dtype, bias_dtype), by_terms)


def checks(
    backend: str,
    device: str,
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = DTYPES,
    cases: list[Case] = CASES,
) -> list[str]:
    """Return what is wrong with cases in every pair of dtypes that the backend takes."""
    found, count = [], 0
    for case in cases:
        for pair in pairs_of(case, dtypes):
            wrong = check(case, *pair, backend, device)
            if wrong and wrong[0].startswith("refused"):
                continue
            count += 1
            found += [f"{case} {pair[0]} {pair[1]}: {text}" for text in wrong]
    return found if count else ["the backend refused every case"]


def pairs_of(
    case: Case, dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = DTYPES
) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of q and of the bias with which a case is checked."""
    return [pair for pair in dtypes if case.bias or pair[0] == pair[1]]
