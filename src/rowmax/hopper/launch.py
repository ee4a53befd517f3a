"""The host's side: a plan for each shape, descriptors for each call, one launch."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ..problem import Problem, Tensors
from . import packed
from .documents import spans_of
from .gluon_compat import TensorDescriptor
from .kernel import forward as kernel
from .schedule import SECTION_BYTES, dense_table, steps_of
from .tiles import ROWS, Constants, Tile, bias_fits, config_for, packed_heads, tile_for

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_LOG2E = math.log2(math.e)
_MOST_PLANS = 256


class Plan(NamedTuple):
    """All of a launch that its shape decides."""

    tile: Tile
    constants: Constants
    blocks: int
    heads: int  # of a tile: query heads, or kv heads where a tile holds all that share one
    rows: Tensor | None  # the order of the tiles, and each block's end; packed calls make theirs
    ends: Tensor | None
    layouts: tuple[Any, ...]


_PLANS: OrderedDict[Any, Plan] = OrderedDict()


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem that ``supports`` has passed."""
    q = tensors.q
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if out.numel() == 0 or problem.total_k == 0 or problem.nq == 0:
        lse.fill_(-math.inf)
        if tensors.sink is not None:
            lse.copy_(tensors.sink[:, None].expand_as(lse))
        return out.zero_(), lse
    bias = how_bias_comes(problem, tensors)
    with torch.cuda.device(q.device):
        launch(plan_of(problem, q.device, bias), problem, tensors, out, lse)
    return out, lse


def how_bias_comes(problem: Problem, tensors: Tensors) -> str:
    """By TMA where it can: a full row of columns at a time, each row on 16 bytes."""
    bias = tensors.bias
    if bias is None:
        return ""
    full = bias.shape[2] == problem.nq and bias.shape[3] == problem.nk
    return "copied" if full and bias_fits(problem) and takes(bias) else "gathered"


def launch(plan: Plan, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    C, group = plan.constants.config, plan.constants.config.GROUP
    q, k, v = (
        t if takes(t) else t.clone(memory_format=torch.contiguous_format) for t in tensors[:3]
    )
    b, n, h, d = q.shape
    sb, sn, sh, _ = strides(q)
    q_view = ([b, n, h // group, group, d], [sb, sn, sh * group, sh, 1])
    q0, q1 = copies(q, q_view, [1, ROWS // group, 1, group], plan.layouts[0])
    k0, k1 = copies(k, (list(k.shape), strides(k)), [1, C.BLOCK_K, 1], plan.layouts[1])
    v0, v1 = copies(v, (list(v.shape), strides(v)), [1, C.BLOCK_K, 1], plan.layouts[2])

    none = lse  # a pointer that is not looked at
    bias, bias_tiles, bias_strides, each = none, q0, (0, 0, 0, 0), (0, 0)
    if tensors.bias is not None:
        bias = tensors.bias
        each = tuple(int(size > 1) for size in bias.shape[:2])
        bias_strides = tuple(
            s if size > 1 else 0 for s, size in zip(bias.stride(), bias.shape, strict=True)
        )
        if C.BIAS == "copied":
            bias_tiles, _ = copies(
                bias, (list(bias.shape), strides(bias)), [1, 1, ROWS], plan.layouts[3]
            )

    rows, ends, counter = plan.rows, plan.ends, none
    cu_q = cu_k = none
    if problem.varlen:
        assert tensors.cu_seqlens_q is not None
        assert tensors.cu_seqlens_k is not None
        cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        tokens = plan.tile.warpgroups * ROWS // group
        most = packed.most_tiles(problem.total_q, problem.nq, problem.batch, tokens)
        counter = packed.order(cu_q, problem.batch, most, tokens)
        rows, ends = counter[packed.HEADER :], counter[1:]
    spans, q_range, k_range, ids = none, none, none, (0, 0)
    if problem.documents:
        assert tensors.q_ids is not None
        assert tensors.k_ids is not None
        spans, q_range, k_range = spans_of(problem, tensors, C.WARPGROUPS, ROWS // group, C.BLOCK_K)
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        ids = tuple(t.shape[1] if t.shape[0] > 1 else 0 for t in (tensors.q_ids, tensors.k_ids))
    cap = problem.softcap
    scale, inner = (cap, problem.scale / cap) if cap > 0 else (problem.scale, 0.0)
    if not plan.constants.ADDED.value:  # the exponential takes both in at once
        scale *= _LOG2E

    def or_none(t: Tensor | None) -> Tensor:
        return none if t is None else t.contiguous()

    kernel[(plan.blocks,)](
        q0, q1, k0, k1, v0, v1, bias_tiles,
        out, lse,
        rows, ends, counter,
        plan.heads, problem.hk, SECTION_BYTES // (2 * (problem.d + problem.dv)),
        problem.nq, problem.nk, problem.left or 0, problem.right or 0,
        cu_q, cu_k, problem.batch, or_none(tensors.lengths), spans,
        inner, or_none(tensors.alibi), bias, *bias_strides, or_none(tensors.sink),
        or_none(tensors.q_ids), or_none(tensors.k_ids), *ids, q_range, k_range,
        *each,
        scale, problem.hq, 1 if group > 1 else problem.group, problem.total_q,
        plan.constants, *plan.tile.registers, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


# --- what the copy engine is told --------------------------------------------------------------


def copies(t: Tensor, view: Any, box: list[int], layouts: Any) -> tuple[Any, Any]:
    """What copies blocks of t, in one part or two (a head size of 96 is 64 + 32)."""
    (w0, l0), (w1, l1) = layouts
    first = TensorDescriptor(t, *view, [*box, w0], l0)
    return first, TensorDescriptor(t, *view, [*box, w1], l1) if w1 else first


def strides(t: Tensor) -> list[int]:
    """The strides of t, with one that the engine takes where the size is one."""
    row = t.shape[-1] + -t.shape[-1] % 8
    return [s if n > 1 else row for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]


def takes(t: Tensor) -> bool:
    """Whether every row begins on 16 bytes."""
    if t.data_ptr() % 16 or (t.stride(-1) != 1 and t.shape[-1] > 1):
        return False
    each = 16 // t.element_size()
    return all(
        n == 1 or (s > 0 and s % each == 0)
        for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)
    )


def layouts_of(constants: Constants, problem: Problem) -> tuple[Any, ...]:
    """(width, layout) of both parts of q, k, v and the bias."""
    C, dtype = constants.config, DTYPES[problem.dtype]
    q_box, k_box = [1, ROWS // C.GROUP, 1, C.GROUP], [1, C.BLOCK_K, 1]

    def parts(box: list[int], w0: int, w1: int, dtype: Any) -> tuple[Any, Any]:
        return tuple(
            (w, gl.NVMMASharedLayout.get_default_for([*box, w], dtype) if w else None)
            for w in (w0, w1)
        )  # pyright: ignore

    w = [constants.D0.value, constants.D1.value, constants.DV0.value, constants.DV1.value]  # pyright: ignore
    bias = ((0, None), (0, None))
    if C.BIAS == "copied":
        assert problem.bias_dtype is not None
        bias = parts([1, 1, ROWS], C.BLOCK_K, 0, DTYPES[problem.bias_dtype])
    return (
        parts(q_box, w[0], w[1], dtype),
        parts(k_box, w[0], w[1], dtype),
        parts(k_box, w[2], w[3], dtype),
        bias,
    )


# --- plans -------------------------------------------------------------------------------------


def plan_of(problem: Problem, device: torch.device, bias: str) -> Plan:
    key = (problem, device, bias)
    plan = _PLANS.get(key)
    if plan is not None:
        _PLANS.move_to_end(key)
        return plan
    plan = made(problem, device, bias)
    if not torch.cuda.is_current_stream_capturing():
        _PLANS[key] = plan
        if len(_PLANS) > _MOST_PLANS:
            _PLANS.popitem(last=False)
    return plan


def made(
    p: Problem, device: torch.device, bias: str = "", tile: Tile | None = None, **options: Any
) -> Plan:
    """The plan of a problem, or with another tile and other constants, to measure those."""
    tile = tile or tile_for(p, bias)
    group = packed_heads(p, bias)
    constants = Constants(replace(config_for(p, tile, bias, group), **options))
    heads = p.hq // group
    tokens = tile.warpgroups * ROWS // group
    most = torch.cuda.get_device_properties(device).multi_processor_count
    layouts = layouts_of(constants, p)
    if p.varlen:
        blocks = max(1, min(most, packed.most_tiles(p.total_q, p.nq, p.batch, tokens) * heads))
        return Plan(tile, constants, blocks, heads, None, None, layouts)
    steps = steps_of(tokens, tile.block_k, p.nq, p.nk, p.left, p.right)
    if p.documents:  # how long its tiles are only the device knows
        steps = torch.ones_like(steps)
    of_one_head = p.nk * (p.d + p.dv) * 2
    section = max(1, SECTION_BYTES // of_one_head) * (heads // p.hk)
    blocks = min(most, steps.shape[0] * p.batch * heads)
    rows, ends = dense_table(steps, tokens, p.batch, heads, section, blocks)
    if p.documents:
        ends = ends.new_tensor([steps.shape[0] * p.batch * heads])
    return Plan(tile, constants, blocks, heads, rows.to(device), ends.to(device), layouts)
