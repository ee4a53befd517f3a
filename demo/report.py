"""The results of the demo, the machine they belong to, and the verdict."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import rowmax
from rowmax.cli.checks import Checks

from . import timed_checks
from .clock import load_average
from .format import duration
from .long_sequence import LongSequence
from .training import NEEDED, Training


@dataclass(frozen=True)
class Machine:
    """The machine and the versions that every figure belongs to."""

    date: str
    device: str
    torch: str
    python: str
    rowmax: str
    threads: int
    cores: int
    load: float | None  # mean number of running tasks in the minute before

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        return cls(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            device=_name(device),
            torch=torch.__version__,
            python=platform.python_version(),
            rowmax=rowmax.__version__,
            threads=torch.get_num_threads() if device.type == "cpu" else 1,
            cores=os.cpu_count() or 1,
            load=load_average(),
        )

    def __str__(self) -> str:
        threads = f" ({self.threads} thread{'s' if self.threads > 1 else ''})"
        load = "" if self.load is None else f", load {self.load:.1f} on {self.cores} cores"
        return (
            f"{self.device}{threads}, rowmax {self.rowmax}, torch {self.torch}, "
            f"Python {self.python}, {self.date}{load}"
        )


@dataclass(frozen=True)
class DemoReport:
    """The results of all parts."""

    machine: Machine
    checks: Checks
    training: Training | None  # None if there was no time for it
    long_sequence: LongSequence | None
    seconds: float
    allowed: float  # seconds
    load: float | None = None  # at the end

    @property
    def ok(self) -> bool:
        """Return True if nothing that was run is wrong."""
        return not self.failed

    @property
    def failed(self) -> str:
        """Return the names of the parts that are wrong."""
        parts = {
            "the checks": self.checks.ok,
            "the training": self.training is None or self.training.ok,
            "the long sequence": self.long_sequence is None or self.long_sequence.ok,
        }
        return " and ".join(name for name, ok in parts.items() if not ok)

    @property
    def left_out(self) -> list[str]:
        """Return a sentence for each part that did not fit into the time."""
        found = []
        if self.checks.left_out:
            total = sum(map(len, self.checks.rows.values()))
            found.append(f"{self.checks.left_out} of {total} checks were not run.")
        if self.training is None:
            found.append("The training was not run.")
        elif not self.training.complete:
            found.append(f"The training ran {self.training.steps} of {self.training.asked} steps.")
        if self.training is not None and self.training.smaller:
            found.append("The training took a smaller model.")
        if self.long_sequence is None:
            found.append("The long sequence was not run.")
        elif not self.long_sequence.complete:
            ran, asked = self.long_sequence.shape.n, self.long_sequence.asked
            found.append(f"The long sequence had {ran:,} of {asked:,} positions.")
        return found

    @property
    def missing(self) -> str:
        """Return the names of the parts that ran less than the demo needs to pass."""
        parts = {
            "the needed checks": timed_checks.enough(self.checks),
            f"{NEEDED} steps of training": self.training is not None and self.training.enough,
            "a long sequence": self.long_sequence is not None,
        }
        return ", ".join(name for name, enough in parts.items() if not enough)

    @property
    def exit_code(self) -> int:
        """Return 1 if something is wrong, 3 if too little was run, else 0."""
        return 1 if self.failed else 3 if self.missing else 0

    @property
    def verdict(self) -> str:
        """Return the verdict in a sentence."""
        if self.failed:
            return f"Not everything holds: see {self.failed}."
        took = f"in {duration(self.seconds)}"
        if self.missing:
            return f"Too little was run {took} to pass: not {self.missing}. What was run holds."
        if self.left_out:
            return f"What was run holds, {took}; some of it did not fit into the time."
        return f"All of it holds, {took}."


def _name(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
