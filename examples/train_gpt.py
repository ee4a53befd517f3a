"""Train a small byte-level GPT on the source of rowmax: about a minute on a CPU.

    python examples/train_gpt.py
    python examples/train_gpt.py --steps 2000 --width 512 --context 2048    # on a GPU

Every second layer sees a window of keys, the others all earlier ones. Two query heads share a head
of keys and values. Positions are known by ALiBi alone.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Attention and a multilayer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads = (heads, heads // 2, heads // 2)  # numbers of q, k and v
        self.mask = rowmax.Window(left=window, right=0)  # None is no limit: causal
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (sum(self.heads), -1))  # [B, N, H, D]
        q, k, v = qkv.split(self.heads, dim=2)  # views: rowmax takes any strides
        x = x + self.out(rowmax.attention(q, k, v, mask=self.mask, alibi=self.slopes).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def gpt(width: int, window: int, layers: int = 4, heads: int = 4) -> nn.Sequential:
    """Return a model from bytes ``[B, N]`` to logits ``[B, N, 256]``."""
    blocks = (Block(width, heads, None if n % 2 else window) for n in range(layers))
    return nn.Sequential(
        nn.Embedding(256, width), *blocks, nn.RMSNorm(width), nn.Linear(width, 256)
    )


def main(steps: int = 200, width: int = 128, context: int = 256, rows: int = 8) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(0)
    files = sorted(Path(rowmax.__file__).parent.rglob("*.py"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    model = gpt(width, window=context // 4).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - context, (rows, 1))
        batch = text[starts + torch.arange(context + 1)].to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:>4}: loss {losses[-1]:.3f} nats a byte")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 200, "width": 128, "context": 256, "rows": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    main(**vars(parser.parse_args()))
