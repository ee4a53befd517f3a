"""Kernels compiled before they are launched, and launched without Triton's work of each launch.

A call of a kernel through Triton compiles it again for every number that is 1 or a multiple of 16.
At every launch it derives the types of all arguments and encodes every descriptor.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource

from . import compat
from .assembler import assembling, current_arch
from .folder import cache_folder
from .source_compat import quick_source

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}

_MOST_KERNELS = 1024
_MOST_READY = 64  # dtypes and alignments of the tensors of one launch
_MOST_PARTS = 256  # addresses of the tensor of one descriptor


class Span:
    """The rest of a tensor from an offset on, as an argument: cheaper to make than a view."""

    __slots__ = ("offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.tensor = tensor
        self.offset = offset  # bytes

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.offset

    def view(self) -> Tensor:
        """Return the rest of the tensor from here on, with one axis."""
        return self.tensor.view(-1)[self.offset // self.tensor.element_size() :]


class _Address:
    """The address of the tensor of a descriptor."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


class _Same:
    """A kernel in keys, by its identity: Triton would hash the sources of kernels for it."""

    __slots__ = ("kernel",)

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.kernel is self.kernel

    def __hash__(self) -> int:
        return id(self.kernel)


class Kept:
    """A compiled kernel on one device, and the launches that use it."""

    def __init__(
        self, kernel: Any, device: int, parts_of: Callable[[int, Any], compat.Parts] | None
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.parts_of = parts_of  # the parts of a descriptor (``compat.flatten_arguments``)
        self.users: WeakSet[Launch] = WeakSet()


class Ready(NamedTuple):
    """A launch with tensors of some dtypes and alignments."""

    run: Callable[..., None] | None  # None: the public way
    parts_of: Callable[[int, Any], compat.Parts] | None
    numbers: tuple[Any, ...]


#: a launch at the addresses of its pointers, and of the tensors of its copies
Addressed = Callable[[tuple[int, ...], tuple[int, ...]], None]
#: a launch with its pointers and the tensors of its copies
Noted = tuple["Launch", Any, tuple[Any, ...]]
#: by thread: the launches that ``recorded_by`` gathers, and whether they run
_recorders: dict[int, tuple[list[Noted], bool]] = {}


@contextmanager
def recorded_by(running: bool = True) -> Iterator[list[Noted]]:
    """Gather the launches of this thread. Unless ``running``, none of them runs."""
    found: list[Noted] = []
    _recorders[threading.get_ident()] = found, running
    try:
        yield found
    finally:
        del _recorders[threading.get_ident()]


def _note_launch(launch: Launch, t: Any, bases: tuple[Any, ...]) -> bool:
    """Note a launch for the recorder of this thread; return False if it shall not run."""
    found, running = _recorders.get(threading.get_ident(), (None, True))
    if found is not None:
        found.append((launch, t, bases))
    return running


#: by thread: what to call once it has read the source of a kernel
_waiting: dict[int, Callable[[], None]] = {}


@contextmanager
def once_read(call: Callable[[], None]) -> Iterator[None]:
    """Call a function when this thread has read the source of a kernel, to compile it.

    Not if all kernels of the context are in a cache.
    """
    _waiting[threading.get_ident()] = call
    try:
        yield
    finally:
        _waiting.pop(threading.get_ident(), None)


def runs() -> bool:
    """Return False while the launches of this thread are only noted."""
    return not _recorders or _recorders.get(threading.get_ident(), (None, True))[1]


#: by kernel, device, signature and options; the one used last is the last
_kernels: OrderedDict[Any, Kept] = OrderedDict()
#: those that a thread compiles now
_compiling: dict[Any, Future[Kept]] = {}
_kernels_lock = threading.Lock()
_key_lock = threading.Lock()


def _evicted() -> list[Kept]:
    """Remove and return the oldest kernels past the bound.

    One that a launch or a CUDA graph may still run stays: from triton 3.9 on, a kernel that nothing
    refers to is unloaded from its device.
    """
    if len(_kernels) <= _MOST_KERNELS or compat.graphs_exist():
        return []
    unused = [key for key, x in _kernels.items() if not x.users]
    return [_kernels.pop(key) for key in unused[: len(_kernels) - _MOST_KERNELS]]


def _unload(evicted: list[Kept]) -> None:
    """Release kernels, each on its own device and once it has run."""
    while evicted:
        with torch.cuda.device(evicted[-1].device):
            torch.cuda.synchronize()
            evicted.pop()


class Signature(NamedTuple):
    """The types, constants and alignments that a kernel is compiled for, as Triton takes them."""

    types: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]

    def flat(self) -> list[Any]:
        """Return the types of the arguments of the compiled kernel, one by one."""
        return [x for x in _leaves(self.types.values()) if x != "constexpr"]


class Launch:
    """A kernel with a grid and all of its arguments but the tensors.

    A kernel takes ``(*copies, t, *last)``: descriptors of tensors, a record of pointers, then
    numbers and constants.
    """

    source: Any = ASTSource  # the source class of the kernel's language

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        options: dict[str, Any],
        last: tuple[Any, ...] = (),
        copies: tuple[Any, ...] = (),
    ) -> None:
        self.kernel = kernel
        self._same = _Same(kernel)
        self.grid = grid
        self.options = options
        self.last = last
        self.copies = copies  # descriptors without their tensors; None where there is no copy
        present = [(place, x) for place, x in enumerate(copies) if x is not None]
        self._copies: list[tuple[int, Any, dict[int, compat.Parts]]] = [
            (place, x, {}) for place, x in present
        ]
        #: by the device, and which tensors there are: their dtypes, and if they are aligned
        self._ready: dict[Any, Ready] = {}

    def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        """Launch on the current stream.

        ``t`` holds tensors, or None where a term is missing; ``bases`` are the tensors of
        ``copies``.
        """
        if _recorders and not _note_launch(self, t, bases):
            return
        pointers = [None if x is None else x.data_ptr() for x in t]
        run, parts_of, numbers = self._ready_for(pointers, t, bases)
        if run is None:
            self.public(t, bases)
            return
        if parts_of is None:
            parts = [_over(x, bases[place]) for place, x, _ in self._copies]
        else:
            parts = self._parts([bases[place].data_ptr() for place, _, _ in self._copies], parts_of)
        run(*parts, *[x for x in pointers if x is not None], *numbers)

    def on(self, like: Tensor, t: Any) -> None:
        """Launch on the current stream of a tensor's device; on a CPU in the interpreter."""
        if not like.is_cuda:
            if like.device.type == "cpu":
                self.public(t)
            else:
                with torch.get_device_module(like.device).device(like.device):
                    self.public(t)
        elif like.get_device() != compat.current_device():
            with torch.cuda.device(like.device):
                self(t)
        else:
            self(t)

    def addressed(self, t: Any, bases: tuple[Any, ...] = ()) -> Addressed | None:
        """Return the launch at addresses, or None if only the public way launches.

        The addresses are those of pointers aligned like those of ``t``, and of the tensors of
        copies.
        """
        run, parts_of, numbers = self._ready_for(
            [None if x is None else x.data_ptr() for x in t], t, bases
        )
        if run is None or (self._copies and parts_of is None):
            return None
        if parts_of is None:
            return lambda pointers, bases: run(*pointers, *numbers)
        known: dict[tuple[int, ...], compat.Parts] = {}

        def launch(pointers: tuple[int, ...], bases: tuple[int, ...]) -> None:
            parts = known.get(bases)  # a loop's tensors take few addresses
            if parts is None:
                if len(known) >= _MOST_PARTS:
                    known.clear()
                parts = known[bases] = self._parts(bases, parts_of)
            run(*parts, *pointers, *numbers)

        return launch

    def _parts(
        self, addresses: Sequence[int], parts_of: Callable[[int, Any], compat.Parts]
    ) -> compat.Parts:
        """Return the parts of all descriptors, made once for each address of a tensor."""
        found: compat.Parts = []
        for n, ((_, copy, known), address) in enumerate(zip(self._copies, addresses, strict=True)):
            parts = known.get(address)
            if parts is None:
                if len(known) >= _MOST_PARTS:
                    known.clear()
                parts = known[address] = parts_of(n, _over(copy, _Address(address)))
            found += parts
        return found

    def public(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        """Launch as users of Triton do: slower, but with nothing of Triton that is private."""
        args = self.arguments(t, bases)
        with assembling(current_arch() if compat.is_compiled(self.kernel) else None) as more:
            self.kernel[self.grid](*args, **self.options, **more)

    def arguments(self, t: Any, bases: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """Return all arguments of the kernel for these tensors, spans as tensors."""
        both = zip(self.copies, map(_whole, bases), strict=True)
        copies = [None if x is None else _over(x, base) for x, base in both]
        return (*copies, type(t)(*map(_whole, t)) if hasattr(t, "_fields") else t, *self.last)

    def _ready_for(self, pointers: list[int | None], t: Any, bases: tuple[Any, ...]) -> Ready:
        compiled = compat.is_compiled(self.kernel)
        device = compat.current_device() if compiled else None
        given = zip(t, pointers, strict=True)
        kind = (device, *[None if at is None else (x.dtype, not at & 15) for x, at in given])
        found = self._ready.get(kind)
        if found is not None:
            return found
        found = Ready(None, None, ())
        if compiled:
            kept = self.loaded(*self.arguments(t, bases))
            run = compat.launcher(kept.kernel, self.grid, kept.device)
            found = Ready(run, kept.parts_of, tuple(_numbers(self.last)))
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        self._ready[kind] = found
        return found

    def loaded(self, *args: Any) -> Kept:
        """Return the kernel for these arguments on the current device, compiled once."""
        device = torch.cuda.current_device()
        key = self._key(device, args)
        kept = self._found(key)
        if kept is not None:
            return kept
        made = _once(key, lambda: _keepable(self.compile(*args), self.signature(*args), device))
        return self._found(key, made)

    def pending(self, *args: Any) -> Callable[[], None] | None:
        """Return the function that compiles the kernel for these arguments, to run in a thread.

        It holds no tensors and calls nothing of CUDA, since another thread may capture a graph.
        Return None if the kernel is there.
        """
        device = torch.cuda.current_device()
        key = self._key(device, args)
        with _kernels_lock:
            if key in _kernels or key in _compiling:
                return None
        signature = self.signature(*args)
        target = triton.runtime.driver.active.get_current_target()

        def make() -> Kept:
            kept = _keepable(self._compiled(signature, target), signature, device)
            with suppress(Exception):  # the first launch would raise it
                compat.build_launcher(kept.kernel)
            return kept

        def compile() -> None:
            _once(key, make)

        return compile

    def _key(self, device: int, args: tuple[Any, ...]) -> Any:
        return (self._same, device, (_kinds(args),), *self.options.items())

    def _found(self, key: Any, new: Kept | None = None) -> Any:
        """Return the kept kernel of a key, else ``new``; this launch then uses it."""
        evicted: list[Kept] = []
        with _kernels_lock:
            kept = _kernels.get(key, new)
            if kept is not None:
                kept.users.add(self)
                _kernels[key] = kept
                _kernels.move_to_end(key)
            if new is not None:
                evicted = _evicted()
        _unload(evicted)
        return kept

    def compile(self, *args: Any, target: Any = None) -> Any:
        """Return the kernel for these arguments, for the current device or another target."""
        target = target or triton.runtime.driver.active.get_current_target()
        return self._compiled(self.signature(*args), target)

    def _compiled(self, signature: Signature, target: Any) -> Any:
        _remember_key()
        source = _announced(self.source)(self.kernel, *signature)
        with assembling(target.arch) as more:
            return triton.compile(source, target=target, options={**self.options, **more})

    def signature(self, *args: Any) -> Signature:
        found = Signature({}, {}, {})
        for i, (name, x) in enumerate(zip(self.kernel.arg_names, args, strict=True)):
            found.types[name] = _described(x, (i,), found)
        return found


def _keepable(kernel: Any, signature: Signature, device: int) -> Kept:
    """Return a compiled kernel as it is kept.

    Before other threads find it: Triton makes its launcher of the types, and would take records and
    constants apart at every launch.
    """
    return Kept(kernel, device, compat.flatten_arguments(kernel, signature.flat()))


def _once(key: Any, make: Callable[[], Kept]) -> Kept:
    """Return the kernel of a key. One thread makes it, others wait and get its error."""
    with _kernels_lock:
        kept, future = _kernels.get(key), _compiling.get(key)
        if kept is not None:
            return kept
        mine = future is None
        if future is None:
            future = _compiling[key] = Future()
    if not mine:
        return future.result()
    try:
        kept = make()
    except BaseException as error:
        with _kernels_lock:
            del _compiling[key]
        future.set_exception(error)
        raise
    with _kernels_lock:
        _kernels.setdefault(key, kept)
        del _compiling[key]
    future.set_result(kept)
    return kept


def _remember_key() -> None:
    with _key_lock, suppress(RuntimeError):  # this user has no home
        compat.remember_key(cache_folder())


@lru_cache(maxsize=8)
def _announced(source: Any) -> Any:
    """Return the class of sources, which calls what waits for ``once_read``."""

    class Source(quick_source(source)):
        def make_ir(self, *args: Any, **kwargs: Any) -> Any:
            module = super().make_ir(*args, **kwargs)
            call = _waiting.pop(threading.get_ident(), None)
            if call is not None:
                call()
            return module

    return Source


def _whole(x: Any) -> Any:
    return x.view() if isinstance(x, Span) else x


def _over(copy: Any, base: Any) -> Any:
    """Return a descriptor with its tensor."""
    # without the checks of the constructor, which its template has passed
    found = object.__new__(type(copy))
    found.__dict__ = copy.__dict__ | {"base": base}
    return found


def _leaves(x: Any) -> Iterator[Any]:
    """Yield the members of a record, and of those within it."""
    for y in x:
        if isinstance(y, tuple):
            yield from _leaves(y)
        else:
            yield y


def _numbers(last: tuple[Any, ...]) -> list[Any]:
    """Return the numbers among the last arguments: a compiled kernel takes no others of them."""
    return [x for x in _leaves(last) if x is not None and not isinstance(x, tl.constexpr)]


def _kinds(x: Any) -> Any:
    """Return all that ``_described`` reads of arguments, which is less work than a signature.

    A call of a new length, such as each step of a growing cache, looks its kernels up by it.
    """
    kind = x.__class__
    if x is None or kind is float:
        return kind
    if kind is int:
        return -(2**31) <= x < 2**31
    if kind is tl.constexpr:
        return x.value.__class__, x.value
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple) and not hasattr(x, "block_shape"):
        return kind, *map(_kinds, x)
    return _described(x, (), Signature({}, {}, {}))


def _described(x: Any, path: tuple[int, ...], found: Signature) -> Any:
    """Return the type of an argument, or of each member of a record.

    Constants and alignments are added to ``found``.
    """
    if x is None or isinstance(x, tl.constexpr):
        found.constants[path] = None if x is None else x.value
        return "constexpr"
    if isinstance(x, Tensor):
        if x.data_ptr() % 16 == 0:
            found.attributes[path] = (("tt.divisibility", 16),)
        return _TYPES[x.dtype]
    if isinstance(x, float):
        return "fp32"
    if isinstance(x, int):
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    if hasattr(x, "block_shape"):  # a descriptor of copies
        box = ", ".join(map(str, x.block_shape))
        return f"tensordesc<{_TYPES[x.base.dtype][1:]}[{box}],{x.layout!r}>"
    parts = [_described(y, (*path, i), found) for i, y in enumerate(x)]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
