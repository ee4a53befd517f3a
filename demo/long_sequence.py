"""One long sequence, forward and backward: its time, its memory, and its errors.

A process of its own measures (``python -m demo.long_sequence``), so that it has its own peak of
memory and can be stopped. It measures a short sequence, then longer ones as long as they are
predicted to fit into the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import rowmax

from .child import Child, read_arguments, report
from .clock import Clock, process_age
from .memory import Memory

CHECKED = 8  # rows and keys whose results are checked
LEAP = 4  # a length is predicted from one that is at most LEAP times shorter
FIRST = 2048  # the shortest length on a CPU


class Shape(NamedTuple):
    """The shape ``[1, n, heads, d]`` of q, k and v, and their dtype."""

    n: int
    heads: int
    d: int
    dtype: str

    @property
    def matrix_bytes(self) -> int:
        """Return the size of a score matrix for each head, in the dtype of the inputs."""
        return self.heads * self.n**2 * getattr(torch, self.dtype).itemsize


class LongSequence(NamedTuple):
    """The measurement of one length."""

    shape: Shape
    device: str
    forward: float  # seconds
    backward: float
    memory: int | None  # bytes beyond the inputs at the peak, results included
    results: int  # bytes of out, lse, dq, dk and dv, which the peak includes
    errors: dict[str, float]  # in checked rows and keys, relative to the definition's norm
    limit: float
    asked: int  # the length that a machine with time for it runs

    @property
    def complete(self) -> bool:
        return self.shape.n >= self.asked

    @property
    def ok(self) -> bool:
        return all(error <= self.limit for error in self.errors.values())


def shape_for(device: torch.device, quick: bool) -> Shape:
    """Return the longest sequence that a device is given, a short one if ``quick``."""
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
) -> LongSequence | None:
    """Measure in a child process; return the longest sequence that fits, or None.

    Raises:
        RuntimeError: the child failed; with its text on stderr.
    """

    def on_line(line: dict | int) -> None:
        if isinstance(line, int):
            on_length(line)

    arguments = (*shape, str(device), backend, seed, seconds)
    with Child("demo.long_sequence", *arguments, on_line=on_line) as child:
        error = child.error() if child.wait(seconds) else None
    if error is not None:
        raise RuntimeError(f"the long sequence failed:\n{error}")
    measured = [line for line in child.lines if isinstance(line, dict)]
    if not measured:
        return None
    last = measured[-1]
    return LongSequence(Shape(*last.pop("shape")), **last)


def measure_lengths(
    shape: Shape,
    measure: Callable[[Shape], LongSequence],
    clock: Clock,
    repeats: int,
    on_length: Callable[[int], None] = lambda n: None,
) -> Iterator[LongSequence]:
    """Yield the measurements of growing lengths, the last of them ``shape.n`` if it fits.

    A measurement runs the calls ``repeats`` times at the full length.
    """
    lengths = [shape.n]
    while lengths[-1] % 2 == 0 and lengths[-1] > max(FIRST, shape.n // 16):
        lengths.append(lengths[-1] // 2)
    n = lengths[-1]
    while n:
        on_length(n)
        start = clock.now()
        measured = measure(shape._replace(n=n))
        yield measured._replace(asked=shape.n)
        calls = repeats * (measured.forward + measured.backward)
        rest = max(0.0, clock.now() - start - calls)
        longer = [m for m in lengths if n < m <= LEAP * n]
        n = next((m for m in longer if clock.fits(calls * (m / n) ** 2 + rest)), 0)


def repeats_for(device: torch.device) -> int:
    """Return the number of calls of a measurement: a GPU's kernels depend on the length."""
    return 1 if device.type == "cpu" else 3


def measure(shape: Shape, device: torch.device, backend: str | None, seed: int) -> LongSequence:
    """Measure forward and backward once, after two calls that compile the kernels."""
    q, k, v, dout = (_normal(shape, device, seed + n) for n in range(4))
    first = 512 if repeats_for(device) == 1 else shape.n
    for _ in range(2):
        run_both(*(t[:, :first] for t in (q, k, v, dout)), backend=backend)
    memory = Memory(device)
    out, lse, gradients, forward, backward = run_both(q, k, v, dout, backend)
    peak = memory.peak()
    results = [out, lse, *gradients]
    return LongSequence(
        shape,
        str(device),
        forward,
        backward,
        peak,
        results=sum(t.numel() * t.itemsize for t in results),
        errors=errors(q, k, v, dout, out, lse, gradients),
        limit={"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}[shape.dtype],
        asked=shape.n,
    )


def _normal(shape: Shape, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    size = (1, shape.n, shape.heads, shape.d)
    dtype = getattr(torch, shape.dtype)
    return torch.randn(size, generator=generator, device=device, dtype=dtype)


def run_both(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, backend: str | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], float, float]:
    """Return out, lse, gradients, and the seconds of forward and of backward."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    times = [_now(q.device)]
    out, lse = rowmax.attention(*leaves, causal=True, return_lse=True, backend=backend)
    times.append(_now(q.device))
    gradients = torch.autograd.grad(out, leaves, dout)
    times.append(_now(q.device))
    return out.detach(), lse.detach(), gradients, times[1] - times[0], times[2] - times[1]


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


# --- errors --------------------------------------------------------------------------------------


def errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, ...],
) -> dict[str, float]:
    """Return errors of some rows and keys against the definition in float64, relative to its norm.

    out, lse and dq of a row are recomputed from the row alone. dk and dv of a key need lse and
    Delta of every row, which are rowmax's.
    """
    n, heads, d = q.shape[1:]
    chosen = torch.linspace(n // 7, n - 1, CHECKED, dtype=torch.int64, device=q.device)
    position = torch.arange(n, device=q.device)
    scale = d**-0.5
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for h in range(heads):
        Q, K, V, dO, O = (t[0, :, h].double() for t in (q, k, v, dout, out))
        S = (scale * Q[chosen] @ K.T).masked_fill(position > chosen[:, None], -torch.inf)
        P = torch.softmax(S, -1)
        o = P @ V
        dS = P * (dO[chosen] @ V.T - (dO[chosen] * o).sum(-1, keepdim=True))
        of_head = {
            "out": (O[chosen], o),
            "lse": (lse[0, h, chosen].double(), torch.logsumexp(S, -1)),
            "dq": (gradients[0][0, chosen, h], scale * dS @ K),
        }
        S = (scale * Q @ K[chosen].T).masked_fill(position[:, None] < chosen, -torch.inf)
        P = torch.exp(S - lse[0, h, :, None].double())
        dS = P * (dO @ V[chosen].T - (dO * O).sum(-1, keepdim=True))
        of_head["dk"] = gradients[1][0, chosen, h], scale * dS.T @ Q
        of_head["dv"] = gradients[2][0, chosen, h], P.T @ dO
        for name, pair in of_head.items():
            pairs.setdefault(name, []).append(pair)
    return {name: _relative_error(of_name) for name, of_name in pairs.items()}


def _relative_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    x, ref = (torch.cat([pair[n].double().flatten() for pair in pairs]) for n in range(2))
    return ((x - ref).norm() / ref.norm()).item()


def main() -> None:
    """Measure in this process, and send each length before it and each measurement after it."""
    n, heads, d, dtype, name, backend, seed, seconds = read_arguments()
    device = torch.device(name)
    clock = Clock(math.inf if seconds is None else seconds, spent=process_age())
    run_one = partial(measure, device=device, backend=backend, seed=seed)
    shape = Shape(n, heads, d, dtype)
    for measured in measure_lengths(shape, run_one, clock, repeats_for(device), report):
        report(measured._asdict())


if __name__ == "__main__":
    main()
