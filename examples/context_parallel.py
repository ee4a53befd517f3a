"""Train on sequences that are distributed over processes: a mesh of data and context parallelism.

    python examples/context_parallel.py
    torchrun --nproc-per-node 2 examples/context_parallel.py    # NCCL on GPUs, Gloo on CPUs

A process holds rows of a sequence, in two chunks that balance a causal mask. The model does not
know: rowmax.attention computes across processes in the context. --dp groups of processes have
other sequences. The losses are those of one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import rowmax
from rowmax import distributed as rd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(rowmax.attention(q, k, v, causal=True).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def main(steps: int = 10, size: int = 256, width: int = 64, dp: int = 1) -> list[float]:
    """Return the loss of each step over all tokens."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", **alone)
    mesh = init_device_mesh(DEVICE, (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "cp"))
    cp, ranks = mesh["cp"], mesh["cp"].size()
    layout = rd.Layout.zigzag(size, ranks)
    torch.manual_seed(0)  # the same weights and data on every process
    model = nn.Sequential(*(Block(width) for _ in range(2))).to(DEVICE)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)  # weights are cut over cp, and copied over dp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, size, width).chunk(dp)[mesh["dp"].get_local_rank()].to(DEVICE)
    mean = x.cumsum(1) / torch.arange(1, size + 1, device=DEVICE)[:, None]
    x, mean = (rd.shard(t, layout, cp) for t in (x, mean))  # own rows
    losses = []
    for step in range(steps):
        with rd.context_parallel(cp, layout):
            error = (model(x) - mean).square().mean(-1)
        loss = error.sum() / (error.shape[0] * size)  # the sum over cp is that of the sequences
        optimizer.zero_grad()
        (loss * ranks).backward()  # FSDP averages over dp and cp: over cp it should add
        optimizer.step()
        dist.all_reduce(loss.detach())  # in place
        losses.append(loss.item() / dp)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.6f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 10, "size": 256, "width": 64, "dp": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
