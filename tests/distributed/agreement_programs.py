"""The functions that ranks run for the tests of agreement."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import rowmax
from rowmax import distributed as rd
from rowmax.distributed import Layout
from rowmax.distributed.strategies import keys as by_keys

from .programs import copies, errors_of, in_stages, mesh_of

attention: Any = importlib.import_module("rowmax.distributed.attention")

_LOCAL_ERRORS: dict[str, Any] = {
    "q": lambda x: {"q": x[:, 1:]},
    "k": lambda x: {"k": x.double()},
    "bias": lambda x: {"bias": torch.zeros(x.shape[1], 3)},
    "causal": lambda x: {"causal": 1},
    "unexpected": lambda x: {"is_causal": True},
    "strategy": lambda x: {"strategy": "rings"},
    "backend": lambda x: {"backend": "hopper"},
    "mask": lambda x: {"mask": rowmax.Documents(torch.zeros(5, dtype=torch.int32))},
}
_UNLIKE: dict[str, Any] = {
    "band of mask": lambda x: {"causal": True},
    "layout": lambda x: {"layout": Layout.contiguous(384, 3)},
    "scale": lambda x: {"scale": 0.5},
    "sink": lambda x: {"sink": torch.zeros(2)},
    "rows of bias": lambda x: {"bias": torch.zeros(1, 384)},
    "dropout_p": lambda x: {"dropout_p": 0.5, "seed": 1},
    "seed": lambda x: {"dropout_p": 0.5},
    "head terms": lambda x: {"alibi": torch.ones(2)},
    "reduce_replicated": lambda x: {"reduce_replicated": True},
    "strategy": lambda x: {"strategy": "heads"},
    "dtype": lambda x: {"q": x.double(), "k": x.double(), "v": x.double()},
}


def refused(
    rank: int, kind: str, name: str, rank_of_it: int | None, shape: tuple[int, ...] = ()
) -> str:
    """Return the error of a call with a wrong argument, on one rank or on all."""
    layout = Layout.zigzag(384, dist.get_world_size())
    x = torch.zeros(1, layout.lengths[rank], 2, 16)
    named: dict[str, Any] = {"q": x, "k": x, "v": x, "layout": layout, "backend": "torch"}
    named |= {"mesh": mesh_of(*shape)} if shape else {}
    if rank_of_it in (None, rank):
        more = (_LOCAL_ERRORS if kind == "local" else _UNLIKE)[name](x)
        if name == "layout":  # the lengths of this rank fit its layout
            n = more["layout"].lengths[rank]
            more |= dict.fromkeys("qkv", torch.zeros(1, n, 2, 16))
        named |= more
    return errors_of([lambda: rd.attention(**named)])[0]


def refused_later(rank: int, name: str) -> tuple[int, str]:
    """Return how often plain calls are checked, and the error of one with a wrong argument."""
    layout = Layout.zigzag(384, dist.get_world_size())
    x = torch.zeros(1, layout.lengths[rank], 2, 16)
    named: dict[str, Any] = {"q": x, "k": x, "v": x, "layout": layout, "scale": 0.123}
    attention._passed.clear()
    with mock.patch.object(attention, "_whole", wraps=attention._whole) as checks:
        for _ in range(3):
            rd.attention(**named)
        rd.attention(**named, strategy="queries")
    wrong = _LOCAL_ERRORS[name](x)
    return checks.call_count, errors_of([lambda: rd.attention(**{**named, **wrong})])[0]


def named(rank: int, strategy: str) -> list[Any]:
    """Return the facts that a named backend checks, of the problem and the wanted gradients."""
    layout, facts = Layout.zigzag(64, dist.get_world_size()), []
    n = layout.lengths[rank]
    x, bias = torch.zeros(1, n, 2, 8), torch.zeros(1, 2, n, 1, requires_grad=True)
    module = sys.modules["rowmax.distributed.attention"]

    def check(problem: Any, name: str, wanted: Any) -> None:
        facts.append((name, problem.part, problem.nq, problem.nk, problem.bias, *wanted))

    options: Any = {"layout": layout, "strategy": strategy, "bias": bias, "backend": "torch"}
    with mock.patch.object(module, "check_named", check):
        rd.attention(x, x, x, **options)
        with torch.no_grad():
            rd.attention(x, x, x, **options)
    return facts


def other_functions(rank: int) -> str:
    """Return the error of a rank that joins rows while others attend."""
    layout = Layout.zigzag(384, 3)
    x = torch.zeros(1, layout.lengths[rank], 2, 8)
    attend = rank != 1
    named: Any = {"layout": layout, "backend": "torch"}
    return errors_of([lambda: rd.attention(x, x, x, **named) if attend else rd.unshard(x, layout)])[
        0
    ]


def unlike_gradients(rank: int) -> str:
    """Return the error of a backward in which one rank needs no gradient of k and v."""
    layout = Layout.zigzag(200, 3)
    q, k = (torch.zeros(1, layout.lengths[rank], 2, 16) for _ in "qk")
    q.requires_grad_()
    k.requires_grad_(rank != 1)
    out: Any = rd.attention(q, k, k, layout=layout, backend="torch")
    return errors_of([lambda: out.sum().backward()])[0]


def with_limit(keys: int, heads: int, seconds: float = 4.0) -> DeviceMesh:
    """Return a mesh of two dimensions whose groups have a time limit: torch's is half an hour."""
    ranks, groups = torch.arange(keys * heads).view(keys, heads), []
    for rows in (ranks.T, ranks):
        each = [dist.new_group(row, timedelta(seconds=seconds)) for row in rows.tolist()]
        groups.append(each[int((rows == dist.get_rank()).nonzero()[0, 0])])
    return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("keys", "heads"))


def killed(rank: int, way: str, shape: tuple[int, ...] = ()) -> str:
    """End one rank before or within a call; return the error that the others see."""
    layout = Layout.zigzag(200, dist.get_world_size())
    x = torch.zeros(1, layout.lengths[rank], 8, 16)
    mesh: Any = with_limit(*shape) if shape else None

    def f() -> Any:
        return rd.attention(x, x, x, layout=layout, mesh=mesh, backend="torch")

    def end(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    dist.barrier()
    if way != "first call":
        f()
    if rank == 1 and way == "raises":
        return "raised"
    if rank == 1 and way != "within":
        end()
    patch = contextlib.nullcontext()
    if rank == 1:  # while rows of the next stage move, and before those of the last
        patch = mock.patch.object(by_keys, "prepared", end)
    with in_stages(4), patch:
        try:
            f()
        except RuntimeError as error:
            return str(error)
    return "no error"


def late(rank: int, repeats: int, way: str, shape: tuple[int, ...] = ()) -> bool:
    """Return True if all repeats have the same bits, with a rank that is late at random."""
    size, draw = dist.get_world_size(), random.Random(rank)
    layout = Layout.zigzag(150, size)
    x = torch.randn(3, 1, 150, 4, 16, generator=torch.Generator().manual_seed(0))
    rows = [t.requires_grad_() for t in x[:, :, layout.positions(rank)].unbind()]
    mesh: Any = mesh_of(*shape) if shape else None
    first: list[Tensor] = []
    with copies(way), in_stages(2):
        for _ in range(repeats):
            out: Any = rd.attention(
                *rows, layout=layout, mesh=mesh, causal=True, deterministic=True, backend="torch"
            )
            if rank == 1 and draw.random() < 0.3:
                time.sleep(draw.random() * 0.004)
            found = [out.detach(), *torch.autograd.grad(out.square().sum(), rows)]
            first = first or found
            if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
                return False
    return True
