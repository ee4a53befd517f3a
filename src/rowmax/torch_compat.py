"""The private interfaces of torch, in one place. Tried with torch 2.11 and 2.13."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import _C, Tensor
from torch._C import DispatchKeySet
from torch._C._functorch import (
    TransformType,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._functorch.utils import enable_single_level_autograd_function as single_level_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _profiler_enabled as profiler_enabled  # pyright: ignore
from torch.autograd import forward_ad, profiler
from torch.autograd.forward_ad import _set_fwd_grad_enabled as forward_mode_enabled
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as active_dispatch_modes,
)

if TYPE_CHECKING:
    from typing_extensions import Self

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # then calls are found by the attributes of their tensors, which takes longer
    TensorGuards = None
try:
    from torch._subclasses.functional_tensor import FunctionalTensor
except ImportError:  # then torch, and not rowmax, computes torch's modules in compiled graphs
    FunctionalTensor = FakeTensor

__all__ = [
    "PLAIN", "DispatchKeySet", "DispatchMode", "SingleLevelFunction", "active_dispatch_modes",
    "forward_mode_enabled", "single_level_autograd",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
#: the types of tensors that hold only numbers
PLAIN = frozenset((Tensor, torch.nn.Parameter))


class DispatchMode(TorchDispatchMode):
    """A mode that torch.compile leaves alone, and that does not import torch._dynamo for it.

    Torch's own modes import it at their first operation, to disable it there: 1 to 2 s. A torch
    that does not read ``_should_skip_dynamo`` goes on to do so.
    """

    def __new__(cls, *args: Any) -> Self:
        return super().__new__(_uncompiled(cls) if "torch._dynamo" in sys.modules else cls)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@lru_cache(maxsize=16)
def _uncompiled(mode: type[DispatchMode]) -> Any:
    """Return the mode with operations that torch.compile skips."""
    uncompiled = torch.compiler.disable(mode.__torch_dispatch__)
    return type(mode.__name__, (mode,), {"__torch_dispatch__": uncompiled})


# --- the call that runs ------------------------------------------------------------------------


def is_transformed() -> bool:
    """Return True inside ``vmap``, ``grad`` and the other transforms of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Return True inside ``torch.jit.trace``."""
    return torch._C._get_tracing_state() is not None


def is_traced_by_make_fx() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def primal_of(t: Tensor) -> Tensor:
    """Return a dual tensor without its tangent, at the only level that torch has."""
    return forward_ad.unpack_dual(t, level=0).primal


def is_zeros_not_written(t: Tensor) -> bool:
    """Return True for zeros without memory, as forward mode makes where nothing changes."""
    return t._is_zerotensor()


def is_observed() -> bool:
    """Return True if a tracer, mode, transform or profiler may observe calls of this thread.

    The observer of an execution trace cannot be seen from Python: it misses calls that skip the
    dispatcher.
    """
    return bool(
        _C._are_functorch_transforms_active()
        or _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._get_tracing_state() is not None
        or profiler_enabled()
        or profiler._is_profiler_enabled  # the profiler of all threads
        or forward_ad._current_level >= 0
    )


def forward_mode_levels() -> int:
    """Return the number of active ``jvp`` levels of ``torch.func``."""
    if not is_transformed():
        return 0
    levels = retrieve_all_functorch_interpreters()
    return sum(level.key() == TransformType.Jvp for level in levels)


def allows_fused_attention() -> bool:
    """Return False where torch's attention may use only its MATH backend, as a user has set."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()


def constant_in_graphs(function: Function) -> Function:
    """Mark a function whose result is a constant of compiled graphs: it runs while they are traced.

    As ``torch.compiler.assume_constant_result`` does, which imports the compiler (a second). Dynamo
    reads the mark; without it a compiled call would not be one graph.
    """
    function._dynamo_marked_constant = True  # pyright: ignore
    return function


constant_in_graphs(allows_fused_attention)


@constant_in_graphs
def is_in_backward() -> bool:
    """Return True while autograd runs a backward in this thread."""
    task = getattr(_C, "_current_graph_task_id", None)
    if task is None:  # autograd's threads for GPUs are not Python's
        return threading.current_thread().name.startswith("Dummy-")
    return task() >= 0


def process_group_named(name: str) -> Any:
    """Return the process group of a name that every rank knows, or None if torch cannot find it."""
    from torch.distributed import distributed_c10d

    resolve = getattr(distributed_c10d, "_resolve_process_group", None)
    return None if resolve is None else resolve(name)


class SymmetricBytes:
    """Bytes on each GPU of a group, that the kernels and copy engines of all of them reach.

    torch's symmetric memory, without multicast.

    Raises:
        RuntimeError: the GPUs cannot reach each other, or torch has no symmetric memory.
    """

    def __init__(self, size: int, process_group: Any, device: torch.device) -> None:
        name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
        before = os.environ.get(name)
        os.environ[name] = "1"  # torch reads it when ranks meet
        try:
            from torch.distributed import _symmetric_memory as symmetric

            self.memory = symmetric.empty(size, dtype=torch.uint8, device=device)
            handle = symmetric.rendezvous(self.memory, process_group.group_name)
            if getattr(handle, "multicast_ptr", 0):
                raise RuntimeError("symmetric memory with multicast, which rowmax does not use")
            # memory of a pool begins within an allocation: later versions count from there
            reach = getattr(handle, "get_remote_tensor", handle.get_buffer)
            self.bytes = [reach(rank, (size,), torch.uint8) for rank in range(handle.world_size)]
            self.handle = handle
        except (ImportError, AttributeError, TypeError) as error:
            raise RuntimeError(f"this torch has no symmetric memory as known: {error}") from error
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before

    def barrier(self, milliseconds: int) -> None:
        """Let the current stream wait for those of all ranks, at most so long."""
        self.handle.barrier(0, milliseconds)


@lru_cache(maxsize=1)
def store_on_stream() -> Callable[[Tensor, int], None] | None:
    """Return the function that stores a number in a uint32 tensor once its stream is there.

    The store is no kernel: it comes before later kernels end. None: this torch has none.
    """
    try:
        from torch._C._distributed_c10d import _SymmetricMemory  # pyright: ignore

        store = _SymmetricMemory.stream_write_value32
    except (ImportError, AttributeError):
        return None

    def stored(t: Tensor, number: int) -> None:
        store(t, 0, number)

    return stored


def time_limit_of(process_group: Any, device: torch.device) -> int:
    """Return the time limit of a group in milliseconds, or torch's own if it cannot be read."""
    try:
        limit = process_group._get_backend(device).options._timeout
        return int(1000 * limit.total_seconds())
    except (AttributeError, RuntimeError):
        return 600_000


# --- tensors -----------------------------------------------------------------------------------

_copy_each: Any = getattr(torch, "_foreach_copy_", None)
_add_each: Any = getattr(torch, "_foreach_add_", None)


def moved(t: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device. The host does not wait for the device."""
    if device.type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


#: so many contiguous tensors are copied one by one: a launch for all has a block each 128 KB of
#: bfloat16, and takes 18 us on an H200 for two of 2 MB
_FEW = 2


def copy_each(to: list[Tensor], x: list[Tensor]) -> None:
    """Copy each tensor to another of its shape. On a GPU, some contiguous ones are one launch."""
    if _copy_each is not None and len(to) > _FEW:
        _copy_each(to, x)
        return
    for a, b in zip(to, x, strict=True):
        a.copy_(b)


def add_each(to: list[Tensor], x: list[Tensor]) -> None:
    """Add each tensor to another of its shape and dtype. On a GPU, contiguous ones are one launch.

    No tensor of ``to`` overlaps another.
    """
    if _add_each is not None and to:
        _add_each(to, x)
        return
    for a, b in zip(to, x, strict=True):
        a += b


#: dispatch keys of tensors that hold only numbers on a device
_plain_keys: set[int] = set()


def is_plain(t: Tensor) -> bool:
    """Return True for a tensor that holds only numbers on a device.

    False for a subclass, a batch of ``vmap`` old or new, a meta tensor, and zeros or a negation
    still to be written.
    """
    if type(t) not in PLAIN:
        return False
    keys = torch._C._dispatch_keys(t).raw_repr()
    if keys not in _plain_keys and not t.is_meta:
        for inference in (False, True):
            with torch.inference_mode(inference):
                plain = torch.empty(0, device=t.device)
            _plain_keys.add(torch._C._dispatch_keys(plain).raw_repr())
    return keys in _plain_keys


def plain_addresses(tensors: Iterable[Tensor | None]) -> list[int] | None:
    """Return the addresses of the tensors that are not None, or None if one is not ``is_plain``.

    ``is_plain`` takes 1.7 us a tensor on an H100's host.
    """
    found = []
    try:
        for t in tensors:
            if t is not None:
                address = t.data_ptr() if type(t) in PLAIN else 0
                if (not address or t.is_neg()) and not is_plain(t):
                    return None
                found.append(address)
    except RuntimeError:  # a batch of ``vmap`` has no address
        return None
    return found


def _public_empty(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


def filled_on_cpu(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that torch fills, in its deterministic mode."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
_guards = getattr(getattr(_C, "_dynamo", None), "guards", None)
#: (sizes, strides, dtype) -> a tensor without values on the current GPU, or on the CPU. Past the
#: dispatcher, in half of the time; torch's deterministic mode does not fill it
empty_on_gpu: Empty = getattr(_guards, "_empty_strided_cuda", _public_empty)
empty_on_cpu: Empty = getattr(_guards, "_empty_strided_cpu", filled_on_cpu)


def are_strided(tensors: Iterable[Any]) -> bool:
    """Return True if all are tensors of torch's own type that have strides."""
    for t in tensors:  # all(...) would take twice as long
        if type(t) not in PLAIN or t.layout is not torch.strided or t.is_nested:
            return False
    return True


def likeness_of(*tensors: Tensor) -> Callable[..., bool] | None:
    """Return a function that is True for as many other tensors like these, none of them twice.

    It compares types, dtypes, devices, sizes, strides, whether gradients are recorded, and
    dispatch keys: those of subclasses, transforms, modes and autocast. The tensors have to be
    ``are_strided``: torch ends the process where it reads sizes of a nested one.
    """
    if TensorGuards is None or len({id(t) for t in tensors}) < len(tensors):
        return None
    found = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return found.check


def stands_for_numbers(t: Tensor) -> bool:
    """Return True for a plain tensor, and for what takes its place while a call is traced.

    False for every other subclass: its operations may mean something else. A compiler that calls
    ``torch.nn.functional.multi_head_attention_forward`` gives it FunctionalTensors.
    """
    return type(t) in PLAIN or isinstance(t, (FakeTensor, FunctionalTensor))


def jagged_axis(t: Tensor) -> int:
    """Return the axis of a jagged tensor whose length differs between sequences."""
    return t._ragged_idx  # pyright: ignore


def cached_lengths(t: Tensor) -> tuple[int | None, int | None]:
    """Return the shortest and the longest length of a jagged tensor; None if not known yet."""
    return t._maybe_min_seqlen, t._maybe_max_seqlen  # pyright: ignore


def longest_length(t: Tensor) -> int:
    """Return the longest length of a jagged tensor, which caches it; may wait for a GPU."""
    return t._max_seqlen  # pyright: ignore


def is_fake(t: Tensor) -> bool:
    """Return True for a tensor without values."""
    return isinstance(t, FakeTensor) or t.is_meta


def is_batched(t: Tensor | None) -> bool:
    """Return True for a tensor of ``vmap`` with a value for each slice: none can be read."""
    while t is not None and is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def values_are_readable(t: Tensor) -> bool:
    """Return True if reading values is free: not on a GPU, which waits, and not while tracing."""
    return t.is_cpu and has_values(t)


def has_values(t: Tensor) -> bool:
    """Return True if a tensor has values that the host can read, if it waits for them."""
    return (
        not torch.compiler.is_compiling()
        and not is_transformed()
        and not is_traced_by_make_fx()
        and type(t) in PLAIN
    )


def any_requires_grad(inputs: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


def below_autograd(keys: DispatchKeySet) -> DispatchKeySet:
    """Return the keys of a dispatched call that come after autograd."""
    return keys & torch._C._after_autograd_keyset


def assert_later(good: Tensor, message: str) -> None:
    """Check a condition on its device when it runs, because the host cannot read it now."""
    torch._assert_async(good, message)  # pyright: ignore
