"""A small call of each Hopper kernel, for tools that watch every access.

compute-sanitizer --tool memcheck python -m tests.gpu.small
compute-sanitizer --tool racecheck python -m tests.gpu.small --only d128
"""

from __future__ import annotations

import argparse
import sys

import torch

from rowmax import hopper
from rowmax.problem import Wanted
from rowmax.reference import dense
from tests.cases import Case, make
from tests.tolerance import complaint

PACKED = ((70, 130), (0, 17), (200, 150))
CASES = [
    *(Case(f"d{d}-full", b=1, nq=200, nk=330, hq=2, hk=1, d=d) for d in (64, 96, 128, 192, 256)),
    *(Case(f"d{d}-causal", b=2, nq=300, hq=2, d=d, causal=True) for d in (64, 128, 256)),
    Case("d64-long", b=80, nq=8, nk=4500, hq=2, d=64, causal=True),
    Case("d128-window", b=1, nq=400, hq=2, d=128, left=100, right=20, softcap=20.0, sink=True),
    Case("d128-bias", b=1, nq=256, hq=2, d=128, bias="1hqk"),
    Case("d64-shared-bias", b=2, nq=256, hq=2, d=64, bias="1hqk", causal=True),
    Case("d128-packed", hq=4, hk=2, d=128, causal=True, sequences=PACKED),
    Case("d64-documents", b=2, nq=300, hq=2, d=64, causal=True, documents="sorted"),
    Case("d128-lengths", b=2, nq=100, nk=300, hq=2, d=128, lengths=(0.4, 0.0), alibi=True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    bad = 0
    for case in (c for c in CASES if options.only in c.name):
        call = make(case, "cuda", torch.bfloat16)
        problem, tensors = call.problem()
        out, lse = hopper.forward(problem, tensors)
        want = dense.attention(problem, tensors, torch.float64)
        std = dense.attention(problem, tensors, problem.dtype)
        wrong = complaint("out", out, want[0], std[0], problem.dtype)
        if options.backward and hopper.supports(problem, "backward") is None:
            wanted = Wanted(True, True, True, problem.bias is not None, False)
            dout = torch.randn_like(out)
            hopper.backward(problem, tensors, out, lse, dout, None, wanted)
        torch.cuda.synchronize()
        bad += bool(wrong)
        print(case.name, wrong or "right", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
