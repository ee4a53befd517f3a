"""Private interfaces of Triton and torch that launches use, each with a public way round it.

Tried with triton 3.6.0 and 3.9.0. Gluon's are in ``hopper/gluon_compat.py``.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


#: device -> the address of its current stream; the public call makes a stream object each time
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_stream
)
#: the public calls look first whether CUDA is initialized, which it is where tensors are on it
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

#: the arguments of a driver's launcher before those of the kernel: 3.6 gathers all but the first
#: five in ``*args``, 3.9 names them
_PLACE = ("gridX", "gridY", "gridZ", "stream", "function")
_HOOKS = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


def is_compiled(kernel: Any) -> bool:
    """False for a kernel of Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return isinstance(kernel, triton.JITFunction)


def is_known(run: Any) -> bool:
    """True if a driver's launcher takes the arguments that ``launcher`` gives it."""
    try:
        parameters = list(inspect.signature(run).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return False
    names = tuple(x.name for x in parameters[:-1])
    return (
        names in (_PLACE, _PLACE + _HOOKS)
        and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL
    )


def graphs_exist() -> bool:
    """True if a CUDA graph of torch's is alive, which may replay any kernel. Looks at all objects:
    for rare occasions. To look at every launch whether it is captured takes 0.3 us (H100 host)."""
    return any(issubclass(type(x), torch.cuda.CUDAGraph) for x in gc.get_objects())


def launcher(compiled: Any, grid: tuple[int, int, int], device: int) -> Callable[..., None] | None:
    """Return a function that launches a compiled kernel on the current stream of its device.

    Does what ``compiled[grid]`` does, but builds the metadata of a launch only if a launch hook is
    installed. Returns None where the driver has a launcher of another kind: the caller launches as
    users of Triton do.
    """
    hooked = compiled[grid]  # loads the kernel
    run = compiled.run
    if not is_known(run):
        return None
    function, metadata = compiled.function, compiled.packed_metadata
    hooks = knobs.runtime

    def ready(*args: Any) -> None:
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            hooked(*args)
        else:
            run(*grid, current_stream(device), function, metadata, None, None, None, *args)

    return ready


def spills(kernel: Any) -> int | None:
    """Words of local memory that a thread of a compiled kernel uses, None if that is not known."""
    load = getattr(kernel, "_init_handles", None)  # what the first launch does
    if load is not None:
        load()
    return getattr(kernel, "n_spills", None)
