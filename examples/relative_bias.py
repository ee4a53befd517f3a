"""Learn a relative-position bias, bucketed as in T5, in seconds on a CPU.

    python examples/relative_bias.py

The task: name the token three places earlier. The tokens carry no position, so that only the bias
can give the place: the loss falls because rowmax returns the gradient of the bias. Only the bias
and its gradient grow with N x N, for all sequences of a batch together.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RelativeBias(nn.Module):
    """A number a head and a bucket of distances; buckets grow with the distance (Raffel 2020)."""

    def __init__(self, heads: int, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.buckets, self.farthest, self.table = buckets, farthest, nn.Embedding(buckets, heads)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance: half for each sign, half of those one distance."""
        half, exact = self.buckets // 2, self.buckets // 4
        far = distance.abs().clamp(exact, self.farthest - 1)
        growth = (far / exact).log() / math.log(self.farthest / exact)  # 0 to 1
        far = (exact + growth * (half - exact)).long()
        return torch.where(distance.abs() < exact, distance.abs(), far) + half * (distance > 0)

    def forward(self, n: int) -> Tensor:
        at = torch.arange(n, device=self.table.weight.device)
        return self.table(self.bucket(at - at[:, None])).permute(2, 0, 1)  # [H, N, N]


class Model(nn.Module):
    """Tokens ``[B, N]`` to logits ``[B, N, tokens]``, by one layer of attention."""

    def __init__(self, tokens: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.relative = heads, RelativeBias(heads)
        self.embed, self.qkv = nn.Embedding(tokens, width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        bias = self.relative(x.shape[1])  # broadcasts over the batch
        return self.out(rowmax.attention(q, k, v, bias=bias).flatten(2))


def main(steps: int = 200, size: int = 64, tokens: int = 16) -> tuple[list[float], Model]:
    """Return the loss of each step, and the model."""
    torch.manual_seed(0)
    model = Model(tokens).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for step in range(steps):
        x = torch.randint(tokens, (8, size), device=DEVICE)
        loss = F.cross_entropy(model(x)[:, 3:].flatten(0, 1), x[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:>3}: loss {losses[-1]:.3f} of {math.log(tokens):.3f} by chance")
    return losses, model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 200, "size": 64, "tokens": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
