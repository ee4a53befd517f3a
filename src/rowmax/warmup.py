"""Compile the kernels of known shapes ahead, for servers and images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from .attention import arguments
from .call.dispatch import Call, choose, run_backward
from .call.inputs import Tensors, Wanted
from .call.normalize import normalized
from .call.problem import Problem, problem_of
from .errors import bad, refuse_unexpected, wrong_type
from .masks import Mask, as_int, as_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: a CPU has other kernels for few queries and for up to 256 tokens; beyond, a few rows compile them
LONG = 260
#: calls that compile side by side on a GPU; each holds the tensors of its call
THREADS = 8


class WarmupOptions(TypedDict, total=False):
    """The features of the calls. Tensors are described: ``bias`` by its shape, others by a flag."""

    causal: bool
    mask: Mask | Tensor | None
    bias: str | None  # letters of bhqk, or 1 where it broadcasts: "1hqk"
    alibi: bool
    scale: float | None
    softcap: float
    sink: bool
    dropout_p: float
    deterministic: bool
    backend: str | None


class Step(NamedTuple):
    """One direction of one kind of call, ready to run."""

    call: Call  # "forward" or "backward"
    dtype: torch.dtype
    queries: int
    keys: int
    backends: tuple[str, ...]
    seconds: float  # almost none if the kernels were in a cache

    def __str__(self) -> str:
        dtype, names = str(self.dtype).removeprefix("torch."), ", ".join(self.backends)
        what = f"{self.call} {dtype} Nq {self.queries} Nk {self.keys}"
        return f"{what}: {names}, {self.seconds:.2f} s"


@dataclass(frozen=True)
class Warmup:
    """The steps of ``warmup``, and the seconds of all of them; ``str`` of it is a text."""

    steps: tuple[Step, ...]
    seconds: float

    def __str__(self) -> str:
        return "\n".join([*map(str, self.steps), f"all: {self.seconds:.2f} s"])


def warmup(
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    lengths: int | Iterable[int | tuple[int, int]] = 1024,
    dtype: torch.dtype | Iterable[torch.dtype] | None = None,
    device: torch.device | str | None = None,
    gradient: bool = True,
    on_step: Callable[[int, int, Step], None] | None = None,
    **options: Unpack[WarmupOptions],
) -> Warmup:
    """Compile the kernels of calls of these shapes, so that the first such call compiles nothing.

    For the start of a server or the building of an image. Compiled code stays in the caches of
    Numba and Triton on disk, and on a GPU in this process. Nothing else stays: no tensors, no
    gradients, no change of torch's random numbers. On a GPU forwards and backwards of all lengths
    compile side by side, and each holds the tensors of its call until it is compiled. On a CPU
    260 rows stand for any more, unless ``mask`` holds a tensor.

    Args:
        heads: of q.
        head_dim: D.
        kv_heads: of k and v, ``heads`` if None.
        value_dim: Dv, ``head_dim`` if None.
        batch: sequences of a call. The tiles of a GPU depend on it, and on a CPU the kernel of up
            to 256 tokens.
        lengths: one or more of N, or of (Nq, Nk). The tiles of a GPU depend on them.
        dtype: one or more; None: bfloat16 on a GPU, float32 on a CPU.
        device: None: the current GPU if there is one, else the CPU.
        gradient: also compile the backward, for the gradients of q, k, v, bias, sink and ALiBi.
        on_step: called as ``on_step(done, total, step)`` after every step.
        **options: those of ``attention``. Of tensors only the kind matters: ``bias="1hqk"`` names
            a shape by letters of bhqk and 1, ``alibi=True`` and ``sink=True`` say that there is
            one. A ``mask`` is given as it is.

    Returns:
        A ``Warmup``: each step with its backends and its seconds, and the seconds of all.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import torch, rowmax
    >>> done = rowmax.warmup(8, 64, kv_heads=2, causal=True, dtype=torch.float32, device="cpu")
    >>> [step.call for step in done.steps]
    ['forward', 'backward']
    """
    unexpected = {n: x for n, x in options.items() if n not in WarmupOptions.__annotations__}
    if unexpected:
        refuse_unexpected("warmup", (), unexpected)
    where = _device(device)
    sizes = (heads, kv_heads or heads, head_dim, value_dim or head_dim, batch)
    names = ("heads", "kv_heads", "head_dim", "value_dim", "batch")
    for name, size in zip(names, sizes, strict=True):
        _check_size(name, size)
    start = time.perf_counter()
    mask = as_mask(options.get("mask"))
    short = where.type == "cpu" and not _holds_tensors(mask)
    directions: tuple[Call, ...] = ("forward", "backward") if gradient else ("forward",)
    plan: list[tuple[Call, _Shape]] = [
        (call, _Shape(*sizes, nq, nk, kind, where))
        for kind in _dtypes(dtype, where)
        for nq, nk in _lengths(lengths, short)
        for call in directions
    ]
    for _, shape in plan:
        _inputs(shape, options)  # invalid arguments raise before anything is compiled
    steps: list[Step] = []
    for step in _compiled(plan, options):
        steps.append(step)
        if on_step is not None:
            on_step(len(steps), len(plan), step)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()
    order = {"forward": 0, "backward": 1}
    steps.sort(key=lambda x: (str(x.dtype), x.queries, x.keys, order[x.call]))
    return Warmup(tuple(steps), time.perf_counter() - start)


class _Shape(NamedTuple):
    """The sizes of a call."""

    heads: int
    kv_heads: int
    d: int
    dv: int
    batch: int
    nq: int
    nk: int
    dtype: torch.dtype
    device: torch.device


def _compiled(plan: list[tuple[Call, _Shape]], options: WarmupOptions) -> Iterator[Step]:
    """Yield every step when it is ready: on a GPU side by side, else in order."""
    if not plan or plan[0][1].device.type != "cuda":
        yield from (_run(call, shape, options) for call, shape in plan)  # Numba has one lock
        return
    device = plan[0][1].device
    torch.zeros(1, device=device)  # starts the driver in one thread
    threads = min(THREADS, len(plan), os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        found: list[Future[Step]] = [pool.submit(_run, *one, options) for one in plan]
        try:
            for done in as_completed(found):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


@torch.no_grad()
def _run(call: Call, shape: _Shape, options: WarmupOptions) -> Step:
    """Run one direction once, on zeros; a backward needs no forward before it."""
    start = time.perf_counter()
    problem, tensors, name = _inputs(shape, options)
    plan = choose(problem, call, name)
    if call == "forward":
        plan.first.forward(problem, tensors)
    else:
        out = torch.zeros(problem.out_shape, dtype=shape.dtype, device=shape.device)
        lse = torch.zeros(problem.lse_shape, dtype=problem.accumulator, device=shape.device)
        there = (tensors.bias, tensors.sink, tensors.heads)
        wanted = Wanted(True, True, True, *(x is not None for x in there))
        run_backward(plan, problem, tensors, out, lse, torch.zeros_like(out), None, wanted)
    names = tuple(job.backend for job in plan.jobs if job.backend is not None)
    seconds = time.perf_counter() - start
    return Step(call, shape.dtype, shape.nq, shape.nk, names, seconds)


def _inputs(shape: _Shape, options: WarmupOptions) -> tuple[Problem, Tensors, str | None]:
    """Return the problem, the inputs (zeros) and the named backend of a call."""
    device, dtype = shape.device, shape.dtype
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    given: dict[str, Any] = dict(options)
    sizes = {"1": 1, "b": shape.batch, "h": shape.heads, "q": shape.nq, "k": shape.nk}
    letters = given.pop("bias", None)
    if letters is not None:
        if not isinstance(letters, str) or not set(letters) <= set(sizes) or len(letters) != 4:
            raise bad("bias", repr(letters), "four letters of bhqk or 1, such as '1hqk'")
        given["bias"] = torch.zeros([sizes[x] for x in letters], dtype=dtype, device=device)
    for name in ("alibi", "sink"):
        there = given.pop(name, False)
        if not isinstance(there, bool):
            raise wrong_type(name, type(there).__name__, "True or False: warmup makes the tensor")
        if there:
            given[name] = torch.zeros(shape.heads, dtype=accumulator, device=device)
    q = torch.zeros(shape.batch, shape.nq, shape.heads, shape.d, dtype=dtype, device=device)
    k = torch.zeros(shape.batch, shape.nk, shape.kv_heads, shape.d, dtype=dtype, device=device)
    v = k
    if shape.dv != shape.d:
        v = k.new_zeros(shape.batch, shape.nk, shape.kv_heads, shape.dv)
    with torch.autocast(device.type, enabled=False):
        checked = arguments(q, k, v, seed=0, **given)
    tensors, found, _ = normalized(checked)
    return problem_of(tensors, found), tensors, found.backend


def _holds_tensors(mask: Mask) -> bool:
    """Return True if a mask fits only calls of some lengths."""
    parts = (mask.prefix, mask.lengths, mask.allowed)
    return bool(mask.documents) or any(x is not None for x in parts)


def _check_size(name: str, size: object) -> None:
    whole = as_int(size)
    if whole is None or whole < 1:
        raise bad(name, repr(size), "an int of at least 1")


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device with its index."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _dtypes(
    dtype: torch.dtype | Iterable[torch.dtype] | None, device: torch.device
) -> list[torch.dtype]:
    """Return the dtypes, each once."""
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    every = [dtype] if isinstance(dtype, torch.dtype) else dtype
    if isinstance(every, str) or not isinstance(every, Iterable):
        raise wrong_type("dtype", repr(dtype), "a torch.dtype or several")
    found = list(dict.fromkeys(every))
    wrong = next((x for x in found if not isinstance(x, torch.dtype)), None)
    if wrong is not None or not found:
        raise wrong_type("dtype", repr(wrong or dtype), "a torch.dtype or several")
    return found


def _lengths(lengths: int | Iterable[int | tuple[int, int]], short: bool) -> list[tuple[int, int]]:
    """Return (Nq, Nk) of each length once; if ``short``, of at most LONG tokens."""
    every: Any = [lengths] if as_int(lengths) is not None else lengths
    if isinstance(every, str) or not isinstance(every, Iterable):
        raise wrong_type("lengths", repr(lengths), "an int, or several of N or (Nq, Nk)")
    found: list[tuple[int, int]] = []
    for n in every:
        pair = n if isinstance(n, (tuple, list)) else (n, n)
        if len(pair) != 2 or any((as_int(x) or 0) < 1 for x in pair):
            raise bad("lengths", repr(n), "an int of at least 1, or (Nq, Nk)")
        nq, nk = int(pair[0]), int(pair[1])
        found.append((min(nq, LONG), min(nk, LONG)) if short else (nq, nk))
    if not found:
        raise bad("lengths", repr(lengths), "at least one length")
    return list(dict.fromkeys(found))
