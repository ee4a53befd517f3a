"""Compile the kernels of a backward for Hopper in threads, as the first forward of a process does.

Run by ``test_ahead.py``: with "needed" the calls come at once and wait, with "exit" the process
ends while threads compile. Each compiled kernel is printed with the thread that compiled it.
"""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from rowmax.call.inputs import Wanted
from rowmax.gpu import ahead, threads
from rowmax.gpu.hopper import backward_host, backward_plan, host
from rowmax.testing import Case, make


def note(src: Any, cache_hit: bool, **_: Any) -> None:
    line = (src.name, threading.current_thread().name, "found" if cache_hit else "compiled")
    sys.stdout.write(f"{' '.join(line)}\n")  # at once: `print` writes the end of a line by itself


def main() -> None:
    problem, tensors = make(Case("64", nq=256, d=64), dtype=torch.bfloat16).problem()
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    there = (getattr(tensors, name) is not None for name in Wanted._fields)
    wanted = Wanted(*there)

    def run(out: Any, lse: Any, dout: Any) -> Any:
        return backward_host.backward(problem, tensors, out, lse, dout, None, wanted)

    with (
        mock.patch.object(host, "processors", return_value=132),
        mock.patch.object(backward_plan, "processors", return_value=132),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        like = torch.zeros(problem.out_shape, dtype=torch.bfloat16)
        backward_plan.plan_of(problem, tensors, like)
        launches = ahead.arguments(problem, tensors, run)
        knobs.compilation.listener = note
        triton.runtime.driver.set_active(driver)  # pyright: ignore
        threads.THREADS.submit([x.pending(*args) for x, args in launches])
        time.sleep(1.0)
        if sys.argv[1] == "needed":
            for launch, args in launches:
                launch.loaded(*args)


if __name__ == "__main__":
    main()
