"""Whole training steps of a small GPT, with each attention in turn, in one run.

    python -m benchmarks.training_step --out results.csv [--heads 8] [--rows 2] [--compile]

The byte-level model of the demo: 12 layers, heads of 128, N 8192, causal; autocast to bfloat16
over float32 weights, fused AdamW, text of Python's standard library. A step is forward, loss,
backward and optimizer; tokens a second. Every attention has a copy of the model of its own, and
all take the same steps. They take turns, with pauses between, since the card slows down as it
warms; the median of the turns is kept. "none" hands v on and costs nothing: no attention can be
faster, and what a step takes beyond it is the attention's share.

All must learn the same: the losses of every step agree to ``NEAR``, and the gradients of what makes
q, k and v in one of the trained models, by any attention, to ``GRADIENT``; both are relative to
cuDNN's. If not, the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import rowmax
from demo.gpt import GPT, Attend, Size, standard_library

#: what bfloat16 (8 bits) may move in a loss of all tokens, and in a gradient of many weights
NEAR, GRADIENT = 2**-7, 3e-2
WARM_UP = 3  # steps, in which all is compiled

COLUMNS = (
    "implementation", "tokens_per_second", "ms", "attention_share", "last_loss", "losses_apart",
    "gradients_apart", "layers", "heads", "head_size", "tokens", "rows", "compiled", "device",
    "versions", "date",
)  # fmt: skip

#: the inputs and the next bytes of a step
Batch = tuple[Tensor, Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rowmax.attention(q, k, v, causal=True)  # pyright: ignore


def of_torch(kind: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(kind):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


def of_flex(n: int, device: str) -> Attend:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return compiled(q, k, v, block_mask=mask).transpose(1, 2)

    return attend


class Nothing(torch.autograd.Function):
    """v, with a gradient for q and k too, so that all around the attention is done as ever."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.view_as(v)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dout, dout, dout


def attentions(n: int, device: str) -> dict[str, Attend]:
    """By name; the first is what the others are set beside."""
    if device == "cpu":  # to check this file
        theirs = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
        return {**{name: of_torch(x) for name, x in theirs.items()}, "rowmax": ours}
    return {
        "cudnn": of_torch(SDPBackend.CUDNN_ATTENTION),
        "fa2": of_torch(SDPBackend.FLASH_ATTENTION),
        "flex": of_flex(n, device),
        "rowmax": ours,
    }


class Learner:
    """A copy of the model with one attention, and what its steps gave."""

    def __init__(self, model: GPT, attend: Attend, compiled: bool) -> None:
        self.plain = copy.deepcopy(model).use(attend)
        self.model = torch.compile(self.plain, dynamic=False) if compiled else self.plain
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=3e-4, fused=True)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []  # of a step, by turn

    def turn(self, batches: list[Batch]) -> None:
        """A step for each batch; the device is waited for at both ends alone."""
        wait()
        start = time.perf_counter()
        for batch in batches:
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        wait()
        self.seconds.append((time.perf_counter() - start) / len(batches))


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    x, y = batch
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def trained(
    model: GPT, attends: dict[str, Attend], batches: Iterator[Batch], options: argparse.Namespace
) -> dict[str, Learner]:
    """Every attention's learner after all of its turns; without those that cannot run."""
    learners = {name: Learner(model, x, options.compile) for name, x in attends.items()}
    first = [next(batches) for _ in range(WARM_UP)]
    for name in list(learners):
        start = time.perf_counter()
        try:
            learners[name].turn(first)
        except RuntimeError as error:
            if name == "rowmax":
                raise
            print(f"{name} cannot run: {str(error)[:200]}")
            del learners[name]
            continue
        learners[name].seconds.clear()
        print(f"{name}: first {WARM_UP} steps {time.perf_counter() - start:.1f} s", flush=True)
    names = list(learners)
    for turn in range(options.turns):
        more = [next(batches) for _ in range(options.steps)]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(0.3)
            learners[name].turn(more)
    return learners


def loss_differences(learners: dict[str, Learner]) -> dict[str, float]:
    """The largest of any step, relative to the first learner's loss."""
    losses = {name: torch.stack(x.losses).double().cpu() for name, x in learners.items()}
    first = next(iter(losses.values()))
    return {name: ((x - first).abs() / first).max().item() for name, x in losses.items()}


def gradient_differences(model: GPT, attends: dict[str, Attend], batch: Batch) -> dict[str, float]:
    """In norm, relative to the first attention's: the largest of q, k and v, all layers at once.

    Of the weights that make q, k and v: nearly all of what they learn comes through the
    attention, which in a norm over all weights would hardly count.
    """
    weights = [block.qkv.weight for block in model.blocks]
    found = {}
    for name, attend in attends.items():
        gradients = torch.autograd.grad(loss_of(model.use(attend), batch), weights)
        found[name] = torch.stack(gradients).unflatten(1, (3, -1)).transpose(0, 1).flatten(1)
    first = next(iter(found.values()))
    return {n: ((g - first).norm(dim=1) / first.norm(dim=1)).max().item() for n, g in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("training_step.csv"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192, help="of a row")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--compile", action="store_true", help="the whole model, by torch.compile")
    parser.add_argument("--only", default="", help="names of attentions, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # a model for each attention
    torch.manual_seed(0)
    width = options.heads * options.head_size
    size = Size(options.layers, options.heads, width, options.tokens)
    attends = attentions(options.tokens, options.device)
    if options.only:
        attends = {name: attends[name] for name in options.only.split(",")}
    with torch.device(options.device):
        model = GPT(size, ours)
        for block in model.blocks:  # not zero as it is made: attention counts from the first step
            torch.nn.init.normal_(block.join.weight, std=width**-0.5)
        torch.nn.init.normal_(model.head.weight, std=0.1 * width**-0.5)
    corpus, generator = standard_library(), torch.Generator().manual_seed(0)

    def batches() -> Iterator[Batch]:
        while True:
            x, y = corpus.batch(options.rows, options.tokens, generator)
            yield x.to(options.device), y.to(options.device)

    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    versions = f"torch {torch.__version__} triton {triton.__version__}"
    about = [device, versions, datetime.date.today().isoformat()]
    shape = [*size[:2], options.head_size, options.tokens, options.rows, options.compile]
    print(f"{about}, {size}, {options.rows} rows, {model.parameter_count / 1e6:.0f} M weights")
    learners = trained(model, {"none": Nothing.apply, **attends}, batches(), options)
    none = learners.pop("none")
    least = statistics.median(none.seconds)
    losses = loss_differences(learners)
    attends = {name: attends[name] for name in learners}
    first = next(iter(learners.values())).plain
    gradients = gradient_differences(first, attends, next(batches()))
    with options.out.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for name, learner in {"none": none, **learners}.items():
            seconds = statistics.median(learner.seconds)
            row = [f"{options.rows * options.tokens / seconds:.0f}", f"{1e3 * seconds:.2f}"]
            row += [f"{1 - least / seconds:.3f}", f"{learner.losses[-1].item():.4f}"]
            row += [f"{x[name]:.1e}" if name in x else "" for x in (losses, gradients)]
            rows.writerow([name, *row, *shape, *about])
            print(
                f"{name:8} {row[0]:>8} tokens/s  {row[1]:>8} ms  attention {row[2]}  "
                f"loss {row[3]}  apart: losses {row[4]}, gradients {row[5]}"
            )
    right = all(x <= NEAR for x in losses.values())
    right &= all(x <= GRADIENT for x in gradients.values())
    print("all learn the same" if right else f"NOT the same: bounds {NEAR}, {GRADIENT}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
