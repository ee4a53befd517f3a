# ruff: noqa: RET505, SIM102, SIM108, RUF100  (constant branches need an else)
"""Parts of dK and dV: programs that share a tile of keys store one each, a second kernel adds them.

Their order is that of the parts, so that sums are the same in every run.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...call.problem import Problem, Tensors
from .. import lib
from ..launch import Job, JobSpec, launch
from ..tiles import Tiles

#: keys of a program of the second kernel
ADDED_KEYS = 16


@triton.jit
def store_keys(x, part_sums, matrix, value, j0, part, num, cfg, place):
    """Store a gradient of a tile of keys, or a part of it in ``part_sums``, unless x is None."""
    if x is not None:
        if part_sums is None:
            lib.store_keys(x, matrix, value, j0, cfg, place)
        else:
            to = part_sums + part_start(part, matrix, num, cfg)
            lib.store_keys(to, matrix, value, j0, cfg, place)


@triton.jit
def part_start(part, matrix, num, cfg):
    """Return the first element of a part of a gradient ``[parts, B, Nk, Hk, D]``."""
    rows = tl.cast(part, tl.int64) * num.total_k
    if not cfg.PACKED:
        rows *= num.batch
    return rows * (cfg.HQ // cfg.GROUP * matrix.D)


@triton.jit
def add_parts(x, parts, matrix, j0, num, cfg, place):
    """Store the sum of the parts of a gradient of a tile of keys, in their order."""
    if x is not None:
        total = tl.zeros([cfg.BLOCK_K, matrix.BLOCK_D], tl.float32)
        for part in tl.range(0, num.parts):
            at = lib.keys(parts + part_start(part, matrix, num, cfg), matrix, cfg, place)
            total += lib.load_tile(at, matrix, j0, place.nk, cfg.BLOCK_K, True)
        lib.store_keys(x, matrix, total, j0, cfg, place)


@triton.jit(do_not_specialize=["num"])
def add_parts_kernel(ptr, num, cfg):
    """Store dK and dV of a tile of keys of a kv head from their parts."""
    HK: tl.constexpr = cfg.HQ // cfg.GROUP
    tile = tl.program_id(0) % num.tiles
    head = tl.program_id(0) // num.tiles
    kv = head % HK
    place = lib.Place(
        head // HK, kv * cfg.GROUP, kv, 0, 0, 0, num.total_k, num.total_k, 0, 0
    )  # fmt: skip
    j0 = tile * cfg.BLOCK_K
    add_parts(ptr.dk, ptr.dk_parts, num.dk, j0, num, cfg, place)
    add_parts(ptr.dv, ptr.dv_parts, num.dv, j0, num, cfg, place)


ADD_PARTS = JobSpec("add_parts", add_parts_kernel, "keys", ("dk", "dv"), lists=False)


def launch_in_parts(
    spec: JobSpec,
    problem: Problem,
    tensors: Tensors,
    tiles: Tiles | None,
    made: dict[str, Any],
    like: Tensor,
) -> None:
    """Launch a job that stores dk and dv, and add their parts if there are several.

    ``made`` is that of ``launch``; parts have the device and dtype of ``like``.
    """
    of_keys = {name: made[name] for name in ("dk", "dv") if made.get(name) is not None}

    def memory(job: Job) -> dict[str, Tensor]:
        count = job.numbers.parts or 1
        if count == 1:
            return {}
        ends = list(accumulate(count * x.numel() for x in of_keys.values()))
        parts = like.new_empty(ends[-1])
        found = zip(of_keys, [0, *ends], ends, strict=False)
        return {f"{name}_parts": parts[begin:end] for name, begin, end in found}

    ptr = launch(spec, problem, tensors, tiles, made, memory)
    parts = {f"{name}_parts": getattr(ptr, f"{name}_parts") for name in of_keys}
    name = next(iter(of_keys))
    if parts[f"{name}_parts"] is None:
        return
    if problem.varlen:  # all rows are those of one sequence
        sizes = {"nq": problem.total_q, "nk": problem.total_k}
        problem = problem._replace(varlen=False, batch=1, **sizes)
    count = parts[f"{name}_parts"].numel() // of_keys[name].numel()
    added = Tiles(16, ADDED_KEYS, 4, 2, parts=count)
    launch(ADD_PARTS, problem, tensors, added, of_keys | parts)
