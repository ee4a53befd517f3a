"""Train with FSDP2 and torch.compile, on one process or several.

    python examples/fsdp_compile.py
    torchrun --nproc-per-node 2 examples/fsdp_compile.py    # NCCL on GPUs, Gloo on CPUs

Every process holds a shard of the weights and a part of the batch. The loss is that of one process
with the whole batch. Blocks are compiled in full: rowmax.attention is one operator of their graph.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import rowmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(rowmax.attention(q, k, v, causal=True).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def main(steps: int = 10, size: int = 128, width: int = 128, compiler: str = "inductor"):
    """Return the loss of each step over the whole batch."""
    several = "RANK" in os.environ  # set by torchrun
    rank, ranks, local = (int(os.environ.get(x, x == "WORLD_SIZE")) for x in VARIABLES)
    if DEVICE == "cuda":
        torch.cuda.set_device(local)
    if several:
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights and data on every process
    model = nn.Sequential(*(Block(width, heads=4) for _ in range(2))).to(DEVICE)
    for block in model:
        block.compile(backend=compiler, fullgraph=True)
    for part in (*model, model) if several else ():
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, size, width).chunk(ranks)[rank].to(DEVICE)  # this process's part
    mean = x.cumsum(1) / torch.arange(1, size + 1, device=DEVICE)[:, None]
    losses = []
    for step in range(steps):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = (model(x) - mean).float().square().mean()
        optimizer.zero_grad()
        loss.backward()  # FSDP averages the gradients over the processes
        optimizer.step()
        if several:
            dist.all_reduce(loss.detach())  # in place
        losses.append(loss.item() / ranks)
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}")
    if several:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 10, "size": 128, "width": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compiler", default="inductor")
    main(**vars(parser.parse_args()))
