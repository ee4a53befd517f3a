"""A small byte-level GPT with attention as an argument, and the text to train it on."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: causal attention, ``[B, N, H, D]`` three times -> ``[B, N, H, D]``
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

VOCABULARY = 256


class Size(NamedTuple):
    """The size of a model."""

    layers: int = 4
    heads: int = 2
    width: int = 128
    context: int = 512


class Block(nn.Module):
    """Attention and a feed-forward part, each added to its input."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = size.heads, attend
        self.norm_1 = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.join = nn.Linear(size.width, size.width, bias=False)
        self.norm_2 = nn.RMSNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = rotate(q, angles), rotate(k, angles)
        x = x + self.join(self.attend(q, k, v).flatten(-2))
        return x + self.down(F.relu(self.up(self.norm_2(x))).square())


class GPT(nn.Module):
    """Maps bytes ``[B, N]`` to logits of the next byte ``[B, N, 256]``."""

    angles: Tensor

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size, attend) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.register_buffer("angles", rotary(size), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.zeros_(block.join.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, self.angles[: x.shape[1]])
        return self.head(self.norm(h))

    def use(self, attend: Attend) -> GPT:
        """Set another attention in every block; return the model."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attend = attend
        return self

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def rotary(size: Size) -> Tensor:
    """Return cosines and sines of each position, ``[context, 2, 1, D/2]``.

    RoFormer, arXiv:2104.09864.
    """
    half = size.width // size.heads // 2
    angles = torch.outer(torch.arange(size.context), 1e-4 ** (torch.arange(half) / half))
    return torch.stack([angles.cos(), angles.sin()], 1)[:, :, None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x ``[B, N, H, D]`` with each pair of its components rotated by its position."""
    cos, sin = angles.to(x.dtype).unbind(1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Corpus(NamedTuple):
    """Bytes to train on and bytes held out."""

    train: Tensor
    held_out: Tensor
    files: int

    def batch(self, rows: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and next bytes, each ``[rows, context]``."""
        return _rows(self.train, rows, context, generator)

    def held_out_batch(self, rows: int, context: int) -> tuple[Tensor, Tensor]:
        return _rows(self.held_out, rows, context, torch.Generator().manual_seed(0))


def _rows(
    data: Tensor, rows: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    starts = torch.randint(data.shape[0] - context, (rows, 1), generator=generator)
    window = data[starts + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def standard_library(least: int = 1 << 20) -> Corpus:
    """Return the source of Python's standard library: real text that every machine has.

    Every twentieth file is held out.

    Raises:
        FileNotFoundError: this Python comes without its source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    texts = [path.read_bytes() for path in files]
    if sum(map(len, texts)) < least:
        raise FileNotFoundError(
            f"the demo learns from the source of Python's standard library, but {folder} holds "
            f"{len(files)} .py files; want {least >> 20} MiB of them"
        )
    kept = b"".join(t for n, t in enumerate(texts) if n % 20)
    held_out = b"".join(texts[::20])
    as_bytes = [torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (kept, held_out)]
    return Corpus(*as_bytes, files=len(files))
