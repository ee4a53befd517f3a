"""Private interfaces of Triton and torch that launches use, each with a public alternative.

Tried with triton 3.6.0 and 3.9.0. Those for sources are in ``source_compat.py``, Gluon's in
``hopper/gluon_compat.py``.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import source_compat  # noqa: F401  (first: it hastens the import of triton)

# isort: split
import triton
from triton import knobs

from .folder import read, write
from .versions import version_text


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


#: device -> the address of its current stream; the public call makes a stream object each time
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_stream
)
#: the public calls first test if CUDA is initialized, which it is if a tensor is on a GPU
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

#: the arguments of a driver's launcher before those of the kernel: 3.6 gathers all but the first
#: five in ``*args``, 3.9 names them
_PLACE = ("gridX", "gridY", "gridZ", "stream", "function")
_HOOKS = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


def is_compiled(kernel: Any) -> bool:
    """Return False for a kernel of Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return isinstance(kernel, triton.JITFunction)


@lru_cache(maxsize=64)
def _parameters(function: Any) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function; none if it is not written in Python."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()


def _parameters_of(run: Any) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a launcher. Each launch has its own, all of one class."""
    if inspect.isroutine(run):
        return _parameters(run)
    return _parameters(type(run).__call__)[1:]  # without self


def is_known(run: Any) -> bool:
    """Return True if a driver's launcher takes the arguments that ``launcher`` passes."""
    parameters = _parameters_of(run)
    if not parameters:
        return False
    names = tuple(x.name for x in parameters[:-1])
    return (
        names in (_PLACE, _PLACE + _HOOKS)
        and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL
    )


def graphs_exist() -> bool:
    """Return True if a CUDA graph of torch's is alive, which may replay any kernel.

    It is slow, because it visits all objects. A test of each launch for a capture takes 0.3 us
    (H100 host).
    """
    kinds = set(map(type, gc.get_objects()))  # a test of each object would take twice as long
    return any(issubclass(kind, torch.cuda.CUDAGraph) for kind in kinds)


def launcher(compiled: Any, grid: tuple[int, int, int], device: int) -> Callable[..., None] | None:
    """Return a function that launches a compiled kernel on the current stream of its device.

    Like ``compiled[grid]``, but it builds the metadata of a launch only if a launch hook is
    installed. Returns None where the driver has a launcher of another kind: the caller launches as
    users of Triton do.
    """
    hooked = compiled[grid]  # loads the kernel
    run = compiled.run
    if not is_known(run):
        return None
    function, metadata = compiled.function, compiled.packed_metadata
    without_hooks = (function, metadata, None, None, None)
    if _is_thin(run):  # 2 us less on an H100's host
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        run, without_hooks = run.launch, (function, *flags, None, None, metadata, None, None, None)
    hooks = knobs.runtime

    def ready(*args: Any) -> None:
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            hooked(*args)
        else:
            run(*grid, current_stream(device), *without_hooks, *args)

    return ready


def _is_thin(run: Any) -> bool:
    """Return True if a launcher only adds two flags and empty scratch memory (triton 3.6)."""
    names = tuple(x.name for x in _parameters_of(run))
    return (
        type(run).__name__ == "CudaLauncher"
        and names[:-1] == _PLACE
        and getattr(run, "global_scratch_size", 1) == getattr(run, "profile_scratch_size", 1) == 0
        and hasattr(run, "launch")
    )


#: the parts of a descriptor as a kernel takes them: the map of a copy, its shape and its strides
Parts = list[Any]
_DESCRIPTOR = re.compile(r"tensordesc<[^\[]*\[([^\]]*)\]")


def flatten_arguments(compiled: Any, types: list[Any]) -> Callable[[int, Any], Parts] | None:
    """Let the launcher of a kernel take its arguments one by one, and descriptors in parts.

    To be called before the kernel is loaded; ``types`` are those of the arguments. Return the
    function from (which descriptor, descriptor) to its parts, so that a caller can keep them:
    Triton builds them at every launch (4 us each, H100's host). Return None where there are no
    descriptors, or where they stay whole.
    """
    parts_of = _parts_of(compiled.metadata)
    if parts_of is not None:
        compiled.metadata = compiled.metadata._replace(tensordesc_meta=None)
        types = [part for x in types for part in _types_of_parts(x)]
    compiled.src.signature = dict(enumerate(types))
    return parts_of


def _parts_of(metadata: Any) -> Callable[[int, Any], Parts] | None:
    described = getattr(metadata, "tensordesc_meta", None)
    if not described or not all(described) or not hasattr(metadata, "_replace"):
        return None
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg as parts
    except ImportError:
        return None
    unused = (None,) * (len(inspect.signature(parts).parameters) - 2)  # 3.9 has one more
    return lambda n, descriptor: parts(descriptor, described[n], *unused)


def _types_of_parts(x: Any) -> Parts:
    found = _DESCRIPTOR.match(x) if isinstance(x, str) else None
    if found is None:
        return [x]
    rank = found[1].count(",") + 1
    return ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]


#: the folders in Triton's whose sources are part of its key
_KEYED = ("compiler", "backends", "language")


def remember_key(folder: Path) -> None:
    """Keep the key that Triton gives its own release, in a file of this folder.

    Triton hashes its files for it in every process that compiles, 400 MB: 0.4 s. The file holds the
    key with the names, sizes and times of the files, and is used while these stay as they are.
    Where Triton computes its key in another way, it goes on to do so.
    """
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if compute is None or getattr(compute, "kept", False):
        return
    root = Path(cache.__file__).parent.parent
    stamp, path = _stamp(root), folder / "triton_key.json"
    found = read(path)
    key = found.get("key") if found.get("stamp") == stamp else None
    if not isinstance(key, str):
        key = compute()
        with suppress(OSError):
            write(path, {"stamp": stamp, "key": key})

    def kept_key() -> str:
        return key

    kept_key.kept = True  # pyright: ignore
    cache.triton_key = kept_key


def _stamp(root: Path) -> str:
    """Return a hash of the names, sizes and times of the files of Triton's key."""
    files = [root / "runtime" / "cache.py", *(root / "_C").glob("libtriton*")]
    files += [x for name in _KEYED for x in sorted((root / name).rglob("*.py"))]
    found = [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in files]
    return hashlib.sha256(repr((triton.__version__, found)).encode()).hexdigest()


class _Subprocess(ModuleType):
    """The module subprocess, which starts no process for a version that is kept."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def check_output(command: Any, *args: Any, **options: Any) -> Any:
        if not args and set(options) <= {"stderr"} and list(command[1:]) == ["--version"]:
            return version_text(command[0], **options)
        return subprocess.check_output(command, *args, **options)


def keep_versions() -> None:
    """Let Triton find the release of ptxas, a part of its keys, by ``version_text``."""
    modules = [knobs]
    with suppress(ImportError):
        from triton.backends.nvidia import compiler

        modules.append(compiler)
    for module in modules:
        if getattr(module, "subprocess", None) is subprocess:
            module.subprocess = _Subprocess("subprocess")  # pyright: ignore


keep_versions()


def build_launcher(compiled: Any) -> None:
    """Fill Triton's cache with the launcher of a kernel, which it compiles from C (gcc).

    Nothing happens where a driver makes its launchers in another way: the first launch builds it.
    """
    make = getattr(triton.runtime.driver.active, "launcher_cls", None)
    if make is not None:
        make(compiled.src, compiled.metadata)


def spills(kernel: Any) -> int | None:
    """Return the words of local memory of a thread of a compiled kernel, None if unknown."""
    load = getattr(kernel, "_init_handles", None)  # the first launch would load it
    if load is not None:
        load()
    return getattr(kernel, "n_spills", None)
