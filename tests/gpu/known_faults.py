"""Calls that have been wrong on an H200 or H100, each in a process of its own.

    python -m tests.gpu.known_faults [--processes 8] [--limit 180] [--only 257]

Prints for each: right, wrong (by how much), or a fault (an error, a crash, a hang).
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cases import Case
from tests.drawn import Drawn
from tests.gpu.random_search import in_a_child


def _case(
    b: int, nq: int, hq: int, d: int, nk: int, hk: int, dv: int, name: str = "", **more: Any
) -> Case:
    text = f"[{b},{nq},{hq},{d}] nk={nk} hk={hk} dv={dv} {name}".strip()
    return Case(text, b=b, nq=nq, hq=hq, d=d, nk=nk, hk=hk, dv=dv, **more)


#: float32, backend triton, forward and backward: kernels that triton 3.6.0 compiles wrongly
CASES = [
    _case(1, 64, 4, 40, 64, 1, 16),
    _case(2, 33, 4, 32, 3, 2, 32),
    _case(2, 64, 8, 8, 64, 2, 24),
    _case(2, 64, 8, 16, 64, 2, 24),
    _case(2, 64, 8, 8, 64, 8, 24),
    _case(2, 64, 8, 8, 64, 2, 24, "causal", causal=True),
    _case(1, 33, 8, 8, 33, 2, 24, "window-sink", left=0, right=0, sink=True),
    _case(2, 520, 1, 128, 130, 1, 16, "alibi", alibi=True),
    _case(2, 257, 8, 8, 130, 2, 128, "softcap", softcap=5.0),
    _case(
        1, 33, 1, 16, 65, 1, 64, "causal-softcap-mask",
        causal=True, softcap=5.0, allowed="11qk",
    ),
    _case(1, 2, 4, 80, 65, 1, 80, "causal", causal=True),
    _case(1, 33, 8, 128, 1, 2, 128),
]  # fmt: skip


def run(device: str, processes: int, limit: float, only: str = "") -> int:
    chosen = [case for case in CASES if only in case.name]

    def said(case: Case) -> str:
        return in_a_child(Drawn(case, "float32", 0), "triton", device, limit)

    bad = 0
    with ThreadPoolExecutor(processes) as pool:
        for case, words in zip(chosen, pool.map(said, chosen), strict=True):
            bad += not words.startswith("right")
            print(f"{case.name}: {words}", flush=True)
    print(f"{len(chosen)} calls, {bad} not right")
    return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=180.0)
    parser.add_argument("--only", default="", help="names that hold this text")
    given = parser.parse_args()
    return run(given.device, given.processes, given.limit, given.only)


if __name__ == "__main__":
    sys.exit(main())
