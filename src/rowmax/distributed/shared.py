"""Memory of each rank that the other ranks of its host read directly.

On GPUs it is torch's symmetric memory: copy engines move rows over NVLink and take no
multiprocessor from the kernels that run meanwhile. NCCL's kernels take some, and a persistent
kernel then needs a second wave: on two H200 the backward of 64k tokens, with copies by
NCCL under its stages, took 114 ms, and 71 in one stage. On CPUs it is a file in memory.

Multicast is never created: a driver may have it and a host forbid it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..rules.arrivals import ALL
from ..torch_compat import SymmetricBytes, copy_each, store_on_stream, time_limit_of
from .collectives import all_objects
from .groups import Group
from .streams import OnStream

#: "shared" or "collectives": the way of copies. Unset: shared on GPUs of one host
VARIABLE = "ROWMAX_DISTRIBUTED_COPIES"
WAYS = ("shared", "collectives")
_MOST_KEPT = 256  # views of a region's memory, by what they are for
_ROUND = 2 << 20  # sizes are multiples of so many bytes
#: the most bytes of a region that takes turns. Ranks meet in 12 to 17 us (four H200)
MOST_IN_TURN = 512 << 20

Copies = Sequence[tuple[Tensor, Tensor]]  # to, from
Made = TypeVar("Made")


class Pull:
    """Copies under way from the memory of other ranks, or to it."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        """Let the current stream wait for the copies, once. The host goes on."""
        event, self._event = self._event, None
        if event is not None:
            torch.cuda.current_stream(self._device.index).wait_event(event)


class _Uses:
    """The last use of a region, or of regions that take turns."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.read: Pull | None = None  # the last of own copies
        self.captured = False  # a graph that may be replayed has such a use


class Region:
    """Memory of each rank that the others read or write, one use after the other.

    ``open`` lets this rank write, its own memory and that of others, once all have read what they
    had before. ``show`` ends the writes: all ranks may read. Both are for all ranks of the group,
    on the current stream, and stop no host with a GPU. Graphs of calls may be replayed: a use
    depends on no number of uses.
    """

    def __init__(self, group: Group, device: torch.device, uses: _Uses | None = None) -> None:
        self.group, self.device, self.uses = group, device, uses or _Uses()
        self.memory: _Symmetric | _File | None = None
        self.addresses: tuple[int, ...] = ()
        self.size = 0
        self._count: Tensor | None = None
        self._count_words: Tensor | None = None  # the same, as ``store_on_stream`` takes it
        self._kept: dict[Any, Any] = {}  # views of the memory
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._shown: Any = None  # an event
        self._written: list[tuple[Pull, Any]] = []  # copies to others, and what they read
        self._captured = False  # a graph reads the memory
        self._of_graphs: list[Any] = []  # smaller memory, which graphs still read

    def open(self, size: int, *, meets: bool = True) -> Tensor:
        """Return own memory to write, of at least so many bytes, the same number on all ranks.

        ``meets``: False if all ranks have met since the last use, or will before they write.

        Raises:
            MemoryError: a rank cannot have the memory; on all ranks.
        """
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device.index)
            captures = torch.cuda.is_current_stream_capturing()
            # a graph waits for no stream outside of it; torch synchronizes before it captures
            last = self.uses.stream
            if last is not None and last != current and not captures:
                current.wait_stream(last)
            self.uses.stream = None if captures else current
            self._captured |= captures
        if self.uses.read is not None:
            self.uses.read.wait()
            self.uses.read = None
        if size > self.size:
            self._grow(size)
        assert self.memory is not None
        if meets:
            self.memory.barrier()
        return self.memory.bytes[self.group.rank]

    def kept(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return views of this memory, made once."""
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = make()
        return found

    def restart(self) -> Tensor:
        """Set the count of copies to 0, before ``show``, and return it, int32 [1]."""
        if self._count is None:
            with torch.inference_mode(False):
                self._count = torch.zeros(1, dtype=torch.int32, device=self.device)
                self._count_words = self._count.view(torch.uint32)
        self._store_count(0)
        return self._count

    def show(self) -> None:
        """Let other ranks read what this one has written since ``open``."""
        assert self.memory is not None
        for pull, _ in self._written:
            pull.wait()
        self._written.clear()
        self.memory.barrier()
        if self.device.type == "cuda":
            self._shown = torch.cuda.current_stream(self.device.index).record_event()

    def of(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of a rank."""
        assert self.memory is not None
        return self.memory.bytes[rank].view(dtype)

    def push(self, copies: Copies) -> Pull:
        """Begin copies (to, from) of what is ready now. ``show`` waits for them."""
        if self.device.type != "cuda":
            copy_each([to for to, _ in copies], [origin for _, origin in copies])
            return Pull(None, self.device)
        stream = _copy_stream(self.device)
        stream.wait_event(torch.cuda.current_stream(self.device.index).record_event())
        with OnStream(stream):
            for to, origin in copies:
                to.copy_(origin, non_blocking=True)
            done = stream.record_event()
        self._written.append((Pull(done, self.device), copies))
        return Pull(done, self.device)

    def pull(self, copies: Copies) -> Pull:
        """Begin copies (to, from), both contiguous. Memory to write is older than ``show``."""
        return self._pull(_copy_stream, [(0, copies)])

    def pull_counted(self, steps: Sequence[tuple[int, Copies]]) -> Pull:
        """Begin copies likewise, and store the number of each step once its copies are done.

        The last one is stored as ``ALL``. A kernel may wait for these (``restart``), so they wait
        for ``show`` alone (``own_stream``).
        """
        steps = [*steps[:-1], *((ALL, copies) for _, copies in steps[-1:])]
        return self._pull(lambda _: self.own_stream("counts"), steps)

    def _pull(
        self, stream_on: Callable[[torch.device], Any], steps: Sequence[tuple[int, Copies]]
    ) -> Pull:
        """Begin copies; a number that is not 0 is stored after those of its step."""
        if self._shown is None or not any(copies for _, copies in steps):
            for _, copies in steps:
                copy_each([to for to, _ in copies], [origin for _, origin in copies])
            return Pull(None, self.device)
        stream = stream_on(self.device)
        stream.wait_event(self._shown)
        with OnStream(stream):
            for number, copies in steps:
                for to, origin in copies:
                    to.copy_(origin, non_blocking=True)
                if number:
                    self._store_count(number)
            self.uses.read = Pull(stream.record_event(), self.device)
        return self.uses.read

    def own_stream(self, purpose: str, urgent: bool = False) -> torch.cuda.Stream:
        """Return the stream for a purpose that no other group has.

        ``urgent``: blocks of its kernels begin before those of others that wait.

        Kernels wait for copies. In a stream of two groups, those of one would wait for the other's:
        without end, where ranks begin them in different orders.
        """
        if purpose not in self._streams:
            self._streams[purpose] = torch.cuda.Stream(self.device, priority=-1 if urgent else 0)
        return self._streams[purpose]

    def _store_count(self, number: int) -> None:
        store = store_on_stream()
        assert store is not None
        assert self._count_words is not None
        store(self._count_words, number)

    def _grow(self, size: int) -> None:
        """Replace the memory by a larger one, on all ranks."""
        size = -(-size // _ROUND) * _ROUND
        old, error = self.memory, ""
        if self._captured:
            self._of_graphs.append(old)
            self._captured = False
        if old is not None:
            old.barrier()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.memory, self.size = None, 0
        self._kept.clear()
        del old
        try:
            with torch.inference_mode(False):  # later calls may train
                made = _MEMORY[self.device.type](size, self.group, self.device)
        except (RuntimeError, OSError) as problem:
            made, error = None, str(problem) or type(problem).__name__
        errors = [text for text in all_objects(error, self.group) if text]
        if made is not None:
            made.settled()
        if made is None or errors:
            del made
            raise MemoryError(f"rowmax.distributed: no shared memory of {size} bytes: {errors[0]}")
        self.memory, self.size = made, size
        self.addresses = tuple(t.data_ptr() for t in made.bytes)


class _Symmetric:
    """Bytes of each GPU of a group."""

    def __init__(self, size: int, group: Group, device: torch.device) -> None:
        self.made = SymmetricBytes(size, group.process_group, device)
        self.bytes = self.made.bytes
        self.limit = time_limit_of(group.process_group, device)

    def settled(self) -> None:
        """Do nothing: no name is left to remove."""

    def barrier(self) -> None:
        """Let the current stream wait for those of all ranks."""
        self.made.barrier(self.limit)


class _File:
    """Bytes of each process of a group, in files in memory."""

    def __init__(self, size: int, group: Group, device: torch.device) -> None:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        self.group, self.path, error = group, f"{folder}/rowmax-{uuid.uuid4().hex}", ""
        try:
            with Path(self.path).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as problem:
            error = str(problem)
        found = all_objects((self.path, error), group)
        for _, text in found:
            if text:
                self.settled()
                raise OSError(text)
        self.bytes = [
            torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name, _ in found
        ]

    def settled(self) -> None:
        """Remove the name, once all ranks have opened the file or none will."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.group.process_group)


_MEMORY: dict[str, Any] = {"cuda": _Symmetric, "cpu": _File}


class Regions:
    """The regions of a group: two for rows, which take turns, and one for gradients that return.

    Ranks meet in ``show``. Before it, each has waited for its copies of the use before. So they
    need not meet again to write where the last use has not read.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        uses = _Uses()
        self.rows = Region(group, device, uses), Region(group, device, uses)
        self.gradients = Region(group, device)
        self._last = 0

    def turn(self, size: int) -> tuple[Region, bool]:
        """Return the region for rows of the next use, of so many bytes, and if ranks meet first.

        They do for a long use, whose memory is not there twice, and after a use in a graph: its
        replays are uses that the host does not see.
        """
        uses, captures = self.rows[0].uses, False
        if self.gradients.device.type == "cuda":
            captures = torch.cuda.is_current_stream_capturing()
        uses.captured |= captures
        if not uses.captured:
            self._last = 0 if size > MOST_IN_TURN else 1 - self._last
        return self.rows[self._last], uses.captured or size > MOST_IN_TURN


_streams: dict[torch.device, torch.cuda.Stream] = {}
#: by name of group and device: the group, because another may have its name later, and its
#: regions, or None where its ranks cannot share memory
_known: dict[tuple[str, torch.device], tuple[Any, Regions | None]] = {}


def regions_of(group: Group, device: torch.device) -> Regions | None:
    """Return the regions of a group, or None where its ranks cannot share memory.

    The first call of a group is for all its ranks, and they agree.
    """
    if group.size == 1:
        return None
    key, process_group = (group.name, device), group.process_group
    there, found = _known.get(key, (None, None))
    if there is None or there() is not process_group:
        found = _agreed(group, device)
        _known[key] = weakref.ref(process_group), found
    return found


def without_regions(group: Group, device: torch.device) -> None:
    """Use collectives from here on: memory for regions has failed, on all ranks."""
    _known[group.name, device] = weakref.ref(group.process_group), None


def shares_memory(group: Group, device: torch.device) -> bool:
    """Return True if copies of this group read the memory of other ranks, or are expected to."""
    there, found = _known.get((group.name, device), (None, None))
    if there is not None:
        return found is not None
    return group.size > 1 and _wanted(device) == "shared"


def _wanted(device: torch.device) -> str:
    given = os.environ.get(VARIABLE) or ("shared" if device.type == "cuda" else "collectives")
    if given not in WAYS:
        raise ValueError(f"{VARIABLE}: got {given!r}; want one of {', '.join(map(repr, WAYS))}")
    return given


def _agreed(group: Group, device: torch.device) -> Regions | None:
    """Return regions if all ranks want them, are on one host and can have a little memory.

    Their GPUs are of one kind, because plans of calls depend on it.
    """
    try:
        wanted = _wanted(device)
    except ValueError as error:
        wanted = f"error: {error}"
    facts = all_objects((wanted, _host(), _kind(device)), group)
    if len(set(facts)) > 1 or facts[0][0] != "shared" or device.type not in _MEMORY:
        for text, *_ in facts:
            if text.startswith("error"):
                raise ValueError(text[len("error: ") :])
        return None
    regions = Regions(group, device)
    try:
        for region in (*regions.rows, regions.gradients):
            region.open(_ROUND)
            region.show()
    except MemoryError:
        return None
    return regions


def _host() -> str:
    """Return a name of the running system."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot}"
    return socket.gethostname()


def _kind(device: torch.device) -> tuple[Any, ...]:
    """Return the type of a device, and the compute capability of a GPU."""
    if device.type != "cuda":
        return (device.type,)
    return device.type, *torch.cuda.get_device_capability(device)


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
