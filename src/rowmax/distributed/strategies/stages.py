"""Stages: the kv heads of a call in parts, so that rows of one part move while another computes.

Heads do not depend on each other. So nothing is merged, and kernels are those of a whole call.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from ..arrivals import arrives
from ..calls import ShardedCall
from ..groups import Group
from ..routes import load_of, sight_of
from ..shared import shares_memory

#: floating-point operations that a GPU computes while one byte arrives. An H100 over NVLink, in
#: bfloat16: 620 TFLOP/s of a backward, 340 GB/s. On other devices only the time differs
PER_BYTE = 1820
#: the kernels of a stage could hide a copy twice as long: copies slow them down
SAFETY = 2
#: the first stage waits for its rows: at most this part of all heads
EXPOSED = 1 / 8
#: tiles of 128 queries that fill a GPU: about two for each of 132 multiprocessors
FULL = 256
#: bytes of a copy that reach most of the rate of the wire
WIDE = 8 << 20
#: bytes of copies that take as long as the calls that stages add, with their launches and last
#: waves: of rows that arrive alone, and with gradients that return. Two H200, 32 query heads of
#: 128, one stage and the best of others, in ms: forward 67 MB 26.5 and 26.9, 268 MB 7.50 and 7.59;
#: backward, whose gradients then returned, 201 MB 76.5 and 76.7, 805 MB 22.5 and 21.9
COST = (512 << 20, 384 << 20)


def stages_of(call: ShardedCall, returns: bool) -> tuple[range, ...]:
    """Return the kv heads of each stage, the same on every rank.

    The rule reads the sizes of the call, its dtype, layouts and band. ``returns`` is True for a
    backward. By collectives gradients return from its stages, and it waits for those of the last.
    """
    own = call.tensors
    if not returns and arrives(call):
        return (range(own.k.shape[2]),)
    returns = returns and not shares_memory(call.group, own.k.device)
    b, _, heads, _ = own.k.shape
    if heads == 1 or not may_hide(call.group, own.k.device):
        return (range(heads),)
    group = own.q.shape[2] // heads
    width = own.k.shape[3] + own.v.shape[3]
    load = load_of(call.queries, call.keys, sight_of(call))
    tiles = b * group * load.chunk / 128
    received = b * load.rows * width * own.k.element_size()
    own_bytes, sums = own.k.element_size(), call.accumulator.itemsize
    moved = heads * received * (own_bytes + returns * sums) / own_bytes
    if not tiles or moved < COST[returns]:
        return (range(heads),)
    least = max(1, round(FULL / tiles), round(WIDE / received))
    growth = 1.0
    if _counted(call):
        # five products of 2 flops a pair; keys and values arrive, their gradients leave in
        # the dtype of sums
        flops = 5 * b * group * load.pairs * width
        both_ways = received * (own_bytes + sums) / own_bytes
        growth = max(1.0, flops / both_ways / PER_BYTE / SAFETY)
    sizes = stage_sizes(heads, least, growth, returns)
    while len(sizes) > 1 + moved / COST[returns]:
        growth *= 1.5
        few = stage_sizes(heads, least, growth, returns)
        sizes = few if growth < heads else (heads,)
    ends = accumulate(sizes, initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def may_hide(group: Group, device: torch.device) -> bool:
    """Return True if copies leave the kernels of a device alone.

    Those of NCCL take multiprocessors from persistent kernels (``shared.py`` has the figures).
    """
    return device.type != "cuda" or shares_memory(group, device)


def stage_sizes(heads: int, least: int, growth: float, returns: bool) -> tuple[int, ...]:
    """Return the number of heads of each stage: as few stages as hide the copies.

    The first stage is small, because its rows hide under nothing. A stage may be ``growth`` times
    as large as the one before it. The last one is small if gradients return from it.

    >>> stage_sizes(8, 1, 10.0, False), stage_sizes(8, 1, 10.0, True)
    ((1, 7), (1, 6, 1))
    >>> stage_sizes(32, 1, 2.5, False), stage_sizes(8, 2, 1.0, True), stage_sizes(8, 5, 9.0, True)
    ((4, 10, 18), (2, 2, 2, 2), (8,))
    """
    if heads < 2 * least:
        return (heads,)
    first = max(least, int(heads * EXPOSED))
    rest = heads - first
    last = first if returns and (rest == first or rest >= 2 * first) else 0
    rest -= last
    sizes = [first]
    while rest:
        size = min(rest, int(growth * sizes[-1]))
        size = rest if rest - size < first else size  # no small one in the middle
        sizes.append(size)
        rest -= size
    return (*sizes, last) if last else tuple(sizes)


def _counted(call: ShardedCall) -> bool:
    """Return True if the band alone limits the pairs, so that the host can count them."""
    own = call.tensors
    limits = (own.k_ids, own.lengths, own.prefix)
    return call.mask_rows == "none" and all(t is None for t in limits)
