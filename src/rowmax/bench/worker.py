"""Workers: prepare the calls of a cell, check them and time them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import timing
from .cells import Cell, Inputs, inputs_of
from .providers import provider

#: providers that a result is compared with: the first that computes the cell
PEERS = {"cuda": ("cudnn", "efficient", "flash", "math"), "cpu": ("sdpa",)}
#: passes whose results are compared: ``jvp`` is the forward with its tangent, ``second`` the
#: backward of a backward
PASSES = ("forward", "backward", "both", "jvp", "second")
#: scores that a dense peer may hold
DENSE = {"cuda": 2**29, "cpu": 2**26}


class Task(NamedTuple):
    """A cell, the pass that is timed, and the provider (for a kernel alone: the change)."""

    cell: Cell
    what: str
    provider: str


class Pace(NamedTuple):
    """The device of a worker, and how it times a turn."""

    device: str
    seconds: float  # spent on calls in a turn
    rested: bool = False  # each call after 15 ms of rest, on a GPU


@dataclass
class Ready:
    """A call that has run."""

    task: Task
    call: Any
    heads_first: bool = False
    note: str = ""

    def results(self) -> list[Tensor]:
        """Return out, or gradients of q, k, v ``[B, N, H, D]`` and of the bias."""
        made = self.call()
        made = [made] if torch.is_tensor(made) else [t for t in made or () if t is not None]
        return [
            t.transpose(-3, -2) if self.heads_first and n < 3 else t for n, t in enumerate(made)
        ]


def along(
    what: str, attend: Callable[..., Any], leaves: list[Tensor], dout: Tensor
) -> Callable[[], Any]:
    """Return a call along tangents of q, k and v: a ``jvp``, or the ``second`` backward."""
    tangents = tuple(t.detach().roll(1, -1) for t in leaves)
    if what == "jvp":
        primals = tuple(t.detach() for t in leaves)
        return lambda: torch.func.jvp(attend, primals, tangents)
    dout = dout.requires_grad_()
    first = torch.autograd.grad(attend(*leaves), leaves, dout, create_graph=True)
    return lambda: torch.autograd.grad(first, [*leaves, dout], tangents, retain_graph=True)


class Worker:
    """The calls of one cell, made and timed in this process."""

    def __init__(self, pace: Pace) -> None:
        self.pace, self.device = pace, pace.device
        self.ready: dict[str, Ready] = {}
        self.inputs: tuple[Cell, Inputs] | None = None

    def facts(self) -> dict[str, str]:
        return timing.facts(self.device)

    def prepare(self, name: str, task: Task) -> dict[str, Any]:
        """Prepare a call and run it once; return its facts, or the error."""
        try:
            ready = self.made(task)
            info = {"note": ready.note} | self.first_run(ready)
            timing.wait()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        self.ready[name] = ready
        return info

    def first_run(self, ready: Ready) -> dict[str, Any]:
        """Run a call for the first time, which compiles its kernels; return facts about it."""
        if ready.task.what.endswith("memory") and self.device == "cpu":
            # compile and start threads, but do not touch the memory of the call itself
            short = replace(ready.task.cell, n=256)
            what = ready.task.what.removesuffix("memory").rstrip("-") or "both"
            self.made(Task(short, what, ready.task.provider)).call()
        else:
            ready.call()
        return {}

    def turn(self, name: str) -> float:
        """Return milliseconds, or MiB of a memory pass."""
        call, what = self.ready[name].call, self.ready[name].task.what
        if what.endswith("memory"):
            return (timing.process_mib if self.device == "cpu" else timing.device_mib)(call)
        if what.startswith("host"):
            return timing.host_milliseconds(call)
        return timing.milliseconds(call, self.device, self.pace.rested, self.pace.seconds)

    def check(self, name: str) -> dict[str, Any]:
        """Return the difference from a peer's results, in norm."""
        ready = self.ready[name]
        found: dict[str, Any] = {}
        for peer in self.peers(ready.task):
            try:
                return found | {"off": self.difference(ready, peer), "note": ready.note}
            except Exception as error:  # noqa: PERF203  (the next one may take the cell)
                timing.wait()  # raises an error of the device, which no call after it survives
                found["note"] = f"unchecked: {error}".split("\n")[0][:100]
        return found

    def peers(self, task: Task) -> tuple[str, ...]:
        """Return the providers that may check a result; none if a check has no meaning."""
        cell, what, name = task
        drawn = cell.dropout and not name.startswith("rowmax")  # weights of its own
        if what not in PASSES or name == "none" or drawn:
            return ()
        dense = cell.b * cell.hq * cell.queries * cell.n <= DENSE[self.device]
        return (*self.others(task), "rowmax:reference") if dense else self.others(task)

    def others(self, task: Task) -> tuple[str, ...]:
        """Return the peers of this device; with dropout none, their weights differ.

        Packed cells are checked by others than cuDNN. After cells of 256 and 512 sequences its
        backward of 64 sequences of 64 gave NaN once, and three times an illegal address (H200,
        torch 2.11.0).
        """
        if task.cell.dropout:
            return ()
        left_out = (task.provider, "cudnn") if task.cell.packed else (task.provider,)
        return tuple(x for x in PEERS[self.device] if x not in left_out)

    def difference(self, ready: Ready, peer: str) -> float:
        """Return the largest difference of a result from a peer's, relative in norm."""
        theirs = [t.float() for t in self.made(ready.task._replace(provider=peer)).results()]
        if not all(t.isfinite().all() for t in theirs):
            raise ValueError(f"{peer} has results that are not finite")
        # the gradient of a bias of each query is only rounding: the largest result sets the scale
        norms = torch.tensor([0.0, *(t.norm() for t in theirs)])
        least = 0.2 * norms.max().item()
        both = zip(ready.results(), theirs, strict=True)
        off = [(x.float() - y).norm().cpu() / y.norm().cpu().clamp_min(least) for x, y in both]
        return torch.stack(off).max().item() if off else 0.0

    def release(self) -> None:
        """Drop all calls and inputs."""
        self.ready, self.inputs = {}, None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def made(self, task: Task) -> Ready:
        """Return the call of a task, not yet run."""
        cell = task.cell
        if task.what == "matmul":
            a = torch.randn(cell.n, cell.n, device=self.device, dtype=getattr(torch, cell.dtype))
            return Ready(task, lambda: a @ a)
        return self.attention(task, self.inputs_for(cell))

    def inputs_for(self, cell: Cell) -> Inputs:
        """Return the inputs of a cell, which its calls share."""
        if self.inputs is None or self.inputs[0] != cell:
            self.inputs = cell, inputs_of(cell, self.device)
        return self.inputs[1]

    def attention(self, task: Task, x: Inputs) -> Ready:
        """Return a provider's call, with leaves in the provider's own layout."""
        cell, what, name = task
        chosen, graded = provider(name), what not in ("forward", "host")

        def laid_out(t: Tensor) -> Tensor:
            t = t.detach().transpose(-3, -2) if chosen.heads_first else t.detach()
            return t.contiguous() if self.device == "cpu" else t

        leaves = [laid_out(t).requires_grad_(graded) for t in (x.q, x.k, x.v)]
        wanted, dout = list(leaves), laid_out(x.dout)
        if x.bias is not None:
            x = replace(x, bias=x.bias.detach())
            if graded and cell.dbias and chosen.dbias:
                wanted.append(x.bias.requires_grad_())  # pyright: ignore
        if x.sink is not None:
            sink = x.sink.detach().requires_grad_(graded)
            x = replace(x, sink=sink)
            wanted += [sink] * graded
        attend = chosen.make(cell, x)
        if (second := what.removesuffix("-memory")) in ("jvp", "second"):
            return Ready(task, along(second, attend, leaves, dout), chosen.heads_first)
        out = attend(*leaves) if what == "backward" else None

        def call() -> Any:
            if not graded:
                return attend(*leaves)
            if out is None:
                return torch.autograd.grad(attend(*leaves), wanted, dout)
            return torch.autograd.grad(out, wanted, dout, retain_graph=True)

        note = "without dbias" if graded and cell.dbias and not chosen.dbias else ""
        return Ready(task, call, chosen.heads_first, note)

    def attend(self, task: Task) -> Callable[..., Tensor]:
        """Return a provider's attention of ``[B, N, H, D]`` for a model."""
        chosen = provider(task.provider)
        attend = chosen.make(task.cell, inputs_of(task.cell, self.device))
        if not chosen.heads_first:
            return attend
        return lambda *qkv: attend(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2)


# --- a process of its own ------------------------------------------------------------------------

_worker: Worker


def _begin(pace: Pace) -> None:
    """Make the worker of this process."""
    global _worker
    _worker = Worker(pace)


def _run(method: str, arguments: tuple[Any, ...]) -> Any:
    """Run a method of the worker of this process."""
    return getattr(_worker, method)(*arguments)


class Alone:
    """A worker in a process of its own, which has a peak of memory of its own.

    A method of it runs the method of ``Worker`` there.
    """

    def __init__(self, pace: Pace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _begin, (pace,))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: self._pool.submit(_run, method, arguments).result()

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
