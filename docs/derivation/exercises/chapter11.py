"""Exercises of chapter 11: many devices."""

from __future__ import annotations

from typing import NamedTuple

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
    raise NotImplementedError


def merge_with_sink(parts: list[tuple[Tensor, Tensor]], sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over all keys and one sink, from parts without it.

    out is ``[N, D]``, lse ``[N]``, sink one number. A row may have seen no key of any part.
    """
    raise NotImplementedError


def least_tokens(machine: Machine, heads: int, kv_heads: int) -> int:
    """Return the least number of tokens at which the link hides in forward and backward.

    The mask is causal and the layout balanced. Round up to a multiple of the devices.
    """
    raise NotImplementedError
