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
from ..copies import DTYPES, strides, taken, takes
from ..documents import tile_spans
from ..gluon_compat import TensorDescriptor
from ..schedule import SECTION_BYTES
from ..schedule import steps_of as steps_of_queries
from ..tiles import Constants
from . import rows
from .kernel import backward as kernel
from .schedule import order_of, padded_rows, steps_of
from .tiles import (
    ROWS,
    TILES,
    WIDE,
    GradientConfig,
    GradientTile,
    config_for,
    sizes_of,
)
from .wide_kernel import wide

_LOG2E = math.log2(math.e)
_MOST_PLANS = 256
BLOCK_K = 128
#: blocks that work on one head at once, where each is to follow another (``schedule.py``)
FOLLOWERS, FOLLOWERS_UP = 4, 8


class Work(NamedTuple):
    """One launch: its kernel's constants, and which tile is worked on where."""

    constants: Constants
    registers: tuple[int, int]
    blocks: int
    table: Tensor | None  # the order of the tiles, and each block's end; packed calls make theirs
    ends: Tensor | None


class Plan(NamedTuple):
    """All of a backward that its shape decides."""

    config: GradientConfig  # what all launches have in common
    rows: int  # of a plane of lse, delta and dq
    planes: int
    works: tuple[Work, ...]  # one for all gradients, or one for each: dq, dk and dv


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
    q, k, v, dout = (taken(t) for t in (*tensors[:3], dout))
    tensors = tensors._replace(q=q, k=k, v=v)
    stats, dsink = prepared(plan, problem, tensors, out, lse, dout, dlse, wanted.sink)
    if len(plan.works) > 1:
        dq, dk, dv = apart(plan, problem, tensors, dout, stats, wanted)
        return Gradients(dq, dk, dv, None, dsink)
    dq, dk, dv, dbias = together(plan, problem, tensors, dout, stats, wanted.q)
    return Gradients(dq, dk if wanted.k else None, dv if wanted.v else None, dbias, dsink)


def together(
    plan: Plan, problem: Problem, tensors: Tensors, dout: Tensor, stats: Tensor, want_q: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dbias in one launch, and dq rounded in another."""
    q, k, v = tensors[:3]
    work = plan.works[0]
    C, constants = work.constants.config, work.constants
    new = q.new_zeros if problem.varlen else q.new_empty  # what lies past the last sequence
    dk, dv = new(k.shape), new(v.shape)
    new_sums = q.new_empty if C.FRESH else q.new_zeros
    sums = new_sums((plan.planes, plan.rows, C.D), dtype=torch.float32)
    q_tiles = copies(q, [1, C.BLOCK_Q, 1, C.D])
    bias_tiles = dbias_tiles = q_tiles
    dbias, each = None, (0, 0)
    if tensors.bias is not None:
        each = tuple(int(size > 1) for size in tensors.bias.shape[:2])
        bias_tiles = copies(tensors.bias, [1, 1, C.BLOCK_Q, BLOCK_K])
    if C.DBIAS:
        assert tensors.bias is not None
        new_bias = q.new_zeros if problem.masked else q.new_empty  # tiles that none visits
        dbias = new_bias(tensors.bias.shape)
        dbias_tiles = copies(dbias, [1, 1, C.BLOCK_Q, ROWS])
    order, turns = (
        order_for(work, problem, tensors.cu_seqlens_k, problem.nk, problem.total_k),
        stats,
    )
    tiles = plan.rows // C.BLOCK_Q
    key_tiles = turns_of_head(problem)
    if C.ORDERED:
        planes = problem.hk if problem.varlen else problem.batch * problem.hk
        turns = torch.zeros(planes * key_tiles, dtype=torch.int32, device=q.device)
    inner, scale = score_scales(problem)
    kernel[(work.blocks,)](
        q_tiles,
        copies(dout, [1, C.BLOCK_Q, 1, C.DV]),
        copies(stats, [1, 2, C.BLOCK_Q]),
        copies(k, [1, BLOCK_K, 1, C.D]),
        copies(v, [1, BLOCK_K, 1, C.DV]),
        copies(sums, [1, C.DQ_ROWS, C.DQ_COLS]),
        bias_tiles, dbias_tiles,
        dk, dv,
        *order, problem.hk, SECTION_BYTES // query_bytes(problem),
        turns, key_tiles,
        *sizes_and_sequences(C, problem, tensors, stats),
        *each,
        inner, or_none(tensors.alibi, stats), scale, problem.scale, problem.hq, problem.group,
        constants, *work.registers, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    if not want_q:
        return None, dk, dv, dbias
    dq = q.new_empty(q.shape)
    rows.finish[(tiles * plan.planes,)](
        sums, dq, tensors.cu_seqlens_q, problem.batch, problem.total_q, problem.hq, tiles,
        problem.scale, D=problem.d, BLOCK_D=C.D, ROWS=C.BLOCK_Q,
    )  # fmt: skip
    return dq, dk, dv, dbias


def apart(
    plan: Plan, problem: Problem, tensors: Tensors, dout: Tensor, stats: Tensor, wanted: Wanted
) -> list[Tensor | None]:
    """dq, dk and dv, as far as they are wanted, each in a launch of its own."""
    q, k, v = tensors[:3]
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    new = q.new_zeros if problem.varlen else q.new_empty  # what lies past the last sequence
    inner, scale = score_scales(problem)
    found: list[Tensor | None] = []
    for work, like, want in zip(plan.works, (q, k, v), wanted[:3], strict=True):
        if not want:
            found.append(None)
            continue
        C, to = work.constants.config, new(like.shape)
        if C.KIND == "dq":
            stays, passes, heads, group = (q, dout), (k, v), problem.hq, 1
            order = order_for(work, problem, cu_q, problem.nq, problem.total_q)
            bytes_passing = 2 * (problem.d + problem.dv)
        else:
            stays, passes, heads, group = (k, v), (q, dout), problem.hk, problem.group
            order = order_for(work, problem, cu_k, problem.nk, problem.total_k)
            bytes_passing = query_bytes(problem)
        wide[(work.blocks,)](
            copies(stays[0], [1, BLOCK_K, 1, C.D]),
            copies(stays[1], [1, BLOCK_K, 1, C.DV]),
            copies(passes[0], [1, C.BLOCK_Q, 1, C.D]),
            copies(passes[1], [1, C.BLOCK_Q, 1, C.DV]),
            copies(stats, [1, 2, C.BLOCK_Q]),
            to, stats,
            *order, heads, SECTION_BYTES // bytes_passing,
            *sizes_and_sequences(C, problem, tensors, stats),
            inner, or_none(tensors.alibi, stats), scale,
            1.0 if C.KIND == "dv" else problem.scale,
            problem.hq, plan.rows, group, problem.group,
            work.constants, *work.registers, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        found.append(to)
    return found


# --- what kernels are told ---------------------------------------------------------------------


def turns_of_head(p: Problem) -> int:
    """Tiles of keys of a head. Packed sequence b has those from ``cu // BLOCK_K + b`` on."""
    return p.total_k // BLOCK_K + p.batch if p.varlen else -(-p.nk // BLOCK_K)


def order_for(
    work: Work, problem: Problem, cu: Tensor | None, longest: int, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(table, ends, counter) of a launch whose tiles are cut from sequences at ``cu``."""
    if not problem.varlen:
        assert work.table is not None
        assert work.ends is not None
        drawn = work.constants.config.DRAWN
        return work.table, work.ends, torch.zeros_like(work.ends) if drawn else work.ends
    assert cu is not None
    most = packed.most_tiles(total, longest, problem.batch, BLOCK_K)
    made = packed.order(cu, problem.batch, most, BLOCK_K)
    return made[packed.HEADER :], made[1:], made


def score_scales(problem: Problem) -> tuple[float, float]:
    """(what goes into the softcap, what makes a score of what comes out, in units of log 2)."""
    cap = problem.softcap
    if cap > 0:
        return problem.scale / cap, cap * _LOG2E
    return 0.0, problem.scale * _LOG2E


def sizes_and_sequences(
    C: GradientConfig, problem: Problem, tensors: Tensors, none: Tensor
) -> tuple[Any, ...]:
    """nq, nk, left, right, cu_q, cu_k, batch, lengths and documents."""
    spans, ids = none, (0, 0)
    if tensors.q_ids is not None and tensors.k_ids is not None:
        both = (tensors.q_ids, tensors.k_ids)
        ids = tuple(t.shape[1] if t.shape[0] > 1 else 0 for t in both)
        stays, passes = both if C.KIND == "dq" else both[::-1]
        spans = tile_spans(stays, passes, BLOCK_K, C.BLOCK_Q, problem.batch)
    reach = problem.total_q + problem.total_k  # a limit past it limits nothing
    return (
        problem.nq,
        problem.nk,
        min(problem.left or 0, reach),
        min(problem.right or 0, reach),
        or_none(tensors.cu_seqlens_q, none),
        or_none(tensors.cu_seqlens_k, none),
        problem.batch,
        or_none(tensors.lengths, none),
        spans,
        or_none(tensors.q_ids, none),
        or_none(tensors.k_ids, none),
        *ids,
    )


def or_none(t: Tensor | None, none: Tensor) -> Tensor:
    """t, or a pointer that is not looked at."""
    return none if t is None else t.contiguous()


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
    C = plan.config
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
    sizes = sizes_of(p.d, p.dv)
    tiles = WIDE[sizes] if sizes in WIDE else {"all": tile or TILES[sizes]}
    configs = {kind: config_for(p, tile, KIND=kind, **options) for kind, tile in tiles.items()}
    works = tuple(work_of(p, c, tiles[kind].registers, device) for kind, c in configs.items())
    config = next(iter(configs.values()))
    rows = padded_rows(config.BLOCK_Q, p.nq, p.total_q, p.batch, p.varlen)
    return Plan(config, rows, p.hq if p.varlen else p.batch * p.hq, works)


def work_of(
    p: Problem, config: GradientConfig, registers: tuple[int, int], device: torch.device
) -> Work:
    constants = Constants(config)
    most = torch.cuda.get_device_properties(device).multi_processor_count
    of_queries = config.KIND == "dq"
    heads, total, longest = (p.hq, p.total_q, p.nq) if of_queries else (p.hk, p.total_k, p.nk)
    if p.varlen:
        tiles = packed.most_tiles(total, longest, p.batch, BLOCK_K) * heads
        return Work(constants, registers, max(1, min(most, tiles)), None, None)
    if of_queries:
        steps = steps_of_queries(BLOCK_K, config.BLOCK_Q, p.nq, p.nk, p.left, p.right)
        section = SECTION_BYTES // (p.nk * 2 * (p.d + p.dv)) * p.group
    else:
        steps = steps_of(config.BLOCK_Q, BLOCK_K, p.nq, p.nk, p.left, p.right) * p.group
        section = SECTION_BYTES // (query_bytes(p) * p.nq)
        if config.ORDERED:
            section = max(section, most // (FOLLOWERS_UP if config.UP else FOLLOWERS))
    blocks = min(most, steps.shape[0] * p.batch * heads)
    drawn = config.DRAWN
    table, ends = order_of(steps, p.batch, heads, max(1, section), blocks, drawn, config.UP)
    return Work(constants, registers, blocks, table.to(device), ends.to(device))


def query_bytes(p: Problem) -> int:
    """What a step brings of a query position, and adds to, of all heads that share a kv head."""
    return p.group * (2 * (p.d + p.dv) + 4 * p.d)
