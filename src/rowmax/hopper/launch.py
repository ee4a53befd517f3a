"""The host's side: a plan for each shape, descriptors for each call, one launch."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ..problem import Problem, Tensors
from .gluon_compat import TensorDescriptor
from .kernel import forward as kernel
from .schedule import SECTION_BYTES, dense_table, steps_of
from .tiles import ROWS, TILES, Config, Constants, Tile, padded

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_LOG2E = math.log2(math.e)
_PLANS: OrderedDict[Any, Plan] = OrderedDict()
_MOST_PLANS = 256


class Plan(NamedTuple):
    """All of a launch that its shape decides."""

    tile: Tile
    constants: Constants
    rows: Tensor  # the order of the tiles
    ends: Tensor
    layouts: tuple[Any, ...]


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem that ``supports`` has passed."""
    q = tensors.q
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if out.numel() == 0 or problem.nk == 0:
        return out.zero_(), lse.fill_(-math.inf)
    launch(plan_of(problem, q.device), problem, tensors, out, lse)
    return out, lse


def launch(plan: Plan, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    q, k, v = (copyable(t) for t in (tensors.q, tensors.k, tensors.v))
    C = plan.constants.config
    parts = plan.constants
    group = C.GROUP
    widths = [w.value for w in (parts.D0, parts.D1, parts.DV0, parts.DV1)]
    d0, d1, dv0, dv1 = widths
    q_box = [1, ROWS // group, 1, group]
    k_box = [1, C.BLOCK_K, 1]
    b, n, h, d = q.shape
    sb, sn, sh, _ = strides(q)
    q_shape, q_strides = [b, n, h // group, group, d], [sb, sn, sh * group, sh, 1]
    lay = plan.layouts
    q0 = TensorDescriptor(q, q_shape, q_strides, [*q_box, d0], lay[0])
    q1 = TensorDescriptor(q, q_shape, q_strides, [*q_box, d1], lay[1]) if d1 else q0
    k0, k1 = rows_of(k, k_box, d0, d1, lay[2:4])
    v0, v1 = rows_of(v, k_box, dv0, dv1, lay[4:6])
    kernel[(plan.ends.shape[0],)](
        q0, q1, k0, k1, v0, v1, out, lse, plan.rows, plan.ends,
        problem.nq, problem.nk, problem.left or 0, problem.right or 0,
        problem.hq, 1 if group > 1 else problem.group, problem.total_q,
        problem.scale * _LOG2E,
        plan.constants, *plan.tile.registers, num_warps=4,
    )  # fmt: skip


def rows_of(t: Tensor, box: list[int], w0: int, w1: int, layouts: Any) -> tuple[Any, Any]:
    """What copies blocks of rows of keys or values, in one part or two."""
    shape, stride = list(t.shape), strides(t)
    first = TensorDescriptor(t, shape, stride, [*box, w0], layouts[0])
    return first, TensorDescriptor(t, shape, stride, [*box, w1], layouts[1]) if w1 else first


def strides(t: Tensor) -> list[int]:
    """The strides of t, with one that the copy engine takes where the size is one."""
    row = t.shape[-1] + -t.shape[-1] % 8
    return [s if n > 1 else row for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]


def copyable(t: Tensor) -> Tensor:
    """t, or a copy where the copy engine cannot take it: rows must begin on 16 bytes."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(-1) == 1
    inner = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    if aligned and all(n == 1 or (s > 0 and s % 8 == 0) for n, s in inner):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def plan_of(problem: Problem, device: torch.device) -> Plan:
    key = (problem, device)
    plan = _PLANS.get(key)
    if plan is None:
        plan = made(problem, device)
        if not torch.cuda.is_current_stream_capturing():
            _PLANS[key] = plan
            if len(_PLANS) > _MOST_PLANS:
                _PLANS.popitem(last=False)
    else:
        _PLANS.move_to_end(key)
    return plan


def config_of(problem: Problem) -> tuple[Tile, Config]:
    d, dv = padded(problem.d), padded(problem.dv)
    d = dv = max(d, dv) if (d, dv) not in TILES else 0
    d, dv = (d, dv) if d else (padded(problem.d), padded(problem.dv))
    tile = TILES[(d, dv)]
    return tile, Config(
        D=d,
        DV=dv,
        DV_OUT=problem.dv,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        Q_STAGES=tile.q_stages,
        WARPGROUPS=tile.warpgroups,
        LEFT=problem.left is not None,
        RIGHT=problem.right is not None,
    )


def made(problem: Problem, device: torch.device, tile: Tile | None = None, **options: Any) -> Plan:
    standard, config = config_of(problem)
    tile = tile or standard
    import dataclasses

    config = dataclasses.replace(
        config, BLOCK_K=tile.block_k, STAGES=tile.stages, Q_STAGES=tile.q_stages,
        WARPGROUPS=tile.warpgroups, **options,
    )  # fmt: skip
    group = config.GROUP
    heads = problem.hq // group
    tokens = tile.warpgroups * ROWS // group
    steps = steps_of(tokens, tile.block_k, problem.nq, problem.nk, problem.left, problem.right)
    of_one_head = problem.nk * (problem.d + problem.dv) * 2
    ratio = 1 if group > 1 else problem.group
    section = max(1, SECTION_BYTES // of_one_head) * ratio
    tiles = steps.shape[0] * problem.batch * heads
    blocks = min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)
    rows, ends = dense_table(steps, tokens, problem.batch, heads, section, blocks)
    constants = Constants(config)
    dtype = _DTYPES[problem.dtype]
    w = [x.value for x in (constants.D0, constants.D1, constants.DV0, constants.DV1)]
    q_box, k_box = [1, ROWS // group, 1, group], [1, config.BLOCK_K, 1]
    boxes = [[*q_box, w[0]], [*q_box, w[1]], [*k_box, w[0]], [*k_box, w[1]], [*k_box, w[2]], [*k_box, w[3]]]
    layouts = tuple(gl.NVMMASharedLayout.get_default_for(b, dtype) if b[-1] else None for b in boxes)
    return Plan(tile, constants, rows.to(device), ends.to(device), layouts)
