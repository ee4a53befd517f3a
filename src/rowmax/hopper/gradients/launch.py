"""The host's side of the backward: a plan for each shape, then three launches.

Before: lse and delta of every row, and zeros in what is added to. Then all gradients at once; of
wide heads dq, and dk with dv (wide.py, pair.py). After, where dq was added up in float32: dq,
rounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...problem import Gradients, Problem, Tensors, Wanted
from ...triton import backward as plain
from ...triton.compiled import Launch
from .. import packed
from ..copies import Copies, blocks, placed, strides, taken, takes
from ..documents import tile_spans
from ..launch import GluonLaunch, processors
from ..schedule import SECTION_BYTES
from ..schedule import steps_of as steps_of_queries
from ..tiles import Constants
from . import rows
from .bundles import Numbers, Pointers, RowConstants, RowNumbers, RowPointers
from .kernel import backward as kernel
from .schedule import order_of, padded_rows, steps_of
from .shared_bias import shared_bias
from .tiles import (
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
    shared: Work | None  # dbias of a bias that sequences or heads share
    works: tuple[Work, ...]  # one for all gradients, or two: dq, and dk with dv
    after: Launch
    of_rows: tuple[Any, ...]  # the arguments of those before and after that follow the pointers

    @property
    def together(self) -> bool:
        return len(self.works) == 1

    @property
    def tiles(self) -> int:
        """Tiles of rows, of all planes."""
        return self.before.grid[0]


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
    q, k, v, bias = tensors[:4]
    some = any(wanted) and out.numel() and q.numel() and k.numel() and problem.batch
    if not some or (bias is not None and not takes(bias)):
        return plain(*given, wanted)
    here = wanted.bias and (stores_dbias(problem) or sums_dbias(problem))
    key = key_of(problem, tensors, dout, here)
    plan = _PLANS.get(key)
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
        q, k, v, dout = (taken(t) for t in (q, k, v, dout))
        tensors = tensors._replace(q=q, k=k, v=v)
        plan = plan_of(problem, tensors, dout, here)
    else:
        try:  # noqa: SIM105  (suppress takes longer)
            _PLANS.move_to_end(key)
        except KeyError:  # another thread has let go of it: it serves this call all the same
            pass
    given = (problem, tensors, out, lse, dout, dlse)
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            found = launch(plan, *given, wanted)
    else:
        found = launch(plan, *given, wanted)
    if wanted.bias and not here:
        found = found._replace(bias=plain(*given, Wanted(False, False, False, True, False)).bias)
    return found


def stores_dbias(p: Problem) -> bool:
    """Whether the kernel of all gradients stores dbias: it is dS, where nothing is summed over."""
    return p.bias is not None and p.bias[:2] == (p.batch, p.hq) and p.softcap == 0


def sums_dbias(p: Problem) -> bool:
    """Whether a kernel here makes the gradient of a bias that is shared, where it is."""
    return not (p.prefix or p.documents)


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
    """The wanted gradients of tensors that the copy engine takes."""
    q, k, v = tensors[:3]
    orders: list[packed.Order] = []
    if problem.varlen:
        orders, tensors = in_order(plan, problem, tensors)
    dq = q.new_empty(q.shape) if wanted.q else None
    # what makes one of dk and dv makes both, and what makes all gradients these as well
    both = plan.together or wanted.k or wanted.v
    dk = q.new_empty(k.shape) if both else None
    dv = q.new_empty(v.shape) if both else None
    t, dsink = prepared(plan, problem, tensors, out, lse, dout, dlse, wanted, (dq, dk, dv))
    dbias = None
    if plan.shared is not None:
        dbias = of_shared_bias(plan.shared, problem, tensors, dout, t)
    if plan.together:
        stored = together(plan, problem, tensors, dout, t, orders)
        dbias = stored if dbias is None else dbias
        if dq is not None:
            plan.after((), RowPointers(sums=t.sums, dq=dq, cu_q=t.cu_q), plan.of_rows)
    else:
        apart(plan, problem, tensors, dout, t, orders)
    return Gradients(dq, dk if wanted.k else None, dv if wanted.v else None, dbias, dsink)


def in_order(plan: Plan, problem: Problem, tensors: Tensors) -> tuple[list[packed.Order], Tensors]:
    """The order of the packed tiles of each work, and offsets in range for all launches to read."""
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    totals = (problem.total_q, problem.total_k)
    orders = []
    for work in plan.works:
        if work.config.KIND == "dq":
            order = packed.order(cu_q, cu_k, totals, work.config.BLOCK_K)
            cu_q, cu_k = order.cu, order.other
        else:
            order = packed.order(cu_k, cu_q, totals[::-1], work.config.BLOCK_K)
            cu_k, cu_q = order.cu, order.other
        orders.append(order)
    return orders, tensors._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def prepared(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    made: tuple[Tensor | None, ...],
) -> tuple[RowPointers, Tensor | None]:
    """(what the launch before has filled, dsink). ``made`` will hold dq, dk and dv."""
    C = plan.config
    dq, dk, dv = made
    parts = sink = sums = turns = counters = None
    if plan.together:
        dq = None  # the launch after writes all of it
        sums = lse.new_empty(plan.sums)
    if C.ORDERED:
        turns = lse.new_empty(turns_of(problem), dtype=torch.int32)
    if C.DRAWN:
        counters = lse.new_empty(16, dtype=torch.int32)
    if wanted.sink:
        assert tensors.sink is not None
        sink = tensors.sink.contiguous()
        parts = lse.new_empty(plan.tiles)
    t = RowPointers(
        out.contiguous(),
        dout,
        lse.contiguous(),
        None if dlse is None else dlse.contiguous(),
        sink,
        lse.new_empty(plan.stats),
        parts,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
        sums,
        turns,
        counters,
        dq,
        dk,
        dv,
    )
    plan.before((), t._replace(sums=None) if C.FRESH else t, plan.of_rows)
    if parts is None or sink is None:
        return t, None
    return t, parts.view(-1, problem.hq, plan.stats[2] // C.BLOCK_Q).sum((0, 2)).to(sink.dtype)


def together(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    t: RowPointers,
    orders: Sequence[packed.Order] = (),
) -> Tensor | None:
    """dk, dv and the sums of dq in one launch; dbias as well, where it stores that."""
    work = plan.works[0]
    C = work.config
    q, k, v, bias = tensors[:4]
    dbias = None
    if C.DBIAS:
        assert bias is not None
        new = q.new_zeros if problem.masked else q.new_empty  # tiles that none visits
        dbias = new(bias.shape)
    copies = placed(work.copies, (q, dout, t.stats, k, v, t.sums, bias, dbias))
    work.launch(copies, pointers(work, problem, tensors, t, (t.dk, t.dv), 0, orders), work.last)
    return dbias


def of_shared_bias(
    work: Work, problem: Problem, tensors: Tensors, dout: Tensor, t: RowPointers
) -> Tensor:
    """dbias, summed over the sequences and heads that share the bias."""
    q, k, v, bias = tensors[:4]
    assert bias is not None
    dbias = q.new_empty(bias.shape)
    copies = placed(work.copies, (q, dout, k, v, t.stats, bias, dbias))
    work.launch(copies, pointers(work, problem, tensors, t, (None, None), 0, ()), work.last)
    return dbias


def apart(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    dout: Tensor,
    t: RowPointers,
    orders: Sequence[packed.Order] = (),
) -> None:
    """dq, and dk with dv, as far as they are wanted, in a launch each."""
    q, k, v = tensors[:3]
    made = {"dq": (t.dq, None), "pair": (t.dk, t.dv)}
    for n, work in enumerate(plan.works):
        to = made[work.config.KIND]
        if to[0] is None:
            continue
        both = (q, dout), (k, v)
        stays, passes = both if work.config.KIND == "dq" else both[::-1]
        copies = placed(work.copies, (*stays, *passes, t.stats))
        work.launch(copies, pointers(work, problem, tensors, t, to, n, orders), work.last)


def pointers(
    work: Work,
    problem: Problem,
    tensors: Tensors,
    t: RowPointers,
    made: tuple[Tensor | None, Tensor | None],
    nth: int,
    orders: Sequence[packed.Order],
) -> Pointers:
    """Of the nth work, which fills what is ``made``."""
    _, _, _, _, _, alibi, _, q_ids, k_ids, lengths, cu_q, cu_k, _ = tensors
    C, table, ends, counter, spans = work.config, work.table, work.ends, None, None
    if orders:
        counter, ends, table = orders[nth][:3]
    elif C.DRAWN:
        assert t.counters is not None
        counter = t.counters[nth:] if nth else t.counters
    if q_ids is not None and k_ids is not None:
        q_ids, k_ids = q_ids.contiguous(), k_ids.contiguous()
        stays, passes = (q_ids, k_ids) if C.KIND == "dq" else (k_ids, q_ids)
        spans = tile_spans(stays, passes, C.BLOCK_K, C.BLOCK_Q, problem.batch)
    return Pointers(
        *made,
        t.stats if C.KIND == "dq" else None,
        table,
        ends,
        counter,
        t.turns,
        cu_q,
        cu_k,
        None if lengths is None else lengths.contiguous(),
        spans,
        q_ids,
        k_ids,
        None if alibi is None else alibi.contiguous(),
    )


# --- plans -------------------------------------------------------------------------------------


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
    plan = _PLANS.get(key)
    if plan is None:
        plan = made(problem, tensors, dout, dbias=dbias)
        if not torch.cuda.is_current_stream_capturing():
            _PLANS[key] = plan
            if len(_PLANS) > _MOST_PLANS:
                _PLANS.popitem(last=False)
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
    stored = dbias and stores_dbias(p)
    options = {"DBIAS": stored} | options
    configs = {kind: config_for(p, tile, KIND=kind, **options) for kind, tile in tiles.items()}
    config = next(iter(configs.values()))
    rows_ = padded_rows(config.BLOCK_Q, p.nq, p.total_q, p.batch, p.varlen)
    planes = p.hq if p.varlen else p.batch * p.hq
    shared = None
    if dbias and not stored:
        tile = SHARED_BIAS[sizes_of(p.d, p.dv)]
        c = config_for(p, tile, KIND="dbias", ORDERED=False, FRESH=False, ABREAST=False)
        shared = work_of(p, c, tile.registers, tensors, dout, planes, rows_)
    works = tuple(
        work_of(p, c, tiles[kind].registers, tensors, dout, planes, rows_)
        for kind, c in configs.items()
    )
    every = planes * (rows_ // config.BLOCK_Q)
    return Plan(
        config,
        (planes, 2, rows_),
        (planes, rows_ // config.BLOCK_Q, config.BLOCK_Q * config.D),
        Launch(rows.prepare, (every, 1, 1), _OPTIONS),
        shared,
        works,
        Launch(rows.finish, (every, 1, 1), _FOLLOWS),
        of_rows(p, config, dout, rows_ // config.BLOCK_Q),
    )


def turns_of(p: Problem) -> int:
    """Tiles of keys of all heads, where they take turns. Packed sequence b has those from
    ``cu // BLOCK_K + b`` on."""
    if p.varlen:
        return p.hk * (p.total_k // BLOCK_K + p.batch)
    return p.batch * p.hk * -(-p.nk // BLOCK_K)


def of_rows(p: Problem, c: GradientConfig, dout: Tensor, tiles: int) -> tuple[Any, ...]:
    """What is told to the launches before and after beside pointers."""
    steps = (s // 8 for s in strides(dout)[:3])
    numbers = RowNumbers(
        p.batch, p.total_q, p.total_k, p.hq, p.hk, tiles, turns_of(p), *steps, p.scale
    )
    return numbers, RowConstants(*map(gl.constexpr, (p.d, p.dv, c.D, c.DV, c.BLOCK_Q)))


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
    )
    last = (numbers, gl.constexpr(Constants(config)), *map(gl.constexpr, registers))
    copies = copies_of(config, tensors, dout, planes, rows_)
    run = {"all": kernel, "dbias": shared_bias}.get(config.KIND, wide)
    return Work(config, table, ends, copies, last, GluonLaunch(run, (blocks_, 1, 1), _FOLLOWS))


def copies_of(c: GradientConfig, tensors: Tensors, dout: Tensor, planes: int, rows_: int) -> Copies:
    """Descriptions that lack their tensors; None for what is not copied."""
    q, k, v, bias = tensors[:4]

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
        more = of_bias([ROWS, c.BLOCK_Q], [ROWS, c.BLOCK_Q]) if c.KIND == "dbias" else ()
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
        blocks(f32, (planes, rows_ * c.D // 32, 32), (rows_ * c.D, 32, 1), [1, 2 * c.D, 32]),
        *of_bias([c.BLOCK_Q, c.BLOCK_K], [c.BLOCK_Q, ROWS] if c.DBIAS else None),
    )


def limits(p: Problem) -> tuple[int, int]:
    reach = p.total_q + p.total_k  # a limit past it limits nothing, and may be past 32 bits
    return min(p.left or 0, reach), min(p.right or 0, reach)


def steps_of_ids(tensors: Tensors) -> tuple[int, ...]:
    both = (tensors.q_ids, tensors.k_ids)
    return tuple(0 if t is None or t.shape[0] == 1 else t.shape[1] for t in both)


def score_scales(problem: Problem) -> tuple[float, float]:
    """(what goes into the softcap, what makes a score of what comes out, in units of log 2)."""
    cap = problem.softcap
    if cap > 0:
        return problem.scale / cap, cap * _LOG2E
    return 0.0, problem.scale * _LOG2E


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
