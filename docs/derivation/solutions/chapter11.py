"""Solutions of chapter 11: many devices."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Machine(NamedTuple):
    """The inputs of the model of section 11.5."""

    devices: int
    forward: float  # operations a second
    backward: float
    link: float  # bytes a second, in each direction


def zigzag(n: int, devices: int) -> list[list[int]]:
    """Return the positions of each device, in increasing order.

    The positions are cut into ``2 * devices`` chunks, whose sizes differ by at most 1, the larger
    ones first. Device d has chunk d and chunk d from the end. A chunk may be empty.
    """
    size, larger = divmod(n, 2 * devices)
    chunks, start = [], 0
    for c in range(2 * devices):
        end = start + size + (c < larger)
        chunks.append(list(range(start, end)))
        start = end
    return [chunks[d] + chunks[2 * devices - 1 - d] for d in range(devices)]


def merge_with_sink(parts: list[tuple[Tensor, Tensor]], sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over all keys and one sink, from parts without it.

    out is ``[N, D]``, lse ``[N]``, sink one number. A row may have seen no key of any part.
    """
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    total = torch.logaddexp(total, sink)
    out = sum(torch.exp(lse - total)[:, None] * out for out, lse in parts)
    assert isinstance(out, Tensor)
    return out, total


def least_tokens(machine: Machine, heads: int, kv_heads: int) -> int:
    """Return the least number of tokens at which the link hides in forward and backward.

    The mask is causal and the layout balanced. Round up to a multiple of the devices.
    """
    c = machine.devices
    ratio = (c - 1) / c * kv_heads / heads / machine.link
    forward, backward = 2 * ratio * machine.forward, 12 / 5 * ratio * machine.backward
    return c * math.ceil(max(forward, backward))
