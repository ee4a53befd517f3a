"""Every backend on a device that is not the current one.

Tensors are on cuda:1 while cuda:0 is current. Forward and backward equal those on cuda:0, whose
sums have an order, and are right; also on streams that are not the default one, and with both
devices at work in two threads.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from rowmax.testing import (
    Answer,
    Call,
    Case,
    answer,
    complaints,
    cotangents,
    expected,
    make,
    refusal,
)

from .launches import different

DEVICES = ("cuda:0", "cuda:1")


def on_stream(call: Call, grads: tuple[Tensor, ...], backend: str | None) -> Answer:
    device = call.leaves["q"].device
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.cuda.device(0):
        got = answer(call, *grads, backend=backend)
    torch.cuda.current_stream(device).wait_stream(stream)
    return got


def check(case: Case, backend: str | None) -> list[str]:
    """Return what is wrong with a case on two devices."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # sums in an order: equal numbers
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)
    both_calls = [make(case, device, torch.bfloat16) for device in DEVICES]
    if reason := refusal(both_calls[1], backend):
        return [f"refused: {reason}"]
    grads = [cotangents(call) for call in both_calls]
    both = list(zip(both_calls, grads, strict=True))
    wants = [expected(call, *g) for call, g in both]
    found: list[str] = []

    def judge(how: str, make_answers: Callable[[], list[Answer]]) -> None:
        assert torch.cuda.current_device() == 0
        got = make_answers()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        for device, one, want in zip(DEVICES, got, wants, strict=True):
            found.extend(f"{how}, {device}: {text}" for text in complaints(one, want))
        found.extend(f"{how}: {name} is not that of {DEVICES[0]}" for name in different(*got))
        if torch.cuda.current_device() != 0:
            found.append(f"{how}: the current device was changed")

    judge("alone", lambda: [answer(call, *g, backend=backend) for call, g in reversed(both)][::-1])
    judge("streams", lambda: [on_stream(call, g, backend) for call, g in both])
    jobs = [lambda c=c, g=g: on_stream(c, g, backend) for c, g in both]
    judge("threads", lambda: at_once(jobs))
    return found


def at_once(jobs: list[Callable[[], Answer]], times: int = 5) -> list[Answer]:
    """Run each job several times in a thread of its own; return the last answers."""
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
