"""Show where the time of a distributed call goes: kernels and copies, or functions of the host.

    python -m benchmarks.distributed_profile --devices 2 --cell documents-64k
    python -m benchmarks.distributed_profile --devices 2 --cell causal-32k --parts
    python -m benchmarks.distributed_profile --device cpu --cell tiny-documents --rank 1

A rank prints two tables for each pass: the device's time by kernel (on a GPU), and the host's time
by function of rowmax, while the device sleeps or other ranks wait. Of the last calls, with a GPU,
it prints every kernel and copy in the order of time. Then a line of each rank follows: microseconds
of a call by kind, where barriers are waits for other ranks. With ``--parts`` it prints the host's
time alone, and that within some functions: without a profiler, whose own time hides theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import pstats
import time
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType

from . import distributed_calls as calls
from .distributed_cells import CELLS, named
from .ranks import Rank, Ranks

CALLS = 8
ROWS = 22  # rows of a table
WIDTH = 70  # characters of a line of the order
KINDS = {
    "forward": "attention", "backward": "attention", "prepare": "attention", "finish": "attention",
    "barrier": "barriers", "Memcpy": "copies",
}  # fmt: skip

#: functions of a call's way from arguments to launches, each where its caller looks it up
PARTS = (
    "distributed.attention:normalized_rows", "distributed.attention:attend",
    "distributed.offsets:_check_unchanged", "distributed.operators:_call",
    "distributed.strategies.keys:_planned", "distributed.strategies.keys:_gathers",
    "distributed.strategies.keys:_part", "distributed.strategies.keys:prepared",
    "distributed.strategies.keys:_dense", "distributed.strategies.keys:_Sums.__init__",
    "distributed.strategies.keys:_Sums.total", "distributed.pulls:PulledRows._show",
    "distributed.pulls:PulledRows.begin", "distributed.pulls:put",
    "distributed.shared:Region.open", "distributed.shared:Region.restart",
    "distributed.shared:Region.show", "distributed.shared:Region._pull",
    "distributed.pushes:Pushed.places", "distributed.pushes:Pushed.total",
    "call.dispatch:Prepared.forward", "call.dispatch:Prepared.backward",
)  # fmt: skip


def profiled(rank: Rank, cell: Any, name: str, what: str) -> tuple[str, str]:
    """Return the tables of a pass, after calls that compile and plan, and the line of the rank."""
    one = calls.contestant(rank, cell, name)
    for _ in range(3):
        one.call(what)
    host = _host(rank, one, what)
    if rank.device.type != "cuda":
        return host, ""
    text, line = _device(one, what)
    return host + text, f"{what}: rank {rank.rank}: {line}"


def _host(rank: Rank, one: Any, what: str) -> str:
    gpu = rank.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(40 * calls.ASLEEP)
    profile, begin = cProfile.Profile(), time.perf_counter()
    for _ in range(CALLS):
        one.call(what)
    plain = 1e3 * (time.perf_counter() - begin) / CALLS
    if gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(40 * calls.ASLEEP)
    profile.enable()
    for _ in range(CALLS):
        one.call(what)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(ROWS)
    return f"{what}: host {plain:.3f} ms a call; {CALLS} calls by function:\n{text.getvalue()}"


def parts(rank: Rank, cell: Any, name: str, what: str) -> str:
    """Return the host's time of a call, and that within each of ``PARTS``."""
    one = calls.contestant(rank, cell, name)
    for _ in range(4):
        one.call(what)

    def enqueued() -> float:
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(4 * calls.ASLEEP)
        begin = time.perf_counter()
        for _ in range(CALLS):
            one.call(what)
        return 1e6 * (time.perf_counter() - begin) / CALLS

    plain = ", ".join(f"{enqueued():.0f}" for _ in range(5))
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as patches:
        for path in PARTS:
            module, _, attribute = path.partition(":")
            owner: Any = import_module(f"rowmax.{module}")
            *within, last = attribute.split(".")
            for each in within:
                owner = getattr(owner, each)
            timed = _timed(getattr(owner, last), found.setdefault(path, []))
            patches.enter_context(mock.patch.object(owner, last, timed))
        enqueued()
        for times in found.values():
            times.clear()
        total = enqueued()
    lines = [f"{what}: {plain} us of the host a call, {total:.0f} with timers; within functions:"]
    for path, times in sorted(found.items(), key=lambda item: -sum(item[1])):
        if times:
            each = f"{len(times) / CALLS:5.1f} x {1e6 * sum(times) / len(times):7.1f}"
            lines.append(f"  {1e6 * sum(times) / CALLS:8.1f} = {each}  {path}")
    return "\n".join(lines)


def _timed(function: Any, times: list[float]) -> Any:
    def timed(*given: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*given, **more)
        finally:
            times.append(time.perf_counter() - begin)

    return timed


def _device(one: Any, what: str) -> tuple[str, str]:
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        torch.cuda._sleep(2 * calls.ASLEEP)  # the host enqueues all calls meanwhile
        for _ in range(CALLS):
            one.call(what)
        torch.cuda.synchronize()
    table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=ROWS)
    found = [one for one in profile.events() if one.device_type == DeviceType.CUDA]
    found.sort(key=lambda one: one.time_range.start)
    found = found[1:]  # without the sleep
    last = found[-2 * len(found) // CALLS :]
    lines = [f"{'stream':>6} {'begin':>9} {'us':>8}"]
    for one in last:
        begin = one.time_range.start - last[0].time_range.start
        lines.append(f"{one.thread:6} {begin:9.1f} {one.time_range.elapsed_us():8.1f} {one.name}")
    text = "\n".join(line[:WIDTH] for line in lines)
    return f"{what}: {CALLS} calls by kernel:\n{table}\n{what}: two calls\n{text}\n", _line(found)


def _line(found: list[Any]) -> str:
    """Return the microseconds of a call by kind, and those of a call as a whole."""
    sums: dict[str, float] = {"span": found[-1].time_range.end - found[0].time_range.start}
    for one in found:
        kind = next((kind for word, kind in KINDS.items() if word in one.name), "others")
        sums[kind] = sums.get(kind, 0.0) + one.time_range.elapsed_us()
    return ", ".join(f"{kind} {total / CALLS:.0f}" for kind, total in sums.items())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--cell", default="documents-64k", help=f"text, or one of {list(CELLS)}")
    parser.add_argument("--provider", default="rowmax:keys")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--parts", action="store_true", help="of the host alone")
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    ranks = Ranks(given.devices, given.device, time.time() + given.seconds)
    (cell,) = named(given.cell)
    try:
        for what in ("forward", "backward"):
            if given.parts:
                found = ranks.run(parts, cell, given.provider, what, limit=given.seconds)
                print(found[given.rank], flush=True)
                continue
            found = ranks.run(profiled, cell, given.provider, what, limit=given.seconds)
            print(found[given.rank][0], *(line for _, line in found), sep="\n", flush=True)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
