"""Tile shapes as data: a table for devices that were measured, a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import Problem


@dataclass(frozen=True)
class Tiles:
    """The shape of one kernel's tiles and how many warps and pipeline stages work on it."""

    block_q: int
    block_k: int
    warps: int
    stages: int


def padded(d: int) -> int:
    """The tile width of a head size: a power of two, 16 at least."""
    return max(16, 1 << (d - 1).bit_length())


def tiles_for(job: str, problem: Problem, device: torch.device) -> Tiles:
    return Tiles(64, 64, 4, 2)
