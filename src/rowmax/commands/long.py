"""One long sequence, forward and backward: its time, its memory, and whether it is right.

The measurement runs in a process of its own (``python -m rowmax.commands.long``), so that its
peak of memory is its own as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor

import rowmax

from .memory import Memory

CHECKED = 8  # rows and keys whose results are checked


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

    @property
    def ok(self) -> bool:
        return all(error <= self.limit for error in self.errors.values())


def shape_for(device: torch.device, quick: bool) -> Shape:
    if device.type == "cpu":
        return Shape(4096 if quick else 32768, 4, 64, "float32")
    return Shape(16384 if quick else 262144, 4, 128, "bfloat16")


def run(shape: Shape, device: torch.device, backend: str | None, seed: int = 0) -> Long:
    """Measure in a child process.

    Raises:
        RuntimeError: the child failed; with what it said.
    """
    arguments = json.dumps([*shape, str(device), backend, seed])
    command = [sys.executable, "-m", "rowmax.commands.long", arguments]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"the long sequence failed:\n{child.stderr.strip()}")
    found = json.loads(child.stdout.splitlines()[-1])
    return Long(Shape(*found.pop("shape")), **found)


def measure(shape: Shape, device: torch.device, backend: str | None, seed: int = 0) -> Long:
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
    n, heads, d, dtype, device, backend, seed = json.loads(sys.argv[1])
    result = measure(Shape(n, heads, d, dtype), torch.device(device), backend, seed)
    print(json.dumps(result._asdict()))
