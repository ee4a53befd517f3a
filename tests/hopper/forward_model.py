"""Run the Hopper forward without a GPU, the host's side and the kernel, on ``tests/emulator``.

    python -m tests.hopper.forward_model [--only NAME] [--seeds 3]

Against the definition in float64, by the rule of ``rowmax.testing``, over memory that begins
as NaN; in float16, for numpy has no bfloat16.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo  # looks for triton, so before the machine takes its place
from torch import Tensor

from tests import emulator

emulator.install()

import rowmax  # noqa: E402
from rowmax.call.dispatch import beyond  # noqa: E402
from rowmax.call.inputs import Arrivals  # noqa: E402
from rowmax.call.problem import Problem, Tensors  # noqa: E402
from rowmax.gpu.hopper import (  # noqa: E402
    LIMITS,
    forward_parts,
    host,
    packed,
    takes_gap,
    tiles,
)  # fmt: skip
from rowmax.gpu.hopper.forward_lib import Pointers  # noqa: E402
from rowmax.gpu.hopper.lib.tma import is_aligned  # noqa: E402
from rowmax.reference import dense  # noqa: E402
from rowmax.rules.arrivals import ALL, Landing, table  # noqa: E402
from rowmax.rules.softmax import LN2  # noqa: E402
from rowmax.testing import CASES, Answer, Case, complaint, make, poisoned, tagged  # noqa: E402
from tests import gaps  # noqa: E402
from tests.emulator.threads import run_later  # noqa: E402
from tests.extreme_bias import CASES as EXTREMES  # noqa: E402
from tests.extreme_bias import complaints as extreme_complaints  # noqa: E402
from tests.extreme_bias import extreme, limit, row_complaints  # noqa: E402
from tests.garbage import collect_less  # noqa: E402
from tests.hopper import document_spans  # noqa: E402
from tests.hopper.packed_calls import in_range, with_rows_past_the_last  # noqa: E402
from tests.poison_padding import padding_matters  # noqa: E402

#: cases that the table of all backends lacks: lengths that meet tiles in every way, few and many
#: tiles, every path of a bias, every head size of a tile
LENGTHS = ((1, 1), (3, 3), (64, 1), (239, 1), (113, 203), (256, 256), (128, 384), (255, 257))
SIZES = ((32, 32), (24, 8), (32, 64), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128),
         (192, 192), (256, 256), (80, 72), (256, 64))  # fmt: skip


def drawn_pairs(count: int, seed: int) -> list[Case]:
    """Return random calls whose sequences share a bias, with many tiles or few for a block."""
    found, rng = [], random.Random(seed)
    for n in range(count):
        b, heads = rng.choice((3, 4, 6, 8, 12)), rng.choice((1, 2, 4))
        lengths = tuple(rng.choice((0.0, 0.01, 0.3, 0.77, 1.0)) for _ in range(b))
        found.append(
            Case(
                f"drawn-pairs-{n}",
                b=b,
                nq=rng.randint(1, 330),
                nk=8 * rng.randint(1, 100),
                hq=heads,
                hk=rng.choice((1, heads)),
                d=8 * rng.randint(1, 4),
                bias=rng.choice(("1hqk", "11qk", "b1qk")),
                bias_float32=rng.random() < 0.5,
                lengths=lengths if rng.random() < 0.3 else None,
                softcap=rng.choice((0.0, 0.0, 2.0)),
                sink=rng.random() < 0.3,
            )
        )
    return found


def drawn_groups(count: int, seed: int) -> list[Case]:
    """Return random calls whose heads may share tiles: packed, documents, limits of every kind."""
    found, rng = [], random.Random(seed)
    for n in range(count):
        hk, d = rng.choice((1, 1, 2, 3)), rng.choice((32, 64, 96, 128, 256))
        values: dict[str, Any] = {"b": rng.choice((1, 2)), "hk": hk, "d": d}
        values["hq"] = hk * rng.choice((2, 3, 4, 6, 8, 16, 24))
        kind = rng.choice(("packed", "sorted", "batched", "unsorted", "queries", "dense"))
        if kind == "packed":
            some = range(rng.randint(1, 5))
            values["sequences"] = tuple((rng.randint(0, 90), rng.randint(0, 200)) for _ in some)
            values["b"] = 1
        else:
            values |= {"nq": rng.randint(1, 200), "nk": rng.randint(1, 500)}
            values["documents"] = None if kind == "dense" else kind
        limits = rng.choice(({}, {"causal": True}, {"left": rng.randint(0, 200), "right": 0},
                             {"left": 70, "right": rng.randint(0, 90)}))  # fmt: skip
        values |= limits | {"sink": rng.random() < 0.3, "alibi": rng.random() < 0.2}
        values["dropout"] = rng.choice((0.0, 0.0, 0.3))
        found.append(Case(f"drawn-groups-{n}", **values))
    return found


def drawn_parts(count: int, seed: int) -> list[Case]:
    """Return random calls whose keys can be split: every query sees keys of several tiles."""
    found, rng = [], random.Random(seed)
    for n in range(count):
        hk, d = rng.choice((1, 1, 2, 3)), rng.choice((32, 64, 80, 96, 128, 192, 256, 512))
        nq = rng.choice((1, 3, 64, 65, rng.randint(1, 300)))
        limits = rng.choice(({}, {"causal": True}, {"left": rng.randint(600, 900), "right": 0},
                             {"left": 700, "right": rng.randint(0, 90)}))  # fmt: skip
        lengths = tuple(rng.choice((0.0, 0.01, 0.3, 0.77, 1.0)) for _ in range(2))
        found.append(
            Case(
                f"drawn-parts-{n}",
                b=rng.choice((1, 2)),
                nq=nq,
                nk=nq + rng.randint(400, 1500),
                hk=hk,
                hq=hk * rng.choice((1, 2, 3, 4, 8)),
                d=d,
                dv=rng.choice((None, d)) if d != 192 else 128,
                softcap=rng.choice((0.0, 0.0, 2.0)),
                sink=rng.random() < 0.4,
                alibi=rng.random() < 0.2,
                lengths=lengths if rng.random() < 0.3 else None,
                **limits,
            )
        )
    return found


def drawn_windows(count: int, seed: int) -> list[Case]:
    """Return random calls under windows, narrow or wide next to a tile, causal or not."""
    found, rng = [], random.Random(seed)
    for n in range(count):
        hk = rng.choice((1, 1, 2))
        nk = rng.randint(1, 700)
        values: dict[str, Any] = {"b": 1, "hk": hk, "hq": hk * rng.choice((1, 2, 4, 8))}
        values["d"] = rng.choice((32, 64, 64, 80, 96, 128, 128, 192, 256))
        values["dv"] = 128 if values["d"] == 192 else None
        values |= {"nq": rng.choice((nk, nk, rng.randint(1, nk), nk + 70)), "nk": nk}
        values["left"] = rng.choice((rng.randint(0, 130), rng.randint(126, 450)))
        values["right"] = rng.choice((0, 0, 0, None, -rng.randint(1, 40), rng.randint(1, 90)))
        if rng.random() < 0.2:
            some = range(rng.randint(1, 4))
            values["sequences"] = tuple((rng.randint(0, 300), rng.randint(0, 400)) for _ in some)
        elif rng.random() < 0.2:
            values["lengths"] = (rng.random(),)
        values |= {"sink": rng.random() < 0.3, "softcap": rng.choice((0.0, 0.0, 2.0))}
        found.append(Case(f"drawn-windows-{n}", **values))
    return found


MORE = [
    *drawn_pairs(40, 0),
    *drawn_windows(40, 0),
    *drawn_parts(40, 0),
    *drawn_groups(40, 0),
    *(
        Case(f"odd-{n}-{m}{'-causal' * causal}", b=1, nq=n, nk=m, hq=2, d=64, causal=causal)
        for n, m in LENGTHS
        for causal in (False, True)
    ),
    *(
        Case(f"size-{d}-{dv}", b=1, nq=140, nk=270, hq=2, d=d, dv=dv, causal=True)
        for d, dv in SIZES
    ),
    *(
        Case(f"bias-{pattern}-{nk}", b=2, nq=150, nk=nk, hq=2, d=64, bias=pattern, causal=True)
        for pattern in ("bhqk", "1hqk", "b11k", "1hq1", "1h1k", "1111")
        for nk in (160, 163)
    ),
    Case("deep-128", b=1, nq=300, nk=900, hq=2, d=128, causal=True),
    Case("deep-256", b=1, nq=200, nk=600, hq=2, d=256),
    Case("deep-bias", b=1, nq=256, nk=640, hq=1, d=128, bias="bhqk"),
    Case("long", b=1, nq=300, nk=2000, hq=1, d=64, left=700, right=0),
    Case("turns", b=1, nq=300, nk=2000, hq=1, d=64),
    Case("turns-causal", b=1, nq=450, nk=4200, hq=2, d=64, causal=True, sink=True),
    Case("turns-window", b=1, nq=450, nk=4200, hq=2, d=64, left=3500, right=-2),
    *(
        Case(f"tall-{d}{'-causal' * causal}", b=1, nq=300, nk=420, hq=2, d=d, causal=causal)
        for d in (72, 96)
        for causal in (False, True)
    ),
    # blocks with one side, two and four
    *(
        Case(f"strip-{pattern}-{d}-{n}-{m}", b=b, nq=n, nk=m, hq=hq, d=d, bias=pattern)
        for pattern, b, hq in (("1hqk", 9, 2), ("1hqk", 10, 2), ("11qk", 4, 3), ("b1qk", 2, 8))
        for d, n, m in ((32, 150, 264), (32, 128, 104), (24, 200, 768), (64, 300, 384))
    ),
    *(
        Case(
            f"strip-lengths-{nk}",
            b=8,
            nq=150,
            nk=nk,
            hq=2,
            hk=1,
            d=32,
            bias="1hqk",
            sink=True,
            lengths=(1.0, 0.0, 0.43, 0.004, 0.9, 0.5, 0.2, 0.7),
        )
        for nk in (272, 768)
    ),
    *(
        Case(f"strip-float32-{nk}", b=8, nq=150, nk=nk, hq=2, d=32, bias="1hqk", bias_float32=True)
        for nk in (164, 384, 512)
    ),
    Case("strip-terms", b=9, nq=150, nk=272, hq=2, d=32, bias="1hqk", softcap=1.5, sink=True),
    *(  # two sides that read a bias at the same time; one side
        Case(
            f"streamed-{b}-{n}-{nk}",
            b=b,
            nq=n,
            nk=nk,
            hq=2,
            d=32,
            bias="1hqk",
            bias_float32=True,
            sink=True,
        )
        for b, n, nk in ((10, 150, 776), (6, 300, 840), (9, 150, 776))
    ),
    Case("streamed-long", b=6, nq=200, nk=1800, hq=2, d=24, bias="1hqk"),
    Case("streamed-lengths", b=6, nq=200, nk=1800, hq=2, d=32, bias="1hqk", lengths=(0.5, 1.0, 0)),
    Case("streamed-float32", b=9, nq=150, nk=776, hq=2, d=32, bias="1hqk", bias_float32=True),
    # values in one launch and in two
    Case("wide-values", b=1, nq=140, nk=270, hq=2, d=512, dv=256, causal=True),
    Case("wide-parts", b=2, nq=140, nk=270, hq=4, hk=2, d=400, dv=328, causal=True, sink=True),
    Case("wide-latent", b=1, nq=140, nk=270, hq=4, hk=1, d=576, dv=512, causal=True),
    Case("wide-widest", b=1, nq=140, nk=130, hq=1, d=520, dv=576, left=50),
    Case("wide-narrow", b=1, nq=70, nk=150, hq=1, d=40, dv=512),
    Case("wide-grouped", b=2, nq=20, nk=150, hq=8, hk=2, d=512, left=60, right=0),
    Case("wide-bias", b=2, nq=70, nk=160, hq=2, d=512, bias="bhqk", lengths=(0.5,), softcap=3.0),
    Case("wide-packed", hq=2, d=512, causal=True, sequences=((5, 90), (0, 17), (150, 270))),
    Case(
        "wide-terms",
        b=2,
        nq=100,
        nk=170,
        hq=2,
        hk=1,
        d=512,
        alibi=True,
        softcap=2.0,
        sink=True,
        causal=True,
    ),
    Case("wide-documents", b=2, nq=150, nk=170, hq=1, d=512, documents="sorted", causal=True),
    Case("wide-lengths", b=3, nq=70, nk=150, hq=2, d=400, lengths=(1.0, 0.0, 0.43)),
    Case("wide-window", b=1, nq=200, nk=260, hq=1, d=512, left=70, right=20),
    *(
        Case(f"dropout-{d}", b=2, nq=140, nk=270, hq=4, hk=2, d=d, causal=True, dropout=0.3)
        for d in (32, 80, 96, 128, 192, 256)
    ),
    *(
        Case(f"dropout-bias-{pattern}", b=2, nq=150, nk=160, hq=2, d=64, bias=pattern, dropout=0.5)
        for pattern in ("bhqk", "b11k", "1hq1")
    ),
    Case("dropout-shared", b=8, nq=150, nk=264, hq=2, d=32, bias="1hqk", dropout=0.2),
    Case("dropout-grouped", b=2, nq=20, nk=300, hq=8, hk=2, d=64, causal=True, dropout=0.2),
    Case("far", b=1, nq=150, nk=270, hq=1, d=64, left=2**31, right=2**32 - 1),
    Case("grouped", b=2, nq=20, nk=300, hq=8, hk=2, d=64, causal=True, sink=True),
    Case(
        "packed", hq=4, hk=2, d=64, causal=True, sequences=((5, 90), (0, 17), (150, 270), (33, 0))
    ),
]


LONG_KEYS = tiles.LONG_KEYS
TALL = [key for key in LONG_KEYS if key[0] > 64]


def prepare(processors: int) -> None:
    host.processors = lambda _: processors
    host.spills = lambda *_: False  # nothing is compiled
    host.spans_of = document_spans.tables  # pyright: ignore  (the emulator has no such kernels)
    host.merge_parts = merge_parts
    host.parts_of = forward_parts.parts_of
    packed._CLEARING = 3  # each of few programs clears several parts
    host._PLANS.clear()
    torch.cuda.current_device = lambda: None  # pyright: ignore
    torch.cuda.is_current_stream_capturing = lambda: False


def drawn_parts_of(p: Problem, most: int) -> int:
    """Return some number of parts that a problem may have, above 1 if it may."""
    possible = forward_parts.parts_to_choose(p, most)
    return random.choice(possible[1:] or possible)


def merge_parts(
    problem: Problem, tensors: Tensors, t: Pointers, results: tuple[Tensor, Tensor]
) -> None:
    """Do what the kernel of ``merge.py`` does, whose own tests are those of few queries."""
    out, lse = results
    m, l = t.lse.view(2, -1, *lse.shape).double()
    of_rows = l.transpose(2, 3)[..., None]
    o = t.out.double().view(-1, *out.shape)
    o = torch.where(of_rows == 0.0, 0.0, o / of_rows)
    sums = m * (1.0 if problem.natural else LN2) + l.log()
    parts = list(zip(o, sums, strict=True))
    if tensors.sink is not None:  # a part of value 0
        parts.append((torch.zeros_like(o[0]), tensors.sink.double()[:, None].expand(lse.shape)))
    for result, whole in zip(results, rowmax.merge(*parts), strict=True):
        result.copy_(whole)


def check(case: Case, seed: int) -> list[str]:
    """Return the faults of a case, on a machine of few processors."""
    random.seed(f"{case.name} {seed}")
    torch.manual_seed(seed)
    prepare(random.choice((1, 1, 2, 3, 64)))
    if case.name.startswith(("strip", "streamed", "drawn")):  # where blocks have many tiles
        prepare(random.choice((1, 2, 3)))
    if case.name.startswith("tall"):  # on one processor, else few rows have tiles of their own
        prepare(1)
    tiles.LONG_KEYS = LONG_KEYS | dict.fromkeys(TALL, 0 if case.name.startswith("tall") else 8192)
    problem, tensors = make(case, dtype=torch.float16).problem()
    if beyond(LIMITS, problem):
        return ["refused"]
    if case.name.startswith("drawn-parts"):
        prepare(64)
    host.parts_of = drawn_parts_of
    ref = dense.attention(problem, tensors, torch.float64)
    std = dense.attention(problem, tensors, problem.dtype)
    with poisoned():
        got = host.forward(problem, tensors)
    if case.name.startswith("strip") and not any(
        plan.constants.config.STRIP for plan in host._PLANS.values()
    ):
        return ["no block keeps the bias"]
    parted = any(plan.parts > 1 for plan in host._PLANS.values())
    if case.name.startswith("drawn-parts") and not parted:
        return ["no keys are split"]
    found = [
        complaint(name, *three, problem.dtype)
        for name, *three in zip(("out", "lse"), got, ref, std, strict=True)
    ]
    found.append(padding_matters(problem, tensors, host.forward, got))
    return [text for text in found if text]


def check_extreme(case: Case, bias_dtype: torch.dtype) -> list[str]:
    """Return the faults with biases and sinks as large as their dtype goes."""
    random.seed(case.name)
    prepare(3)
    problem, tensors = extreme(case, torch.float16, bias_dtype, "cpu").problem()
    if beyond(LIMITS, problem):
        return ["refused"]
    want = Answer(*dense.attention(problem, tensors, torch.float64), {})
    with poisoned():
        got = Answer(*host.forward(problem, tensors), {})
    allowed = limit(torch.float16, bias_dtype)
    return extreme_complaints(got, want, allowed) + row_complaints(got, want, allowed)


def past_the_last(sink: bool) -> list[str]:
    """Return the faults of rows past the last packed sequence.

    They see nothing, and no other row sees them.
    """
    prepare(3)
    case = Case("", hq=4, hk=2, d=64, causal=True, sink=sink, sequences=((5, 90), (0, 17), (99, 3)))
    problem, tensors = make(case, dtype=torch.float16).problem()
    want = host.forward(problem, tensors)
    with poisoned():
        out, lse = host.forward(*with_rows_past_the_last(problem, tensors, 2100))
    of_nothing = torch.full_like(lse[0], -torch.inf)
    if tensors.sink is not None:
        of_nothing = tensors.sink[:, None].expand_as(lse[0])
    at = problem.total_q
    wrong = {
        "out": not torch.equal(out[:, :at], want[0]),
        "lse": not torch.equal(lse[..., :at], want[1]),
        "out past the last": out[:, at:].count_nonzero() > 0,
        "lse past the last": not torch.equal(lse[0, :, at:], of_nothing[:, at:]),
    }
    return [name for name, bad in wrong.items() if bad]


def check_arrivals(case: Case, seed: int) -> list[str]:
    """Return the faults of a case whose keys and values arrive while the kernel runs.

    Copies of some rows of all heads or of one, in any order, land in memory full of NaN.
    """
    random.seed(f"{case.name} {seed}")
    torch.manual_seed(seed)
    prepare(random.choice((1, 2, 3, 64)))
    problem, tensors = make(case, dtype=torch.float16).problem()
    if beyond(LIMITS, problem) or not (problem.nq and problem.total_k and problem.batch):
        return ["refused"]
    if not (is_aligned(tensors.k) and is_aligned(tensors.v)):
        return ["refused"]
    want = host.forward(problem, tensors)
    rows, heads = tensors.k.shape[1:3]
    ends = sorted({0, rows, *(random.randrange(rows) for _ in range(random.choice((0, 1, 5, 9))))})
    names = [slice(None)] if random.random() < 0.5 else [slice(h, h + 1) for h in range(heads)]
    copies = [(name, *pair) for name in names for pair in pairwise(ends)]
    random.shuffle(copies)
    if random.random() < 0.3:  # some rows are there
        copies = copies[1:] or copies
    memory = [t.clone() for t in (tensors.k, tensors.v)]
    for name, start, stop in copies:
        for t in memory:
            t[:, start:stop, name] = torch.nan
    count = torch.zeros(1, dtype=torch.int32)
    landings = [
        [Landing(n, *pair) for n, (other, *pair) in enumerate(copies, 1) if other == name]
        for name in names
    ]
    numbers = torch.tensor(table(landings, 0, rows), dtype=torch.int32)

    def land(number: int) -> None:
        name, start, stop = copies[number]
        for to, t in zip(memory, (tensors.k, tensors.v), strict=True):
            to[:, start:stop, name] = t[:, start:stop, name]
        number += 1
        count.fill_(ALL if number == len(copies) else number)
        if number < len(copies):
            run_later(lambda: land(number))

    run_later(lambda: land(0))
    k, v = memory
    with poisoned():
        got = host.forward(problem, tensors._replace(k=k, v=v), Arrivals(count, numbers))
    return [n for n, x, y in zip(("out", "lse"), got, want, strict=True) if not torch.equal(x, y)]


def check_gap(seed: int) -> list[str]:
    """Return the faults of two chunks of queries in one call, against a call of each."""
    prepare((1, 2, 3, 64)[seed % 4])
    problem, tensors = gaps.drawn(seed, "cpu", torch.float16, 256)
    if not takes_gap(problem):
        return ["refused"]
    with poisoned():
        return gaps.complaints(problem, tensors, host.forward(problem, tensors))


def out_of_range(seed: int) -> list[str]:
    """Return the faults of offsets that fall or lie outside: ``in_range`` of them acts alike."""
    torch.manual_seed(seed)
    prepare(3)
    n = int(torch.randint(1, 300, ()))
    case = Case("", hq=2, hk=2, d=64, causal=True, sequences=((100, 200), *[(0, 0)] * n, (99, 3)))
    problem, tensors = make(case, dtype=torch.float16).problem()
    cu = torch.randint(-50, 300, (2, n + 3), dtype=torch.int32)
    cu[:, torch.randint(n + 3, ())] = torch.tensor([2**31 - 1, -(2**31)])
    got = []
    for q, k in (cu, in_range(cu, (199, 203))):
        some = tensors._replace(cu_seqlens_q=q, cu_seqlens_k=k)
        with poisoned():
            got.append(host.forward(problem._replace(nq=199, nk=203), some))
    return [n for n, x, y in zip(("out", "lse"), *got, strict=True) if not torch.equal(x, y)]


def checks_of(only: str, seeds: int) -> list[tuple[str, Callable[[], list[str]]]]:
    """Return all checks, each after its name; ``only`` is a part of the names of cases."""
    drawn = [c for c in (*MORE, *CASES, *tagged("blocks")) if only in c.name]
    found = [
        (f"{case.name} seed {seed}", partial(check, case, seed))
        for case in drawn
        for seed in range(seeds)
    ]
    both = torch.float16, torch.float32  # the second has the smaller tolerance
    extremes = [(c, kind) for c in EXTREMES for kind in (both if c.bias else both[1:])]
    found += [(f"{c.name} {kind} seed 0", partial(check_extreme, c, kind)) for c, kind in extremes]
    arriving = [c for c in (*MORE, *CASES) if only in c.name][::6]
    found += [
        (f"keys that arrive, {c.name} seed 0", partial(check_arrivals, c, 0)) for c in arriving
    ]
    found += [
        (f"past the last, sink {sink}, seed 0", partial(past_the_last, sink))
        for sink in (False, True)
    ]
    found += [(f"gap, seed {seed}", partial(check_gap, seed)) for seed in range(24)]
    return found + [
        (f"out of range, seed {seed}", partial(out_of_range, seed)) for seed in range(4)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--shares", type=int, default=1, help="take one check in so many")
    parser.add_argument("--share", type=int, default=0, help="the first of these")
    options = parser.parse_args()
    collect_less()
    wrong = right = refused = 0
    for name, run in checks_of(options.only, options.seeds)[options.share :: options.shares]:
        begin = time.monotonic()
        try:
            found = run()
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found == ["refused"] and not name.startswith("gap"):  # none of these may be
            refused += 1
        elif found:
            wrong += 1
            print(f"{name}: {'; '.join(found)}", flush=True)
        else:
            right += 1
            print(f"{name} {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{right} right, {wrong} wrong, {refused} refused")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
