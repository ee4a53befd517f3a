"""Run the Hopper backward without a GPU, the host's side and all kernels.

    TRITON_INTERPRET=1 python -m tests.hopper.backward_model [--kernels] [--long] [--only NAME ...]

Plain Triton kernels run under Triton's interpreter, Gluon kernels on ``tests/emulator`` in a
process of its own. The cases are those of the checks on a GPU, or with ``--kernels`` those of
``kernel_cases``, in float16, by the rule of ``rowmax.testing``.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import types
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rowmax.call.problem import Wanted
from rowmax.gpu import hopper, triton
from rowmax.gpu.compiled import Launch
from rowmax.gpu.hopper import (
    backward_dbias,
    backward_plan,
    backward_tiles,
    packed,
    part_sums,
    row_stats,
)
from rowmax.reference import dense
from rowmax.testing import Call, Case, Expected, cotangents, expected, make, poisoned, tagged
from tests import extreme_bias, interpreter
from tests.emulator.remote import RemoteLaunch
from tests.garbage import collect_less
from tests.gpu import hopper_direct as device
from tests.hopper.packed_calls import in_range, longer, with_rows_past_the_last

#: head sizes of each tile shape: three of the fused kernel, two of dq with dk and dv, and three
#: with columns in two parts
SIZES = (
    *((64, 64), (128, 128), (256, 128), (256, 256), (96, 80), (80, 72), (192, 128)),
    *((32, 32), (400, 328)),
)
#: the numbers of processors of the machine, of which a case has one
PROCESSORS = (1, 2, 3, 5, 7, 9)
LENGTHS = ((1, 1), (3, 3), (64, 1), (239, 1), (399, 3), (1, 300), (113, 203), (108, 256),
           (255, 256), (256, 255), (64, 128), (192, 384))  # fmt: skip
#: cases by halves of a step: of long sequences (backward_tiles.LONG), of head size 96, and of a
#: bias that sequences share (backward_tiles.FOUR)
PACKED = ((5, 90), (0, 17), (150, 270), (33, 0), (1, 40), (200, 200))
LONG: dict[str, dict[str, Any]] = {
    **{
        f"{n}-{m}{'-causal' * c}": {"nq": n, "nk": m, "causal": c}
        for n, m, c in ((1, 300, True), (64, 1, False), (64, 192, False), (399, 3, True),
                        (108, 256, True), (256, 255, False), (300, 400, True))
    },
    "heads": {"b": 2, "nq": 130, "nk": 260, "hq": 4, "hk": 2, "causal": True},
    "many-tiles": {"nq": 200, "nk": 620, "hq": 2, "d": 40, "dv": 64},
    "packed": {"hq": 2, "hk": 1, "causal": True, "sequences": PACKED},
    "lengths": {"b": 4, "nq": 70, "nk": 400, "lengths": (1.0, 0.0, 0.43, 0.004)},
    "window": {"nq": 300, "nk": 450, "left": 70, "right": 30},
    "documents": {"b": 2, "nq": 200, "nk": 400, "documents": "sorted", "causal": True},
    "score-terms": {"nq": 130, "nk": 260, "hq": 2, "softcap": 1.5, "alibi": True},
    "96": {"nq": 113, "nk": 203, "hq": 2, "hk": 1, "d": 96},
    "96-causal": {"nq": 256, "nk": 255, "d": 88, "dv": 96, "causal": True},
    "96-ragged": {"nq": 399, "nk": 3, "d": 96},
    "96-packed": {"hq": 2, "d": 96, "sequences": PACKED},
    "96-window": {"nq": 300, "left": 70, "right": 30, "d": 96, "softcap": 1.5},
    "bias": {"b": 3, "nq": 130, "nk": 200, "hq": 2, "bias": "1hqk", "d": 32},
    "bias-causal": {"b": 2, "nq": 300, "nk": 256, "bias": "1hqk", "d": 32, "causal": True},
    "bias-lengths": {"b": 4, "nq": 100, "nk": 504, "bias": "11qk", "d": 24, "dv": 32,
                     "lengths": (1.0, 0.0, 0.43, 0.9)},
    "bias-heads": {"b": 2, "nq": 300, "nk": 504, "hq": 4, "hk": 2, "bias": "1hqk", "d": 32,
                   "left": 40, "right": 90, "softcap": 1.5},
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "heads": {"b": 2, "nq": 130, "nk": 260, "hq": 4, "hk": 2, "causal": True},
    "many-tiles": {"nq": 200, "nk": 520, "hq": 2},
    "shared-heads": {"nq": 200, "nk": 520, "hq": 2, "hk": 1},
    "window": {"nq": 300, "nk": 400, "left": 70, "right": 30},
    "window-left": {"nq": 300, "left": 100},
    "window-narrow": {"nq": 400, "left": 0, "right": 0},
    "window-longer-keys": {"nq": 70, "nk": 500, "left": 40, "right": 0},
    "window-longer-queries": {"nq": 500, "nk": 130, "left": 40, "right": 3},
    "lengths": {"b": 4, "nq": 100, "nk": 300, "lengths": (1.0, 0.0, 0.43, 0.004), "causal": True},
    "documents": {"b": 2, "nq": 300, "nk": 500, "hq": 2, "documents": "sorted", "causal": True},
    "documents-full": {"nq": 500, "nk": 300, "documents": "sorted"},
    "documents-any": {"nq": 300, "documents": "unsorted", "left": 90},
    "softcap": {"nq": 130, "nk": 200, "softcap": 1.5, "causal": True},
    "alibi": {"nq": 130, "nk": 200, "hq": 2, "hk": 1, "alibi": True, "causal": True},
    "dropout": {"b": 2, "nq": 130, "nk": 260, "hq": 4, "hk": 2, "causal": True, "dropout": 0.3},
    "dropout-bias": {"nq": 130, "nk": 200, "hq": 2, "bias": "bhqk", "dropout": 0.5},
    "dropout-shared": {"b": 5, "nq": 150, "nk": 264, "hq": 2, "bias": "1hqk", "dropout": 0.3,
                       "lengths": (1.0, 0.0, 0.43, 0.004, 0.9)},
    "dropout-row": {"b": 2, "nq": 130, "nk": 200, "hq": 2, "hk": 1, "bias": "b11k",
                    "dropout": 0.3},
    "dropout-packed": {"hq": 4, "hk": 2, "causal": True, "sequences": PACKED, "dropout": 0.3},
    "dropout-block": {"nq": 130, "nk": 200, "hq": 2, "dropout": 0.3,
                      "positions": (0, 77, 128, 3, 9)},
    "bias": {"b": 2, "nq": 130, "nk": 200, "hq": 2, "hk": 1, "bias": "bhqk"},
    "bias-causal": {"nq": 300, "nk": 304, "hq": 2, "bias": "bhqk", "causal": True},
    "bias-window": {"nq": 300, "nk": 304, "hq": 2, "bias": "bhqk", "left": 40, "right": 90},
    "bias-1h": {"b": 2, "nq": 200, "nk": 304, "hq": 2, "bias": "1hqk", "causal": True},
    "bias-b1": {"b": 2, "nq": 300, "nk": 200, "hq": 2, "bias": "b1qk"},
    "bias-lengths": {"b": 3, "nq": 100, "nk": 304, "hq": 2, "bias": "b1qk",
                     "lengths": (1.0, 0.0, 0.43)},
    "bias-parts": {"b": 7, "nq": 70, "nk": 136, "bias": "11qk", "causal": True},
    "bias-parts-lengths": {"b": 5, "nq": 70, "nk": 136, "bias": "11qk",
                           "lengths": (1.0, 0.0, 0.43, 0.004, 0.9)},
    "bias-parts-documents": {"b": 5, "nq": 70, "nk": 136, "bias": "11qk", "documents": "sorted"},
    **{
        f"float32-{name}": {"b": 5, "nq": 150, "nk": 264, "hq": 2, "bias": pattern,
                            "bias_float32": True, **more}
        for pattern, name, more in (
            ("1hqk", "shared", {}),
            ("11qk", "heads", {"hk": 1, "causal": True}),
            ("bhqk", "own", {"softcap": 1.5}),
            ("b1qk", "lengths", {"lengths": (1.0, 0.0, 0.43, 0.004, 0.9)}),
            ("1hqk", "window", {"left": 40, "right": 90}),
            ("1hqk", "documents", {"b": 2, "documents": "sorted"}),
        )
    },
    "row": {"b": 2, "nq": 300, "nk": 333, "hq": 4, "hk": 2, "bias": "b11k", "causal": True},
    "row-softcap": {"b": 2, "nq": 130, "nk": 260, "hq": 2, "bias": "1h1k", "softcap": 1.5,
                    "lengths": (1.0, 0.3)},
    "row-heads": {"nq": 130, "nk": 260, "hq": 4, "hk": 2, "bias": "1h1k"},
    "column": {"nq": 131, "nk": 201, "hq": 2, "bias": "1hq1", "sink": True},
    "causal": {"nq": 300, "nk": 400, "hq": 2, "causal": True},
    "full": {"b": 2, "nq": 200, "nk": 700},
    "long-window": {"nq": 500, "nk": 600, "hq": 2, "left": 70, "right": 0},
    "abreast": {"b": 2, "nq": 300, "nk": 500, "hq": 6, "hk": 2, "causal": True},
    "abreast-longer-queries": {"nq": 500, "nk": 300, "hq": 4, "hk": 2, "alibi": True,
                               "causal": True},
    "abreast-bias": {"nq": 300, "nk": 304, "hq": 4, "hk": 2, "bias": "bhqk", "causal": True},
    "abreast-documents": {"nq": 300, "nk": 500, "hq": 2, "hk": 1, "documents": "sorted",
                          "causal": True},
    "abreast-lengths": {"b": 4, "nq": 100, "nk": 300, "hq": 2, "hk": 1,
                        "lengths": (1.0, 0.0, 0.43, 0.004), "causal": True},
    "followers": {"nq": 400, "nk": 1500, "right": 700},
    "packed": {"hq": 4, "hk": 2, "causal": True, "sequences": PACKED},
    "packed-full": {"hq": 2, "sequences": PACKED},
    "packed-window": {"hq": 2, "left": 40, "right": 10,
                      "sequences": ((130, 130), (64, 128), (1, 1), (0, 0), (129, 257))},
}  # fmt: skip


def kernel_cases(every: bool, share: int | None) -> list[Case]:
    """Return every length, mask and mode, as small as tiles allow.

    Each comes at every third head size and at 32, or at ``every``. ``share`` takes a part of them.
    Part 0 has each once, and all head sizes; parts 1 and 2 have the rest; None takes all.
    """
    alone: dict[str, Any] = {"b": 1, "hq": 1}
    named: dict[str, dict[str, Any]] = {
        f"{n}-{m}{'-causal' * c}": {"nq": n, "nk": m, "causal": c}
        for n, m in LENGTHS
        for c in (False, True)
    } | FEATURES
    found = []
    for n, (name, features) in enumerate(named.items()):
        cases = [
            Case(f"{name}-{d}-{dv}", **(alone | {"d": d, "dv": dv} | features)) for d, dv in SIZES
        ]
        (smallest,) = (case for case in cases if case.d == 32)
        first = cases[3 * (n // 3 % 3) + n % 3]
        first = first if is_computed(first) else smallest
        rest = [
            case
            for m, case in enumerate(cases)
            if (every or case.d == 32 or m % 3 == n % 3) and case is not first
        ]
        parts = ([first], rest[::2], rest[1::2])
        found += [case for k, part in enumerate(parts) if share in (None, k) for case in part]
    return found


def is_computed(case: Case) -> bool:
    problem, _ = make(case, dtype=torch.float16).problem()
    return hopper.supports(problem, "backward") is None


def long_cases() -> list[Case]:
    return [Case(f"long-{name}", **({"b": 1, "hq": 1, "d": 64} | x)) for name, x in LONG.items()]


def drawn_packed(count: int, seed: int) -> list[Case]:
    """Return random packed calls under a diagonal: the last sequences have several runs."""
    found, rng = [], random.Random(seed)
    for n in range(count):
        hk = rng.choice((1, 2, 3))
        values: dict[str, Any] = {"b": 1, "hk": hk, "hq": hk * rng.choice((1, 2, 3))}
        pairs = [(rng.randint(0, 120), rng.randint(0, 700)) for _ in range(rng.randint(1, 5))]
        same = [(k, k) for _, k in pairs if k < 400]
        values["sequences"] = tuple(rng.choice((pairs, same or pairs)))
        values["d"] = rng.choice((16, 64, 96, 128, 128, 256))
        values |= rng.choice(({"causal": True}, {"right": rng.randint(1, 90)}))
        values["dropout"] = rng.choice((0.0, 0.0, 0.3))
        found.append(Case(f"drawn-packed-{n}", **values))
    return found


class Interpreted(Launch):
    """A launch by Triton's interpreter."""

    def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        self.kernel[self.grid](*self.arguments(t, bases))


def prepare() -> None:
    """Replace launches and uses of a device, so that the checks of a GPU run here."""
    RemoteLaunch.start()
    interpreter.speed_up()
    backward_plan.GluonLaunch = RemoteLaunch  # pyright: ignore
    backward_plan.Launch = packed.Launch = Interpreted  # pyright: ignore
    cuda: Any = torch.cuda
    cuda.device = lambda _: contextlib.nullcontext()
    cuda.get_device_properties = lambda _: types.SimpleNamespace(
        multi_processor_count=random.choice(PROCESSORS)
    )
    cuda.current_device = lambda: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.synchronize = lambda: None
    hopper._missing = lambda _: None  # pyright: ignore
    row_stats.gdc_wait = row_stats.gdc_launch_dependents = lambda: None  # pyright: ignore
    backward_dbias.gdc_wait = part_sums.gdc_wait = lambda: None  # pyright: ignore
    triton.backward = fallback  # the twin does not run here
    # one launch sums and rounds dq wherever it can; wider heads have launches before and after
    backward_tiles.COMPLETE_TILES = 0
    backward_tiles.COMPLETE_KEYS = dict.fromkeys(backward_tiles.COMPLETE_KEYS, (0, 2**31))
    # heads that share keys have any number of shares
    backward_plan.shares_of = device.drawn_shares
    # the last packed sequences have several runs, however short they are
    backward_tiles.LATE_D = backward_tiles.LATE_KEYS = 0
    real = device.make
    device.make = lambda case, where, dtype: real(case, "cpu", dtype)
    device.expected = expected_once


@lru_cache(maxsize=1)
def _expected(case: Case, dtype: torch.dtype) -> Expected:
    call = make(case, dtype=dtype)
    return expected(call, *cotangents(call))


def expected_once(call: Call, *grads: Tensor | None) -> Expected:
    """Return the references of a call, the same for both modes of a case."""
    return _expected(call.case, call.inputs[0].dtype)


def fallback(problem, tensors, out, lse, dout, dlse, wanted):
    from rowmax import reference

    return reference.backward(problem, tensors, out, lse, dout, dlse, wanted)


def past_the_last(d: int) -> list[str]:
    """Return the faults of rows past the last packed sequence.

    They have no gradient, and change no other's.
    """
    case = Case("", hq=4, hk=2, d=d, causal=True, sequences=((5, 90), (0, 17), (99, 133)))
    problem, tensors = make(case, dtype=torch.float16).problem()
    out, lse = dense.attention(problem, tensors, torch.float32)
    out, wanted = out.half(), Wanted(True, True, True, False, False)
    dout = torch.randn_like(out)
    want = hopper.backward(problem, tensors, out, lse.float(), dout, None, wanted)
    n = 150

    bigger, given = with_rows_past_the_last(problem, tensors, n)
    more = torch.full_like(lse[..., :1], -torch.inf).expand(-1, -1, n)
    lse = torch.cat([lse, more], -1).float()
    with poisoned():
        got = hopper.backward(bigger, given, longer(out, n), lse, longer(dout, n), None, wanted)
    found = []
    for name, x, y in zip("qkv", want[:3], got[:3], strict=True):
        assert x is not None
        assert y is not None
        at = x.shape[1]
        if not torch.allclose(x, y[:, :at], atol=2e-3):  # dq is added up as it comes
            found.append(f"d{name} differs")
        if y[:, at:].count_nonzero():
            found.append(f"d{name} past the last sequence")
    return found


def out_of_range(d: int, deterministic: bool) -> list[str]:
    """Return the faults of offsets that fall or lie outside: ``in_range`` of them acts alike.

    The emulator allows no access outside a tensor.
    """
    case = Case("", hq=4, hk=2, d=d, causal=True, sequences=((5, 90), (0, 17), (99, 133)))
    problem, tensors = make(case, dtype=torch.float16).problem()
    out, lse = dense.attention(problem, tensors, torch.float32)
    generator = torch.Generator().manual_seed(d + deterministic)
    cu = torch.randint(-300, 400, (2, 4), dtype=torch.int32, generator=generator)
    cu[0, 1], cu[1, 2] = 2**31 - 1, -(2**31)
    risen = in_range(cu, (problem.total_q, problem.total_k))
    problem = problem._replace(deterministic=deterministic)
    both = []
    for x in (cu, risen):
        given = tensors._replace(cu_seqlens_q=x[0], cu_seqlens_k=x[1])
        args = (problem, given, out.half(), lse.float(), out.half(), None)
        with poisoned():
            both.append(hopper.backward(*args, Wanted(True, True, True, False, False)))
    return [
        f"d{name} of offsets out of range"
        for name, x, y in zip("qkv", both[0][:3], both[1][:3], strict=True)
        if x is None or not torch.allclose(x, y, 2e-3, 2e-3)  # dq is added up as it comes
    ]


def extremes(only: list[str]) -> list[str]:
    """Return the faults with biases and sinks of any size (tests/extreme_bias.py)."""
    found = []
    half = torch.float16
    for case in extreme_bias.CASES:
        if not any(part in case.name for part in only):
            continue
        both = (half, half), (half, torch.float32)
        for pair in both if case.bias else both[1:]:  # the second has the smaller tolerance
            problem = extreme_bias.extreme(case, *pair, "cpu").problem()[0]
            if hopper.supports(problem, "backward") is not None:
                continue
            lacked = hopper.lacks(problem, "backward")
            wrong = extreme_bias.check_backward(case, *pair, "cpu", hopper.backward, lacked)
            found += [f"{case} {pair[0]} {pair[1]}: {text}" for text in wrong]
            print(case, *pair, *(wrong or ["right"]), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of cases")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--extremes", action="store_true", help="biases and sinks of any size")
    parser.add_argument("--long", action="store_true", help="by tiles of long sequences")
    parser.add_argument("--kernels", action="store_true", help="small cases of every kernel")
    parser.add_argument("--share", type=int, choices=range(3), help="a part of these cases")
    parser.add_argument("--every-size", action="store_true", help="each of them at every head size")
    options = parser.parse_args()
    collect_less()
    prepare()
    if options.long:
        chosen = [case for case in long_cases() if any(part in case.name for part in options.only)]
        every = {
            case.name: device.check_long(case, "float16", n % 2 > 0, 0, "cpu")
            for n, case in enumerate(chosen)
        }
        print(*(f"{name}: {texts}" for name, texts in every.items() if texts), sep="\n")
        return int(any(every.values()))
    if options.extremes:
        return int(bool(extremes(options.only)))

    def wanted(name: str) -> bool:
        return any(part in name for part in options.only)

    every = [*tagged("every barrier", "blocks"), *device.cases("backward"), *drawn_packed(16, 0)]
    if options.kernels:
        every = kernel_cases(options.every_size, options.share)
    chosen = [c for c in every if wanted(c.name)]
    chosen = [c for c in chosen if c.nq * (c.nk or c.nq) * c.hq * c.b <= 4e6]
    named = options.only != [""]
    end = time.monotonic() + options.seconds
    counts = {"right": 0, "wrong": 0, "refused": 0}
    for case in chosen:
        for deterministic in (False, True):
            if time.monotonic() > end:
                break
            fused = case.d <= 128
            if deterministic and options.kernels and not fused:
                continue  # the other kernels are deterministic anyway
            repeats = int(options.kernels and (deterministic or not fused))
            try:
                found = device.check_backward(case, "float16", deterministic, repeats)
            except Exception as error:
                if named:
                    raise
                found = [f"{type(error).__name__}: {str(error)[:300]}"]
            if found and found[0].startswith("refused"):
                kind = "refused"
            else:
                kind = "wrong" if found else "right"
            counts[kind] += 1
            if found or named:
                print(case.name, "deterministic" * deterministic, *(found or ["right"]), flush=True)
    for d in (64, 256) if wanted("past-the-last") else ():
        found = past_the_last(d)
        found += [text for flag in (False, True) for text in out_of_range(d, flag)]
        counts["wrong" if found else "right"] += 1
        if found:
            print("past the last", d, *found, flush=True)
    print(counts)
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
