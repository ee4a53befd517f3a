"""The functions that ranks run for the tests of shards."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from rowmax import distributed as rd
from rowmax.distributed import Layout

from .programs import LAYOUTS, errors_of, mesh_of


def round_trips(rank: int, kind: str, ranks: int, shape_of_mesh: tuple[int, ...] = ()) -> bool:
    """Return True if the rows of every shape and dtype come back."""
    mesh = mesh_of(*shape_of_mesh) if shape_of_mesh else None
    for shape, dim in (((3, 50, 2), 1), ((50,), 0), ((2, 3, 4, 50), -1), ((0, 50), 1), ((1, 0), 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            x = (whole % 3 == 0) if dtype == torch.bool else whole.to(dtype)
            layout = LAYOUTS[kind](shape[dim], ranks)
            rows = rd.shard(x, layout, mesh, dim=dim)
            assert torch.equal(rows, x.index_select(dim, layout.positions(rank)))
            assert torch.equal(rd.unshard(rows, layout, mesh, dim=dim), x)
    return True


def dot_products(rank: int, kind: str, ranks: int) -> dict[str, Any]:
    """Return the products of a shard and of a join, and what their derivatives are."""
    layout = LAYOUTS[kind](70, ranks)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 70, 3, generator=generator, dtype=torch.float64) for _ in "xy")
    own = y[:, layout.positions(rank)].clone()

    def cut(t: Tensor) -> Tensor:
        return rd.shard(t, layout)

    def join(t: Tensor) -> Tensor:
        return rd.unshard(t, layout)

    (of_shard,) = torch.autograd.grad(cut(x.requires_grad_()), x, own)
    (of_join,) = torch.autograd.grad(join(own.requires_grad_()), own, x)
    with warnings.catch_warnings():  # torch compiles its decompositions the first time
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        _, tangent = torch.func.jvp(cut, (torch.zeros_like(x),), (x.detach(),))
    (g,) = torch.autograd.grad(cut(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    x, own, tangent = x.detach(), own.detach(), tangent.detach()
    return {
        "whole": float((x * join(own)).sum()),
        "shards": float((cut(x) * own).sum()),
        "tangents": float((tangent * own).sum()),
        "gradient of shard": torch.equal(of_shard, y),
        "gradient of unshard": torch.equal(of_join, x[:, layout.positions(rank)]),
        "second derivative": torch.allclose(second, 6 * x),
    }


def wrong_shards(rank: int) -> list[str]:
    layout = Layout.zigzag(8, 2)
    x: Any = torch.zeros(1, 7)
    mesh = mesh_of(1, 1, 2)
    words: Any = "words"
    return errors_of(
        [
            lambda: rd.shard(x, Layout.zigzag(7, 3)),
            lambda: rd.shard(x, layout),
            lambda: rd.unshard(x, layout),
            lambda: rd.shard(x.tolist(), layout),
            lambda: rd.shard(x, words),
            lambda: rd.shard(x, layout, dim=3),
            lambda: rd.shard(x, layout, mesh),
            lambda: rd.shard(x, layout, words),
        ]
    )


def unlike_shards(rank: int) -> str:
    layout = Layout.zigzag(8, 2)
    return errors_of([lambda: rd.unshard(torch.zeros(3 + rank, 4), layout)])[0]
