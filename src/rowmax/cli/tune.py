"""``rowmax tune``: measures tile shapes on this machine's GPU and keeps them for later calls."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ..gpu.tiles import Tiles
    from ..gpu.triton.tuning import Trial


def tune_tiles(
    console: Console, heads: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Path | None:
    """Measure every candidate and store the fastest; return the file, or None if nothing ran.

    Each kind is printed and stored at once: an interrupt loses only the kind that is measured then.

    Raises:
        OSError: the file of tuned tiles cannot be written; raised before any measurement.
    """
    from ..gpu import tiles
    from ..gpu.triton import tuning

    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
        device = torch.device("cuda", torch.cuda.current_device())
    tiles.keep(tiles.limits_of(device).name, {})
    path = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )

    def log(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    with Progress(*columns, console=console) as progress:
        for d in heads:
            for causal in (False, True):
                todo = tuning.trials(d, dtype, causal, device=str(device))
                name = f"head {d}, {'causal' if causal else 'full'}"
                log(f"{name}: {len(todo)} candidates")
                start = time.perf_counter()
                ready = tuning.compiled([call for _, _, call in todo], device)
                for _ in progress.track(ready, len(todo), description=f"{name}: compile"):
                    pass
                log(f"  compiled in {time.perf_counter() - start:.0f} s")
                steps = progress.track(todo, description=f"{name}: measure")
                for kind, some in groupby(steps, lambda trial: trial[0]):
                    done = [tuning.measure(*trial) for trial in some]
                    found = tuning.winners(done)
                    log(f"  {kind}: {describe(found, done)}")
                    if found:
                        path = tiles.keep(tiles.limits_of(device).name, found)
    log(f"Kept in {path}" if path else "No candidate ran on this device.")
    return path


def describe(found: dict[str, Tiles], done: list[Trial]) -> str:
    """Return a line on the fastest of the trials of one kind."""
    for best in found.values():
        ms = next(t.ms for t in done if t.tiles == best)
        loops = "two loops" if best.split else "one loop"
        shape = f"{best.block_q} x {best.block_k}, {best.warps} warps, {best.stages} stages"
        return f"{shape}, {loops}: {ms:.3f} ms, the best of {len(done)}"
    return "none can run"
