"""Two copies of one model, trained on the same batches, one with rowmax, one with SDPA.

The copies alternate within each step, and in each step another is first, so that other load on the
machine slows both equally.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import rowmax

from .clock import MARGIN, Clock
from .gpt import GPT, Attend, Corpus, Size
from .learner import Differences, Learner, Plan, learning_rate

NAMES = ("rowmax", "SDPA")
SMOOTHING = 20  # steps
NEEDED = 25  # the fewest steps for which the allowed differences of a Plan are valid
MEASURED = 5  # steps at a constant learning rate, before the number of steps is decided
AFTER = 4  # the time for held-out loss and gradients at the end, in steps of both models


@dataclass
class Curve:
    """The losses and times of one of the models."""

    losses: list[float]
    seconds: list[float]  # time of each step
    held_out: float = 0.0

    @property
    def smooth(self) -> list[float]:
        """Return the running mean of the losses."""
        n = min(SMOOTHING, len(self.losses))
        return torch.tensor(self.losses, dtype=torch.float64).unfold(0, n, 1).mean(-1).tolist()


@dataclass
class Training:
    """Both curves, and how far they and the gradients are apart."""

    plan: Plan
    parameters: int
    corpus_bytes: int
    files: int
    curves: dict[str, Curve]
    gradient: float = 0.0  # the difference of the two gradients of the trained model
    first_call: float = 0.0  # seconds of rowmax's first step, compilation included
    asked: int = 0  # steps that a machine with time for all of them runs
    smaller: bool = False  # the usual model was too large for the time

    @property
    def steps(self) -> int:
        """Return the number of steps of each of the models."""
        return len(self.curves["rowmax"].losses)

    @property
    def enough(self) -> bool:
        return self.steps >= NEEDED

    @property
    def complete(self) -> bool:
        return self.steps >= self.asked

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Return the rate of each model by its median step, without its first two."""
        tokens = self.plan.rows * self.plan.size.context
        seconds = {n: c.seconds[2:] or c.seconds for n, c in self.curves.items()}
        return {n: tokens / statistics.median(s) for n, s in seconds.items()}

    @property
    def differences(self) -> Differences:
        ours, theirs = (self.curves[name] for name in NAMES)
        first = _largest_difference(ours.losses[:SMOOTHING], theirs.losses[:SMOOTHING])
        return Differences(first, _largest_difference(ours.smooth, theirs.smooth), self.gradient)

    @property
    def agreement(self) -> dict[str, tuple[float, float]]:
        """Return (found, allowed) of each difference."""
        names = (f"first {SMOOTHING} losses", "curves", "gradients of the trained model")
        return dict(zip(names, zip(self.differences, self.plan.allowed, strict=True), strict=True))

    @property
    def ok(self) -> bool:
        """Return True if the two agree; a NaN does not."""
        return all(found <= allowed for found, allowed in self.agreement.values())


def _largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference relative to theirs, NaN if either holds one."""
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return ((a - b).abs() / b).max().item()


# --- plans ---------------------------------------------------------------------------------------


def plan_for(device: torch.device, steps: int | None, quick: bool) -> Plan:
    """Return the usual plan of a device: about 40 seconds on two cores."""
    if quick:
        return Plan(Size(2, 2, 64, 128), rows=4, steps=steps or 30)
    if device.type == "cpu":
        return Plan(Size(4, 2, 128, 512), rows=4, steps=steps or 150)
    allowed = Differences(first_losses=1e-2, gradients=3e-2)
    return Plan(Size(6, 4, 256, 2048), rows=8, steps=steps or 500, bfloat16=True, allowed=allowed)


def plan_within(
    plans: tuple[Plan, ...], clock: Clock, device: torch.device, ours: Attend
) -> Plan | None:
    """Return the first of the plans, each smaller than the one before, that fits; else None.

    A step of the smallest is measured first. It predicts whether a larger one can be measured.
    """
    fewest = NEEDED + AFTER
    smallest = plans[-1]
    pair = _pair_seconds(smallest, clock, device, ours)
    for plan in plans[:-1]:
        if not clock.fits(2 * pair * plan.work / smallest.work):
            continue
        if clock.fits(fewest * _pair_seconds(plan, clock, device, ours)):
            return plan
    # fewer steps than needed still show the losses; the verdict names the missing steps
    return smallest if clock.fits((2 + AFTER) * pair) else None


def _pair_seconds(plan: Plan, clock: Clock, device: torch.device, ours: Attend) -> float:
    """Return the seconds of one step with each attention, without compilation."""
    seconds = 0.0
    x = torch.zeros(plan.rows, plan.size.context, dtype=torch.int64, device=device)
    learners = [
        Learner(GPT(plan.size, attend).to(device), plan) for attend in (ours, standard_attention)
    ]
    for step in range(2):  # the first compiles and loads
        start = clock.now()
        for learner in learners:
            learner.step(learning_rate(step, plan.steps), x, x)
        seconds = clock.now() - start
    return seconds


def _affordable(wanted: int, clock: Clock, done: int, pair: float) -> int:
    """Return how many of the steps fit, at least as many as are needed."""
    if not math.isfinite(clock.left):
        return wanted
    room = clock.left / max(pair, 1e-9) - MARGIN * AFTER
    return min(wanted, max(NEEDED, done + int(0.9 * room)))


# --- training ------------------------------------------------------------------------------------


def rowmax_attention(backend: str | None) -> Attend:
    """Return causal attention by rowmax."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = rowmax.attention(q, k, v, causal=True, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return attend


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by SDPA."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def train(
    plan: Plan,
    corpus: Corpus,
    device: torch.device,
    ours: Attend,
    seed: int = 0,
    on_step: Callable[[int, int, dict[str, Curve]], None] = lambda step, steps, curves: None,
    clock: Clock | None = None,
) -> Training:
    """Train both models. The seed determines the result if attention is deterministic.

    With a clock, the first steps are measured and decide how many fit. If the machine becomes
    slower after that, both models stop after the same step.
    """
    torch.manual_seed(seed)
    first = GPT(plan.size, ours)
    second = copy.deepcopy(first).use(standard_attention)
    learners = {"rowmax": Learner(first.to(device), plan), "SDPA": Learner(second.to(device), plan)}
    curves = {name: Curve([], []) for name in NAMES}
    generator = torch.Generator().manual_seed(seed)
    clock = Clock(math.inf) if clock is None else clock
    step, steps, pair = 0, plan.steps, 0.0
    while step < steps and (step == 0 or clock.fits((1 + AFTER) * pair)):
        start = clock.now()
        batch = [t.to(device) for t in corpus.batch(plan.rows, plan.size.context, generator)]
        for name in NAMES if step % 2 == 0 else NAMES[::-1]:
            loss, seconds = learners[name].step(learning_rate(step, steps), *batch)
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
    gradient = _gradient_difference(learners["rowmax"], ours, *held_out)
    return Training(
        plan._replace(steps=steps),
        first.parameter_count,
        corpus.train.shape[0],
        corpus.files,
        curves,
        gradient=gradient,
        first_call=curves["rowmax"].seconds[0],
        asked=plan.steps,
    )


def _gradient_difference(learner: Learner, ours: Attend, x: Tensor, y: Tensor) -> float:
    """Return the difference of all weights' gradients with either attention, relative to SDPA's."""
    gradients = []
    for attend in (standard_attention, ours):
        weights = list(learner.model.use(attend).parameters())
        parts = torch.autograd.grad(learner.loss(x, y), weights)
        gradients.append(torch.cat([g.flatten().double() for g in parts]))
    standard, other = gradients
    return ((other - standard).norm() / standard.norm()).item()
