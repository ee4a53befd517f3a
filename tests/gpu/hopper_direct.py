"""The Hopper forward and backward, called directly: without dispatch and autograd.

Each case runs over memory filled with NaN, by the rule of ``rowmax.testing``. Infinite numbers in
padding must change nothing, and repeats must agree to the bit, except dq if its sums have no order.
The gradients must also be near those of the Triton backend.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rowmax.call.inputs import Arrivals, Places, Tensors
from rowmax.call.problem import Gradients, Problem, Wanted
from rowmax.gpu import hopper, triton
from rowmax.gpu.hopper.lib.tma import is_aligned
from rowmax.reference import dense
from rowmax.reference.tolerance import GRADIENT, LIMITS
from rowmax.rules.arrivals import ALL, Landing, table
from rowmax.testing import (
    CASES,
    Case,
    Expected,
    complaint,
    cotangents,
    expected,
    field_of,
    make,
    poisoned,
    tagged,
)
from rowmax.torch_compat import store_on_stream
from tests import gaps
from tests.poison_padding import padding_matters, padding_matters_backward

#: sequences that share a bias of each pair, with so many tiles that blocks keep it
PAIRS = [
    Case(f"pairs-{n}-{d}{'-float32' * wide}{'-lengths' * bool(lengths)}", b=b, nq=n, nk=n, hq=4,
         d=d, bias="1hqk", bias_float32=wide, lengths=lengths)
    for n, b, d in ((256, 72, 32), (384, 48, 32), (512, 36, 32), (768, 24, 32), (504, 33, 32),
                    (512, 36, 64), (768, 24, 64))
    for wide in (False, True)
    for lengths in (None, (0.75, 1.0, 0.0, 0.3))
]  # fmt: skip


def cases(call: str) -> list[Case]:
    """Return the cases of the forward or of the backward."""
    found = tagged("odd lengths", "every head size")
    if call == "forward":
        found = [case for case in found if "gradients" not in case.tags]
    return [*found, *CASES, *PAIRS]


def check_forward(
    case: Case, dtype: str, repeats: int, device: str = "cuda", reference: str | None = None
) -> list[str]:
    """Return what is wrong with the forward of a case.

    The references are computed on the device ``reference``, or on that of the call.
    """
    problem, tensors = make(case, device, getattr(torch, dtype)).problem()
    reason = hopper.supports(problem, "forward")
    if reason is not None:
        return ["refused: " + reason]
    same = make(case, reference or device, getattr(torch, dtype)).problem()
    ref, std = (dense.attention(*same, t) for t in (torch.float64, problem.dtype))
    with poisoned():
        got = hopper.forward(problem, tensors)
    found = [
        complaint(name, x.to(y.device), y, z, problem.dtype)
        for name, x, y, z in zip(("out", "lse"), got, ref, std, strict=True)
    ]
    found.append(padding_matters(problem, tensors, hopper.forward, got))
    for n in range(repeats):
        again = hopper.forward(problem, tensors)
        if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            found.append(f"repeat {n} differs")
            break
    if problem.total_k and hopper.takes_arrivals(problem) and got[0].is_cuda:
        found += differs_late(got, problem, tensors)
    found += slower_tiles()
    return [text for text in found if text]


def differs_late(got: tuple[Tensor, Tensor], problem: Problem, tensors: Tensors) -> list[str]:
    """Return what differs from a forward whose keys arrive before it begins (``Arrivals``).

    They come from pinned memory of the host, in parts that a copy engine brings; the last rows
    first. Until then they are NaN.
    """
    both = tensors.k, tensors.v
    if not all(map(is_aligned, both)):
        return []
    store = store_on_stream()
    assert store is not None
    rows, device = tensors.k.shape[1], tensors.k.device
    order = random.Random(0)
    ends = sorted({0, rows, *(order.randrange(rows) for _ in range(4))})
    heads = order.choice((1, tensors.k.shape[2]))  # all of them at once, or one after the other
    copies = [(head, *pair) for head in range(heads) for pair in list(pairwise(ends))[::-1]]
    landings: list[list[Landing]] = [[] for _ in range(heads)]
    for number, (head, *pair) in enumerate(copies, 1):
        landings[head].append(Landing(number, *pair))
    numbers = torch.tensor(table(landings, 0, rows), dtype=torch.int32).to(device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    # [heads, B, rows, ...], so that a copy is contiguous
    origins = [t.unflatten(2, (heads, -1)).permute(2, 0, 1, 3, 4) for t in both]
    origins = [t.contiguous().cpu().pin_memory() for t in origins]
    memory = [torch.full(t.shape, float("nan"), dtype=t.dtype, device=device) for t in origins]
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000)
        for number, (head, start, stop) in enumerate(copies, 1):
            for to, t in zip(memory, origins, strict=True):
                for b in range(t.shape[1]):
                    to[head, b, start:stop].copy_(t[head, b, start:stop], non_blocking=True)
            store(count.view(torch.uint32), ALL if number == len(copies) else number)
    k, v = (to.permute(1, 2, 0, 3, 4).flatten(2, 3) for to in memory)
    assert k.data_ptr() == memory[0].data_ptr()
    found = hopper.forward(problem, tensors._replace(k=k, v=v), Arrivals(count, numbers))
    torch.cuda.synchronize()
    each = zip(("out", "lse"), found, got, strict=True)
    return [
        f"{name} differs of keys that arrive late" for name, x, y in each if not torch.equal(x, y)
    ]


def check_gap(seed: int, dtype: str, longest: int, device: str = "cuda") -> list[str]:
    """Return what is wrong with a drawn call that has a gap between its queries."""
    problem, tensors = gaps.drawn(seed, device, getattr(torch, dtype), longest)
    reason = hopper.supports(problem._replace(gap=None), "forward")
    if reason is not None or not hopper.takes_gap(problem):
        return [f"refused: {reason or 'a gap within tiles'}"]
    with poisoned():
        got = hopper.forward(problem, tensors)
    found = gaps.complaints(problem, tensors, got)
    if hopper.takes_arrivals(problem):
        found += differs_late(got, problem, tensors)
    return found


def slower_tiles() -> list[str]:
    """Return what is wrong with the tiles of three warpgroups that gave way to two.

    Under a causal mask some compilers leave them no registers (``LONG_64_SPILLS``).
    """
    from rowmax.gpu.hopper import host

    spilled = {c.D for c, words in host._SPILLED.items() if words and not c.RIGHT}
    return [f"three warpgroups spill at head size {d}: two are slower" for d in spilled]


def check_lagging(
    case: Case, dtype: str, repeats: int, device: str = "cuda", reference: str | None = None
) -> list[str]:
    """Return what is wrong with a forward whose reference lags, however little work there is."""
    from rowmax.gpu.hopper import host

    with lagging_references():
        found = check_forward(case, dtype, repeats, device, reference)
        lags = [plan.constants.config.LAGS for plan in host._PLANS.values()]
    return found if found or any(lags) else ["refused: no reference lags"]


@contextmanager
def lagging_references() -> Iterator[None]:
    """Compute forwards by references that lag, and share a bias, however little work there is."""
    from rowmax.gpu.hopper import host, tiles

    every = dict.fromkeys(product(tiles.TILES, ("full", "causal", "window")), 0.0)
    strip_for = tiles.strip_for
    with (
        mock.patch.object(tiles, "LAGS_OPERATIONS", every),
        mock.patch.object(tiles, "LAGS_KEYS", {}),
        mock.patch.object(tiles, "ONTO_OPERATIONS", 0.0),
        mock.patch.object(tiles, "STRIP_SHARERS", 2),
        mock.patch.object(tiles, "strip_for", lambda p, tile, _: strip_for(p, tile, 0)),
    ):
        host._PLANS.clear()
        try:
            yield
        finally:
            host._PLANS.clear()


def check_backward(
    case: Case,
    dtype: str,
    deterministic: bool,
    repeats: int,
    device: str = "cuda",
    reference: str | None = None,
) -> list[str]:
    """Return what is wrong with the gradients of a case.

    The references are computed on the device ``reference``, or on that of the call. With another
    device the gradients are not compared with those of a Triton kernel.
    """
    call = make(case, device, getattr(torch, dtype))
    problem, tensors = call.problem()
    problem = problem._replace(deterministic=deterministic)
    reason = hopper.supports(problem, "backward")
    if reason is not None:
        return ["refused: " + reason]
    same = call if reference is None else make(case, reference, getattr(torch, dtype))
    want = expected(same, *cotangents(same)).to(tensors.q.device)
    # out and lse of the reference, rounded: then every error is from the backward
    out, lse = want.ref.out.to(problem.dtype), want.ref.lse.float()
    dout, dlse = cotangents(call)
    if case.packed:
        out, lse, dout, dlse = (t[None] for t in (out, lse, dout, dlse))
    lacked = hopper.lacks(problem, "backward")
    wanted = Wanted(*(w and f"d{n}" not in lacked for n, w in call.wanted._asdict().items()))
    arguments = (problem, tensors, out, lse, dout, dlse, wanted)

    with poisoned():
        got = hopper.backward(*arguments)
    if device != "cpu":
        torch.cuda.synchronize()
    found = wrong_gradients(got, want, lacked)
    wide = max(problem.d, problem.dv) > 128
    text = padding_matters_backward(
        problem,
        tensors,
        (out, lse, dout, dlse),
        wanted,
        hopper.backward,
        got,
        lambda name: deterministic or wide or name != "q",
    )
    found += [text] if text else []
    if problem.hk < problem.hq:
        problem = problem._replace(wide=True)
        parts = hopper.backward(problem, *arguments[1:])
        found += rounded_parts(got, parts)
        if hopper.takes_places(problem) and got.k is not None and got.v is not None:
            run = partial(hopper.backward, problem, *arguments[1:])
            with whole_groups():  # as every backward with places adds up a group
                found += misplaced(run(), problem.dtype, run)
            if device != "cpu":
                torch.cuda.synchronize()
    if reference is None:
        found += far_from_triton(got, triton.backward(*arguments), LIMITS[problem.dtype])
    for n in range(repeats):
        text = differs(got, hopper.backward(*arguments), deterministic, LIMITS[problem.dtype])
        if text:
            return [*found, f"repeat {n}: {text}"]
    return found


@contextmanager
def halved_steps() -> Iterator[None]:
    """Compute backwards by halves of a step, of every length and with every feature.

    Where one launch can both sum and round dq, it does, however few its tiles. The last packed
    sequences have several runs, however short they are.
    """
    from rowmax.gpu.hopper import backward_tiles

    every = backward_tiles.LONG | {(96, 96): backward_tiles.HALVES_OF_96}
    with (
        mock.patch.object(backward_tiles, "LONG", every),
        mock.patch.object(backward_tiles, "is_long", lambda p, size: size in every and not p.bias),
        mock.patch.object(backward_tiles, "FOUR_TILES", 0),
        mock.patch.object(backward_tiles, "COMPLETE_KEYS", defaultdict(lambda: (0, 2**31))),
        mock.patch.object(backward_tiles, "COMPLETE_TILES", 0),
        mock.patch.object(backward_tiles, "fill_four", return_value=True),
        late_runs(),
    ):
        yield


@contextmanager
def whole_groups() -> Iterator[None]:
    """Compute backwards in which a block sums dk and dv over all query heads of a kv head."""
    with _shares(lambda *_: 1):
        yield


@contextmanager
def any_shares() -> Iterator[None]:
    """Compute backwards in which a group has any number of shares that it may have."""
    from rowmax.gpu import launch, shares

    launch._jobs.clear()
    try:
        with (
            _shares(drawn_shares),
            mock.patch.object(launch, "shares_of", lambda p, _: _drawn(p, shares.possible_shares)),
        ):
            yield
    finally:
        launch._jobs.clear()


def drawn_shares(p: Problem, *_: Any) -> int:
    """Return one of the numbers of shares that a problem may have on Hopper, by its sizes."""
    from rowmax.gpu.hopper.backward_shares import shares_to_choose

    return _drawn(p, shares_to_choose)


@contextmanager
def any_parts() -> Iterator[None]:
    """Compute forwards whose tiles have any number of parts of keys that they may have."""
    from rowmax.gpu.hopper import forward_parts, host

    def drawn(p: Problem, most: int) -> int:
        return _drawn(p, lambda p: forward_parts.parts_to_choose(p, most)[1:] or [1])

    host._PLANS.clear()
    try:
        with mock.patch.object(host, "parts_of", drawn):
            yield
    finally:
        host._PLANS.clear()


def _drawn(p: Problem, possible: Callable[[Problem], Sequence[int]]) -> int:
    numbers = possible(p)
    return numbers[(p.total_q + p.total_k + p.d // 8) % len(numbers)]


@contextmanager
def _shares(shares_of: Callable[..., int]) -> Iterator[None]:
    from rowmax.gpu.hopper import backward_plan

    kept = dict(backward_plan.PLANS)
    backward_plan.PLANS.clear()
    try:
        with mock.patch.object(backward_plan, "shares_of", shares_of):
            yield
    finally:
        backward_plan.PLANS.clear()
        backward_plan.PLANS.update(kept)


@contextmanager
def late_runs() -> Iterator[None]:
    """Put tiles of the last packed sequences in several runs, however short sequences are."""
    from rowmax.gpu.hopper import backward_plan, backward_tiles

    with mock.patch.multiple(backward_tiles, LATE_D=0, LATE_KEYS=0, LATE_TILES=2**31):
        backward_plan.PLANS.clear()
        try:
            yield
        finally:
            backward_plan.PLANS.clear()


def check_long(
    case: Case,
    dtype: str,
    deterministic: bool,
    repeats: int,
    device: str = "cuda",
    reference: str | None = None,
) -> list[str]:
    """Return what is wrong with a backward whose steps have halves, however short sequences are."""
    from rowmax.gpu.hopper import backward_plan

    with halved_steps():
        found = check_backward(case, dtype, deterministic, repeats, device, reference)
        halved = [plan.works[0].config.HALVED for plan in backward_plan.PLANS.values()]
    return found if found or any(halved) else ["refused: its steps have no halves"]


def rounded_parts(got: Gradients, parts: Gradients) -> list[str]:
    """Return what is wrong with dk and dv as parts of sums: gradients are their rounding."""
    found = []
    for name in ("k", "v"):
        x, part = getattr(got, name), getattr(parts, name)
        if x is not None and part.dtype != torch.float32:
            found.append(f"d{name}: a part of a sum is {part.dtype}")
        elif x is not None and not torch.equal(part.to(x.dtype), x):
            found.append(f"d{name}: the part of a sum differs before rounding")
    return found


def misplaced(
    parts: Gradients, dtype: torch.dtype, backward: Callable[[Places], Gradients]
) -> list[str]:
    """Return what is wrong with dk and dv that are written to rows in any order (``Places``).

    Some are no parts of sums: these are rounded to ``dtype``, in memory of their own.
    """
    order = torch.Generator().manual_seed(0)
    memories, tables, rows = [], [], []
    for t in parts[1:3]:
        n, width = t.shape[0] * t.shape[1], t.shape[2] * t.shape[3]
        place, alone = (torch.randperm(2 * n, generator=order)[:n] for _ in range(2))
        share = torch.rand(n, generator=order) < 0.4
        unit = torch.where(share, -1 - alone * (width // 4), place * (width // 4))
        memories.append([t.new_full((2 * n, width), float("nan"), dtype=x) for x in (None, dtype)])
        tables.append(unit.to(t.device))
        rows.append([(place[~share].to(t.device), ~share), (alone[share].to(t.device), share)])
    wide, rounded = zip(*memories, strict=True)
    got, found = backward(Places(*wide, *tables, *rounded)), []
    for name, t, memory, each in zip("kv", parts[1:3], memories, rows, strict=True):
        if getattr(got, name) is not None:
            found.append(f"d{name} is returned, and not at its places")
        for to, (place, there), text in zip(memory, each, ("", " alone"), strict=True):
            want = t.flatten(0, 1).flatten(1)[there.to(t.device)]
            if not torch.equal(to[place], want.to(to.dtype)):
                found.append(f"d{name} differs at its places{text}")
            to[place] = float("nan")
            if not to.isnan().all():
                found.append(f"d{name} is written past its places{text}")
    return found


def wrong_gradients(got: Gradients, want: Expected, lacked: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the gradients that the backend does not lack."""
    found = []
    for name, ref in want.ref.gradients.items():
        if f"d{field_of(name)}" in lacked:
            continue
        x = getattr(got, field_of(name))
        if x is None:
            found.append(f"d{name}: missing")
            continue
        std, noise = want.std.gradients[name], want.noise[f"d{name}"]
        found.append(
            complaint(f"d{name}", x.view(ref.shape), ref, std, want.dtype, GRADIENT, noise)
        )
    return [text for text in found if text]


def _pairs(a: Gradients, b: Gradients) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for name, x, y in zip(a._fields, a, b, strict=True):
        if x is not None and y is not None:
            yield name, x, y


def _distance(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the norms of x - y and of y."""
    return (x.double() - y.double()).norm().item(), y.double().norm().item()


def far_from_triton(got: Gradients, twin: Gradients, limit: float) -> list[str]:
    found = []
    for name, x, y in _pairs(got, twin):
        off, size = _distance(x, y)
        if not off <= 2 * limit * size + 1e-6 * y.numel() ** 0.5:
            found.append(f"d{name}: {off:.3g} from the Triton backend's, of size {size:.3g}")
    return found


def differs(got: Gradients, again: Gradients, deterministic: bool, limit: float) -> str | None:
    """Return a sentence if a repeat differs by a bit; an unordered dq may differ by rounding."""
    for name, x, y in _pairs(got, again):
        if torch.equal(x, y):
            continue
        if deterministic or name != "q":
            return f"d{name} differs"
        off, size = _distance(x, y)
        if not off <= limit * size + 1e-6 * y.numel() ** 0.5:
            return f"dq differs by {off:.3g} of {size:.3g}"
    return None
