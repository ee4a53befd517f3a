"""The host's side of the backward: a plan for each shape, then three launches."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...problem import Gradients, Problem, Tensors, Wanted
from ...triton import backward as plain
from .. import packed
from ..gluon_compat import TensorDescriptor
from ..launch import DTYPES, strides, takes
from ..schedule import SECTION_BYTES
from . import rows
from .kernel import backward as kernel
from .schedule import order_of, padded_rows, steps_of
from .tiles import ROWS, TILES, GradientConstants, GradientTile, config_for, sizes_of

_LOG2E = math.log2(math.e)
_MOST_PLANS = 256


class Plan(NamedTuple):
    """All of a launch that its shape decides."""

    tile: GradientTile
    constants: GradientConstants
    blocks: int
    rows: int  # of a plane of lse, delta and dq
    planes: int
    table: Tensor | None  # the order of the tiles, and each block's end; packed calls make theirs
    ends: Tensor | None


_PLANS: OrderedDict[Any, Plan] = OrderedDict()


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The wanted gradients of a problem that ``supports`` has passed."""
    given = (problem, tensors, out, lse, dout, dlse)
    some = problem.nq and problem.nk and problem.total_q and problem.total_k
    if not (any(wanted) and some) or (tensors.bias is not None and not takes(tensors.bias)):
        return plain(*given, wanted)
    here = wanted.bias and stores_dbias(problem)
    with torch.cuda.device(tensors.q.device):
        found = launch(plan_of(problem, tensors.q.device, here), *given, wanted)
    if wanted.bias and not here:
        found = found._replace(bias=plain(*given, Wanted(False, False, False, True, False)).bias)
    return found


def stores_dbias(p: Problem) -> bool:
    """Whether the kernel stores dbias: it is dS, where nothing is summed over."""
    return p.bias is not None and p.bias[:2] == (p.batch, p.hq) and p.softcap == 0


def launch(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    C = plan.constants.config
    q, k, v, dout = (
        t if takes(t) else t.clone(memory_format=torch.contiguous_format)
        for t in (*tensors[:3], dout)
    )
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    stats, dsink = prepared(plan, problem, tensors, out, lse, dout, dlse, wanted.sink)
    new = q.new_zeros if problem.varlen else q.new_empty  # what lies past the last sequence
    dk, dv = new(k.shape), new(v.shape)
    sums = q.new_zeros((plan.planes, plan.rows, C.D), dtype=torch.float32)

    none = lse  # a pointer that is not looked at
    q_tiles = copies(q, [1, C.BLOCK_Q, 1, C.D])
    bias_tiles = dbias_tiles = q_tiles
    dbias, each = None, (0, 0)
    if tensors.bias is not None:
        each = tuple(int(size > 1) for size in tensors.bias.shape[:2])
        bias_tiles = copies(tensors.bias, [1, 1, C.BLOCK_Q, _BLOCK_K])
    if C.DBIAS:
        assert tensors.bias is not None
        new_bias = q.new_zeros if problem.masked else q.new_empty  # tiles that none visits
        dbias = new_bias(tensors.bias.shape)
        dbias_tiles = copies(dbias, [1, 1, C.BLOCK_Q, ROWS])
    table, ends, counter, turns = plan.table, plan.ends, none, none
    if C.ORDERED:
        zeros = torch.zeros(
            16 + plan.planes * plan.rows // C.BLOCK_Q, dtype=torch.int32, device=q.device
        )
        counter, turns = zeros, zeros[16:]
    if problem.varlen:
        assert cu_k is not None
        most = packed.most_tiles(problem.total_k, problem.nk, problem.batch, _BLOCK_K)
        counter = packed.order(cu_k, problem.batch, most, _BLOCK_K)
        table, ends = counter[packed.HEADER :], counter[1:]
    cap = problem.softcap
    scale, inner = (cap, problem.scale / cap) if cap > 0 else (problem.scale, 0.0)
    reach = problem.total_q + problem.total_k  # a limit past it limits nothing
    k_view = [1, _BLOCK_K, 1]

    kernel[(plan.blocks,)](
        q_tiles,
        copies(dout, [1, C.BLOCK_Q, 1, C.DV]),
        copies(stats, [1, 2, C.BLOCK_Q]),
        copies(k, [*k_view, C.D]),
        copies(v, [*k_view, C.DV]),
        copies(sums, [1, plan.constants.DQ_ROWS.value, plan.constants.DQ_COLS.value]),
        bias_tiles, dbias_tiles,
        dk, dv,
        table, ends, counter, problem.hk, SECTION_BYTES // query_bytes(problem),
        turns, plan.rows // C.BLOCK_Q,
        problem.nq, problem.nk, min(problem.left or 0, reach), min(problem.right or 0, reach),
        none if cu_q is None else cu_q, none if cu_k is None else cu_k, problem.batch,
        none if tensors.lengths is None else tensors.lengths.contiguous(),
        *each,
        inner, none if tensors.alibi is None else tensors.alibi.contiguous(), scale * _LOG2E, problem.scale, problem.hq, problem.group,
        plan.constants, *plan.tile.registers, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    dq = None
    if wanted.q:
        dq = q.new_empty(q.shape)
        tiles = plan.rows // C.BLOCK_Q
        rows.finish[(tiles * plan.planes,)](
            sums, dq, cu_q, problem.batch, problem.total_q, problem.hq, tiles, problem.scale,
            D=problem.d, BLOCK_D=C.D, ROWS=C.BLOCK_Q,
        )  # fmt: skip
    return Gradients(dq, dk if wanted.k else None, dv if wanted.v else None, dbias, dsink)


def prepared(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    want_sink: bool,
) -> tuple[Tensor, Tensor | None]:
    """lse and delta of every row ``[planes, 2, rows]``, and dsink."""
    C = plan.constants.config
    tiles = plan.rows // C.BLOCK_Q
    stats = lse.new_empty((plan.planes, 2, plan.rows))
    parts = sink = None
    if want_sink:
        assert tensors.sink is not None
        sink = tensors.sink.contiguous()
        batch = 1 if problem.varlen else problem.batch
        parts = lse.new_empty((batch, problem.hq, tiles))
    b, n, h, _ = strides(dout)
    rows.prepare[(tiles * plan.planes,)](
        out.contiguous(), dout, lse.contiguous(), None if dlse is None else dlse.contiguous(),
        sink, stats, parts, tensors.cu_seqlens_q, problem.batch, problem.total_q, problem.hq,
        tiles, b, n, h, DV=problem.dv, BLOCK_DV=C.DV, ROWS=C.BLOCK_Q,
    )  # fmt: skip
    if parts is None or sink is None:
        return stats, None
    return stats, parts.sum((0, 2)).to(sink.dtype)


def copies(t: Tensor, box: list[int]) -> TensorDescriptor:
    """What copies blocks of t."""
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[t.dtype])
    return TensorDescriptor(t, list(t.shape), strides(t), box, layout)


# --- plans -------------------------------------------------------------------------------------

_BLOCK_K = 128


def plan_of(problem: Problem, device: torch.device, dbias: bool = False) -> Plan:
    key = (problem, device, dbias)
    plan = _PLANS.get(key)
    if plan is not None:
        _PLANS.move_to_end(key)
        return plan
    plan = made(problem, device, DBIAS=dbias)
    if not torch.cuda.is_current_stream_capturing():
        _PLANS[key] = plan
        if len(_PLANS) > _MOST_PLANS:
            _PLANS.popitem(last=False)
    return plan


def made(
    p: Problem, device: torch.device, tile: GradientTile | None = None, **options: Any
) -> Plan:
    """The plan of a problem, or with another tile and other constants, to measure those."""
    tile = tile or TILES[sizes_of(p.d, p.dv)]
    constants = GradientConstants(config_for(p, tile, **options))
    most = torch.cuda.get_device_properties(device).multi_processor_count
    rows = padded_rows(tile.block_q, p.nq, p.total_q, p.batch, p.varlen)
    planes = p.hq if p.varlen else p.batch * p.hq
    if p.varlen:
        tiles = packed.most_tiles(p.total_k, p.nk, p.batch, _BLOCK_K) * p.hk
        return Plan(tile, constants, max(1, min(most, tiles)), rows, planes, None, None)
    steps = steps_of(tile.block_q, _BLOCK_K, p.nq, p.nk, p.left, p.right) * p.group
    blocks = min(most, steps.shape[0] * p.batch * p.hk)
    section = max(1, SECTION_BYTES // (query_bytes(p) * p.nq))
    table, ends = order_of(steps, p.batch, p.hk, section, blocks, constants.DRAWN.value)
    return Plan(tile, constants, blocks, rows, planes, table.to(device), ends.to(device))


def query_bytes(p: Problem) -> int:
    """What a step brings of a query position, and adds to, of all heads that share a kv head."""
    return p.group * (2 * (p.d + p.dv) + 4 * p.d)
