"""One long sequence, forward and backward: its time, its memory, and whether it is right.

The measurement runs in a process of its own (``python -m rowmax.cli.long``), so that its
peak of memory is its own as well, and so that it can be stopped. It measures a short sequence,
then longer ones as long as they are predicted to fit into the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import rowmax

from .child import Child, arguments, report
from .clock import Clock, age
from .memory import Memory

CHECKED = 8  # rows and keys whose results are checked
LEAP = 4  # a length is predicted from one that is at most so many times shorter
FIRST = 2048  # the shortest length on a CPU


class Shape(NamedTuple):
    n: int
    heads: int
    d: int
    dtype: str

    @property
    def matrix_bytes(self) -> int:
        """One score matrix a head, in the dtype of the inputs."""
        return self.heads * self.n**2 * getattr(torch, self.dtype).itemsize


class Long(NamedTuple):
    """What was measured."""

    shape: Shape
    device: str
    forward: float  # seconds
    backward: float
    memory: int | None  # bytes beyond the inputs at the peak, results included
    results: int  # bytes of out, lse, dq, dk and dv, part of that
    errors: dict[str, float]  # of the rows and keys checked, relative to the definition's norm
    limit: float
    asked: int  # the length that a machine with time for it runs

    @property
    def complete(self) -> bool:
        return self.shape.n >= self.asked

    @property
    def ok(self) -> bool:
        return all(error <= self.limit for error in self.errors.values())


def shape_for(device: torch.device, quick: bool) -> Shape:
    if device.type == "cpu":
        return Shape(4096 if quick else 32768, 4, 64, "float32")
    return Shape(16384 if quick else 262144, 4, 128, "bfloat16")


def run(
    shape: Shape,
    device: torch.device,
    backend: str | None,
    seed: int = 0,
    seconds: float | None = None,
    on_length: Callable[[int], None] = lambda n: None,
) -> Long | None:
    """Measure in a child process; return the longest sequence that fits, or None if none does.

    Raises:
        RuntimeError: the child failed; with what it said.
    """

    def on_line(line: dict | int) -> None:
        if isinstance(line, int):
            on_length(line)

    given = (*shape, str(device), backend, seed, seconds)
    with Child("rowmax.cli.long", *given, on_line=on_line) as child:
        complaint = child.complaint() if child.wait(seconds) else None
    if complaint is not None:
        raise RuntimeError(f"the long sequence failed:\n{complaint}")
    found = [line for line in child.lines if isinstance(line, dict)]
    if not found:
        return None
    last = found[-1]
    return Long(Shape(*last.pop("shape")), **last)


def measured(
    shape: Shape,
    device: torch.device,
    backend: str | None,
    seed: int = 0,
    clock: Clock | None = None,
    before: Callable[[int], None] = lambda n: None,
    measure: Callable[[Shape], Long] | None = None,
) -> Iterator[Long]:
    """Yield what is measured at growing lengths, the last of them that of the shape if it fits."""
    clock = Clock(math.inf) if clock is None else clock
    lengths = [shape.n]
    while lengths[-1] % 2 == 0 and lengths[-1] > max(FIRST, shape.n // 16):
        lengths.append(lengths[-1] // 2)
    n = lengths[-1]
    while True:
        before(n)
        start = clock.now()
        if measure is None:
            found = measure_once(shape._replace(n=n), device, backend, seed)
        else:
            found = measure(shape._replace(n=n))
        yield found._replace(asked=shape.n)
        times = (1 if device.type == "cpu" else 3) * (found.forward + found.backward)
        rest = max(0.0, clock.now() - start - times)
        longer = [m for m in lengths if n < m <= LEAP * n]
        n = next((m for m in longer if clock.fits(times * (m / n) ** 2 + rest)), 0)
        if not n:
            return


def measure_once(shape: Shape, device: torch.device, backend: str | None, seed: int = 0) -> Long:
    """Forward and backward once, after calls that compile what there is to compile."""
    q, k, v, dout = (_normal(shape, device, seed + n) for n in range(4))
    first = 512 if device.type == "cpu" else shape.n  # a GPU's kernels depend on the length
    for _ in range(2):
        _both(*(t[:, :first] for t in (q, k, v, dout)), device=device, backend=backend)
    memory = Memory(device)
    out, lse, gradients, forward, backward = _both(q, k, v, dout, device, backend)
    extra = memory.peak()
    results = [out, lse, *gradients]
    limit = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}[shape.dtype]
    return Long(
        shape,
        str(device),
        forward,
        backward,
        extra,
        sum(t.numel() * t.itemsize for t in results),
        errors(q, k, v, dout, out, lse, gradients),
        limit,
        shape.n,
    )


def _normal(shape: Shape, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    size = (1, shape.n, shape.heads, shape.d)
    dtype = getattr(torch, shape.dtype)
    return torch.randn(size, generator=generator, device=device, dtype=dtype)


def _both(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, device: torch.device, backend: str | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], float, float]:
    """out, lse, gradients, and the seconds of each direction."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    times = [_now(device)]
    out, lse = rowmax.attention(*leaves, causal=True, return_lse=True, backend=backend)
    times.append(_now(device))
    gradients = torch.autograd.grad(out, leaves, dout)
    times.append(_now(device))
    return out.detach(), lse.detach(), gradients, times[1] - times[0], times[2] - times[1]


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


# --- whether it is right -----------------------------------------------------------------------


def errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, ...],
) -> dict[str, float]:
    """Errors of some rows and keys against the definition in float64, relative to its norm.

    Rows need no more than themselves: all of out, lse and dq of a row is recomputed. dk and dv
    of a key take every row's lse and Delta, and those are rowmax's own.
    """
    n, heads, d = q.shape[1:]
    where = torch.linspace(n // 7, n - 1, CHECKED, dtype=torch.int64, device=q.device)
    scale = d**-0.5
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for h in range(heads):
        Q, K, V, dO, O = (t[0, :, h].double() for t in (q, k, v, dout, out))
        position = torch.arange(n, device=q.device)
        S = (scale * Q[where] @ K.T).masked_fill(position > where[:, None], -torch.inf)
        P = torch.softmax(S, -1)
        o = P @ V
        dS = P * (dO[where] @ V.T - (dO[where] * o).sum(-1, keepdim=True))
        pairs = {
            "out": (O[where], o),
            "lse": (lse[0, h, where].double(), torch.logsumexp(S, -1)),
            "dq": (gradients[0][0, where, h], scale * dS @ K),
        }
        S = (scale * Q @ K[where].T).masked_fill(position[:, None] < where, -torch.inf)
        P = torch.exp(S - lse[0, h, :, None].double())
        dS = P * (dO @ V[where].T - (dO * O).sum(-1, keepdim=True))
        pairs["dk"] = gradients[1][0, where, h], scale * dS.T @ Q
        pairs["dv"] = gradients[2][0, where, h], P.T @ dO
        for name, pair in pairs.items():
            found.setdefault(name, []).append(pair)
    return {name: _error(pairs) for name, pairs in found.items()}


def _error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    x, ref = (torch.cat([pair[n].double().flatten() for pair in pairs]) for n in range(2))
    return ((x - ref).norm() / ref.norm()).item()


if __name__ == "__main__":
    n, heads, d, dtype, device, backend, seed, seconds = arguments()
    clock = Clock(math.inf if seconds is None else seconds, spent=age())
    shape = Shape(n, heads, d, dtype)
    for found in measured(shape, torch.device(device), backend, seed, clock, before=report):
        report(found._asdict())
