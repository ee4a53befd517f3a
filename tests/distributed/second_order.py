"""A model whose loss has tangents and second derivatives, and its training over ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rowmax

WIDTH, HEADS, TOKENS, ROWS, STEPS = 32, 2, 20, 4, 3


class Layer(nn.Module):
    """Attention, to which its tangent along q is added if ``tangents``."""

    def __init__(self, tangents: bool) -> None:
        super().__init__()
        self.tangents = tangents
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)

        def attend(q: Tensor) -> Tensor:
            return rowmax.attention(q, k, v, causal=True)  # pyright: ignore

        if self.tangents:
            both = torch.func.jvp(attend, (q,), (q.detach().cos(),))
            return self.out(sum(both).flatten(2)).tanh()  # FSDP2 warns of a view
        return self.out(attend(q).flatten(2)).tanh()


def losses(rank: int, kind: str, tangents: bool, ranks: int) -> list[float]:
    """Return the loss of each step over the whole batch, of this rank's part of it.

    Without tangents the loss has a penalty on its slope along x.
    """
    # torch's own: forward mode imports scripted functions
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    torch.manual_seed(0)
    model = Layer(tangents)
    x = torch.randn(ROWS, TOKENS, WIDTH).chunk(ranks)[rank].requires_grad_()
    trained = wrapped(model, kind, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for _ in range(STEPS):
        y = trained(x)
        loss = y.square().mean()
        if not tangents:
            (slope,) = torch.autograd.grad(y.square().sum() / y[0].numel(), x, create_graph=True)
            loss = loss + (TOKENS * slope).square().sum((1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        if kind == "fsdp":
            trained.reshard()  # the optimizer changes the shards
        optimizer.step()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        found.append(total.item() / ranks)
    return found


def wrapped(model: Layer, kind: str, ranks: int) -> Any:
    """Return the model under data parallelism, which averages gradients."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "one":
        return model
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    # the first of two backwards of a step must leave the weights whole
    sharded.set_reshard_after_backward(kind == "fsdp, freed")
    return sharded
