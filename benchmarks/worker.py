"""Workers: prepare the calls of a cell, check them and time them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rowmax

from . import timing
from .cells import Cell, Inputs, inputs_of
from .processes import ROOT, Settings, Task
from .providers import provider

#: providers that a result is compared with: the first that computes the cell
PEERS = {"cuda": ("cudnn", "efficient", "flash", "math"), "cpu": ("sdpa",)}
#: passes whose results are compared: ``jvp`` is the forward with its tangent, ``second`` the
#: backward of a backward
PASSES = ("forward", "backward", "both", "jvp", "second")
#: scores that a dense peer may hold
DENSE = {"cuda": 2**29, "cpu": 2**26}


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

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, settings.device
        source = Path(rowmax.__file__ or "").resolve().parents[1]
        if settings.root not in (ROOT, source.parent):
            raise RuntimeError(f"rowmax is imported from {source}, not of {settings.root}")
        adapter = settings.root / "benchmarks" / "variants.py"
        if settings.root != ROOT and adapter.exists():  # private names of that checkout
            spec: Any = importlib.util.spec_from_file_location("benchmarks.variants", adapter)
            sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[spec.name])
        self.variants: Any = importlib.import_module("benchmarks.variants")
        if settings.usual_assembler:
            self.variants.use_usual_assembler()
        self.ready: dict[str, Ready] = {}
        self.inputs: tuple[Cell, Inputs] | None = None

    def facts(self) -> dict[str, str]:
        return timing.facts(self.device)

    def prepare(self, name: str, task: Task) -> dict[str, Any]:
        """Prepare a call and run it once; return its facts, or the error."""
        info: dict[str, Any] = {}
        try:
            ready = self.made(task)
            info["note"] = ready.note
            if task.what == "memory" and self.device == "cpu":
                # compile and start threads, but do not touch the memory of the call itself
                self.made(Task(replace(task.cell, n=256), "both", task.provider)).call()
            elif self.settings.registers:
                info |= self.variants.usage(ready.call)
            else:
                ready.call()
            timing.wait()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        self.ready[name] = ready
        return info

    def turn(self, name: str) -> float:
        """Return milliseconds, or MiB of a memory pass."""
        call, what, s = self.ready[name].call, self.ready[name].task.what, self.settings
        if what == "memory":
            return (timing.process_mib if self.device == "cpu" else timing.device_mib)(call)
        if what.startswith("host"):
            return timing.host_milliseconds(call)
        if what == "step":
            return call.turn()
        return timing.milliseconds(call, self.device, s.rested, s.seconds)

    def check(self, name: str) -> dict[str, Any]:
        """Return the difference from a peer's results, in norm; in training also of losses."""
        ready = self.ready[name]
        found: dict[str, Any] = {}
        if ready.task.what == "step":
            found["losses"] = [x.item() for x in ready.call.losses]
        for peer in self.peers(ready.task):
            try:
                return found | {"off": self.difference(ready, peer), "note": ready.note}
            except Exception as error:  # noqa: PERF203  (the next one may take the cell)
                found["note"] = f"unchecked: {error}".split("\n")[0][:100]
        return found

    def peers(self, task: Task) -> tuple[str, ...]:
        """Return the providers that may check a result; none if a check has no meaning."""
        cell, what, name = task
        if what in self.variants.KERNELS:
            return ("shipped",) if name != "shipped" else ()
        ours = name.startswith("rowmax")
        drawn = cell.dropout and not ours  # weights of its own
        if what not in (*PASSES, "step") or name == "none" or drawn:
            return ()
        dense = cell.b * cell.hq * cell.n**2 <= DENSE[self.device] and what != "step"
        others = tuple(x for x in PEERS[self.device] if x != name and not cell.dropout)
        return (*others, "rowmax:reference") if dense else others

    def difference(self, ready: Ready, peer: str) -> float:
        task = ready.task._replace(provider=peer)
        if task.what == "step":
            return ready.call.gradient_difference(self.attend(task))
        theirs = [t.float() for t in self.made(task).results()]
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
        cell, what, name = task
        if what == "matmul":
            a = torch.randn(cell.n, cell.n, device=self.device, dtype=getattr(torch, cell.dtype))
            return Ready(task, lambda: a @ a)
        if what == "step":
            from .training import Learner

            return Ready(task, Learner(cell, self.attend(task), self.device))
        if self.inputs is None or self.inputs[0] != cell:
            self.inputs = cell, inputs_of(cell, self.device)
        if what in self.variants.KERNELS:
            return Ready(task, self.variants.KERNELS[what][0](cell, self.inputs[1], name))
        return self.attention(task, self.inputs[1])

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
        attend = chosen.make(cell, x)
        if what in ("jvp", "second"):
            return Ready(task, along(what, attend, leaves, dout), chosen.heads_first)
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
