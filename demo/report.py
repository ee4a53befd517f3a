"""The results of the demo, the machine they belong to, and the verdict."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import rowmax
from rowmax.cli.checks import Checks

from . import timed_checks
from .child import ROOT
from .clock import load_average
from .format import duration
from .long_sequence import LongSequence
from .speed import Speed, as_json
from .training import NEEDED, Training

#: the rule of tolerance, in the repository
RULE = Path("src/rowmax/reference/tolerance.py")
#: instructions of processors that attention uses
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
#: running tasks for each core: with more at the start, or one task more at the end, other programs
#: slowed the demo
_BUSY = 0.6


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
    features: str = ""  # instructions of the processor
    numba: str = ""

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
            features=_features(device),
            numba=_release("numba"),
        )

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return a name and a value of each fact that is known."""
        found = [
            ("device", self.device),
            ("instructions", self.features),
            ("cores, threads used", f"{self.cores}, {self.threads}"),
            ("rowmax", self.rowmax),
            ("torch", self.torch),
            ("Numba", self.numba),
            ("Python", self.python),
            ("date", self.date),
        ]
        return [(name, value) for name, value in found if value]

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
    speed: Speed | None  # None if there was no time for it
    training: Training | None
    long_sequence: LongSequence | None
    seconds: float
    allowed: float  # seconds
    load: float | None = None  # at the end
    path: Path = Path("report.html")
    command: str = "python -m demo"

    @property
    def json_name(self) -> str:
        """The name of the file of the same numbers."""
        return self.path.with_suffix(".json").name

    @property
    def rule(self) -> str:
        """The path of the rule of tolerance from the report's folder."""
        try:
            return Path(os.path.relpath(ROOT / RULE, self.path.resolve().parent)).as_posix()
        except ValueError:  # on another drive
            return (ROOT / RULE).as_uri()

    @property
    def busy(self) -> str:
        """A sentence if other programs kept the machine busy, else nothing."""
        start, end, cores = self.machine.load, self.load, self.machine.cores
        if start is None or end is None or (start <= _BUSY * cores and end <= cores + 1):
            return ""
        return (
            f"The machine was busy: load average {start:.1f} at the start and {end:.1f} at the "
            f"end, on {cores} cores. All times are longer than on an idle one."
        )

    def write_json(self) -> None:
        """Write the same numbers next to the page."""
        long, training = self.long_sequence, self.training
        found = {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "command": self.command,
            "machine": asdict(self.machine),
            "load_at_end": self.load,
            "seconds": self.seconds,
            "left_out": self.left_out,
            "checks": asdict(self.checks),
            "speed": None if self.speed is None else as_json(self.speed),
            "training": None if training is None else _of_training(training),
            "long_sequence": None if long is None else long._asdict(),
        }
        text = json.dumps(_plain(found), indent=1, allow_nan=False)
        self.path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")

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
        if self.speed is None:
            found.append("The speed was not measured.")
        elif not self.speed.complete:
            ran, planned = len(self.speed.measurements), self.speed.planned
            found.append(f"{planned - ran} of {planned} measurements of speed were not run.")
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


def _features(device: torch.device) -> str:
    """Return the instructions of the processor that matter here, and what torch uses."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"compute capability {major}.{minor}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    flags = next((x.split() for x in lines if x.startswith(("flags", "Features"))), [])
    found = [name for name in _FLAGS if name in flags]
    return ", ".join([*found, f"torch uses {torch.backends.cpu.get_cpu_capability()}"])


def _release(package: str) -> str:
    """Return the version of a package, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _of_training(training: Training) -> dict[str, Any]:
    """Return the numbers of both runs."""
    return {
        "parameters": training.parameters,
        "size": training.plan.size._asdict(),
        "rows": training.plan.rows,
        "steps": training.steps,
        "curves": {name: asdict(curve) for name, curve in training.curves.items()},
        "tokens_per_second": training.tokens_per_second,
        "agreement": {
            name: {"found": found, "allowed": allowed}
            for name, (found, allowed) in training.agreement.items()
        },
    }


def _plain(x: Any) -> Any:
    """Return a value as JSON holds it: records as objects, and null for what is not finite."""
    if hasattr(x, "_asdict"):
        x = x._asdict()
    if isinstance(x, dict):
        return {str(key): _plain(y) for key, y in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(y) for y in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
