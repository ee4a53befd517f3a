"""A small call of each Hopper kernel, for tools that watch every access.

compute-sanitizer --tool memcheck python -m tests.gpu.small
compute-sanitizer --tool racecheck python -m tests.gpu.small --backward --only bias
"""

from __future__ import annotations

import argparse
import sys

import torch

from rowmax.call.problem import Gradients, Wanted
from rowmax.gpu import hopper
from tests.cases import LEAVES, Case, make
from tests.gpu.hopper_backward import judged
from tests.tolerance import Expected, complaint, cotangents, definition, expected

PACKED = ((70, 130), (0, 17), (200, 150))
CASES = [
    *(Case(f"d{d}-full", b=1, nq=200, nk=330, hq=2, hk=1, d=d) for d in (64, 96, 128, 192, 256)),
    *(Case(f"d{d}-causal", b=2, nq=300, hq=2, d=d, causal=True) for d in (64, 128, 256)),
    Case("d64-many", b=80, nq=8, nk=700, hq=2, d=64, causal=True),
    Case("d128-window", b=1, nq=400, hq=2, d=128, left=100, right=20, softcap=20.0, sink=True),
    Case("d128-bias", b=1, nq=256, hq=2, d=128, bias="1hqk"),
    Case("d64-bias-window", nq=300, nk=328, hq=2, d=64, bias="bhqk", left=90, right=20),
    Case("d64-bias-documents", nq=200, hq=2, d=64, bias="bhqk", documents="sorted"),
    Case("d192-bias", nq=200, nk=328, hq=2, d=192, bias="bhqk"),
    Case("d256-bias", nq=200, nk=328, hq=2, hk=1, d=256, bias="bhqk", causal=True),
    Case("d192-128-bias", nq=200, nk=328, hq=2, d=192, dv=128, bias="bhqk", left=90, right=20),
    Case("d64-shared-bias", b=2, nq=256, hq=2, d=64, bias="1hqk", causal=True),
    Case("d256-shared-bias", b=2, nq=200, nk=328, hq=2, hk=1, d=256, bias="1hqk"),
    Case(
        "d64-shared-bias-lengths", b=2, nq=200, nk=328, hq=2, d=64, bias="1hqk", lengths=(0.7, 0.2)
    ),
    Case("d128-shared-bias-documents", b=2, nq=264, hq=2, d=128, bias="11qk", documents="batched"),
    Case("d128-row-bias", nq=300, nk=331, hq=4, hk=2, d=128, bias="b11k", causal=True),
    Case("d256-row-bias", nq=150, nk=201, hq=2, d=256, bias="1h1k"),
    Case("d64-column-bias", nq=131, nk=201, hq=2, d=64, bias="1hq1", sink=True),
    Case("d128-packed", hq=4, hk=2, d=128, causal=True, sequences=PACKED),
    Case("d64-documents", b=2, nq=300, hq=2, d=64, causal=True, documents="sorted"),
    Case("d128-lengths", b=2, nq=100, nk=300, hq=2, d=128, lengths=(0.4, 0.0), alibi=True),
]
#: of these the forward alone: the noise of gradients is worked out from all pairs of keys
FORWARD = [Case("d64-long", b=80, nq=8, nk=4500, hq=2, d=64, causal=True)]


def complaints(case: Case, backward: bool) -> list[str]:
    """What is wrong. The references are the CPU's: a tool that watches is slow in any kernel."""
    there, call = (make(case, device, torch.bfloat16) for device in ("cpu", "cuda"))
    cotangents_there = cotangents(there)
    if backward:
        want = expected(there, *cotangents_there)
    else:
        both = (definition(there, *cotangents_there, t) for t in (torch.float64, torch.bfloat16))
        want = Expected(torch.bfloat16, *both, noise={})
    problem, tensors = call.problem()
    out, lse = hopper.forward(problem, tensors)
    x = out.cpu().view(want.ref.out.shape)
    found = [complaint("out", x, want.ref.out, want.std.out, problem.dtype)]
    if backward:
        dout, dlse = (
            t.cuda().view(s.shape) for t, s in zip(cotangents_there, (out, lse), strict=True)
        )
        lacked = hopper.lacks(problem, "backward")
        wanted = Wanted(*(name in call.leaves and f"d{name}" not in lacked for name in LEAVES))
        for deterministic in (False, True):
            given = problem._replace(deterministic=deterministic)
            if reason := hopper.supports(given, "backward"):
                found.append(f"refused: {reason}")
                continue
            got = hopper.backward(given, tensors, out, lse, dout, dlse, wanted)
            got = Gradients(*(g if g is None else g.cpu() for g in got))
            found += judged(got, want, lacked)
    return [text for text in found if text]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    bad = 0
    chosen = [case for case in (*CASES, *FORWARD) if options.only in case.name]
    if not chosen:
        parser.error(f"--only {options.only!r} names none of the cases")
    for case in chosen:
        found = complaints(case, options.backward and case not in FORWARD)
        torch.cuda.synchronize()
        bad += bool(found)
        print(case.name, *(found or ["right"]), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
