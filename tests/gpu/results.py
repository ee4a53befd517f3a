"""The results of checks, one schema for every file: a row a check."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import NamedTuple

import torch


class Machine(NamedTuple):
    device: str
    torch: str
    triton: str
    date: str


class Row(NamedTuple):
    kind: str
    check: str
    dtype: str
    variant: str
    result: str  # "right", "refused: reason", "fault: ...", or a sentence for what is wrong
    seconds: str
    device: str
    torch: str
    triton: str
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        return self[:4]

    @property
    def right(self) -> bool:
        return self.result.startswith("right")

    @property
    def refused(self) -> bool:
        return self.result.startswith("refused")


def machine(device: str) -> Machine:
    """Return the columns of every row that describe this machine."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = ""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return Machine(name, torch.__version__, version, datetime.date.today().isoformat())


def write(path: Path, rows: list[Row]) -> None:
    """Replace the file at once, so that a stop leaves the old or the new one."""
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        csv.writer(file).writerows([Row._fields, *sorted(rows)])
    part.replace(path)


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]
