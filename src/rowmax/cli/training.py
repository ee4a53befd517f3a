"""Two copies of one model, trained on the same batches, one with rowmax, one with SDPA.

The copies take turns within each step (and take turns at being first), so that whatever else
the machine does falls on both alike.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import rowmax

from .clock import MARGIN, Clock
from .gpt import GPT, Attend, Corpus, Size, write

NAMES = ("rowmax", "SDPA")
SMOOTHING = 20  # steps
NEEDED = 25  # steps, for the bounds of a Plan to mean something
MEASURED = 5  # steps, after which the number of steps is decided; the pace is the same until then
AFTER = 6  # steps of both that the held-out loss, the gradients and the sample take at the end


class Plan(NamedTuple):
    """What is trained, for how long, and how far apart the two runs may be.

    Training is chaotic: rounding alone drives two runs apart, not at once, but more with every
    step. So there are three bounds, all on relative differences. ``near``: the first losses, one
    by one. ``apart``: the whole curves, each the running mean of ``SMOOTHING`` steps.
    ``gradient``: after the training, the gradient of all weights of one of the models, on one
    batch, with either attention (the norm of the difference). The last has no chaos in it.
    """

    size: Size
    rows: int
    steps: int
    bfloat16: bool = False  # by autocast
    near: float = 1e-3
    apart: float = 5e-2  # rounding alone was seen to do 1.4e-2
    gradient: float = 1e-5

    @property
    def work(self) -> float:
        """Return what a step costs: multiplications by weights and of attention."""
        tokens, width = self.rows * self.size.context, self.size.width
        return tokens * self.size.layers * width * (12.0 * width + self.size.context)


@dataclass
class Curve:
    """What one of the models went through."""

    losses: list[float]
    seconds: list[float]  # of each step
    held_out: float = 0.0

    @property
    def smooth(self) -> list[float]:
        """Running mean of the losses."""
        n = min(SMOOTHING, len(self.losses))
        return torch.tensor(self.losses, dtype=torch.float64).unfold(0, n, 1).mean(-1).tolist()


@dataclass
class Training:
    """Both curves, and what the rowmax model writes."""

    plan: Plan
    parameters: int
    corpus_bytes: int
    files: int
    curves: dict[str, Curve]
    gradient: float = 0.0  # the difference of the two gradients of the trained model
    sample: str = ""
    first_call: float = 0.0  # seconds of rowmax's first step, with what is compiled in it
    asked: int = 0  # steps that a machine with time for all of them runs
    smaller: bool = False  # the usual model was too large for the time

    @property
    def steps(self) -> int:
        """Return how many steps each of the models ran."""
        return len(self.curves["rowmax"].losses)

    @property
    def enough(self) -> bool:
        return self.steps >= NEEDED

    @property
    def complete(self) -> bool:
        return self.steps >= self.asked

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """By the median step; the first two of each are not counted."""
        tokens = self.plan.rows * self.plan.size.context
        seconds = {n: c.seconds[2:] or c.seconds for n, c in self.curves.items()}
        return {n: tokens / statistics.median(s) for n, s in seconds.items()}

    @property
    def near(self) -> float:
        """The largest relative difference of the first losses."""
        ours, theirs = (self.curves[name].losses[:SMOOTHING] for name in NAMES)
        return _largest_difference(ours, theirs)

    @property
    def apart(self) -> float:
        """The largest relative difference of the running means."""
        ours, theirs = (self.curves[name].smooth for name in NAMES)
        return _largest_difference(ours, theirs)

    @property
    def ok(self) -> bool:
        """Whether the two agree; a NaN does not."""
        return all(found <= allowed for found, allowed in self.agreement.values())

    @property
    def agreement(self) -> dict[str, tuple[float, float]]:
        """(found, allowed) of each bound."""
        return {
            f"first {SMOOTHING} losses": (self.near, self.plan.near),
            "curves": (self.apart, self.plan.apart),
            "gradients of the trained model": (self.gradient, self.plan.gradient),
        }


def _largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Relative to theirs; NaN where there is one."""
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return ((a - b).abs() / b).max().item()


def plan_for(device: torch.device, steps: int | None, quick: bool) -> Plan:
    """Sized for its device: about 70 seconds on two cores."""
    if quick:
        return Plan(Size(2, 2, 64, 128), rows=4, steps=steps or 30)
    if device.type == "cpu":
        return Plan(Size(4, 2, 128, 512), rows=4, steps=steps or 300)
    size = Size(6, 4, 256, 2048)
    return Plan(size, rows=8, steps=steps or 500, bfloat16=True, near=1e-2, gradient=3e-2)


def plan_within(
    plans: tuple[Plan, ...],
    clock: Clock,
    device: torch.device,
    ours: Attend,
    theirs: Attend | None = None,
) -> Plan | None:
    """Return the first of the plans, each smaller than the one before, that fits; else None.

    A step of the smallest is measured first. It predicts whether a larger one can be measured.
    """
    fewest = NEEDED + AFTER
    smallest = plans[-1]
    pair = pair_seconds(smallest, clock, device, ours, theirs)
    for plan in plans[:-1]:
        if not clock.fits(2 * pair * plan.work / smallest.work):
            continue
        if clock.fits(fewest * pair_seconds(plan, clock, device, ours, theirs)):
            return plan
    # fewer steps than needed are still worth a look at the losses; the verdict says so
    return smallest if clock.fits((2 + AFTER) * pair) else None


def pair_seconds(
    plan: Plan, clock: Clock, device: torch.device, ours: Attend, theirs: Attend | None
) -> float:
    """Return the seconds of one step with each attention, what is compiled in them left out."""
    seconds = 0.0
    x = torch.zeros(plan.rows, plan.size.context, dtype=torch.int64, device=device)
    learners = [
        Learner(GPT(plan.size, attend).to(device), plan)
        for attend in (ours, theirs or standard_attention)
    ]
    for step in range(2):  # the first compiles and loads
        start = clock.now()
        for learner in learners:
            learner.step(pace(step, plan.steps), x, x)
        seconds = clock.now() - start
    return seconds


def rowmax_attention(backend: str | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = rowmax.attention(q, k, v, causal=True, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return attend


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def train(
    plan: Plan,
    corpus: Corpus,
    device: torch.device,
    ours: Attend,
    theirs: Attend = standard_attention,
    seed: int = 0,
    on_step: Callable[[int, int, dict[str, Curve]], None] = lambda step, steps, curves: None,
    clock: Clock | None = None,
) -> Training:
    """Train both; deterministic by the seed (as far as their attention is).

    With a clock, the first steps are measured and decide how many fit. Should the machine become
    slower after that, both models stop after the same step.
    """
    torch.manual_seed(seed)
    first = GPT(plan.size, ours)
    models = {"rowmax": first.to(device), "SDPA": copy.deepcopy(first).use(theirs).to(device)}
    learners = {name: Learner(model, plan) for name, model in models.items()}
    curves = {name: Curve([], []) for name in NAMES}
    generator = torch.Generator().manual_seed(seed)
    clock = Clock(math.inf) if clock is None else clock
    step, steps, pair = 0, plan.steps, 0.0
    while step < steps and (step == 0 or clock.fits((1 + AFTER) * pair)):
        start = clock.now()
        batch = [t.to(device) for t in corpus.batch(plan.rows, plan.size.context, generator)]
        for name in NAMES if step % 2 == 0 else NAMES[::-1]:
            loss, seconds = learners[name].step(pace(step, steps), *batch)
            curves[name].losses.append(loss)
            curves[name].seconds.append(seconds)
        step += 1
        pair = clock.now() - start if step <= 2 else 0.8 * pair + 0.2 * (clock.now() - start)
        if step == MEASURED:
            steps = _affordable(plan.steps, clock, step, pair)
        on_step(step, steps, curves)
    held_out = [t.to(device) for t in corpus.held_out_batch(4 * plan.rows, plan.size.context)]
    for name in NAMES:
        with torch.no_grad():
            curves[name].held_out = learners[name].loss(*held_out).item()
    gradient = _gradient_difference(learners["rowmax"], ours, theirs, *held_out)
    return Training(
        plan._replace(steps=steps),
        first.parameter_count,
        corpus.train.shape[0],
        corpus.files,
        curves,
        gradient=gradient,
        sample=write(models["rowmax"], "def ", 400, seed, lambda: clock.fits(pair)),
        first_call=curves["rowmax"].seconds[0],
        asked=plan.steps,
    )


def _affordable(wanted: int, clock: Clock, done: int, pair: float) -> int:
    """Return how many of the steps fit, at least as many as are needed."""
    if not math.isfinite(clock.left):
        return wanted
    room = clock.left / max(pair, 1e-9) - MARGIN * AFTER
    return min(wanted, max(NEEDED, done + int(0.9 * room)))


def _gradient_difference(
    learner: Learner, ours: Attend, theirs: Attend, x: Tensor, y: Tensor
) -> float:
    """Of all weights' gradients with either attention, relative to theirs."""
    found = []
    for attend in (theirs, ours):
        weights = list(learner.model.use(attend).parameters())
        gradients = torch.autograd.grad(learner.loss(x, y), weights)
        found.append(torch.cat([g.flatten().double() for g in gradients]))
    standard, other = found
    return ((other - standard).norm() / standard.norm()).item()


class Learner:
    """A model and its optimizers: Muon for the matrices within, AdamW for the rest."""

    def __init__(self, model: GPT, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.device = model.embed.weight.device
        within = [p for p in model.blocks.parameters() if p.dim() == 2]
        known = {id(p) for p in within}
        rest = [p for p in model.parameters() if id(p) not in known]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(within, lr=2e-2, weight_decay=0.0), 2e-2),
            (torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0), 1e-2),
        ]

    def step(self, share: float, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Return (loss, seconds) of one step at a share of the learning rates."""
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


def pace(step: int, steps: int) -> float:
    """The share of the learning rate: up in ten steps, down to nothing over the last 60%."""
    return min(1.0, (step + 1) / 10, (steps - step) / (0.6 * steps))
