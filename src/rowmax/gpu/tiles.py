"""Tile shapes as data: a table of measured ones, a rule from the size of memory for the rest.

A user's call measures nothing. ``rowmax tune`` measures candidates on the current device and keeps
the fastest in the user's cache directory; they take precedence over the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from ..call.problem import Problem
from . import assembler
from .folder import cache_folder, read, write


@dataclass(frozen=True)
class Tiles:
    """The shape of a kernel's tiles, with its warps and pipeline stages."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    split: bool = False  # in a backward: full and partial tiles in separate loops
    parts: int = 0  # number of parts of the keys, of few queries; 0: that of ``parts.py``


@dataclass(frozen=True)
class Kind:
    """The properties of a job that its tiles depend on."""

    job: str
    bytes: int  # size of an element
    d: int  # padded
    dv: int
    masked: bool
    scored: bool  # the score has terms other than q.k
    long: bool = False

    def __str__(self) -> str:
        on = (("m", self.masked), ("s", self.scored), ("l", self.long))
        marks = "".join(c for c, there in on if there)
        return f"{self.job}-{8 * self.bytes}-{self.d}x{self.dv}{'-' + marks if marks else ''}"


@dataclass(frozen=True)
class Limits:
    """The limits of a device for one program."""

    name: str
    shared: int  # bytes
    lanes: int  # threads of a warp
    no_wgmma: bool = False  # in float32: every installed ptxas builds wrong descriptors
    split: bool = False  # float32 products read operands in two halves (tf32x3)
    wgmma: bool = False


#: longer sequences may have separate tiles
LONG = 2048
#: the fewest rows of a wgmma product
WGMMA_ROWS = 64
#: bytes for each row of a tile of queries: LSE and Delta, in at most three stages
VECTORS = 2 * 4 * 2
#: the widest head whose sums of dK and of dV one kernel holds
BOTH_UP_TO = 128


def padded(d: int) -> int:
    """Return the tile width of a head size: a power of two, at least 16."""
    return max(16, 1 << (d - 1).bit_length())


def kind_of(job: str, problem: Problem) -> Kind:
    """Return the Kind of a job of a problem."""
    scored = problem.bias is not None or bool(problem.heads) or problem.softcap > 0
    scored = scored or problem.dropout_threshold > 0
    d, dv, long = padded(problem.d), padded(problem.dv), max(problem.nq, problem.nk) > LONG
    return Kind(job, problem.dtype.itemsize, d, dv, problem.masked, scored, long)


def columns(kind: Kind) -> int:
    """Return the columns of a head that a step of dbias reads: 128 bytes of each row."""
    return min(max(kind.d, kind.dv), 128 // kind.bytes)


def tiles_for(job: str, problem: Problem, device: torch.device) -> Tiles:
    """Return the tiles for a job: the user's, the table's, or the rule's, no longer than needed."""
    return chosen(kind_of(job, problem), limits_of(device), problem)


def chosen(kind: Kind, limits: Limits, problem: Problem) -> Tiles:
    """Return the tiles of a kind on a device with these limits, for a problem of that kind."""
    tiles = user_tiles(limits.name).get(str(kind)) or table(kind, limits)
    if tiles is None or not allowed(kind, tiles, limits):
        # whole operands choose the float32 tiles, too; where the halves of tf32x3 do not fit,
        # tiles shrink below and keep their warps
        tiles = next(candidates(kind, replace(limits, split=False)))
    rows = problem.nq * (problem.group if kind.job == "few" else 1)
    block_q = min(tiles.block_q, padded(max(rows, 1)))
    block_k = min(tiles.block_k, padded(max(problem.nk, 1)))
    tiles = replace(tiles, block_q=block_q, block_k=block_k)
    while limits.split and kind.bytes == 4 and not fits(kind, tiles, limits):
        less = smaller(tiles)
        if less is None:
            break
        tiles = less
    return tiles


def allowed(kind: Kind, tiles: Tiles, limits: Limits) -> bool:
    """Return False for float32 tiles of wgmma that no installed ptxas assembles correctly."""
    return not (limits.no_wgmma and kind.bytes == 4 and wide(tiles))


def wide(tiles: Tiles) -> bool:
    """Return True if a device with wgmma computes the products by it: warps in groups of four."""
    return max(tiles.block_q, tiles.block_k) >= WGMMA_ROWS and tiles.warps % 4 == 0


# --- the device --------------------------------------------------------------------------------


def limits_of(device: torch.device) -> Limits:
    """Return the Limits of a device."""
    if device.type != "cuda":
        return Limits(device.type, 64 << 10, 32)
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _limits(device: int) -> Limits:
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 64 << 10)
    version = torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
    hopper = version == (9, 0)
    return Limits(
        found.name,
        shared or 64 << 10,
        getattr(found, "warp_size", 32),
        no_wgmma=hopper and assembler.choice().taken is None,
        split=version >= (8, 0),
        wgmma=hopper,
    )


# --- measured ----------------------------------------------------------------------------------

#: (job, width of a head) -> tiles of 16-bit elements without a mask, with a mask, and with other
#: terms than q.k: the fastest of some forty candidates whose loops do not spill, in bfloat16 at
#: 4096 tokens, on an H200 with triton 3.6.0. Of heads of 512 three were measured; None: the rule's
_H200: dict[tuple[str, int], tuple[Tiles | None, Tiles | None, Tiles | None]] = {
    ("forward", 64): (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 4), Tiles(128, 64, 8, 3)),
    ("forward", 128): (Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3)),
    ("forward", 256): (Tiles(128, 64, 8, 2),) * 3,
    ("dkdv", 64): (Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 3)),
    ("dkdv", 128): (Tiles(64, 128, 8, 3),) * 3,
    ("dk", 256): (Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 2)),
    ("dv", 256): (Tiles(32, 128, 8, 3), Tiles(64, 128, 8, 2), Tiles(32, 128, 8, 2)),
    ("dq", 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)),
    ("dq", 128): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3, split=True), Tiles(128, 64, 8, 3)),
    ("dq", 256): (Tiles(128, 32, 8, 3), Tiles(128, 32, 8, 3, split=True), Tiles(64, 32, 4, 3)),
    ("dbias", 64): (Tiles(64, 64, 4, 3),) * 3,
    ("dbias", 128): (Tiles(64, 64, 4, 3),) * 3,
    ("forward", 512): (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), None),
    ("dk", 512): (None, Tiles(16, 64, 8, 2), None),
    ("dv", 512): (Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2), None),
    ("dq", 512): (None, Tiles(64, 16, 8, 2), None),
}
#: as ``_H200`` for tangents, not measured: the largest whose loops do not spill, compiled for sm_90
#: with triton 3.6.0; two load up to 11 loop invariants from local memory
_TANGENTS = {
    ("tangent", 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)),
    ("tangent", 128): (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
    ("tangent_dq", 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
    ("tangent_dq", 128): (Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(128, 16, 8, 2)),
    ("tangent_dkdv", 64): (Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 2), Tiles(32, 128, 8, 2)),
    ("tangent_dkdv", 128): (Tiles(32, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(16, 128, 8, 2)),
    ("tangent_dk", 64): (Tiles(32, 128, 8, 3),) * 3,
    ("tangent_dk", 128): (Tiles(32, 128, 8, 2), Tiles(32, 128, 8, 2), Tiles(16, 128, 8, 2)),
    ("tangent_dv", 64): (Tiles(32, 128, 8, 3),) * 3,
    ("tangent_dv", 128): (Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 2)),
}
#: as ``_H200`` for few queries, not measured: four stages, of which three are loaded ahead, 32 KiB
#: of keys and values each. The memory of a processor holds two programs
_FEW = {
    ("few", 64): (Tiles(64, 128, 4, 4),) * 3,
    ("few", 128): (Tiles(64, 64, 4, 4),) * 3,
    ("few", 256): (Tiles(64, 32, 4, 4),) * 3,
}
#: as ``_H200`` for few keys; of backwards, by the number of keys that a program holds. None: not
#: measured, or slower than the tiles of longer sequences
_SHORT: dict[tuple[str, int], tuple[Tiles | None, Tiles | None, Tiles | None]] = {
    ("short-64", 64): (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 3), None),
    ("short-128", 64): (Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 3), None),
    ("short-128", 128): (Tiles(32, 128, 8, 3), Tiles(32, 128, 8, 3), None),
    ("short-256", 64): (Tiles(32, 256, 8, 3), None, None),
    ("forward-short", 64): (Tiles(64, 32, 4, 3), Tiles(64, 64, 4, 2), None),
}
#: faster than the middle one beyond ``LONG``
_H200_LONG = {("dkdv", 128): Tiles(64, 128, 8, 3, split=True)}


def table(kind: Kind, limits: Limits) -> Tiles | None:
    """Return the fastest tiles measured on a device like this one; None if none were."""
    if not any(name in limits.name for name in ("H100", "H200", "GH200")) or kind.bytes != 2:
        return None
    width = max(kind.d, kind.dv, 64)
    found = {**_H200, **_FEW, **_SHORT, **_TANGENTS}.get((kind.job, width))
    if found is None or kind.scored:
        return found and found[2]
    if kind.masked and kind.long:
        return _H200_LONG.get((kind.job, width), found[1])
    return found[kind.masked]


# --- the rule ----------------------------------------------------------------------------------

_SHAPES = {
    "forward": ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4), (64, 32, 4), (32, 32, 4)),
    "few": ((64, 64, 4), (64, 32, 4), (32, 32, 4)),
    "dkdv": ((64, 128, 8), (64, 64, 8), (64, 64, 4), (32, 64, 4), (32, 32, 4)),
    "dk": ((64, 64, 4), (32, 64, 4), (32, 32, 4)),
    "dv": ((64, 64, 4), (32, 64, 4), (32, 32, 4)),
    "dq": ((128, 64, 8), (64, 64, 8), (64, 64, 4), (64, 32, 4), (32, 32, 4)),
    "dheads": ((128, 64, 8), (64, 64, 8), (64, 64, 4), (64, 32, 4), (32, 32, 4)),
    "dbias": ((128, 64, 8), (64, 64, 4), (32, 64, 4), (32, 32, 4)),
    "row_sums": ((128, 64, 8), (64, 64, 8), (64, 64, 4), (64, 32, 4), (32, 32, 4)),
    "delta": ((64, 16, 4), (32, 16, 4), (16, 16, 4)),
    "tangent": ((128, 64, 8), (128, 32, 8), (64, 32, 8), (64, 16, 8), (32, 32, 8), (32, 16, 8)),
    "tangent_dq": ((128, 32, 8), (64, 64, 8), (64, 32, 8), (64, 16, 8), (32, 32, 8), (32, 16, 8)),
    "tangent_dkdv": ((32, 128, 8), (32, 64, 8), (16, 64, 8), (32, 32, 8), (16, 32, 8)),
    "tangent_dk": ((32, 128, 8), (32, 64, 8), (16, 64, 8), (32, 32, 8), (16, 32, 8)),
    "tangent_dv": ((32, 128, 8), (32, 64, 8), (16, 64, 8), (32, 32, 8), (16, 32, 8)),
    "tangent_dheads": ((64, 64, 8), (64, 32, 8), (64, 32, 4), (32, 32, 4)),
    "tangent_dbias": ((64, 64, 8), (32, 64, 4), (32, 32, 4)),
    "tangent_rows": ((64, 16, 4), (32, 16, 4), (16, 16, 4)),
}
_LAST = ((32, 16, 4), (16, 32, 4), (16, 16, 4), (16, 16, 8))


def candidates(kind: Kind, limits: Limits) -> Iterator[Tiles]:
    """Yield tiles that fit the device, the rule's choice first; last the smallest, untested."""
    for block_q, block_k, warps in _SHAPES[kind.job] + _LAST:
        for stages in (2, 3):
            tiles = Tiles(block_q, block_k, warps, stages)
            if fits(kind, tiles, limits) and allowed(kind, tiles, limits):
                yield tiles
    yield Tiles(16, 16, 4, 2)


def fits(kind: Kind, tiles: Tiles, limits: Limits) -> bool:
    """Return True if shared memory holds the tiles and registers hold the sums and scores."""
    bq, bk, both = tiles.block_q, tiles.block_k, kind.d + kind.dv
    streamed, resident, sums, scores = {
        "forward": (bk * both, bq * kind.d, bq * kind.dv, 1),
        "few": (bk * both, bq * kind.d, bq * kind.dv, 1),
        "dkdv": (bq * both, bk * both, bk * both, 2),
        "dk": (bq * both, bk * both, bk * kind.d, 2),
        "dv": (bq * both, bk * kind.d, bk * kind.dv, 1),
        "dq": (bk * both, bq * both, bq * kind.d, 2),
        "dheads": (bk * both, bq * both, 0, 2),
        "dbias": (2 * (bq + bk) * columns(kind), 0, bq * bk, 2),
        "row_sums": (bk * kind.d, bq * kind.d, 0, 1),
        "delta": (0, 0, 2 * bq * kind.dv, 1),
        "tangent": (2 * bk * both, 2 * bq * kind.d, 2 * bq * kind.dv, 2),
        "tangent_dq": (2 * bk * both, 2 * bq * both, 2 * bq * kind.d, 4),
        "tangent_dkdv": (2 * bq * both, 2 * bk * both, bk * max(both, min(2 * both, 256)), 4),
        "tangent_dk": (2 * bq * both, 2 * bk * both, 2 * bk * kind.d, 4),
        "tangent_dv": (2 * bq * both, 2 * bk * kind.d, 2 * bk * kind.dv, 2),
        "tangent_dheads": (2 * bk * both, 2 * bq * both, 0, 4),
        "tangent_dbias": (4 * (bq + bk) * columns(kind), 0, 2 * bq * bk, 4),
        "tangent_rows": (0, 0, 2 * bq * kind.dv, 1),
    }[kind.job]
    threads = tiles.warps * limits.lanes
    ahead = kind.scored and not kind.job.endswith("dbias")  # a bias is prefetched too
    loaded = kind.bytes * tiles.stages * streamed + 4 * ahead * tiles.stages * bq * bk
    shared = loaded + kind.bytes * (resident + bq * bk)
    if limits.split and kind.bytes == 4:
        if limits.wgmma and wide(tiles):
            # as measured: a resident tile has two halves, and narrow tiles do not pack with wide
            side = bq if kind.job.endswith(("dkdv", "dk", "dv")) else bk
            packed = 2 * resident + side * abs(kind.d - kind.dv) - ahead * bq * bk
            shared = loaded + 4 * packed + VECTORS * side
        else:
            halves = 4 * bq * bk * (kind.job in ("forward", "few", "tangent"))
            shared = max(shared + halves, loaded // 2 + 8 * resident + VECTORS * bq)
    return shared <= limits.shared and (sums + scores * bq * bk) / threads <= held(
        kind, tiles, limits
    )


def held(kind: Kind, tiles: Tiles, limits: Limits) -> int:
    """Return the numbers of sums and scores that the registers of a thread hold.

    Kernels of tangents have more operands. As compiled, their loops spill beyond these numbers.
    """
    if not kind.job.startswith("tangent") or kind.job == "tangent_rows":
        return 200
    by_wgmma = limits.wgmma and wide(tiles)
    if kind.bytes == 4:
        return 56 if by_wgmma else 35
    return 200 if by_wgmma else 70


def smaller(tiles: Tiles) -> Tiles | None:
    """Return the next tiles to try where some do not fit: fewer stages, then half the longer side.

    Never one stage: V then replaces K in shared memory, and ptxas 12.8.93 builds three of V's four
    wgmma descriptors from registers that do not hold the address (bfloat16, head sizes 32 and 64
    with values of 16: wrong results on an H200; correct with 12.9.86).
    """
    if tiles.stages > 2:
        return replace(tiles, stages=tiles.stages - 1)
    if max(tiles.block_q, tiles.block_k) <= 16:
        return None
    if tiles.block_q >= tiles.block_k:
        return replace(tiles, block_q=tiles.block_q // 2, stages=2)
    return replace(tiles, block_k=tiles.block_k // 2, stages=2)


# --- tuned by the user -------------------------------------------------------------------------


def cache_file() -> Path:
    """Return the file of tuned tiles, in ``$ROWMAX_CACHE`` or the user's cache directory."""
    return cache_folder() / "tiles.json"


@lru_cache(maxsize=8)
def user_tiles(device: str) -> dict[str, Tiles]:
    """Return the tiles that ``rowmax tune`` stored for the device of this name."""
    try:
        found = read(cache_file())
    except RuntimeError:  # this user has no home
        return {}
    return {kind: Tiles(*shape) for kind, shape in found.get(device, {}).items()}


def keep(device: str, found: dict[str, Tiles]) -> Path:
    """Add tiles to the file of all devices and kinds; return the file.

    Later calls in any process use them.

    Raises:
        OSError: the file cannot be written; with its name and how to choose another folder.
    """
    try:
        path = cache_file()
        everything = read(path)
        shapes = {kind: list(astuple(t)) for kind, t in found.items()}
        everything[device] = {**everything.get(device, {}), **shapes}
        write(path, everything, indent=1)
    except (OSError, RuntimeError) as error:
        want = "set ROWMAX_CACHE to a folder that can be written"
        raise OSError(f"tuned tiles cannot be kept: {error}; {want}") from error
    user_tiles.cache_clear()
    return path
