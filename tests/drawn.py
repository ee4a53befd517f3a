"""Random calls: everything that a call can vary, drawn from one seed.

``drawn(seed)`` is one call. ``draw_group`` draws what is compiled into kernels (features, head
sizes, strides). ``varied`` draws the rest (lengths, batch, limits, contents): one compiled kernel
serves many calls. ``reduced`` shrinks a call that fails.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from rowmax.call.dispatch import beyond
from rowmax.call.inputs import Options, Positions
from rowmax.call.problem import Problem, positions_read, shifted_band
from rowmax.reference.tolerance import Noise
from rowmax.testing import (
    LEAVES,
    Answer,
    Call,
    Case,
    Expected,
    answer,
    complaint,
    complaints,
    cotangents,
    expected,
    make,
    poisoned,
    refusal,
)
from rowmax.testing.cases import shape_of, sizes_of

DTYPES = ("float32", "bfloat16", "float16")
DOCUMENTS = ("sorted", "unsorted", "runs", "batched", "queries", "offsets")
#: limits of B Hq max(Nq, Nk) Nk: the float64 definition fits into a GPU's memory, and takes
#: milliseconds on a CPU
GPU_BUDGET, CPU_BUDGET = 32_000_000, 40_000
#: elements that q, k and v may each have; with a large budget, an eighth of it
_WIDTH = 60_000
_TRIES = 40
#: calls with other numbers that run after one that seems wrong, and after these
MORE = 7, 24

#: tile edges and their neighbours
_EDGES = (
    *(1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 95, 96, 97, 127, 128, 129, 130),
    *(191, 192, 193, 255, 256, 257, 319, 384, 511, 512, 513, 520, 767, 1000, 1023, 1024, 1025),
    *(1500, 2047, 2048, 2049, 3000, 4096, 4999, 5000),
)
_USUAL_HEADS = (8, 16, 24, 32, 40, 48, 56, 64, 64, 64, 72, 80, 96, 104, 112, 128, 128, 128)
_EDGE_HEADS = (1, 2, 3, 4, 5, 7, 9, 15, 17, 31, 33, 63, 65, 95, 97, 127)
_WIDE_HEADS = (129, 136, 144, 160, 176, 192, 192, 200, 224, 255, 256, 256)
_WIDEST_HEADS = (257, 264, 320, 384, 511, 512)
_LAYOUTS = ("bnhd", "bhnd", "sliced", "interleaved", "strided", "expanded")
_PATTERNS = (
    *("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "b11k", "1h1k", "111k", "bhq1", "1hq1", "b1q1"),
    *("11q1", "bh11", "1h11", "b111", "1111", "hqk", "qk", "k", "Bhqk", "bHqk", "BHqk", "bhQk"),
    *("bhqK", "bHQk", "HQK"),
)
#: biases whose gradient the Hopper backend computes
_HOPPER_PATTERNS = ("bhqk", "1hqk", "b1qk", "11qk", "b11k", "111k", "bh1k", "bhq1", "1hq1")


class RefusedError(ValueError):
    """The backend does not take the call."""


class UnpreparedError(Exception):
    """The call or its references cannot be made. This is not the backend's fault."""


@dataclass(frozen=True)
class Drawn:
    """A call: its case, its dtype, and the seed of its numbers."""

    case: Case
    dtype: str
    seed: int

    def call(self, device: str | torch.device = "cpu") -> Call:
        return make(self.case, device, getattr(torch, self.dtype), self.seed)

    def snippet(
        self, backend: str, device: str, check: str = "wrong", module: str = "tests.drawn"
    ) -> str:
        """Return Python that makes the call again and prints what a check finds wrong."""
        return (
            "from rowmax.testing import Case\n"
            "from tests.drawn import Drawn\n"
            f"from {module} import {check}\n"
            f"case = {literal(self.case)}\n"
            f"print({check}(Drawn(case, {self.dtype!r}, {self.seed}), {backend!r}, {device!r}))\n"
        )

    def as_json(self) -> str:
        return json.dumps({"dtype": self.dtype, "seed": self.seed, "case": changed(self.case)})


def from_json(text: str) -> Drawn:
    given = json.loads(text)
    case = {k: _tuples(v) for k, v in given["case"].items()}
    return Drawn(Case(**case), given["dtype"], given["seed"])


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def changed(case: Case) -> dict[str, Any]:
    """Return the fields that are not the default."""
    default = {f.name: f.default for f in fields(Case)}
    return {k: v for k, v in asdict(case).items() if v != default[k]}


def literal(case: Case) -> str:
    return f"Case({', '.join(f'{k}={v!r}' for k, v in changed(case).items())})"


def wrong(
    drawn: Drawn, backend: str, device: str = "cpu", reference: str | None = None
) -> list[str]:
    """Return what breaks the rule; nothing if all is right.

    The references are computed on the device ``reference``, or on that of the call.

    The rule compares the largest error with that of standard attention. Of a few elements, both
    are random numbers. If a call breaks the rule, the same call runs with more numbers, and the
    rule is applied to all of them together. An error that is not rounding stays the largest.

    Raises:
        RefusedError: the backend does not take the call.
        UnpreparedError: the call or its references cannot be made.
    """
    found = [_compared(drawn, backend, device, reference)]
    texts = complaints(*found[0])
    if not texts or any(is_clear(text) for text in texts):
        return texts
    for more in MORE:
        seeds = range(drawn.seed + len(found), drawn.seed + len(found) + more)
        found += [_compared(replace(drawn, seed=n), backend, device, reference) for n in seeds]
        texts = together(found)
        if not texts:
            break
    return texts


def is_clear(text: str) -> bool:
    """Return True for a sentence that more numbers do not change."""
    return any(word in text for word in ("NaN", "infinite", "shape"))


def together(found: list[tuple[Answer, Expected]]) -> list[str]:
    """Return what breaks the rule, applied to the answers of several calls as to one."""
    texts = []
    for parts in zip(*(_items(*pair) for pair in found), strict=True):
        names, xs, refs, stds, dtypes, factors, noises = zip(*parts, strict=True)
        x, ref, std = (torch.cat([t.flatten() for t in ts]) for ts in (xs, refs, stds))
        largest = max(n.largest for n in noises)
        norms = (math.hypot(*(getattr(n, name) for n in noises)) for name in ("norm", "cut"))
        noise = Noise(largest, *norms)
        texts.append(complaint(names[0], x, ref, std, dtypes[0], factors[0], noise))
    return [text for text in texts if text is not None]


def _items(got: Answer, want: Expected) -> Iterator[tuple[Any, ...]]:
    for (name, x, factor), (_, ref, _), (_, std, _) in zip(
        got.items(), want.ref.items(), want.std.items(), strict=True
    ):
        yield name, x, ref, std, want.dtype, factor, want.noise[name]


def _compared(
    drawn: Drawn, backend: str, device: str, reference: str | None
) -> tuple[Answer, Expected]:
    """Return the answer of a backend, and its references.

    A second call of a kind is recorded, a third is repeated, and the backward of a fourth is found
    by one check, on other tensors. The answer of half of the calls is that of their fourth.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        call, grads, want = _prepared(drawn, backend, device, reference)
    except (RefusedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnpreparedError(f"{type(error).__name__}: {error}") from error
    calls = [call]
    if drawn.seed % 2:
        calls = [call, call, call, drawn.call(device)]
    with poisoned(drawn.case.deterministic):
        answers = [answer(one, *grads, backend=backend) for one in calls]
    got = answers[-1]
    return got if reference is None else got.to(reference), want


def _prepared(
    drawn: Drawn, backend: str, device: str, reference: str | None
) -> tuple[Call, tuple[torch.Tensor, torch.Tensor | None], Expected]:
    """Return the call, its cotangents, and the references of its answer."""
    call = drawn.call(device)
    if reason := refusal(call, backend):
        raise RefusedError(reason)
    grads = given_cotangents(call, drawn.seed)
    if reference is None:
        want = expected(call, *grads)
    else:
        same = drawn.call(reference)
        want = expected(same, *given_cotangents(same, drawn.seed), torch.device(device).type)
    if device != "cpu":  # a later error is not the reference's
        torch.cuda.synchronize()
    return call, grads, want


def given_cotangents(call: Call, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    dout, dlse = cotangents(call, seed + 1)
    return dout, dlse if call.case.dlse else None


# --- drawing -----------------------------------------------------------------------------------


def drawn(
    seed: int, dtype: str | None = None, budget: int = CPU_BUDGET, backend: str = "cpu"
) -> Drawn:
    """Return one call of the seed, with features that the backend takes."""
    rng = random.Random(seed)
    dtype = dtype or rng.choice((*DTYPES, "float64"))
    return Drawn(varied(rng, draw_group(rng, dtype, backend, budget), budget), dtype, seed)


def draw_group(
    rng: random.Random, dtype: str, backend: str = "cpu", budget: int = GPU_BUDGET
) -> Case:
    """Return a case of the features that are compiled into kernels, with lengths of one call.

    The backend takes most of these cases.
    """
    hopper = backend == "hopper"
    for _ in range(_TRIES):
        case = within(_group(rng, dtype, hopper), budget)
        if not hopper or rng.random() < 0.03:
            return case
        from rowmax.gpu import hopper as module

        p = problem_of(case, dtype)
        refused = beyond(module.LIMITS, p) or module._refused_backward(p)
        if not refused and not module.lacks(p, "backward"):
            return case
    return case


def _group(rng: random.Random, dtype: str, hopper: bool) -> Case:
    often = rng.choice((0.06, 0.2, 0.4))  # calls with few features, and with many

    def has(weight: float = 1.0) -> bool:
        return rng.random() < often * weight

    d = head_size(rng, hopper)
    same = rng.random() < 0.4
    hk = rng.choice((1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8))
    values: dict[str, Any] = {
        "b": rng.choice((1, 1, 2, 2, 3, 4)),
        "hk": hk,
        "hq": hk * rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 8, 16)),
        "d": d,
        "dv": d if same else head_size(rng, hopper),
        "nq": length(rng),
        "scale": rng.choice((None, None, None, 1e-4, 0.3, 2.0)),
        "layout": layouts(rng),
        "dout": rng.choice(("bnhd",) * 8 + _LAYOUTS),
        "shift": rng.choice((0,) * 8 + (1, 2, 3, 4)),
        "dlse": rng.random() < 0.6,
        "deterministic": rng.random() < 0.25,
    }
    values["nk"] = values["nq"] if rng.random() < 0.35 else length(rng)
    if has(0.2) and not hopper:
        values["scale"] = 0.0
    if has(0.8):
        values["softcap"] = 5.0
    values |= {
        "causal": has(1.5),
        "alibi": has(0.8),
        "sink": has(),
        "left": limit(rng, 300) if has() else None,
        "right": limit(rng, 300) if has() else None,
        "lengths": (0.5, 0.0, 1.5, 1.0) if has() else None,
        "bias": rng.choice(_HOPPER_PATTERNS if hopper else _PATTERNS) if has(1.3) else None,
    }
    if has(0.8):
        count = rng.randint(1, 6)
        values["sequences"] = tuple((length(rng), length(rng)) for _ in range(count))
        values["max_given"] = rng.random() < 0.3
        values["wide_offsets"] = rng.random() < 0.3
    elif has():
        values["documents"] = rng.choice(DOCUMENTS)
    if not hopper:
        values["dropout"] = 0.2 if has() else 0.0
        values["allowed"] = rng.choice(_PATTERNS) if has() else None
    if has(0.6) and "sequences" not in values:
        values["padding"] = rng.choice(("left", "starts", "any"))
    if has(0.4) and "sequences" not in values:
        values["step"] = rng.choice((2, 3, 7, 64, 1000))
    if has(0.6) and not hopper:
        values |= {"prefix": (0.5, 0.0, 1.5, 0.2), "causal": False, "right": None}
    if values["lengths"] is not None and not hopper:
        values["align"] = rng.choice(("keys", "lengths"))
    if values["bias"] is not None:
        values["bias_float32"] = rng.random() < 0.3 and dtype in ("bfloat16", "float16")
    values["transposed"] = rng.random() < 0.15
    if rng.random() < 0.35:
        there = {"bias": values["bias"] is not None, **{n: values[n] for n in ("sink", "alibi")}}
        values["grads"] = tuple(n for n in LEAVES if there.get(n, True) and rng.random() < 0.5)
    reads = ("causal", "alibi", "left", "right", "dropout", "prefix")
    if any(values.get(name) not in (None, False, 0.0) for name in reads) and rng.random() < 0.2:
        values["positions"] = positions(rng)
    case = Case("drawn", **values)
    return case.with_constant_slopes() if hopper else case


def positions(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Return positions of a block that are not 0; Triton takes keys from a multiple of 64 on."""
    shift = rng.choice((-1, 1)) * rng.choice((1, 2, 7, 64, 100, 300, 5000))
    far = rng.choice((64, 1 << 12, 1 << 20))
    return (shift, rng.randint(1, far), 64 * rng.randint(1, far), rng.randint(1, 9), far)


def head_size(rng: random.Random, hopper: bool = False) -> int:
    if hopper:
        return rng.choice((*_USUAL_HEADS, 64, 128, 136, 160, 192, 200, 224, 256, 256))
    kinds = (_USUAL_HEADS, range(1, 129), _EDGE_HEADS, _WIDE_HEADS, _WIDEST_HEADS)
    return rng.choice(rng.choices(kinds, (45, 25, 20, 8, 2))[0])


def length(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.02:
        return 0
    if kind < 0.6:  # small ones are more likely
        return _EDGES[int(len(_EDGES) * rng.random() ** 1.5)]
    if kind < 0.9:
        return rng.randint(1, 300)
    return rng.randint(1, 5000)


def limit(rng: random.Random, n: int) -> int:
    """Return a limit of a window: often 0, or negative, past the keys, past 32 bits."""
    return rng.choice((0, 0, 1, rng.randint(0, 64), rng.randint(0, max(n, 1)), -3, 2**31, 2**40))


def layouts(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        return "bnhd"
    if kind < 0.65:
        return rng.choice(_LAYOUTS)
    return "/".join(rng.choice(_LAYOUTS) for _ in "qkv")


def varied(
    rng: random.Random,
    case: Case,
    budget: int,
    compiled_in: Callable[[Case], Hashable] | None = None,
) -> Case:
    """Return the case with other numbers that do not change ``compiled_in`` of it."""
    kept = compiled_in(case) if compiled_in else None
    for _ in range(_TRIES):
        other = within(_varied(rng, case), budget)
        if compiled_in is None or compiled_in(other) == kept:
            return other
    return case


def _varied(rng: random.Random, case: Case) -> Case:
    values: dict[str, Any] = {"b": rng.choice((case.b, 1, 2, 3, 4))}
    if case.sequences is None:
        nq, nk = case.nq, case.nq if case.nk is None else case.nk
        values["nq"] = alike(rng, nq)
        values["nk"] = values["nq"] if nq == nk and rng.random() < 0.8 else alike(rng, nk)
    else:
        count = rng.choice((len(case.sequences), rng.randint(0, 8)))
        longest = max((n for pair in case.sequences for n in pair), default=0)
        values["sequences"] = tuple(
            tuple(rng.choice((0, min(length(rng), longest), alike(rng, n), n)) for n in pair)
            for pair in rng.choices(case.sequences or ((5, 9),), k=count)
        )
        values["wide_offsets"] = rng.random() < 0.3
    n = max(values.get("nk", 0), values.get("nq", 0), 65)
    for name in ("left", "right"):
        if getattr(case, name) is not None:
            values[name] = limit(rng, n)
    if case.scale != 0.0:
        values["scale"] = rng.choice((None, None, 1e-4, 0.3, 1.0, 5.0))
    if case.softcap:
        values["softcap"] = rng.choice((0.2, 1.5, 5.0, 30.0, 1e4))
    if case.dropout:
        values["dropout"] = rng.choice((0.05, 0.1, 0.3, 0.5, 0.95))
    if case.lengths is not None:
        values["lengths"] = tuple(rng.choice((0.0, 1.0, 1.5, rng.random())) for _ in range(4))
    if case.prefix is not None:
        values["prefix"] = tuple(rng.choice((0.0, 1.5, rng.random())) for _ in range(4))
    if case.step is not None:
        values["step"] = rng.choice((2, 3, 7, 64, 1000))
    if case.padding is not None:
        values["padding"] = rng.choice(("left", "starts", "any"))
    if case.documents is not None:
        values["documents"] = rng.choice(DOCUMENTS)
    values["empty_rows"] = case.allowed is not None and rng.random() < 0.4
    if case.positions is not None:
        values["positions"] = positions(rng)
    return replace(case, **values)


def siblings(rng: random.Random, drawn: Drawn, dtypes: Sequence[str], count: int) -> list[Drawn]:
    """Return calls that differ from this one in one thing each: the first in its dtype.

    A cache must not give one of them the kernel or the plan of another.
    """
    found = [replace(drawn, dtype=rng.choice([x for x in dtypes if x != drawn.dtype]))]
    names = rng.sample(list(_OTHERS), k=min(count - 1, len(_OTHERS)))
    for name in names:
        now = getattr(drawn.case, name)
        values = [x for x in _OTHERS[name] if x != now]
        case = replace(drawn.case, **{name: rng.choice(values)})
        if case.prefix is not None and (case.right or 0) > 0:  # no mask has both
            case = replace(case, right=None)
        found.append(replace(drawn, case=case))
    return found


#: by field of a case, values for a sibling
_OTHERS: dict[str, tuple[Any, ...]] = {
    "scale": (None, 0.3, 2.0),
    "softcap": (0.0, 5.0, 30.0),
    "causal": (False, True),
    "left": (None, 0, 5, 40),
    "right": (None, 0, 5, 40),
    "lengths": (None, (0.5, 0.0, 1.5, 1.0), (1.0, 0.2, 0.9)),
    "align": ("keys", "lengths"),
    "prefix": (None, (0.5, 0.0, 1.5, 0.2)),
    "step": (None, 3, 64),
    "padding": (None, "left", "starts", "any"),
    "documents": (None, *DOCUMENTS),
    "allowed": (None, "bhqk", "11qk", "111k", "b11k"),
    "empty_rows": (False, True),
    "bias": (None, "bhqk", "1hqk", "11q1", "111k"),
    "bias_float32": (False, True),
    "alibi": (False, True),
    "sink": (False, True),
    "dropout": (0.0, 0.1, 0.5),
    "layout": _LAYOUTS,
    "dout": _LAYOUTS,
    "transposed": (False, True),
    "shift": (0, 1, 4),
    "max_given": (False, True),
    "wide_offsets": (False, True),
    "positions": (None, (7, 3, 64, 2, 9), (-2, 1, 128, 1, 40)),
    "grads": (None, ("q",), ("k", "v")),
    "dlse": (False, True),
    "deterministic": (False, True),
}


def alike(rng: random.Random, n: int) -> int:
    """Return a length for the same tiles as n, with a last tile that is full only if n's is."""
    if n <= 1:
        return n
    top = max(16, 1 << (n - 1).bit_length())
    low, high = (2 if top == 16 else top // 2 + 1, top)
    if n > 64:
        low, high = 65, rng.choice((128, 256, 400, 600, max(n, 65)))
    step = next((s for s in (128, 64, 32, 16, 8) if n % s == 0), 1)
    other = rng.choice((rng.randint(low, high), rng.choice(_EDGES)))
    if not low <= other <= high:
        other = rng.randint(low, high)
    if step > 1:
        return max(other // step, 1) * step
    return other if other % 8 else max(other - 1, 1)


def within(case: Case, budget: int) -> Case:
    """Return the case with shorter lengths, fewer sequences and heads, to fit the budget."""
    while (over := _over(case, budget)) > 1:
        b, nq, nk, hq, hk, *_ = sizes_of(case)
        if case.sequences is not None:
            kept = case.sequences[: max(1, len(case.sequences) * 2 // 3)]
            if over > 4 or len(kept) == len(case.sequences):
                kept = tuple((n * 2 // 3, m * 2 // 3) for n, m in kept)
            case = replace(case, sequences=kept)
        elif b > 1:
            case = replace(case, b=b - 1)
        elif hk > 1 and over > 2:
            case = replace(case, hq=hq // hk * (hk // 2), hk=hk // 2)
        elif max(nq, nk) < 32 and hq > hk:
            case = replace(case, hq=hk)
        elif max(nq, nk) <= 1:
            return case
        else:
            most = int(max(nq, nk) * (0.5 if over > 4 else 0.8))
            case = replace(case, nq=min(nq, most), nk=min(nk, most))
    return case


def _over(case: Case, budget: int) -> float:
    """Return the size of a case, divided by the budget."""
    b, nq, nk, hq, hk, d, dv = sizes_of(case)
    rows, cols, n = nq, nk, b
    if case.sequences is not None:
        rows, cols, n = sum(n for n, _ in case.sequences), sum(n for _, n in case.sequences), 1
        most = max((max(i, j) * j for i, j in case.sequences), default=0)
        scores = max(most * hq * max(len(case.sequences) // 2, 1), max(rows, cols) * cols * hq)
    else:
        scores = b * hq * max(nq, nk) * nk
    width = n * max(rows * hq * max(d, dv), cols * hk * max(d, dv))
    return max(scores / budget, width / max(_WIDTH, budget // 8))


def problem_of(case: Case, dtype: str, device: str = "cuda") -> Problem:
    """Return the problem of a case without making its tensors.

    Without a bound, a GPU takes the totals for the longest lengths of packed sequences.
    """
    b, nq, nk, hq, hk, d, dv = sizes_of(case)
    kind = getattr(torch, dtype)
    total_q, total_k = nq, nk
    if case.sequences is not None:
        total_q, total_k = (sum(n[i] for n in case.sequences) for i in (0, 1))
        if not (case.max_given or case.bias or case.allowed):
            nq, nk = total_q, total_k
    wide = torch.float64 if kind == torch.float64 else torch.float32
    left, right = (None if n is not None and n >= 2**32 else n for n in (case.left, case.right))
    if case.causal or case.prefix is not None:
        right = 0 if right is None else min(right, 0)
    options = Options(1.0, left=left, right=right)
    if case.positions is not None:
        options = options._replace(**Positions(*case.positions)._asdict())
    left, right = shifted_band(options, nq, nk)
    return Problem(
        device=device,
        dtype=kind,
        batch=b,
        nq=nq,
        nk=nk,
        hq=hq,
        hk=hk,
        d=d,
        dv=dv,
        scale=d**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        dropout_p=case.dropout,
        left=left,
        right=right,
        documents=any(x is not None for x in (case.documents, case.padding, case.step)),
        prefix=case.lengths is not None,
        allowed=shape_of(case.allowed, case),
        bias=shape_of(case.bias, case),
        bias_dtype=None if case.bias is None else wide if case.bias_float32 else kind,
        heads=("alibi",) if case.alibi else (),
        sink=case.sink,
        varlen=case.packed,
        total_q=total_q,
        total_k=total_k,
        deterministic=case.deterministic,
        positions=positions_read(options, case.alibi, case.dropout > 0),
        bidirectional=case.prefix is not None and right is not None,
    )


# --- shrinking ---------------------------------------------------------------------------------


def reduced(drawn: Drawn, fails: Callable[[Drawn], bool], most: int = 200) -> Drawn:
    """Return a smaller call that still fails.

    One after the other, features are dropped and sizes halved while the call fails.
    """
    tried = {drawn}
    again = True
    while again:
        again = False
        for other in _simpler(drawn):
            if other in tried:
                continue
            if len(tried) > most:
                return drawn
            tried.add(other)
            if fails(other):
                drawn, again = other, True
                break
    return drawn


def _simpler(drawn: Drawn) -> Iterator[Drawn]:
    """Yield calls with one thing less, the largest steps first."""
    case = drawn.case
    default = {f.name: f.default for f in fields(Case)}
    kept = ("name", "b", "nq", "nk", "hq", "hk", "d", "dv", "sequences", "grads")
    options: list[dict[str, Any]] = []
    if case.sequences is not None:
        options += _fewer_sequences(case)
    options += [{name: default[name]} for name in changed(case) if name not in kept]
    for name in ("nq", "nk") if case.sequences is None else ():
        n = case.nq if getattr(case, name) is None else getattr(case, name)
        options += [{name: m} for m in (n // 2, n - 1) if m >= 0]
    if case.nk is not None and case.nk != case.nq:
        options.append({"nk": case.nq})
    if case.b > 1:
        options += [{"b": 1}, {"b": case.b - 1}]
    hk = case.hq if case.hk is None else case.hk
    if hk > 1:
        options += [{"hq": case.hq // hk, "hk": 1}, {"hq": case.hq // hk * (hk - 1), "hk": hk - 1}]
    if case.hq > hk:
        options.append({"hq": hk, "hk": hk})
    dv = case.d if case.dv is None else case.dv
    options += [{"d": n, "dv": dv} for n in _smaller(case.d)]
    options += [{"dv": n} for n in _smaller(dv)]
    options += [{"grads": (name,)} for name in case.grads or LEAVES if case.grads != (name,)]
    for option in options:
        other = replace(case, **option)
        if other != case:
            yield replace(drawn, case=other)


def _smaller(n: int) -> list[int]:
    """Return half of n and the power of two below n."""
    return [] if n == 1 else sorted({1 << ((n - 1).bit_length() - 1), n // 2})


def _fewer_sequences(case: Case) -> list[dict[str, Any]]:
    sequences = case.sequences or ()
    b, nq, nk, *_ = sizes_of(replace(case, max_given=False))
    found: list[dict[str, Any]] = [
        {"sequences": None, "b": b, "nq": nq, "nk": nk, "max_given": False, "wide_offsets": False}
    ]
    half = len(sequences) // 2
    found += [{"sequences": part} for part in (sequences[half:], sequences[:half]) if part]
    found += [{"sequences": sequences[:n] + sequences[n + 1 :]} for n in range(len(sequences))]
    found += [
        {"sequences": (*sequences[:n], (i // 2, j // 2), *sequences[n + 1 :])}
        for n, (i, j) in enumerate(sequences)
        if i > 1 or j > 1
    ]
    return found
