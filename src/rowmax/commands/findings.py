"""What the demo found, and on what machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import rowmax

from .checks import Checks
from .long import Long
from .training import Training


@dataclass(frozen=True)
class Machine:
    """What a figure belongs to."""

    date: str
    device: str
    torch: str
    python: str
    rowmax: str
    threads: int

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        return cls(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            device=_name(device),
            torch=torch.__version__,
            python=platform.python_version(),
            rowmax=rowmax.__version__,
            threads=torch.get_num_threads() if device.type == "cpu" else 1,
        )

    def __str__(self) -> str:
        threads = f" ({self.threads} threads)" if self.threads > 1 else ""
        return (
            f"{self.device}{threads}, rowmax {self.rowmax}, torch {self.torch}, "
            f"Python {self.python}, {self.date}"
        )


@dataclass(frozen=True)
class Findings:
    """All that the report shows."""

    machine: Machine
    checks: Checks
    training: Training
    long: Long
    seconds: float

    @property
    def ok(self) -> bool:
        return self.checks.ok and self.training.ok and self.long.ok

    @property
    def failed(self) -> str:
        """The parts that do not hold."""
        parts = {
            "the checks": self.checks.ok,
            "the training": self.training.ok,
            "the long sequence": self.long.ok,
        }
        return " and ".join(name for name, ok in parts.items() if not ok)


def _name(device: torch.device) -> str:
    """The device as people call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
