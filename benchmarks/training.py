"""Training steps of a small GPT on bytes, with one attention: autocast to bfloat16, fused AdamW.

A step is forward, loss, backward and optimizer. Every provider has a copy of the model and takes
the same steps, so that losses can be compared. The provider ``none`` computes nothing: the time of
a step beyond it is the attention's share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demo.gpt import GPT, Size, standard_library
from rowmax.bench.cells import Cell
from rowmax.bench.providers import Attend
from rowmax.bench.timing import wait

#: bounds of bfloat16's error (8 bits) in a loss of all tokens, and in a gradient of weights
NEAR, GRADIENT = 2**-7, 3e-2
WARM_UP = 3  # steps in which kernels compile
STEPS = 5  # steps of a turn

#: the inputs and the next bytes of a step
Batch = tuple[Tensor, Tensor]


class Learner:
    """A model with one attention, its optimizer, and the losses of its steps."""

    def __init__(self, cell: Cell, attend: Attend, device: str) -> None:
        width = cell.hq * cell.d
        torch._dynamo.config.recompile_limit = 64  # a model for each attention
        torch.manual_seed(0)
        with torch.device(device):
            self.plain = GPT(Size(cell.layers, cell.hq, width, cell.n), attend)
            for block in self.plain.blocks:  # not zero: attention matters from the first step
                torch.nn.init.normal_(block.join.weight, std=width**-0.5)
            torch.nn.init.normal_(self.plain.head.weight, std=0.1 * width**-0.5)
        self.attend, self.cell, self.device = attend, cell, device
        self.model = torch.compile(self.plain, dynamic=False) if cell.compiled else self.plain
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=3e-4, fused=True)
        self.corpus, self.generator = standard_library(), torch.Generator().manual_seed(0)
        self.losses: list[Tensor] = []

    def batch(self) -> Batch:
        x, y = self.corpus.batch(self.cell.b, self.cell.n, self.generator)
        return x.to(self.device), y.to(self.device)

    def __call__(self) -> None:
        self.turn(WARM_UP)

    def turn(self, steps: int = STEPS) -> float:
        """Return the milliseconds of a step; wait for the device only before and after the turn."""
        batches = [self.batch() for _ in range(steps)]
        wait()
        start = time.perf_counter()
        for batch in batches:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        wait()
        return 1e3 * (time.perf_counter() - start) / steps

    def gradient_difference(self, peer: Attend) -> float:
        """Return the relative difference of this model's gradients from a peer's, in norm.

        The largest of q, k and v, all layers at once. Nearly all of these gradients comes through
        the attention; in a norm over all weights it would be negligible.
        """
        batch, found = self.batch(), []
        weights = [block.qkv.weight for block in self.plain.blocks]
        for attend in (self.attend, peer):
            loss = loss_of(self.plain.use(attend), batch)
            gradients = torch.stack(torch.autograd.grad(loss, weights))
            found.append(gradients.unflatten(1, (3, -1)).transpose(0, 1).flatten(1))
        self.plain.use(self.attend)
        ours, theirs = found
        return ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max().item()


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch, under autocast to bfloat16."""
    x, y = batch
    with torch.autocast(x.device.type, torch.bfloat16):
        logits: Any = model(x)
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
