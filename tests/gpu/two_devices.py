"""Every backend on a device that is not the current one, on a host with two GPUs.

    python -m tests.gpu.two_devices [--only NAME]

Tensors on cuda:1 while cuda:0 is current: forward and backward equal those on cuda:0, where the
sums have an order, and are right by the rule of ``tests/tolerance.py``; also on streams that are
not the default one, and with both devices at work in two threads. Prints a line for each check
and exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from rowmax.call import dispatch as backends
from tests.cases import Call, Case, make
from tests.tolerance import Answer, answer, complaints, cotangents, expected

CASES = [
    Case("causal", b=2, nq=300, hq=4, hk=2, d=64, causal=True),
    Case("bias", b=2, nq=200, nk=328, hq=4, hk=2, d=128, bias="1hqk", causal=True),
    Case("row-of-heads", b=2, nq=200, nk=328, hq=4, hk=2, d=64, bias="1h1k"),
    Case("documents", b=2, nq=328, hq=4, hk=2, d=64, documents="sorted", sink=True),
    Case("wide", b=1, nq=200, nk=328, hq=2, d=256, causal=True),
    Case("packed", hq=4, hk=2, d=64, causal=True, sequences=((5, 90), (0, 17), (150, 270))),
]
BACKENDS = (None, "hopper", "triton", "torch", "reference")
DEVICES = ("cuda:0", "cuda:1")


def calls(case: Case) -> list[Call]:
    """The same numbers on both devices."""
    return [make(case, device, torch.bfloat16) for device in DEVICES]


def refused(call: Call, name: str | None) -> str | None:
    """Why the backend makes no forward, or not every gradient, of a call."""
    problem, _ = call.problem()
    if name is None:
        return None
    for which in ("forward", "backward"):
        reason = backends.refusal(name, problem, which)
        reason = reason or "; ".join(backends.lacks(name, problem, which).values())
        if reason:
            return f"{which}: {reason}"
    return None


def differ(first: Answer, second: Answer) -> list[str]:
    return [
        f"{name} is not that of {DEVICES[0]}"
        for (name, x, _), (_, y, _) in zip(first.items(), second.items(), strict=True)
        if not torch.equal(x.cpu(), y.cpu())
    ]


def on_stream(call: Call, grads: tuple[Tensor, ...], name: str | None) -> Answer:
    device = call.leaves["q"].device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.cuda.device(0):
        got = answer(call, *grads, backend=name)
    torch.cuda.current_stream(device).wait_stream(stream)
    return got


def check(case: Case, name: str | None) -> list[str]:
    there = calls(case)
    if reason := refused(there[1], name):
        return [f"refused: {reason}"]
    grads = [cotangents(call) for call in there]
    both = list(zip(there, grads, strict=True))
    wants = [expected(call, *g) for call, g in both]
    found: list[str] = []

    def judge(how: str, make_answers: Callable[[], list[Answer]]) -> None:
        assert torch.cuda.current_device() == 0
        got = make_answers()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        for device, one, want in zip(DEVICES, got, wants, strict=True):
            found.extend(f"{how}, {device}: {text}" for text in complaints(one, want))
        found.extend(f"{how}: {text}" for text in differ(*got))
        if torch.cuda.current_device() != 0:
            found.append(f"{how}: the current device was changed")

    judge("alone", lambda: [answer(call, *g, backend=name) for call, g in reversed(both)][::-1])
    judge("streams", lambda: [on_stream(call, g, name) for call, g in both])
    judge("threads", lambda: at_once([lambda c=c, g=g: on_stream(c, g, name) for c, g in both]))
    return found


def at_once(jobs: list[Callable[[], Answer]], times: int = 5) -> list[Answer]:
    """The last of several answers of each job, each job in a thread of its own."""
    got: dict[int, Answer] = {}
    errors: list[str] = []
    barrier = threading.Barrier(len(jobs))

    def work(n: int) -> None:
        try:
            barrier.wait()
            for _ in range(times):
                got[n] = jobs[n]()
        except Exception:
            errors.append(traceback.format_exc(limit=-3))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise RuntimeError("; ".join(errors))
    return [got[n] for n in range(len(jobs))]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names that hold this text")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print(f"it needs two GPUs, here are {torch.cuda.device_count()}")
        return 1
    warnings.simplefilter("ignore")  # that cuBLAS may differ from run to run
    torch.use_deterministic_algorithms(True, warn_only=True)  # sums in an order: equal numbers
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)
    bad = 0
    for case in CASES:
        for name in BACKENDS:
            if options.only not in f"{case.name} {name}":
                continue
            try:
                found = check(case, name)
            except Exception:
                found = [traceback.format_exc(limit=-3)]
            wrong = [text for text in found if not text.startswith("refused")]
            bad += bool(wrong)
            print(case.name, name or "chosen", *(found or ["right"]), flush=True)
    print(f"{bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
