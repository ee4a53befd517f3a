"""``rowmax tune``: tile shapes measured on this machine's GPU, kept for later calls."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def run(
    console: Console, heads: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Path | None:
    """Measure every candidate and store the fastest; the file, or None where nothing ran."""
    from ..triton import tiles, tuning

    if device.index is not None:
        torch.cuda.set_device(device)
    done = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for d in heads:
            for causal in (False, True):
                todo = tuning.trials(d, dtype, causal, device=str(device))
                name = f"head {d}, {'causal' if causal else 'full'}"
                for kind, shape, call in progress.track(todo, description=name):
                    done.append(tuning.measure(kind, shape, call))
    found = tuning.winners(done)
    if not found:
        console.print("No candidate ran on this device.")
        return None
    times = {(str(t.kind), t.tiles): t.ms for t in done}
    table = Table("kernel", "queries x keys", "warps", "stages", "loops", "ms")
    for name, best in sorted(found.items()):
        shape, loops = f"{best.block_q} x {best.block_k}", "two" if best.split else "one"
        ms = times[name, best] or 0.0
        table.add_row(name, shape, str(best.warps), str(best.stages), loops, f"{ms:.3f}")
    console.print(table)
    path = tiles.keep(torch.cuda.get_device_name(device), found)
    console.print(f"Kept in {path}", highlight=False, soft_wrap=True)
    return path
