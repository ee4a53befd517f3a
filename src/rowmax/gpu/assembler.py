"""Choose the ptxas that assembles kernels for Hopper.

ptxas 12.8.93, which triton 3.6 and 3.7 ship for sm_90, builds some descriptors of wgmma operands
from the wrong register: the stack pointer, a stale constant, an unwritten register. The product
then reads other shared memory: results are wrong, or the access faults. Seen on an H200 in float32
kernels and in a bfloat16 kernel of one stage. The smallest kernel that shows it is
``tests/compile/wgmma_descriptor.ptx``. The same PTX is correct with 12.9.86 and later, and every
Triton ships one such ptxas.

Only our own kernels are assembled so: Triton's knobs are restored once a kernel is compiled.
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

from . import source_compat  # noqa: F401  (first: it hastens the import of triton)

# isort: split
from triton import knobs

from .versions import version_text

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
        """The newest PTX that it accepts, times ten: 12.9 accepts 8.8, and 13.0 accepts 9.0."""
        major, minor = self.release
        return 79 + minor if major == 12 else 90 + 10 * (major - 13) + minor


class Choice(NamedTuple):
    """The assembler of Hopper kernels, and the one that Triton would use."""

    taken: Assembler | None  # None: no sound one is installed
    usual: Assembler | None

    @property
    def swapped(self) -> bool:
        return self.taken is not None and self.taken != self.usual


_lock = threading.Lock()
_kept: dict[str, Any] = {}
_threads = 0  # that compile
_entered: Choice | None = None  # theirs


@lru_cache(maxsize=64)
def release_of(path: str) -> Assembler | None:
    """Return the assembler at a path, or None if none runs there."""
    try:
        text = version_text(path, stderr=subprocess.STDOUT).decode(errors="replace")
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return Assembler(path, (int(found[1]), int(found[2]))) if found else None


def choice() -> Choice:
    """Return the first sound ptxas: Triton's choice, its other one, then one of a CUDA toolkit."""
    with _lock:
        return _chosen()


def _chosen() -> Choice:
    """Return the choice, under the lock: while a thread compiles, the knobs hold what it took."""
    if _threads and _entered is not None:
        return _entered
    return _choice(tuple(_given()), torch.version.cuda)


@lru_cache(maxsize=16)
def _choice(paths: tuple[str, ...], cuda: str | None) -> Choice:
    # one by one: each is a process
    found = (one for one in map(release_of, paths) if one is not None)
    # a driver loads machine code of its own major release and of older ones
    newest = int(cuda.split(".")[0]) if cuda else 99
    usual = release_of(paths[0]) if paths else None
    sound = (one for one in found if one.release >= SOUND and one.release[0] <= newest)
    return Choice(usual if usual and usual.release >= SOUND else next(sound, None), usual)


def _given() -> Iterator[str]:
    """Return the candidates' paths, first the one that Triton uses for Hopper."""
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
    """Return the compute capability of the current CUDA device, times ten, or None."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device())
    return 10 * major + minor


def note(index: int | None) -> str | None:
    """Return a sentence about the assembler of a device's kernels if it is not Triton's choice."""
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


@contextmanager
def assembling(arch: Any) -> Iterator[dict[str, Any]]:
    """Compile the kernels for ``arch`` in this context by a sound ptxas; yield the options for it.

    The options name the PTX version of that ptxas. An older ptxas refuses that version: a kernel
    assembled by the wrong one is an error. The option also separates the results in Triton's cache.
    """
    taken = _enter() if arch == HOPPER else None
    if taken is None:
        yield {}
        return
    try:
        yield {"ptx_version": taken.ptx_version}
    finally:
        _leave()


# The knobs' own setters are avoided: they would put the path into the environment of children.
# Threads may compile at the same time: the first sets the path, the last puts back what was there.


def _enter() -> Assembler | None:
    """Set the path of the assembler and return it, or None if Triton's own is taken."""
    global _threads, _entered
    with _lock:
        found = _chosen()
        if found.taken is None or not found.swapped:
            return None
        values = vars(knobs.nvidia)
        if _threads == 0:
            _kept.clear()
            _kept.update({name: values[name] for name in _KNOBS if name in values})
            _entered = found
        _threads += 1
        values.update(dict.fromkeys(_KNOBS, found.taken.path))
        return found.taken


def _leave() -> None:
    global _threads
    with _lock:
        _threads -= 1
        if _threads == 0:
            values = vars(knobs.nvidia)
            for name in _KNOBS:
                values.pop(name, None)
            values.update(_kept)
