"""Timers of one call, and the facts that accompany every figure."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]


def wait() -> None:
    """Wait until the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(call: Call, device: str, rested: bool, seconds: float) -> float:
    """Return the median time of a call in about ``seconds`` of calls."""
    if device == "cpu":
        from torch.utils.benchmark import Timer

        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return 1e3 * timer.blocked_autorange(min_run_time=seconds).median
    if rested:
        return after_rest(call, seconds)
    import triton

    rep = int(1e3 * seconds)
    bench: Any = triton.testing.do_bench
    return float(bench(call, warmup=rep // 4, rep=rep, return_mode="median"))


def after_rest(call: Call, seconds: float) -> float:
    """Return the median time of calls after 15 ms of rest, each with an empty L2 cache.

    ``do_bench`` measures only after some 60 ms of work, when the power limit is in effect.
    """
    call()
    wait()
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def times(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(25_000_000)  # clocks, about 15 ms, in which the host can enqueue calls
        for start, end in events:
            cache.zero_()
            start.record()
            call()
            end.record()
        wait()
        return [start.elapsed_time(end) for start, end in events]

    each = statistics.median(times(3))
    return statistics.median(times(max(4, min(100, int(1e3 * seconds / each)))))


def host_milliseconds(call: Call) -> float:
    """Return the median time of the host's part of a warm call; the device runs later."""
    for _ in range(300):
        call()
    times = []
    for _ in range(30):
        wait()
        start = time.perf_counter()
        for _ in range(50):
            call()
        times.append((time.perf_counter() - start) / 50)
    wait()
    return 1e3 * statistics.median(times)


def free_bytes(device: str) -> int | None:
    """Return the free memory of the device, None where the system does not report it."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")), None)


def device_mib(call: Call) -> float:
    """Return the MiB that a call adds to the memory of the device at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    del found
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def process_mib(call: Call) -> float:
    """Return the MiB that a call adds to this process at its peak (Linux)."""

    def read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = read("VmRSS")
    found = call()
    del found
    return (read("VmHWM") - before) / 1024


def facts(device: str) -> dict[str, str]:
    """Return device, versions and date."""

    def release(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    info = Path("/proc/cpuinfo")
    names = [x for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
    processor = names[0].split(":")[1].strip() if names else platform.processor()
    on_cpu = device == "cpu"
    return {
        "device": processor if on_cpu else torch.cuda.get_device_name(),
        "threads": str(torch.get_num_threads()) if on_cpu else "",
        "vectors": torch.backends.cpu.get_cpu_capability() if on_cpu else "",
        "torch": torch.__version__,
        "triton": release("triton"),
        "numba": release("numba") if on_cpu else "",
        "date": datetime.date.today().isoformat(),
    }
