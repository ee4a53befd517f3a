"""Train one layer on one long sequence: 131,072 tokens on a GPU, 8,192 on a CPU.

    python examples/long_context.py                  # causal: every token sees all earlier ones
    python examples/long_context.py --window 1024    # the last 1024 keys, and a sink a head

It prints tokens a second, the peak of memory, and the size of the N x N scores. The last figure is
computed, because rowmax never holds the scores.
"""

import argparse
import resource
import sys
import time

import torch
from torch import Tensor, nn

import rowmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 131_072 if DEVICE == "cuda" else 8_192


class Attention(nn.Module):
    """Causal attention with four query heads a head of keys; a window has a sink as well."""

    def __init__(self, width: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads = (heads, heads // 4, heads // 4)  # numbers of q, k and v
        self.mask = rowmax.Window(left=window, right=0)  # None is no limit: causal
        # a logit in the softmax: a row whose window holds nothing of use can attend to it
        self.sink = None if window is None else nn.Parameter(torch.zeros(heads))
        head_size = width // heads
        self.qkv = nn.Linear(width, sum(self.heads) * head_size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=2)
        return x + self.out(rowmax.attention(q, k, v, mask=self.mask, sink=self.sink).flatten(2))


def peak_bytes() -> int:
    """Return the peak of memory: the GPU's by torch, or that of the whole process on a CPU."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(tokens: int = TOKENS, width: int = 512, window: int | None = None, steps: int = 2):
    """Return the loss of each step, and the gradient of the sink if there is one."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = Attention(width, heads=8, window=window).to(DEVICE, dtype)
    x = torch.randn(1, tokens, width, device=DEVICE, dtype=dtype)
    # to learn: the mean of all tokens so far
    mean = x.float().cumsum(1) / torch.arange(1, tokens + 1, device=DEVICE)[:, None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):  # the first compiles
        start = time.perf_counter()
        loss = (model(x) - mean).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        rate = tokens / (time.perf_counter() - start)
        print(f"step {step}: {tokens:,} tokens, {rate:,.0f} a second, loss {losses[-1]:.4f}")
    scores = 8 * tokens**2 * x.element_size()
    print(f"peak of memory: {peak_bytes() / 2**30:.2f} GiB")
    print(f"the scores of 8 heads alone would take {scores / 2**30:,.5g} GiB (computed)")
    return losses, None if model.sink is None else model.sink.grad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--window", type=int)
    main(**vars(parser.parse_args()))
