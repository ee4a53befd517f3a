"""Run the Hopper forward whose reference lags without a GPU, on ``tests/emulator``.

    python -m tests.hopper.lagging_model [--only NAME] [--unmended]

In float32, which has the range of bfloat16. Steps of hundreds in the scores, within and between
key tiles, overflow the weights of some rows: the second launch must mend them. ``--unmended``
leaves it out.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # looks for triton, so before the machine takes its place
from torch import Tensor

from tests import emulator

emulator.install()
gl: Any = sys.modules["triton.experimental.gluon.language"]
gl.bfloat16 = gl.float32  # weights and tensors in float32

from rowmax.call.problem import Problem, Tensors  # noqa: E402
from rowmax.gpu.hopper import forward_kernel, forward_scores, host, tiles  # noqa: E402
from rowmax.reference import dense  # noqa: E402
from rowmax.testing import Case, complaint, make, poisoned  # noqa: E402
from tests.hopper.forward_model import drawn_pairs, prepare  # noqa: E402

CASES = [
    Case("full", b=1, nq=300, nk=700, hq=2, d=64),
    Case("long", b=1, nq=250, nk=2000, hq=1, d=64),
    Case("causal", b=1, nq=500, nk=500, hq=2, d=128, causal=True),
    Case("causal-corner", b=1, nq=320, nk=640, hq=1, d=64, right=-1),
    Case("causal-short", b=1, nq=400, nk=131, hq=2, d=64, causal=True),
    Case("window", b=1, nq=500, nk=700, hq=1, d=64, left=300, right=40),
    Case("left", b=1, nq=200, nk=700, hq=1, d=64, left=400),
    Case("window-causal", b=1, nq=500, nk=700, hq=1, d=64, left=300, right=0),
    Case("window-turns", b=1, nq=250, nk=3400, hq=1, d=64, left=3200, right=0),
    Case("grouped", b=2, nq=20, nk=500, hq=8, hk=2, d=64, causal=True, sink=True),
    Case("lengths", b=3, nq=140, nk=600, hq=2, d=64, lengths=(1.0, 0.6, 0.0)),
    Case("packed", hq=4, hk=2, d=64, causal=True,
         sequences=((5, 90), (0, 17), (300, 570), (33, 0), (200, 260))),
    Case("dropout", b=1, nq=300, nk=700, hq=2, d=64, causal=True, dropout=0.3),
    Case("wide", b=1, nq=200, nk=500, hq=1, d=256, causal=True),
    Case("parts", b=1, nq=200, nk=500, hq=1, d=96, causal=True),
    Case("values", b=1, nq=200, nk=500, hq=1, d=192, dv=128, causal=True),
]  # fmt: skip
#: products are added to a bias that sequences share, strips of it or tiles
PAIRS = [
    Case("pairs-full", b=8, nq=150, nk=256, hq=2, d=32, bias="1hqk"),
    Case("pairs-short", b=8, nq=150, nk=200, hq=2, d=24, bias="1hqk"),
    Case("pairs-sides", b=8, nq=100, nk=408, hq=2, d=32, bias="1hqk"),
    Case("pairs-streamed", b=8, nq=100, nk=900, hq=2, d=32, bias="1hqk"),
    Case("pairs-lengths", b=8, nq=150, nk=256, hq=2, d=32, bias="1hqk",
         lengths=(1.0, 0.6, 0.0, 0.3, 0.9, 0.99, 0.01, 1.0)),
    Case("pairs-sink", b=8, nq=150, nk=256, hq=2, hk=1, d=32, dv=16, bias="1hqk", sink=True),
]  # fmt: skip
#: random ones, which have other kernels where few tiles share a bias
DRAWN = [replace(case, softcap=0.0) for case in drawn_pairs(12, 1)]
#: the size of the steps in the scores, in base 2; 0: ordinary. Weights may be 2^126
STEPS = (0, 63, 200, 1000, 1000)


def stepped(problem: Problem, tensors: Tensors, size: float) -> Tensors:
    """Return tensors whose scores step by up to +-size, at some keys and for some queries."""
    q, k = tensors.q.clone(), tensors.k.clone()
    at = torch.arange(k.shape[1]) // random.choice((1, 7, 128, 200))
    sizes = torch.randn(int(at.max()) + 1).clamp(-1.0, 1.0) * size / (1.4427 * problem.scale)
    # half of the queries see the steps
    q[..., 0] = (torch.rand(q.shape[:-1]) < 0.5).float()
    k[..., 0] = sizes[at][None, :, None]
    return tensors._replace(q=q, k=k, bias=masking(tensors.bias))


def masking(bias: Tensor | None) -> Tensor | None:
    """Return a bias that masks the last keys for all queries, and all keys for some."""
    if bias is None:
        return None
    bias, low = bias.clone(), (-torch.inf, torch.finfo(torch.float32).min, -1e9)
    bias[..., random.choice((-1, -70, -130)) :] = random.choice(low)
    bias[..., torch.rand(bias.shape[2]) < 0.05, :] = random.choice(low)
    return bias


def check(case: Case, size: float, seed: int, mended: bool = True) -> tuple[list[str], int]:
    """Return (the faults of a case, the rows that overflowed)."""
    torch.manual_seed(seed)
    random.seed(f"{case.name} {size} {seed}")
    prepare(random.choice((1, 2, 3)))
    problem, tensors = make(case, dtype=torch.float32).problem()
    if size:
        tensors = stepped(problem, tensors, size)
    ref = dense.attention(problem, tensors, torch.float64)
    std = dense.attention(problem, tensors, torch.float32)
    counts: list[int] = []
    added: list[bool] = []

    def run(plan: host.Plan, t: Any, copied: Any) -> None:
        plan.launch(t, copied)
        counts.append(int(t.lse.isnan().sum()))
        added.append(plan.constants.config.ONTO_BIAS)
        if case in DRAWN and plan.mends is None:  # few tiles share the bias
            return
        assert plan.mends is not None
        if mended:
            plan.mends.launch(plan.mends.ordered(t), copied)

    with mock.patch.object(host.Plan, "run", run), poisoned():
        got = host.forward(problem, tensors)
    found = [
        complaint(name, *three, problem.dtype)
        for name, *three in zip(("out", "lse"), got, ref, std, strict=True)
    ]
    found += ["no product is added to the bias"] * (case in PAIRS and added != [True])
    return [text for text in found if text], counts[0]


def not_finite() -> list[str]:
    """Return the faults with infinite and NaN inputs: results are those of maxima in all tiles."""
    problem, tensors = make(CASES[0], dtype=torch.float32).problem()
    q, k, v = (t.clone() for t in tensors[:3])
    q[:, 7, 0], q[:, 70, 0, 3] = torch.nan, torch.inf
    k[:, 600, 1, 5], v[:, 9, 0] = torch.inf, -torch.inf
    tensors = tensors._replace(q=q, k=k, v=v)
    got = []
    for lagging in (True, False):
        prepare(2)
        tiles.lags = lambda *_, lagging=lagging: lagging  # pyright: ignore
        got.append(host.forward(problem, tensors))
    tiles.lags = lambda *_: True  # pyright: ignore
    return [
        f"not finite: wrong {name}"
        for name, x, y in zip(("out", "lse"), *got, strict=True)
        if not torch.allclose(x, y, 1e-5, 1e-5, equal_nan=True)
    ]


def aligned_blocks(causal: bool) -> list[str]:
    """Return the faults of tiles of queries computed alone: rows are the same bits."""
    prepare(2)
    case = Case("blocks", b=1, nq=500, nk=500, hq=2, d=64)
    problem, tensors = make(case, dtype=torch.float32).problem()
    tensors = stepped(problem, tensors, 60)
    problem = problem._replace(right=0 if causal else None)
    whole = host.forward(problem, tensors)
    found = []
    for i, j in ((0, 128), (128, 384), (384, 500)):
        nk = j if causal else 500  # the last query stands at the last key
        part = tensors._replace(q=tensors.q[:, i:j], k=tensors.k[:, :nk], v=tensors.v[:, :nk])
        out, lse = host.forward(problem._replace(nq=j - i, nk=nk, total_q=j - i, total_k=nk), part)
        same = torch.equal(out, whole[0][:, i:j]) and torch.equal(lse, whole[1][..., i:j])
        found += [f"wrong bits of queries {i} to {j - 1}, causal {causal}"] * (not same)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--unmended", action="store_true", help="leave the second launch out")
    options = parser.parse_args()
    tiles.lags = lambda _, bias: not bias  # pyright: ignore
    tiles.onto_bias = lambda _: True  # pyright: ignore
    for module in (forward_kernel, forward_scores):
        module.widened = lambda x: x  # pyright: ignore
    wrong = right = rows = 0
    for case in (case for case in (*CASES, *PAIRS, *DRAWN) if options.only in case.name):
        for seed, size in enumerate(STEPS):
            found, overflowed = check(case, size, seed, not options.unmended)
            if size == 0 and overflowed:
                found.append(f"{overflowed} rows of ordinary scores overflowed")
            rows += overflowed
            print(f"{case.name} steps of {size}: {overflowed} rows overflowed", flush=True)
            right, wrong = right + (not found), wrong + bool(found)
            for text in found:
                print(f"{case.name} steps of {size}: wrong {text}", flush=True)
    if not (options.only or options.unmended):
        for found in (not_finite(), aligned_blocks(False), aligned_blocks(True)):
            right, wrong = right + (not found), wrong + bool(found)
            print(*found, sep="\n", flush=True)
    print(f"{right} right, {wrong} wrong, {rows} rows overflowed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
