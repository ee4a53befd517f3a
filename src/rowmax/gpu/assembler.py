"""Choose the ptxas that assembles kernels for Hopper.

ptxas 12.8.93, which triton 3.6 and 3.7 bundle for sm_90, builds some descriptors of wgmma operands
from the wrong register (the stack pointer, a stale constant, one that nothing has written). The
product then reads other shared memory: results are wrong, or the access faults. Seen on an H200 in
float32 kernels and in a bfloat16 kernel of one stage. The smallest kernel that shows it is
``tests/compile/wgmma_descriptor.ptx``. The same PTX is right through 12.9.86 and later, and one
such ptxas lies in every Triton.

Only our own kernels are assembled so: Triton's knobs are as they were once a kernel is compiled.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from triton import knobs

#: the first release known to be right
SOUND = (12, 9)
#: compute capability whose products are wgmma
HOPPER = 90
_KNOBS = ("ptxas", "ptxas_blackwell")


class Assembler(NamedTuple):
    """A ptxas and its release, such as (12, 9)."""

    path: str
    release: tuple[int, int]

    def __str__(self) -> str:
        return f"ptxas {self.release[0]}.{self.release[1]}"

    @property
    def ptx_version(self) -> int:
        """The newest PTX that it takes, ten times: 12.9 takes 8.8, and 13.0 takes 9.0."""
        major, minor = self.release
        return 79 + minor if major == 12 else 90 + 10 * (major - 13) + minor


class Choice(NamedTuple):
    """The assembler of Hopper kernels, and the one that Triton itself would take."""

    taken: Assembler | None  # None: no sound one is at hand
    usual: Assembler | None

    @property
    def swapped(self) -> bool:
        return self.taken is not None and self.taken != self.usual


@lru_cache(maxsize=64)
def release_of(path: str) -> Assembler | None:
    """The assembler at a path, or None if there is none that runs."""
    try:
        text = subprocess.check_output([path, "--version"], text=True, stderr=subprocess.STDOUT)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return Assembler(path, (int(found[1]), int(found[2]))) if found else None


def choice() -> Choice:
    """The sound ptxas to take: Triton's own choice, its other one, then one of a CUDA toolkit."""
    return _choice(tuple(_given()), torch.version.cuda)


@lru_cache(maxsize=16)
def _choice(paths: tuple[str, ...], cuda: str | None) -> Choice:
    found = [one for one in map(release_of, paths) if one is not None]
    # a driver loads machine code of its own major release and of older ones
    newest = int(cuda.split(".")[0]) if cuda else 99
    usual = release_of(paths[0]) if paths else None
    sound = (one for one in found if one.release >= SOUND and one.release[0] <= newest)
    return Choice(usual if usual and usual.release >= SOUND else next(sound, None), usual)


def _given() -> Iterator[str]:
    """Paths to look at, the one that Triton takes for Hopper first."""
    yield _usual_path()
    for name in _KNOBS:
        tool = getattr(knobs.nvidia, name, None)
        if tool is not None:
            yield tool.path
    on_path = shutil.which("ptxas")
    if on_path:
        yield on_path
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield os.path.join(home, "bin", "ptxas")


def _usual_path() -> str:
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return get_ptxas(HOPPER).path
    except (ImportError, TypeError):  # another release of Triton: its knob for this architecture
        return knobs.nvidia.ptxas.path


def current_arch() -> int | None:
    """Compute capability of the current CUDA device, times ten; None where there is none."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device())
    return 10 * major + minor


def note(index: int | None) -> str | None:
    """A sentence about the assembler of a device's kernels, where it is not simply Triton's."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) != (9, 0):
        return None
    taken, usual = choice()
    if taken is None:
        return (
            f"no ptxas of 12.9 or newer is at hand, and {usual or 'none'} builds wrong wgmma "
            "descriptors in some kernels (TRITON_PTXAS_PATH can name another)"
        )
    if taken != usual:
        return f"assembled by {taken}: {usual}, which Triton would take, builds wrong descriptors"
    return None


_lock = threading.Lock()
_kept: dict[str, Any] = {}
_within = 0


@contextmanager
def assembling(arch: Any) -> Iterator[dict[str, Any]]:
    """Compile kernels for ``arch`` within by a sound ptxas; yields the options to compile with.

    The options name the PTX version of that ptxas. An older one refuses it, so that a kernel is
    never assembled by another without an error, and Triton's cache tells the results apart.
    """
    chosen = choice() if arch == HOPPER else None
    if chosen is None or chosen.taken is None or not chosen.swapped:
        yield {}
        return
    _enter(chosen.taken.path)
    try:
        yield {"ptx_version": chosen.taken.ptx_version}
    finally:
        _leave()


# Past the knobs' own setters, which would put the path into the environment of child processes.
# Threads may compile at the same time: the first sets the path, the last puts back what was there.


def _enter(path: str) -> None:
    global _within
    with _lock:
        values = vars(knobs.nvidia)
        if _within == 0:
            _kept.clear()
            _kept.update({name: values[name] for name in _KNOBS if name in values})
        _within += 1
        values.update(dict.fromkeys(_KNOBS, path))


def _leave() -> None:
    global _within
    with _lock:
        _within -= 1
        if _within == 0:
            values = vars(knobs.nvidia)
            for name in _KNOBS:
                values.pop(name, None)
            values.update(_kept)
