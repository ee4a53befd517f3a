"""Plan a backward of Hopper kernels, by shape and strides: its launches and their orders of tiles.

``backward_host.py`` runs the launches of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon import language as gl

from ...call.problem import Problem, Tensors
from ...rules.softmax import LOG2E
from ..compiled import Launch
from ..kept import Plans
from ..shares import note
from . import packed, row_stats
from .backward_args import (
    Numbers,
    PartNumbers,
    ProductConstants,
    ProductNumbers,
    RowConstants,
    RowNumbers,
)
from .backward_bias import gradient_by, kind_of, refused_gradient
from .backward_order import complete_table, counter_table, padded_rows
from .backward_shares import shares_of, shares_to_choose
from .backward_tiles import (
    DQ_OF_DBIAS,
    ROUNDED_TILES,
    ROW_TILE,
    ROWS,
    WARPGROUPS,
    Config,
    DbiasConfig,
    DkdvConfig,
    DqConfig,
    FusedConfig,
    WideConfig,
    config_for,
    shared_bias_tile,
    tiles_of,
)
from .host import GluonLaunch, draws, processors
from .lib.order import (
    LEAST_LAST,
    SECTION_BYTES,
    dense_table,
    even_sections,
    heads_of_longest,
    sections_ending_first,
    touched_tile_count,
)
from .lib.tma import Descriptors, descriptor, strides
from .tiles import Constants

_MOST_PLANS = 256
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
#: options of a launch that overlaps with the end of the one before (backward_lib.follow)
_FOLLOWS = _OPTIONS | {"launch_pdl": True}
#: the most parts of dbias, the fewest sequences and heads of one, and the bytes of all
MOST_PARTS, LEAST_SHARERS, PART_BYTES = 8, 2, 2**25
#: (the most steps of a first tile of keys, how long others wait for it, in rounds of all blocks)
AHEAD = (8, 1.0), (16, 1.5)
#: the most blocks that work on one head, where each follows another (``backward_order.py``)
FOLLOWERS = 66


def kernel_of(kind: type[Config]) -> Any:
    """Return the kernel of a kind of config. A call imports its own: all five take 20 ms."""
    if kind is FusedConfig:
        from .backward_fused import backward as kernel
    elif kind is DqConfig:
        from .backward_dq import backward_dq as kernel
    elif kind is DkdvConfig:
        from .backward_dkdv import backward_dkdv as kernel
    elif kind is DbiasConfig:
        from .backward_dbias import backward_dbias as kernel
    else:
        assert kind is WideConfig
        from .backward_wide import backward_wide as kernel
    return kernel


class Work(NamedTuple):
    """One launch of a kernel that makes gradients."""

    config: Config
    table: Tensor | None  # the order of the tiles; packed calls make theirs on the device
    ends: Tensor | None  # the end of each block's places in it
    launch: Launch


class Plan(NamedTuple):
    """The part of a backward that its problem and strides decide."""

    tiles: int  # tiles of rows in a plane
    stats: int  # float32 numbers of lse and delta
    sums: int  # and behind them of the sums of dq
    before: Launch
    dbias: str  # ``gradient_by``; "" where it is not made here
    shared: Work | None  # dbias of a bias that sequences or heads share
    works: tuple[Work, ...]  # the fused kernel; or dq, and dk with dv
    after: Launch | None  # dq, from its sums or from dbias; None where the fused kernel rounds it
    done: int  # words of done steps, if dq is added to in an order
    parts: int  # parts of dbias, each of float32
    total: Launch | None  # the sum of the parts, if there are several
    shares: int  # parts of dk and dv, each of a share of the heads of a group
    of_shares: Launch | None  # dk and dv from their parts, if there are several

    @property
    def fused(self) -> FusedConfig | None:
        config = self.works[0].config
        return config if isinstance(config, FusedConfig) else None


PLANS = Plans(_MOST_PLANS)


def key_of(
    problem: Problem, tensors: Tensors, dout: Tensor, dbias: bool, placed: bool = False
) -> tuple[Any, ...]:
    """Return all that a plan depends on."""
    q, k, v, bias, _, _, _, q_ids, k_ids, *_ = tensors
    strides = (q.stride(), k.stride(), v.stride(), dout.stride())
    batches = [None if x is None else x.shape[0] for x in (q_ids, k_ids)]
    of_bias = None if bias is None else bias.stride()
    return (problem, q.device.index, dbias, placed, *strides, of_bias, *batches)


def plan_of(
    problem: Problem, tensors: Tensors, dout: Tensor, dbias: bool = False, placed: bool = False
) -> Plan:
    """Return the plan of aligned tensors; ``placed``: dk and dv are at places (``Places``)."""
    key = key_of(problem, tensors, dout, dbias, placed)
    plan = PLANS.get(key)
    if plan is None:
        shares = 1 if placed else None
        plan = build_plan(problem, tensors, dout, dbias=dbias, shares=shares)
        if not torch.cuda.is_current_stream_capturing():
            PLANS.keep(key, plan)
    return plan


def build_plan(
    p: Problem,
    tensors: Tensors,
    dout: Tensor,
    tiles: tuple[Config, ...] | None = None,
    dbias: bool = False,
    shares: int | None = None,
    **options: Any,
) -> Plan:
    """Return the plan of a problem; with other tiles, shares and constants to measure those."""
    if shares is None:
        shares = chosen_shares(p, tensors.q.device)
    assert shares in shares_to_choose(p)
    of_shares = sum_of_shares(p, shares) if shares > 1 else None
    p = p._replace(hk=shares * p.hk)
    tiles = tiles or tiles_of(p, kind_of(p) == "tile")
    assert not (dbias and refused_gradient(p))
    by = gradient_by(p) if dbias else ""
    configs = [config_for(p, tile, **(bias_options(p, tile, by) | options)) for tile in tiles]
    rows = padded_rows(ROW_TILE, p.nq, p.total_q, p.batch, p.varlen)
    planes = p.hq if p.varlen else p.batch * p.hq
    shared = total = None
    parts = 1
    if by == "shared":
        c = config_for(p, shared_bias_tile(p))
        parts = parts_of(p, c, processors(tensors.q.device))
        shared = build_work(p, c, tensors, dout, planes, rows, parts)
        total = sum_of_parts(parts, math.prod(p.bias)) if parts > 1 else None
    fused = configs[0] if isinstance(configs[0], FusedConfig) else None
    sections = []
    if fused is not None and fused.COMPLETE:
        sections = complete_sections(p, fused, processors(tensors.q.device))
    works = tuple(build_work(p, c, tensors, dout, planes, rows, sections=sections) for c in configs)
    row_tiles = rows // ROW_TILE
    grid = planes * row_tiles, 1, 1
    zeroed = sections[0] * p.group if sections else planes
    last = row_arguments(p, configs[0], dout, row_tiles, zeroed, shares)
    after: Launch | None = Launch(row_stats.finish, grid, _FOLLOWS, last)
    if fused is not None and not fused.DQ:
        after = product_of_dbias(p, fused, tensors.k)
    elif fused is not None and fused.COMPLETE:
        after = None
    return Plan(
        tiles=row_tiles,
        stats=planes * 2 * rows,
        sums=planes * rows * fused.D if fused is not None and fused.DQ else 0,
        before=Launch(row_stats.prepare, grid, _OPTIONS, last),
        dbias=by,
        shared=shared,
        works=works,
        after=after,
        done=done_words(p, configs[0]),
        parts=parts,
        total=total,
        shares=shares,
        of_shares=of_shares,
    )


def bias_options(p: Problem, tile: Config, by: str) -> dict[str, Any]:
    """Return the constants that a bias, and the way its gradient is made, decide."""
    kind = kind_of(p)
    stored = by == "stored"
    # with documents the product would read keys that the query's tile does not see
    product = stored and isinstance(tile, FusedConfig) and p.deterministic and not p.documents
    return {
        "BIAS": kind == "tile",
        "DBIAS": stored,
        "DQ": not product,
        "ROW": kind == "row",
        "COLUMN": kind == "column",
        "DROW": by == "row",
    }


def done_words(p: Problem, c: Config) -> int:
    """Return the number of tiles of keys of all heads, or of heads, where they are counted.

    Packed sequence b has those from ``cu // tile + b`` on.
    """
    if not isinstance(c, FusedConfig) or not (c.ORDERED or c.COMPLETE):
        return 0
    if c.COMPLETE:
        return p.batch * p.hk
    tile = WARPGROUPS * ROWS
    if p.varlen:
        return p.hk * (p.total_k // tile + p.batch)
    return p.batch * p.hk * -(-p.nk // tile)


def row_arguments(
    p: Problem, c: Config, dout: Tensor, tiles: int, zeroed: int, shares: int
) -> tuple[Any, ...]:
    """Return the arguments of the passes over rows that follow the pointers."""
    eights = (s // 8 for s in strides(dout)[:3])
    numbers = RowNumbers(
        p.batch,
        p.total_q,
        p.total_k,
        p.hq,
        p.hk,
        tiles,
        done_words(p, c),
        *eights,
        p.scale,
        p.nq,
        zeroed,
        shares,
    )
    complete = isinstance(c, FusedConfig) and c.COMPLETE
    constants = (p.d, p.dv, c.D0, c.D1, next_power_of_2(c.DV), ROW_TILE, c.NATURAL, complete)
    return numbers, RowConstants(*map(gl.constexpr, constants))


def product_of_dbias(p: Problem, c: FusedConfig, k: Tensor) -> Launch:
    """Return the launch that makes dq from dbias."""
    from .backward_dbias import dq_of_dbias

    tile = DQ_OF_DBIAS
    tiles = -(-p.nq // tile.rows)
    eights = (s // 8 for s in strides(k)[:3])
    numbers = ProductNumbers(
        p.nq, p.nk, *limits(p), p.hq, p.group, tiles, p.nk // 8, *eights, p.scale
    )
    constants = ProductConstants(
        *map(gl.constexpr, (p.d, c.D, tile.rows, tile.columns, c.LEFT, c.RIGHT))
    )
    options = _FOLLOWS | {"num_warps": tile.warps, "num_stages": tile.stages}
    return Launch(dq_of_dbias, (p.batch * p.hq * tiles, 1, 1), options, (numbers, constants))


def sum_of_parts(parts: int, size: int, other: int = 0) -> Launch:
    """Return the launch that sums parts of ``size`` numbers, and of a second gradient if any."""
    from .part_sums import sum_parts

    block = 1024
    last = (PartNumbers(size, parts, other), gl.constexpr(block))
    grid = (-(-max(size, other) // block), 1 + (other > 0), 1)
    return Launch(sum_parts, grid, _FOLLOWS, last)


def chosen_shares(p: Problem, device: torch.device) -> int:
    """Return the number of shares of a group (``backward_shares.py``)."""
    if p.group == 1:
        return 1
    tile = next(tile for tile in tiles_of(p, False) if not tile.QUERIES_RESIDENT)
    return shares_of(p, tile, processors(device))


def note_of_shares(p: Problem) -> str | None:
    """Return a sentence about the shares of a group, if there are several."""
    return note(p, chosen_shares(p, torch.device(p.device, p.device_index)))


def sum_of_shares(p: Problem, shares: int) -> Launch:
    """Return the launch that sums dk and dv of all shares."""
    numbers = rows_of_share(p) * p.hk
    return sum_of_parts(shares, numbers * p.d, numbers * p.dv)


def rows_of_share(p: Problem) -> int:
    """Return the rows of dk and dv of all sequences."""
    return p.total_k if p.varlen else p.batch * p.nk


def build_work(
    p: Problem,
    c: Config,
    tensors: Tensors,
    dout: Tensor,
    planes: int,
    rows: int,
    parts: int = 1,
    sections: Sequence[int] = (),
) -> Work:
    """Return the launch of a kernel; ``planes`` and ``rows`` are those of lse and delta.

    ``p`` has a kv head for each share. ``sections`` are those of ``complete_sections``.
    """
    of_queries = c.QUERIES_RESIDENT
    kv_heads = tensors.k.shape[2]
    shares = 1 if of_queries else p.hk // kv_heads
    if of_queries:  # a query reads the keys of a whole group
        p = p._replace(hk=kv_heads)
    programs, table, ends = order_for(p, c, tensors.q.device, parts, sections)
    ids = (tensors.q_ids, tensors.k_ids)
    each = (0, 0) if p.bias is None else (int(size > 1) for size in p.bias[:2])
    numbers = Numbers(
        p.hq if of_queries else p.hk,
        SECTION_BYTES // (2 * (p.d + p.dv) if of_queries else query_bytes(p)),
        rows,
        p.nq,
        p.nk,
        *limits(p),
        p.batch,
        *(0 if x is None or x.shape[0] == 1 else x.shape[1] for x in ids),
        *each,
        *score_scales(p),
        p.scale,
        p.hq,
        1 if of_queries else p.group,
        p.hq // kv_heads,
        *bias_strides(tensors.bias if kind_of(p) == "tile" else None),
        None if p.positions is None else p.positions.shift,
        parts if parts > 1 else None,
        shares if shares > 1 else None,
        rows_of_share(p),
        sections[0] if sections else 0,
        *draws(p),
    )
    last = (numbers, gl.constexpr(Constants(c)))
    copies = copies_of(c, tensors, dout, planes, rows)
    launch = GluonLaunch(kernel_of(type(c)), (programs, 1, 1), _FOLLOWS, last, copies)
    return Work(c, table, ends, launch)


def copies_of(c: Config, tensors: Tensors, dout: Tensor, planes: int, rows: int) -> Descriptors:
    """Return the descriptors of a kernel without their tensors; None for a copy it lacks.

    Their order is that of the kernel's arguments.
    """
    q, k, v = tensors[:3]
    bias = tensors.bias if c.BIAS else None
    f32 = torch.float32
    n_q, n_k = c.BLOCK_STREAMED, c.BLOCK_RESIDENT
    if c.QUERIES_RESIDENT:
        n_q, n_k = n_k, n_q

    def cut(t: Tensor, tokens: int, width: int) -> Any:
        return descriptor(t.dtype, t.shape, strides(t), [1, tokens, 1, width])

    def cut_bias(*box: int) -> Any:
        if bias is None:
            return None
        return descriptor(bias.dtype, bias.shape, strides(bias), [1, 1, *box])

    def cut_dbias(*box: int) -> Any:
        if bias is None:
            return None
        _, h, i, j = bias.shape
        return descriptor(bias.dtype, bias.shape, (h * i * j, i * j, j, 1), [1, 1, *box])

    halves = 2 if isinstance(c, DkdvConfig) and c.ALONE else 1
    stats = descriptor(f32, (planes, 2, rows), (2 * rows, rows, 1), [1, 2, n_q])
    if isinstance(c, FusedConfig):
        both = [
            tuple(cut(t, rows, width) if width else None for width in widths)
            for t, rows, widths in (
                (q, n_q, (c.D0, c.D1)), (dout, n_q, (c.DV0, c.DV1)),
                (k, n_k // c.KEY_TILES, (c.D0, c.D1)), (v, n_k // c.KEY_TILES, (c.DV0, c.DV1)),
            )
        ]  # fmt: skip
        dbias = cut_dbias(n_q, ROWS) if c.DBIAS else None
        of_bias = cut_bias(n_q, ROWS if c.BIAS_FLOAT32 else n_k)
        sums = sums_of(c, planes, rows)
        return (*both[0], *both[1], stats, *both[2], *both[3], *sums, of_bias, dbias)
    if isinstance(c, WideConfig):
        resident, streamed = (c.HELD, c.DV), (c.D, c.HALF_V)
        of_q, of_k = (resident, streamed) if c.QUERIES_RESIDENT else (streamed, resident)
        queries = (cut(q, n_q, of_q[0]), cut(dout, n_q, of_q[1]))
        return wide_operands(c, *queries, cut(k, n_k, of_k[0]), cut(v, n_k, of_k[1]), stats)
    queries = (cut(q, n_q, c.BUFFER_D), cut(dout, n_q, c.DV))
    keys = (cut(k, n_k, c.BUFFER_D // halves), cut(v, n_k, c.DV // halves))
    if isinstance(c, DqConfig):
        return (*queries, *keys)
    if isinstance(c, DkdvConfig):
        return (*keys, *queries, stats, cut_bias(n_q, n_k))
    if isinstance(c, DbiasConfig):
        return (*queries, *keys, stats, cut_bias(ROWS, n_k), cut_dbias(ROWS, n_k))
    raise TypeError(f"no copies of a {type(c).__name__}")


def wide_operands(c: WideConfig, q: Any, dout: Any, k: Any, v: Any, stats: Any) -> tuple[Any, ...]:
    """Return what ``backward_wide`` copies, in its order: of the tensors, or of their copies."""
    if c.QUERIES_RESIDENT:
        return q, dout, k, v, None
    return k, None if c.SCORES_ALONE else v, q, dout, stats


def sums_of(c: FusedConfig, planes: int, rows: int) -> Descriptors:
    """Return the descriptors of both parts of a tile of dQ, if the kernel makes it.

    A tile of it is 32 numbers wide (backward_steps.thread_order).
    """
    if not c.DQ:
        return None, None
    shape, strides = (planes, rows * c.D // 32, 32), (rows * c.D, 32, 1)
    return tuple(
        descriptor(torch.float32, shape, strides, [1, 2 * w, 32]) if w else None
        for w in (c.D0, c.D1)
    )


def limits(p: Problem) -> tuple[int, int]:
    """Return (left, right) of the band, 0 for a side without a limit."""
    left, right = p.limits
    return left or 0, right or 0


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a bias in units of 8; 0 where a dimension is broadcast."""
    if bias is None:
        return 0, 0, 0
    return tuple(
        s // 8 if n > 1 else 0 for n, s in zip(bias.shape[:3], strides(bias)[:3], strict=True)
    )


def score_scales(problem: Problem) -> tuple[float, float]:
    """Return (factor of the products inside a softcap, factor that gives scores in their units)."""
    cap, unit = problem.softcap, 1.0 if problem.natural else LOG2E
    if cap > 0:
        return problem.scale / cap, cap * unit
    return 0.0, problem.scale * unit


def bias_tiles(p: Problem, c: Config) -> int:
    """Return the number of tiles of a bias."""
    assert p.bias is not None
    b, h, i, j = p.bias
    return b * h * -(-i // c.BLOCK_RESIDENT) * -(-j // c.BLOCK_STREAMED)


def parts_of(p: Problem, c: DbiasConfig, most: int) -> int:
    """Return the number of blocks that compute a tile of dbias, on ``most`` processors.

    With n parts, processors work ``ceil(tiles n / most) / n`` times as long as one block for one
    tile, and each part costs time and memory.
    """
    assert p.bias is not None
    tiles, sequences = bias_tiles(p, c), p.batch // p.bias[0]
    sharers = sequences if c.RUNS else sequences * (p.hq // p.bias[1])
    bound = min(MOST_PARTS, sharers // LEAST_SHARERS, PART_BYTES // (4 * math.prod(p.bias)))
    return min(range(1, max(1, bound) + 1), key=lambda n: -(-tiles * n // most) / n * (1 + n / 20))


def order_for(
    p: Problem, c: Config, device: torch.device, parts: int = 1, sections: Sequence[int] = ()
) -> tuple[int, Tensor | None, Tensor | None]:
    """Return (blocks, the order of the tiles, the end of each block's places)."""
    most = processors(device)
    tile = (c.BLOCK_RESIDENT, c.BLOCK_STREAMED)
    if isinstance(c, DbiasConfig):
        return min(most, bias_tiles(p, c) * parts), None, None
    of_queries = c.QUERIES_RESIDENT
    heads, total, longest = (p.hq, p.total_q, p.nq) if of_queries else (p.hk, p.total_k, p.nk)
    if p.varlen:
        tiles = packed.most_tiles(total, longest, p.batch, tile[0]) * heads
        return max(1, min(most, tiles)), None, None
    if of_queries:
        steps = touched_tile_count(tile, p.nq, p.nk, p.left, p.right)
        many, group = SECTION_BYTES // (p.nk * 2 * (p.d + p.dv)), p.group
    else:
        steps = touched_tile_count(tile, p.nk, p.nq, p.right, p.left) * p.group
        many, group = SECTION_BYTES // (query_bytes(p) * p.nq), 1
    n = steps.shape[0]
    programs = min(most, n * p.batch * heads)
    if c.DRAWN:
        fused = isinstance(c, FusedConfig)
        if fused and c.COMPLETE:
            sections = sections or complete_sections(p, c, most)
            rounds = -(-p.group * -(-p.nq // ROW_TILE) // ROUNDED_TILES)
            table, ends = complete_table(n, tile[0], sections, heads, rounds, c.RIGHT)
        else:
            section = max(1, many * group, most // FOLLOWERS if fused and c.ORDERED else 1)
            table, ends = counter_table(n, tile[0], p.batch, heads, section, fused and c.UP)
    else:
        least = math.ceil(LEAST_LAST * heads_of_longest(steps, most) / group)
        given = (p.batch * heads // group, max(many, least), least, group, programs)
        if of_queries or p.group == 1:
            sections = sections_ending_first(steps, *given)
        else:  # the longest tiles of a short first section read queries of all heads of a group
            sections = even_sections(*given[:2], group)
        table, ends = dense_table(steps, tile[0], p.batch, heads, sections, programs)
    return programs, table.to(device), ends.to(device)


def complete_sections(p: Problem, c: FusedConfig, most: int) -> list[int]:
    """Return the heads of each section of ``complete_table``, for ``most`` blocks.

    While the first tiles of a section run, blocks take as many other tiles as they are, or twice as
    many under a diagonal, where the first ones are the longest. Few steps wait for a short while,
    and the cache has room for fewer heads.
    """
    wait = 1.0
    if c.RIGHT:
        steps = p.group * -(-p.nq // c.BLOCK_STREAMED)
        wait = next((x for n, x in AHEAD if steps <= n), 2.0)
    section = math.ceil(wait * most / max(1, -(-p.nk // c.BLOCK_RESIDENT) - 1))
    return even_sections(p.batch * p.hk, section, 1)


def query_bytes(p: Problem) -> int:
    """Return the bytes that a step loads and adds for a query position of all heads of a group."""
    return p.group * (2 * (p.d + p.dv) + 4 * p.d)
