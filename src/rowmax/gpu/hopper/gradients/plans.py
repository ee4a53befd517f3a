"""The plans of the backward: all that a problem's shape and strides decide of its launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ....call.problem import Problem, Tensors
from ...compiled import Launch
from .. import packed
from ..host import GluonLaunch, processors
from ..kept import Plans
from ..lib.order import SECTION_BYTES
from ..lib.order import tile_count as steps_of_queries
from ..lib.tma import Descriptors as Copies
from ..lib.tma import descriptor as blocks
from ..lib.tma import strides
from ..tiles import Constants
from . import rows
from .biases import gradient_by, kind_of, refused_gradient
from .bundles import DbiasConstants, DbiasNumbers, Numbers, RowConstants, RowNumbers
from .dq_of_dbias import dq_of_dbias
from .kernel import backward as kernel
from .schedule import order_of, padded_rows, steps_of
from .shared_bias import shared_bias
from .tiles import (
    DQ_OF_DBIAS,
    ROWS,
    SHARED_BIAS,
    GradientConfig,
    Tiles,
    config_for,
    sizes_of,
    tiles_of,
)
from .wide_kernel import wide

_LOG2E = math.log2(math.e)
_MOST_PLANS = 256
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
#: of a launch that begins beside the end of the one before (pipeline.follow)
_FOLLOWS = _OPTIONS | {"launch_pdl": True}
BLOCK_K = 128
#: blocks that work on one head at most, where each is to follow another (``schedule.py``)
FOLLOWERS = 66


class Work(NamedTuple):
    """One launch that makes gradients."""

    config: GradientConfig
    table: Tensor | None  # the order of the tiles, and each block's end; packed calls make theirs
    ends: Tensor | None
    copies: Copies
    last: tuple[Any, ...]  # the arguments after the pointers
    launch: Launch


class Plan(NamedTuple):
    """All of a backward that its shape and its strides decide."""

    config: GradientConfig  # what all works have in common
    stats: tuple[int, ...]  # sizes of lse and delta, and of the sums of dq
    sums: tuple[int, ...]
    before: Launch
    dbias: str  # what makes it (biases.gradient_by); "" where nothing here does
    shared: Work | None  # dbias of a bias that sequences or heads share
    works: tuple[Work, ...]  # one for all gradients, or two: dq, and dk with dv
    after: Launch  # dq, of its sums or of dbias
    turns: int  # counts of steps, where blocks tell each other
    of_rows: tuple[Any, ...]  # the arguments of the launch before that follow the pointers
    of_after: tuple[Any, ...]

    @property
    def together(self) -> bool:
        return len(self.works) == 1

    @property
    def tiles(self) -> int:
        """Tiles of rows, of all planes."""
        return self.before.grid[0]


PLANS = Plans(_MOST_PLANS)


def key_of(problem: Problem, tensors: Tensors, dout: Tensor, dbias: bool) -> tuple[Any, ...]:
    q, k, v, bias, _, _, _, q_ids, k_ids, *_ = tensors
    strides = (q.stride(), k.stride(), v.stride(), dout.stride())
    batches = [None if x is None else x.shape[0] for x in (q_ids, k_ids)]
    return (
        problem, q.device.index, dbias, *strides, None if bias is None else bias.stride(), *batches
    )  # fmt: skip


def plan_of(problem: Problem, tensors: Tensors, dout: Tensor, dbias: bool = False) -> Plan:
    """The plan of tensors that the copy engine takes."""
    key = key_of(problem, tensors, dout, dbias)
    plan = PLANS.get(key)
    if plan is None:
        plan = made(problem, tensors, dout, dbias=dbias)
        if not torch.cuda.is_current_stream_capturing():
            PLANS.keep(key, plan)
    return plan


def made(
    p: Problem,
    tensors: Tensors,
    dout: Tensor,
    tiles: Tiles | None = None,
    dbias: bool = False,
    **options: Any,
) -> Plan:
    """The plan of a problem, or with other tiles and other constants, to measure those."""
    tiles = tiles or tiles_of(sizes_of(p.d, p.dv))
    assert not (dbias and refused_gradient(p))
    by = gradient_by(p) if dbias else ""
    configs = {
        kind: config_for(p, tile, **(bias_options(p, kind, by) | options))
        for kind, tile in tiles.items()
    }
    config = next(iter(configs.values()))
    rows_ = padded_rows(config.BLOCK_Q, p.nq, p.total_q, p.batch, p.varlen)
    planes = p.hq if p.varlen else p.batch * p.hq
    shared = None
    if by == "shared":
        tile = SHARED_BIAS[sizes_of(p.d, p.dv)]
        c = config_for(p, tile, KIND="dbias", BIAS=True)
        shared = work_of(p, c, tile.registers, tensors, dout, planes, rows_)
    works = tuple(
        work_of(p, c, tiles[kind].registers, tensors, dout, planes, rows_)
        for kind, c in configs.items()
    )
    every = planes * (rows_ // config.BLOCK_Q)
    before = of_rows(p, config, dout, rows_ // config.BLOCK_Q)
    after, of_after = Launch(rows.finish, (every, 1, 1), _FOLLOWS), before
    if not config.DQ:
        after, of_after = of_dbias(p, config, tensors.k)
    return Plan(
        config,
        (planes, 2, rows_),
        (planes, rows_ // config.BLOCK_Q, config.BLOCK_Q * config.D),
        Launch(rows.prepare, (every, 1, 1), _OPTIONS),
        by,
        shared,
        works,
        after,
        turns_of(p),
        before,
        of_after,
    )


def bias_options(p: Problem, kind: str, by: str) -> dict[str, Any]:
    """What a bias, and who makes its gradient, decide of a launch."""
    stored = by == "stored" and kind != "pair"
    # of documents that product would meet keys that the query's tile sees nothing of
    product = stored and kind == "all" and p.deterministic and not p.documents
    return {
        "KIND": kind,
        "BIAS": kind_of(p) == "tile",
        "DBIAS": stored,
        "DQ": not product,
        "ROW": kind_of(p) == "row",
        "COLUMN": kind_of(p) == "column",
        "DROW": by == "row" and kind != "dq",
    }


def turns_of(p: Problem) -> int:
    """Tiles of keys of all heads, where they take turns. Packed sequence b has those from
    ``cu // BLOCK_K + b`` on."""
    if p.varlen:
        return p.hk * (p.total_k // BLOCK_K + p.batch)
    return p.batch * p.hk * -(-p.nk // BLOCK_K)


def of_rows(p: Problem, c: GradientConfig, dout: Tensor, tiles: int) -> tuple[Any, ...]:
    """What is told to the launches before and after, by rows, beside pointers."""
    steps = (s // 8 for s in strides(dout)[:3])
    numbers = RowNumbers(
        p.batch, p.total_q, p.total_k, p.hq, p.hk, tiles, turns_of(p), *steps, p.scale, p.nq
    )  # fmt: skip
    constants = (p.d, p.dv, c.D, c.DV, c.BLOCK_Q, c.NATURAL)
    return numbers, RowConstants(*map(gl.constexpr, constants))


def of_dbias(p: Problem, c: GradientConfig, k: Tensor) -> tuple[Launch, tuple[Any, ...]]:
    """The launch that makes dq of dbias, and what it is told beside pointers."""
    tile = DQ_OF_DBIAS
    tiles = -(-p.nq // tile.rows)
    steps = (s // 8 for s in strides(k)[:3])
    numbers = DbiasNumbers(p.nq, p.nk, *limits(p), p.hq, p.group, tiles, p.nk // 8, *steps, p.scale)
    constants = DbiasConstants(
        *map(gl.constexpr, (p.d, c.D, tile.rows, tile.columns, c.LEFT, c.RIGHT))
    )
    options = _FOLLOWS | {"num_warps": tile.warps, "num_stages": tile.stages}
    launch = Launch(dq_of_dbias, (p.batch * p.hq * tiles, 1, 1), options)
    return launch, (numbers, constants)


def work_of(
    p: Problem,
    config: GradientConfig,
    registers: tuple[int, int],
    tensors: Tensors,
    dout: Tensor,
    planes: int,
    rows_: int,
) -> Work:
    of_queries = config.QUERIES_DOWN
    blocks_, table, ends = order_for(p, config, tensors.q.device)
    heads = p.hq if of_queries else p.hk
    passing = 2 * (p.d + p.dv) if of_queries else query_bytes(p)
    numbers = Numbers(
        heads,
        SECTION_BYTES // passing,
        rows_,
        p.nq,
        p.nk,
        *limits(p),
        p.batch,
        *steps_of_ids(tensors),
        *((0, 0) if p.bias is None else (int(size > 1) for size in p.bias[:2])),
        *score_scales(p),
        p.scale,
        p.hq,
        1 if of_queries else p.group,
        p.group,
        *steps_of_bias(tensors.bias if kind_of(p) == "tile" else None),
    )
    last = (numbers, gl.constexpr(Constants(config)), *map(gl.constexpr, registers))
    copies = copies_of(config, tensors, dout, planes, rows_)
    run = {"all": kernel, "dbias": shared_bias}.get(config.KIND, wide)
    return Work(config, table, ends, copies, last, GluonLaunch(run, (blocks_, 1, 1), _FOLLOWS))


def copies_of(c: GradientConfig, tensors: Tensors, dout: Tensor, planes: int, rows_: int) -> Copies:
    """Descriptions that lack their tensors; None for what is not copied."""
    q, k, v = tensors[:3]
    bias = tensors.bias if c.BIAS else None

    def cut(t: Tensor, tokens: int, width: int) -> Any:
        return blocks(t.dtype, t.shape, strides(t), [1, tokens, 1, width])

    def of_bias(box: list[int], dbox: list[int] | None) -> Copies:
        if bias is None:
            return None, None
        _, h, i, j = bias.shape
        steps = (h * i * j, i * j, j, 1)
        tiles = blocks(bias.dtype, bias.shape, strides(bias), [1, 1, *box])
        return tiles, blocks(bias.dtype, bias.shape, steps, [1, 1, *dbox]) if dbox else None

    f32 = torch.float32
    queries = c.BLOCK_K if c.KIND == "dbias" else c.BLOCK_Q
    stats = blocks(f32, (planes, 2, rows_), (2 * rows_, rows_, 1), [1, 2, queries])
    if c.KIND != "all":
        both = (q, dout), (k, v)
        stays, passes = both if c.QUERIES_DOWN else both[::-1]
        widths = (c.D // 2, c.DV // 2) if c.ALONE else (c.D, c.DV)
        more = of_bias([ROWS, c.BLOCK_Q], [ROWS, c.BLOCK_Q])
        if c.KIND == "pair":
            more = of_bias([c.BLOCK_Q, c.BLOCK_K], None)[:1]
        elif c.KIND == "dq":  # from global memory
            more = (None,)
        return (
            *(cut(t, c.BLOCK_K, width) for t, width in zip(stays, widths, strict=True)),
            *(cut(t, c.BLOCK_Q, width) for t, width in zip(passes, (c.D, c.DV), strict=True)),
            stats,
            *more,
        )
    return (
        cut(q, c.BLOCK_Q, c.D),
        cut(dout, c.BLOCK_Q, c.DV),
        stats,
        cut(k, c.BLOCK_K, c.D),
        cut(v, c.BLOCK_K, c.DV),
        # a tile of dQ, in the order of ``by_threads``, is 32 numbers wide
        blocks(f32, (planes, rows_ * c.D // 32, 32), (rows_ * c.D, 32, 1), [1, 2 * c.D, 32])
        if c.DQ
        else None,
        *of_bias([c.BLOCK_Q, c.BLOCK_K], [c.BLOCK_Q, ROWS] if c.DBIAS else None),
    )


def limits(p: Problem) -> tuple[int, int]:
    left, right = p.limits
    return left or 0, right or 0


def steps_of_ids(tensors: Tensors) -> tuple[int, ...]:
    both = (tensors.q_ids, tensors.k_ids)
    return tuple(0 if t is None or t.shape[0] == 1 else t.shape[1] for t in both)


def steps_of_bias(bias: Tensor | None) -> tuple[int, ...]:
    """From one to the next, in units of 8; none where one is for all."""
    if bias is None:
        return 0, 0, 0
    return tuple(
        s // 8 if n > 1 else 0 for n, s in zip(bias.shape[:3], strides(bias)[:3], strict=True)
    )


def score_scales(problem: Problem) -> tuple[float, float]:
    """(what goes into the softcap, what makes a score of what comes out, in its units)."""
    cap, unit = problem.softcap, 1.0 if problem.natural else _LOG2E
    if cap > 0:
        return problem.scale / cap, cap * unit
    return 0.0, problem.scale * unit


def order_for(
    p: Problem, config: GradientConfig, device: torch.device
) -> tuple[int, Tensor | None, Tensor | None]:
    """(blocks, the order of the tiles, each block's end)."""
    most = processors(device)
    if config.KIND == "dbias":
        assert p.bias is not None
        b, h, i, j = p.bias
        return min(most, b * h * -(-i // config.BLOCK_K) * -(-j // config.BLOCK_Q)), None, None
    of_queries = config.KIND == "dq"
    heads, total, longest = (p.hq, p.total_q, p.nq) if of_queries else (p.hk, p.total_k, p.nk)
    if p.varlen:
        tiles = packed.most_tiles(total, longest, p.batch, config.BLOCK_K) * heads
        return max(1, min(most, tiles)), None, None
    if of_queries:
        steps = steps_of_queries(config.BLOCK_K, config.BLOCK_Q, p.nq, p.nk, p.left, p.right)
        section = SECTION_BYTES // (p.nk * 2 * (p.d + p.dv)) * p.group
    else:
        steps = steps_of(config.BLOCK_Q, config.BLOCK_K, p.nq, p.nk, p.left, p.right) * p.group
        section = SECTION_BYTES // (query_bytes(p) * p.nq)
        if config.ORDERED:
            section = max(section, most // FOLLOWERS)
    many = min(most, steps.shape[0] * p.batch * heads)
    table, ends = order_of(
        steps, p.batch, heads, max(1, section), many, config.DRAWN, config.UP, config.BLOCK_K
    )
    return many, table.to(device), ends.to(device)


def query_bytes(p: Problem) -> int:
    """What a step brings of a query position, and adds to, of all heads that share a kv head."""
    return p.group * (2 * (p.d + p.dv) + 4 * p.d)
