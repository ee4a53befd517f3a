"""The host's side: a plan for each shape, made once; then pointers, and one launch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...call.problem import Problem, Tensors
from .. import compat
from ..compiled import Launch
from . import packed
from .copies import Copies, copies_of, over, taken, takes
from .documents import spans_of
from .gluon_compat import GluonASTSource
from .kept import Plans
from .kernel import Numbers, Pointers
from .kernel import forward as kernel
from .schedule import SECTION_BYTES, dense_table, steps_of
from .tiles import (
    LONG_64,
    LONG_64_SPILLS,
    ROWS,
    Config,
    Constants,
    Tile,
    bias_fits,
    config_for,
    packed_heads,
    tile_for,
)

_LOG2E = math.log2(math.e)
_MOST_PLANS = 256


class GluonLaunch(Launch):
    source = GluonASTSource


class Plan(NamedTuple):
    """All of a launch that its shape and its strides decide."""

    tile: Tile
    constants: Constants
    rows: Tensor | None  # the order of the tiles, and each block's end; packed calls make theirs
    ends: Tensor | None
    copies: Copies
    last: tuple[Any, ...]  # the arguments after the pointers
    launch: Launch


_PLANS = Plans(_MOST_PLANS)
#: by config of three warpgroups: True if its kernel, as compiled, uses too much local memory
_SPILLED: dict[Config, bool] = {}


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem that ``supports`` has passed."""
    q, k, v = tensors[:3]
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if not (lse.numel() and problem.total_k and problem.nq and problem.batch):
        lse.fill_(-math.inf)
        if tensors.sink is not None:
            lse.copy_(tensors.sink[:, None].expand_as(lse))
        return out.zero_(), lse
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            launch(problem, tensors, out, lse)
    else:
        launch(problem, tensors, out, lse)
    return out, lse


def launch(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> None:
    q, k, v, bias = tensors[:4]
    key = key_of(problem, tensors)
    plan = _PLANS.get(key)
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = taken(q), taken(k), taken(v)
        tensors = tensors._replace(q=q, k=k, v=v)
        plan = plan_of(problem, tensors, out)
        if plan.tile is LONG_64 and spills(plan, problem, tensors, out, lse):
            _PLANS.pop(key_of(problem, tensors), None)
            plan = plan_of(problem, tensors, out)  # now with the next best tile
    else:
        try:  # noqa: SIM105  (suppress takes longer)
            _PLANS.move_to_end(key)
        except KeyError:  # another thread has let go of it: it serves this call all the same
            pass
    t = pointers(plan, problem, tensors, out, lse)
    plan.launch(over(plan.copies, q, k, v, bias, out), t, plan.last)


def pointers(plan: Plan, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> Pointers:
    _, _, _, bias, sink, alibi, _, q_ids, k_ids, lengths, cu_q, cu_k, _ = tensors
    C, table, ends, counter = plan.constants.config, plan.rows, plan.ends, None
    small = (x if x is None else x.contiguous() for x in (q_ids, k_ids, alibi, sink, lengths))
    q_ids, k_ids, alibi, sink, lengths = small
    spans = q_range = k_range = None
    if problem.varlen:
        assert cu_q is not None
        assert cu_k is not None
        tokens = C.WARPGROUPS * ROWS // C.GROUP
        totals = (problem.total_q, problem.total_k)
        counter, ends, table, cu_q, cu_k = packed.order(cu_q, cu_k, totals, tokens, out, lse, sink)
    if problem.documents:
        spans, q_range, k_range = spans_of(
            problem, tensors, C.WARPGROUPS, ROWS // C.GROUP, C.BLOCK_K
        )
        counter = torch.zeros(1, dtype=torch.int32, device=out.device)
    return Pointers(
        out,
        lse,
        table,
        ends,
        counter,
        cu_q,
        cu_k,
        lengths,
        spans,
        q_range,
        k_range,
        q_ids,
        k_ids,
        alibi,
        sink,
        bias if C.BIAS != "copied" else None,
    )


def spills(plan: Plan, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> bool:
    """True if the kernel of three warpgroups uses more local memory than it may; compiles it."""
    config = plan.constants.config
    found = _SPILLED.get(config)
    if found is None:
        copies = over(plan.copies, *tensors[:4], out)
        t = pointers(plan, problem, tensors, out, lse)
        words = compat.spills(plan.launch.loaded(*copies, t, *plan.last).kernel)
        found = words is None or words > LONG_64_SPILLS
        if len(_SPILLED) >= _MOST_PLANS:
            _SPILLED.clear()
        _SPILLED[config] = found
    return found


# --- plans -------------------------------------------------------------------------------------


def key_of(problem: Problem, tensors: Tensors) -> tuple[Any, ...]:
    q, k, v, bias, _, _, _, q_ids, k_ids, *_ = tensors
    more = None
    if bias is not None:
        more = (bias.stride(), bias.data_ptr() & 15)
    batches = [None if x is None else x.shape[0] for x in (q_ids, k_ids)]
    return (problem, q.device.index, q.stride(), k.stride(), v.stride(), more, *batches)


def plan_of(problem: Problem, tensors: Tensors, out: Tensor) -> Plan:
    """The plan of tensors that the copy engine takes."""
    key = key_of(problem, tensors)
    plan = _PLANS.get(key)
    if plan is None:
        plan = made(problem, tensors, out)
        if not torch.cuda.is_current_stream_capturing():
            _PLANS.keep(key, plan)
    return plan


def how_bias_comes(problem: Problem, bias: Tensor | None) -> str:
    """ "copied" by TMA where each row of columns begins on 16 bytes; else read from global memory,
    as a "row" for all queries, a "column" for all keys, or "gathered" one by one."""
    if bias is None:
        return ""
    _, _, i, j = bias.shape
    if i != problem.nq or not bias.stride(2):
        return "row"
    if j != problem.nk or not bias.stride(3):
        return "column"
    return "copied" if bias_fits(problem) and takes(bias) else "gathered"


def made(
    p: Problem, tensors: Tensors, out: Tensor, tile: Tile | None = None, **options: Any
) -> Plan:
    """The plan of a problem, or with another tile and other constants, to measure those."""
    q, k, v, bias = tensors[:4]
    how = how_bias_comes(p, bias)
    tile = tile or best_tile(p, how, q.device)
    group = packed_heads(p, how)
    constants = Constants(replace(config_for(p, tile, how, group), **options))
    heads = p.hq // group
    tokens = tile.warpgroups * ROWS // group
    blocks, rows, ends = order_of(p, tokens, tile.block_k, heads, q.device)
    last = (
        numbers(p, tensors, constants.config, heads),
        gl.constexpr(constants),
        *map(gl.constexpr, tile.registers),
    )
    copies = copies_of(p, constants.config, q, k, v, bias, out)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    launch = GluonLaunch(kernel, (blocks, 1, 1), options)
    return Plan(tile, constants, rows, ends, copies, last, launch)


def best_tile(p: Problem, bias: str, device: torch.device) -> Tile:
    """The tile of a problem, as far as what was compiled before allows."""
    tile = tile_for(p, bias, processors(device))
    if tile == LONG_64 and _SPILLED.get(config_for(p, tile, bias, packed_heads(p, bias))):
        return tile_for(p, bias, processors(device), spilled=True)
    return tile


def note_of_tile(p: Problem) -> str | None:
    """A sentence about the tile of a problem, where what was compiled decides on it."""
    device = torch.device(p.device, p.device_index)
    if p.bias is not None or tile_for(p, "", processors(device)) != LONG_64:
        return None
    found = _SPILLED.get(config_for(p, LONG_64, "", packed_heads(p, "")))
    if found is None:
        return "three warpgroups, if the kernel keeps to registers once compiled; else two"
    if found:
        return "two warpgroups: a kernel of three was compiled and did not keep to registers"
    return "three warpgroups"


def numbers(p: Problem, tensors: Tensors, c: Config, heads: int) -> Numbers:
    cap, ids = p.softcap, (tensors.q_ids, tensors.k_ids)
    scale, inner = (cap, p.scale / cap) if cap > 0 else (p.scale, 0.0)
    if not c.ADDED:  # the exponential takes both in at once
        scale *= _LOG2E
    left, right = p.limits
    steps, each = (0, 0, 0, 0), (0, 0)
    if tensors.bias is not None:
        sizes = tensors.bias.shape
        each = tuple(int(size > 1) for size in sizes[:2])
        steps = tuple(
            s if size > 1 else 0 for s, size in zip(tensors.bias.stride(), sizes, strict=True)
        )
    return Numbers(
        heads,
        p.hk,
        SECTION_BYTES // (2 * (p.d + p.dv)),
        p.nq,
        p.nk,
        left or 0,
        right or 0,
        p.batch,
        scale,
        inner,
        *steps,
        *(0 if x is None or x.shape[0] == 1 else x.shape[1] for x in ids),
        *each,
        p.hq,
        1 if c.GROUP > 1 else p.group,
        p.total_q,
    )


def order_of(
    p: Problem, tokens: int, block_k: int, heads: int, device: torch.device
) -> tuple[int, Tensor | None, Tensor | None]:
    """(blocks, the order of the tiles, each block's end)."""
    most = processors(device)
    if p.varlen:
        tiles = packed.most_tiles(p.total_q, p.nq, p.batch, tokens) * heads
        return max(1, min(most, tiles)), None, None
    steps = steps_of(tokens, block_k, p.nq, p.nk, p.left, p.right)
    if p.documents:  # how long its tiles are only the device knows
        steps = torch.ones_like(steps)
    of_one_head = p.nk * (p.d + p.dv) * 2
    section = max(1, SECTION_BYTES // of_one_head) * (heads // p.hk)
    every = steps.shape[0] * p.batch * heads
    blocks = min(most, every)
    rows, ends = dense_table(steps, tokens, p.batch, heads, section, blocks)
    if p.documents:
        ends = ends.new_tensor([every])
    return blocks, rows.to(device), ends.to(device)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
