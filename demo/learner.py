"""Training steps of one model: Muon for the matrices within, AdamW for the rest."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .gpt import GPT, Size


class Differences(NamedTuple):
    """Relative differences of two training runs, found or allowed.

    Training is chaotic: rounding alone makes two runs diverge, more with every step. Gradients of
    one model are not chaotic.
    """

    first_losses: float = 1e-3  # difference of each of the first losses
    curves: float = 5e-2  # difference of running means of the losses; rounding caused 1.4e-2
    gradients: float = 1e-5  # norm of the difference, over all weights of the trained model


class Plan(NamedTuple):
    """The model, the steps, and the differences that are allowed."""

    size: Size
    rows: int
    steps: int
    bfloat16: bool = False  # by autocast
    allowed: Differences = Differences()

    @property
    def work(self) -> float:
        """Return the cost of a step: multiplications by weights and of attention."""
        tokens, width = self.rows * self.size.context, self.size.width
        return tokens * self.size.layers * width * (12.0 * width + self.size.context)


class Learner:
    """A model and its optimizers."""

    def __init__(self, model: GPT, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.device = model.embed.weight.device
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        known = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in known]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.0), 2e-2),
            (torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0), 1e-2),
        ]

    def step(self, share: float, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Take a step at a share of the learning rates; return (loss, seconds)."""
        self.wait()
        start = time.perf_counter()
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        for optimizer, _ in self.optimizers:
            optimizer.step()
        self.wait()
        return loss.item(), time.perf_counter() - start

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.precision():
            logits = self.model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def precision(self) -> AbstractContextManager:
        if not self.plan.bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the full rate: up in ten steps, down to 0 over the last 60 %."""
    return min(1.0, (step + 1) / 10, (steps - step) / (0.6 * steps))
