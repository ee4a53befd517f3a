"""Few keys: which calls have kernels or tiles of their own, and by which tiles.

In a backward one program holds all keys of a kv head (``triton/short.py``). Memory and registers
bound their number. Where kv heads are fewer than processors, programs share the queries of a kv
head. A forward of few keys differs in its tiles alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..call.problem import Problem, Wanted
from .tiles import BOTH_UP_TO, WGMMA_ROWS, Tiles, kind_of, limits_of, padded, table

#: elements of K, and of V, of a kv head that a program of a backward holds
MOST_ELEMENTS = 256 * 64
#: programs wanted: two for each of 132 processors
PROGRAMS = 264
#: the fewest queries of a part of many
LEAST_QUERIES = 256
#: head sizes and queries of all heads up to which a backward is faster than Hopper's kernels on the
#: device; by (keys that a program holds, with a mask). They end where measurements do (an H200)
MOST_WIDTH = 64
MOST_ROWS = {(64, False): 1 << 19, (128, False): 1 << 18, (128, True): 1 << 14}
#: keys of a forward with tiles of its own, and the tiles of queries of one that is always faster
MOST_KEYS, FEW_TILES = 224, 1056
#: rows of Hopper's tiles of keys, and of those of a forward of few keys
HOPPER_TILE, SMALL_TILE = 128, 32


def tiles_of(problem: Problem, wanted: Wanted | None = None) -> Tiles | None:
    """Return the tiles of a backward of few keys, or None: then other kernels compute it.

    Without ``wanted``, all gradients are. There are tiles for devices that were measured.
    """
    p = problem
    others = (p.bias is not None, p.sink, bool(p.heads)) if wanted is None else wanted[3:]
    if not _is_plain(p) or any(others) or max(p.d, p.dv) > BOTH_UP_TO:
        return None
    height = held_keys(p)
    if height * padded(max(p.d, p.dv, 64)) > MOST_ELEMENTS:
        return None
    found = _measured(f"short-{height}", p)
    return found and replace(found, block_k=height, parts=parts_of(p))


def held_keys(problem: Problem) -> int:
    """Return the rows of a tile that holds all keys."""
    return max(WGMMA_ROWS, padded(problem.nk))


def parts_of(problem: Problem) -> int:
    """Return the number of programs that share the queries of a kv head."""
    heads = max(1, problem.batch * problem.hk)
    return max(1, min(PROGRAMS // heads, problem.nq // LEAST_QUERIES))


def forward_tiles(problem: Problem) -> Tiles | None:
    """Return the tiles of a forward of few keys, or None: then it is as any other.

    Hopper's tiles of 128 keys lose where more than an eighth of their rows are past the last key.
    They lose in the smallest calls too, by the time that a program takes to begin.
    """
    p = problem
    if not _is_plain(p) or max(p.d, p.dv) > MOST_WIDTH:
        return None
    if p.nk > MOST_KEYS or p.nq < WGMMA_ROWS:
        return None
    small = p.batch * p.hq * -(-p.nq // WGMMA_ROWS) <= FEW_TILES
    uneven = 7 * _rounded(p.nk, HOPPER_TILE) >= 8 * _rounded(p.nk, SMALL_TILE)
    return _measured("forward-short", p) if small or (uneven and not p.masked) else None


def deferral(problem: Problem, call: str) -> str | None:
    """Return why Hopper's backend leaves a call of few keys to Triton's, or None."""
    p = problem
    if call == "forward" and forward_tiles(p) is not None:
        return "few keys: triton's tiles are smaller"
    if call != "backward" or max(p.d, p.dv) > MOST_WIDTH or tiles_of(p) is None:
        return None
    if p.batch * p.hq * p.nq > MOST_ROWS.get((held_keys(p), p.masked), 0):
        return None
    return "few keys: triton computes all gradients in one launch"


def _is_plain(p: Problem) -> bool:
    """Return True for sequences of 16-bit numbers on a GPU that are neither packed nor empty."""
    there = p.nk and p.nq and p.batch and p.d and p.dv
    on_gpu = p.device == "cuda" and torch.cuda.is_available()
    return bool(on_gpu and there and p.dtype.itemsize == 2 and not p.varlen)


def _measured(job: str, p: Problem) -> Tiles | None:
    """Return the tiles of a job that were measured on a device like that of the problem."""
    return table(kind_of(job, p), limits_of(torch.device(p.device, p.device_index)))


def _rounded(n: int, unit: int) -> int:
    return -(-n // unit) * unit
