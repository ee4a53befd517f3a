"""Workers in processes of their own, each with the rowmax of a checkout.

So one run times two versions of a module on one device. This file does not import rowmax: a child
chooses its checkout first.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Settings(NamedTuple):
    """The checkout and assembler of a worker, and the seconds of a turn."""

    device: str
    seconds: float
    rested: bool = False
    registers: bool = False
    root: Path = ROOT
    usual_assembler: bool = False


def worker_of(settings: Settings) -> Any:
    """Return a worker with the rowmax of a checkout; runs in the child."""
    sys.path.insert(0, str(settings.root / "src"))
    use_these_measurements()
    from .worker import Worker

    return Worker(settings)


def use_these_measurements() -> None:
    """Import ``rowmax.bench`` of this checkout, next to any other version of rowmax."""
    import rowmax

    folder = ROOT / "src" / "rowmax" / "bench"
    if Path(rowmax.__file__ or "").resolve().parent == folder.parent:
        return
    places = [str(folder)]
    spec: Any = importlib.util.spec_from_file_location(
        "rowmax.bench", folder / "__init__.py", submodule_search_locations=places
    )
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    vars(rowmax)["bench"] = sys.modules[spec.name]


class Child(BaseManager):
    """A process with a worker; it ends with the context."""

    worker: Any

    @classmethod
    def begin(cls, settings: Settings) -> Child:
        child = cls(ctx=multiprocessing.get_context("spawn"))
        child.start()
        try:
            child.worker = child.worker_of(settings)  # pyright: ignore
        except BaseException:
            child.shutdown()
            raise
        return child


Child.register("worker_of", worker_of)
