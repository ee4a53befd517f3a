"""Launch the forward: a plan for each shape, made once; then pointers, and one launch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...call.inputs import Arrivals, Positions
from ...call.problem import Problem, Tensors
from ...rules.arrivals import MOST_KEYS
from ...rules.softmax import LOG2E
from .. import compat, threads
from ..compiled import Launch, runs
from ..kept import Plans
from ..parts import parts_for
from . import packed, tiles
from .documents import spans_of
from .forward_kernel import forward as kernel
from .forward_lib import Numbers, Pointers
from .forward_parts import config_of_parts, parts_of, tile_of_parts
from .gluon_compat import GluonASTSource
from .lib.order import (
    FEW_TILES,
    FORWARD_SECTION_BYTES,
    LEAST_IN_OCTAVES,
    SECTION_BYTES,
    dense_table,
    even_sections,
    strip_table,
    tile_count,
)
from .lib.tma import Descriptors, aligned, descriptor, is_aligned, strides
from .tiles import Config, Constants, Tile

_MOST_PLANS = 256


class GluonLaunch(Launch):
    """A launch of a kernel in Gluon."""

    source = GluonASTSource


class Plan(NamedTuple):
    """All of a launch that the shape and the strides of a problem decide."""

    tile: Tile
    constants: Constants
    rows: Tensor | None  # the order of the tiles, and each block's end; packed calls make theirs
    ends: Tensor | None
    launch: Launch
    parts: int = 1  # number of parts of a tile's keys (forward_parts.py)
    overflow: Tensor | None = None  # LAGS: not 0 since a row has overflowed; stays so
    mends: Plan | None = None  # after a launch whose reference lags: overflowed rows, by maxima

    def run(self, t: Pointers, copied: tuple[Any, ...]) -> None:
        """Launch all kernels, with pointers and with the tensors of the descriptors."""
        self.launch(t, copied)
        if self.mends is not None:
            self.mends.launch(self.mends.ordered(t), copied)

    def ordered(self, t: Pointers) -> Pointers:
        """Return the pointers of a second launch: the order of its tiles, and no arrivals."""
        t = t._replace(arrived=None, needed=None)
        return t if self.rows is None else t._replace(table=self.rows, ends=self.ends)

    def compile_ahead(self, t: Pointers, copied: tuple[Any, ...]) -> None:
        """Let a thread compile the second kernel while this one compiles the first."""
        if self.mends is None or not (t.out.is_cuda and threads.enabled() and runs()):
            return
        mends = self.mends.launch
        job = mends.pending(*mends.arguments(self.mends.ordered(t), copied))
        if job is not None:
            threads.THREADS.submit([job])


_PLANS = Plans(_MOST_PLANS)
#: by config of three warpgroups: True if its kernel, as compiled, uses too much local memory
_SPILLED: dict[Config, bool] = {}


def forward(
    problem: Problem, tensors: Tensors, arrivals: Arrivals | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a problem that ``supports`` accepts."""
    q, k, v = tensors[:3]
    if arrivals is not None and not (is_aligned(k) and is_aligned(v)):
        raise ValueError("k, v: rows that arrive have to begin on 16 bytes: a copy would be early")
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if not (lse.numel() and problem.total_k and problem.nq and problem.batch):
        lse.fill_(-math.inf)
        if tensors.sink is not None:
            lse.copy_(tensors.sink[:, None].expand_as(lse))
        return out.zero_(), lse
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            launch_all(problem, tensors, out, lse, arrivals)
    else:
        launch_all(problem, tensors, out, lse, arrivals)
    return out, lse


def launch_all(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, arrivals: Arrivals | None = None
) -> None:
    """Launch the kernel; once for every ``tiles.MOST_COLUMNS`` columns of values that are wider.

    Each of those launches computes all scores again. Where ``tiles.is_wide`` there is one.
    """
    most = tiles.MOST_COLUMNS
    if problem.dv <= most or tiles.is_wide(problem, bias_path(problem, tensors.bias)):
        launch(problem, tensors, out, lse, arrivals)
        return
    for first in range(0, problem.dv, most):
        width = min(most, problem.dv - first)
        v, some = (x.narrow(3, first, width) for x in (tensors.v, out))
        launch(problem._replace(dv=width), tensors._replace(v=v), some, lse, arrivals)


def launch(
    problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor, arrivals: Arrivals | None = None
) -> None:
    """Launch the kernel. Prepare a plan where the cache has none."""
    q, k, v, bias = tensors[:4]
    key = key_of(problem, tensors, out)
    plan, new = _PLANS.get(key), False
    if plan is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = aligned(q), aligned(k), aligned(v)
        tensors = tensors._replace(q=q, k=k, v=v)
        new = plan is None
        plan = find_plan(problem, tensors, out)
        if plan.tile in tiles.LONG.values() and spills(plan, problem, tensors, out, lse):
            _PLANS.pop(key_of(problem, tensors, out), None)
            plan = find_plan(problem, tensors, out)  # now with the next best tile
    else:
        try:  # noqa: SIM105  (suppress takes longer)
            _PLANS.move_to_end(key)
        except KeyError:  # another thread has dropped it; this call still uses it
            pass
    t = pointers(plan, problem, tensors, out, lse)
    if arrivals is not None:
        if plan.constants.config.BLOCK_K > MOST_KEYS:  # a tile would be read too early
            raise ValueError(f"arrivals: tiles have more than {MOST_KEYS} keys")
        t = t._replace(arrived=arrivals.arrived, needed=arrivals.needed)
    copied = bases(q, k, v, bias, out)
    if new:
        plan.compile_ahead(t, copied)
    run(plan, problem, tensors, t, copied, (out, lse))


def run(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    t: Pointers,
    copied: tuple[Any, ...],
    results: tuple[Tensor, Tensor],
) -> None:
    """Launch the kernels of a plan, and the one that merges parts."""
    plan.run(t, copied)
    if plan.parts > 1:
        merge_parts(problem, tensors, t, results)


def merge_parts(
    problem: Problem, tensors: Tensors, t: Pointers, results: tuple[Tensor, Tensor]
) -> None:
    """Launch the kernel that merges parts. It is imported where it is needed."""
    from ..merge import merge

    merge(problem, tensors, t.out, t.lse, *results)


def pointers(plan: Plan, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> Pointers:
    """Return the pointers of a call; launches what makes its tables.

    Parts of the keys have memory for their sums there.
    """
    C, table, ends, counter = plan.constants.config, plan.rows, plan.ends, None
    names = ("q_ids", "k_ids", "heads", "sink", "lengths")
    small = (getattr(tensors, name) for name in names)
    q_ids, k_ids, heads, sink, lengths = (x if x is None else x.contiguous() for x in small)
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    spans = q_range = k_range = None
    if problem.varlen:
        assert cu_q is not None
        assert cu_k is not None
        totals = (problem.total_q, problem.total_k)
        counter, ends, table, cu_q, cu_k = packed.order(cu_q, cu_k, totals, C.TILE, out, lse, sink)
    if problem.documents:
        found = spans_of(problem, tensors, C.ROW_GROUPS, C.TOKENS, C.BLOCK_K)
        spans, q_range, k_range, counter = found
    bias = tensors.bias if C.BIAS != "copied" else None
    if plan.parts > 1:
        made = parts_for(problem, lse, plan.parts)
        out, lse, sink = made["part_out"], made["part_rows"], None  # merged with the sink
    return Pointers(
        out, lse, table, ends, counter, cu_q, cu_k, lengths, spans, q_range, k_range, q_ids, k_ids,
        heads, sink, bias, tensors.seed if C.DROPOUT else None, plan.overflow,
    )  # fmt: skip


def spills(plan: Plan, problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> bool:
    """Return True if the kernel of three warpgroups uses more local memory than it may.

    Compiles the kernel.
    """
    config = plan.constants.config
    found = _SPILLED.get(config)
    if found is None:
        t = pointers(plan, problem, tensors, out, lse)
        args = plan.launch.arguments(t, bases(*tensors[:4], out))
        words = compat.spills(plan.launch.loaded(*args).kernel)
        found = words is None or words > tiles.LONG_64_SPILLS
        if len(_SPILLED) >= _MOST_PLANS:
            _SPILLED.clear()
        _SPILLED[config] = found
    return found


# --- plans -------------------------------------------------------------------------------------


def key_of(problem: Problem, tensors: Tensors, out: Tensor) -> tuple[Any, ...]:
    """Return all that a plan depends on."""
    q, k, v, bias, _, _, _, q_ids, k_ids, *_ = tensors
    more = None
    if bias is not None:
        more = (bias.stride(), bias.data_ptr() & 15)
    batches = [None if x is None else x.shape[0] for x in (q_ids, k_ids)]
    strides = (q.stride(), k.stride(), v.stride(), out.stride(2))
    return (problem, q.device.index, *strides, more, *batches)


def find_plan(problem: Problem, tensors: Tensors, out: Tensor) -> Plan:
    """Return the plan of aligned tensors."""
    key = key_of(problem, tensors, out)
    plan = _PLANS.get(key)
    if plan is None:
        plan = build_plan(problem, tensors, out)
        if not torch.cuda.is_current_stream_capturing():
            _PLANS.keep(key, plan)
    return plan


def bias_path(problem: Problem, bias: Tensor | None) -> str:
    """Return "copied" for a bias that TMA copies: each row of columns begins on 16 bytes.

    Else the kernel reads global memory: a "row" for all queries, a "column" for all keys, or
    "gathered" one by one. Without a bias return "".
    """
    if bias is None:
        return ""
    _, _, i, j = bias.shape
    if i != problem.nq or not bias.stride(2):
        return "row"
    if j != problem.nk or not bias.stride(3):
        return "column"
    return "copied" if tiles.bias_fits(problem) and is_aligned(bias) else "gathered"


def build_plan(
    p: Problem,
    tensors: Tensors,
    out: Tensor,
    tile: Tile | None = None,
    parts: int | None = None,
    **options: Any,
) -> Plan:
    """Return the plan of a problem; another tile, parts and other constants serve measurements."""
    q, k, v, bias = tensors[:4]
    path = bias_path(p, bias)
    if parts is None:
        parts = 1 if tile else parts_of(p, processors(q.device))
    tile = tile or (best_tile(p, path, q.device) if parts == 1 else tile_of_parts(p))
    group = tiles.packed_heads(p, tile, path)
    C = replace(tiles.config_for(p, tile, path, group), OUT_ROW=out.stride(2))
    C = replace(C if parts == 1 else config_of_parts(C), **options)
    if C.SIDES > 1 and C.SIDES * C.WARPGROUPS != 4:
        raise ValueError(
            f"sides={C.SIDES} of {C.WARPGROUPS} warpgroups: a block has four, give {4 // C.SIDES}"
        )
    if C.ONTO_BIAS and (C.OVERLAP or not C.LAGS):
        raise ValueError(
            f"overlap={C.OVERLAP:d}, LAGS={C.LAGS:d} with onto_bias: give 0 and 1, or onto_bias=0"
        )
    order = order_of(p, C, q.device, parts)
    plan = plan_of(p, tensors, out, tile, C, order, parts)
    if not C.LAGS:
        return plan
    if isinstance(C, tiles.WideConfig):
        raise ValueError(
            f"LAGS=1 with {C.DV} columns of values: give LAGS=0, or {tiles.MOST_COLUMNS}"
        )
    if C.ONTO_BIAS:
        plain = tiles.tile_for(p, path, processors(q.device), held=False)
        mends = build_plan(p, tensors, out, plain, LAGS=False, MENDS=True)
    elif C.STRIP or C.SIDES > 1:
        raise ValueError(f"LAGS=1 with {C.SIDES} sides and a strip of {C.STRIP} tiles: give LAGS=0")
    else:
        mends = plan_of(p, tensors, out, tile, replace(C, LAGS=False, MENDS=True), order)
    # copied like the tables: no other stream may find the plan before its memory is set
    overflow = torch.zeros(1, dtype=torch.int32).to(q.device)
    return plan._replace(overflow=overflow, mends=mends)


def order_of(p: Problem, C: Config, device: torch.device, parts: int = 1) -> tuple[int, Any, Any]:
    """Return (blocks, the order of the tiles, each block's end) of a launch.

    Parts of the keys are to the order as many batches.
    """
    if C.STRIP or C.SIDES > 1:
        return strip_order(p, C, device)
    most = processors(device)
    if C.MENDS:  # rows to mend recur, like a bias, with tiles of a head: an odd number spreads them
        most -= 1 - most % 2
    return tile_order(p._replace(batch=p.batch * parts), C, most, device, parts)


def plan_of(
    p: Problem,
    tensors: Tensors,
    out: Tensor,
    tile: Tile,
    C: Config,
    order: tuple[int, Any, Any],
    parts: int = 1,
) -> Plan:
    """Return the plan of one launch."""
    blocks, rows, ends = order
    constants = Constants(C)
    last = (numbers(p, tensors, C, p.hq // C.GROUP, parts), gl.constexpr(constants))
    options = {"num_warps": 4, "enable_fp_fusion": True}
    copies = descriptors(C, *tensors[:4], out)
    launch = GluonLaunch(kernel_of(C), (blocks, 1, 1), options, last, copies)
    return Plan(tile, constants, rows, ends, launch, parts)


def kernel_of(C: Config) -> Any:
    """Return the kernel of a config. The wide one is imported where it is needed."""
    if not isinstance(C, tiles.WideConfig):
        return kernel
    from .forward_wide import forward_wide

    return forward_wide


def descriptors(
    C: Config, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor
) -> Descriptors:
    """Return the kernel's descriptors without their tensors.

    They are those of q, k and v in two parts of columns, a copied bias, and out.
    """

    def parts(t: Tensor, view: Any, tile: list[int], widths: tuple[int, int]) -> Descriptors:
        return tuple(descriptor(t.dtype, *view, [*tile, w]) if w else None for w in widths)

    q_tile, k_tile = [1, C.TOKENS, 1, C.GROUP], [1, C.BLOCK_K, 1]
    of_bias = of_out = None
    if C.BIAS == "copied":
        assert bias is not None
        of_bias = descriptor(bias.dtype, bias.shape, strides(bias), [1, 1, tiles.ROWS, C.BLOCK_K])
    if C.STAGED:
        of_out = descriptor(out.dtype, *_grouped(out, C.GROUP), [*q_tile, C.STAGED])
    return (
        *parts(q, _grouped(q, C.GROUP), q_tile, (C.D0, C.D1)),
        *parts(k, (k.shape, strides(k)), k_tile, (C.D0, C.D1)),
        *parts(v, (v.shape, strides(v)), k_tile, (C.DV0, C.DV1)),
        of_bias,
        of_out,
    )


def _grouped(t: Tensor, group: int) -> tuple[list[int], list[int]]:
    """Return shape and strides of t with the heads of a kv head as a dimension of their own."""
    b, n, h, d = t.shape
    sb, sn, sh, _ = strides(t)
    return [b, n, h // group, group, d], [sb, sn, sh * group, sh, 1]


def bases(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> tuple[Any, ...]:
    """Return the tensors of ``descriptors``."""
    return q, q, k, k, v, v, bias, out


def long_spills(p: Problem) -> bool | None:
    """Return ``spills`` of three warpgroups for a problem, None until that kernel is compiled."""
    tile = tiles.LONG[tiles.sizes_of(p)]
    return _SPILLED.get(tiles.config_for(p, tile, "", tiles.packed_heads(p, tile, "")))


def best_tile(p: Problem, bias: str, device: torch.device) -> Tile:
    """Return the tile of a problem, as far as kernels compiled before allow."""
    tile = tiles.tile_for(p, bias, processors(device))
    if tile in tiles.LONG.values() and long_spills(p):
        return tiles.tile_for(p, bias, processors(device), spilled=True)
    return tile


def note_of_tile(p: Problem) -> str | None:
    """Return a sentence about the tile of a problem, where the compiled kernel decides on it."""
    device = torch.device(p.device, p.device_index)
    if p.bias is not None or parts_of(p, processors(device)) > 1:
        return None
    if tiles.tile_for(p, "", processors(device)) not in tiles.LONG.values():
        return None
    found = long_spills(p)
    if found is None:
        return "three warpgroups, if the kernel keeps to registers once compiled; else two"
    if found:
        return "two warpgroups: a kernel of three was compiled and did not keep to registers"
    return "three warpgroups"


def note_of_heads(p: Problem) -> str | None:
    """Return a sentence about a tile of several heads, where no bias decides on it."""
    device = torch.device(p.device, p.device_index)
    if p.bias is not None:
        return None
    parts = parts_of(p, processors(device))
    tile = best_tile(p, "", device) if parts == 1 else tile_of_parts(p)
    heads = tiles.packed_heads(p, tile, "")
    return None if heads == 1 else f"{heads} query heads of a kv head share a tile"


def note_of_parts(p: Problem) -> str | None:
    """Return a sentence about the parts of a problem's keys, if there are several."""
    parts = parts_of(p, processors(torch.device(p.device, p.device_index)))
    return None if parts == 1 else f"the keys of a tile in {parts} parts, which a launch merges"


def note_of_maxima(p: Problem) -> str | None:
    """Return a sentence about the second launch of a problem, if it has one."""
    device = torch.device(p.device, p.device_index)
    if p.bias is None:
        lagging = tiles.lags(p, "") and parts_of(p, processors(device)) == 1
    else:
        assert p.bias_dtype is not None
        rows = p.bias[2:] == (p.nq, p.nk) and p.nk * p.bias_dtype.itemsize % 16 == 0
        lagging = (
            rows
            and tiles.bias_fits(p)
            and tiles.tile_for(p, "copied", processors(device)).onto_bias
        )
    if not lagging:
        return None
    return "full tiles take no maxima: a second launch computes rows again whose weights overflow"


def numbers(p: Problem, tensors: Tensors, c: Config, heads: int, parts: int) -> Numbers:
    """Return the kernel's numbers; ``heads`` are those of tiles."""
    cap, ids = p.softcap, (tensors.q_ids, tensors.k_ids)
    scale, inner = (cap, p.scale / cap) if cap > 0 else (p.scale, 0.0)
    if not c.ADDED:  # the exponential takes both in at once
        scale *= LOG2E
    bias_strides, each = (0, 0, 0, 0), (0, 0)
    if tensors.bias is not None:
        sizes = tensors.bias.shape
        each = tuple(int(size > 1) for size in sizes[:2])
        bias_strides = tuple(
            s if size > 1 else 0 for s, size in zip(tensors.bias.stride(), sizes, strict=True)
        )
    id_strides = (0 if x is None or x.shape[0] == 1 else x.shape[1] for x in ids)
    keys, ratio = SECTION_BYTES // (2 * (p.d + p.dv)), p.group // c.GROUP
    return Numbers(
        heads, p.hk, keys, p.nq, p.nk, *p.limits, p.batch, scale, inner, *bias_strides, *id_strides,
        *each, p.hq, ratio, p.total_q, None if p.positions is None else p.positions.shift,
        parts if parts > 1 else None, *(p.gap or (None, None)),
        *draws(p),
    )  # fmt: skip


def draws(p: Problem) -> tuple[Any, ...]:
    """Return the numbers of dropout, None without it: those of ``dropout.first_draw`` come last."""
    if not p.dropout_p:
        return (None,) * 6
    _, query, key, head, sequence = p.positions or Positions()
    return p.dropout_threshold, p.keep_scale, query, key // 64, head, sequence


def tile_order(
    p: Problem, C: Config, most: int, device: torch.device, parts: int = 1
) -> tuple[int, Tensor | None, Tensor | None]:
    """Return (blocks, the order of the tiles, each block's end) of at most so many blocks.

    Tiles have a part of their keys.
    """
    tokens, heads = C.TILE, p.hq // C.GROUP
    if p.varlen:
        every = packed.most_tiles(p.total_q, p.nq, p.batch, tokens) * heads
        return max(1, min(most, every)), None, None
    early = 0 if p.gap is None else p.gap.queries
    counts = tile_count(tokens, C.BLOCK_K, p.nq - early, p.nk, p.left, p.right)
    if p.gap is not None:  # the last of these queries stands at the last key that they see
        seen = p.nk - p.nq + early - p.gap.keys
        counts = torch.cat([tile_count(tokens, C.BLOCK_K, early, seen, p.left, p.right), counts])
    near = not p.documents and int(counts.max()) * C.BLOCK_K < p.nk
    counts = (counts + parts - 1) // parts
    if p.documents:  # the lengths of tiles are only on the device
        counts = torch.ones_like(counts)
    sections = sections_of(p, counts.shape[0], heads, most)
    every = counts.shape[0] * p.batch * heads
    blocks = min(most, every)
    if not near and bool((counts == counts[0]).all()):
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        made = _even_table.__wrapped__ if capturing else _even_table  # a graph's memory is its own
        rows, ends = made(counts.shape[0], tokens, p.batch, heads, blocks, device)
    else:
        given = (counts, tokens, p.batch, heads, sections, blocks)
        rows, ends = dense_table(*given, octaves=True, near=near)
        rows, ends = rows.to(device), ends.to(device)
    if p.documents:
        ends = torch.tensor([every], dtype=torch.int32, device=device)
    return blocks, rows, ends


def takes_gap(p: Problem) -> bool:
    """Return True if the kernel takes the gap of a problem: queries before it fill tiles.

    The mask is causal, and no term reads positions.
    """
    assert p.gap is not None
    others = (p.allowed, p.bias, p.positions, p.left)
    plain = not (p.documents or p.prefix or p.varlen or p.distance or p.dropout_p)
    if not plain or p.right != 0 or any(x is not None for x in others) or max(p.d, p.dv) > 256:
        return False
    # three warpgroups may give way to two
    tile = tiles.tile_for(p, "", processors(torch.device(p.device, p.device_index)))
    rows = tiles.ROWS * tile.warpgroups
    return p.gap.queries % rows == 0 and p.gap.queries % (2 * tiles.ROWS) == 0


def sections_of(p: Problem, n: int, heads: int, processors: int) -> list[int]:
    """Return the heads, of n query tiles each, in each section of the order.

    Their keys and values stay in the cache. Heads of few tiles are as many as give all processors a
    tile. If a processor has few tiles, the longest of all heads of a sequence come first.
    """
    group = heads // p.hk
    many = max(1, FORWARD_SECTION_BYTES // (p.nk * (p.d + p.dv) * 2))
    few = n * p.batch * heads <= FEW_TILES * processors
    if few:
        many = max(many, p.hk)
    if few or n < LEAST_IN_OCTAVES:
        many = max(many, -(-processors // (n * group)))
    return even_sections(p.batch * p.hk, many, group)


def strip_order(p: Problem, C: Config, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Return (blocks, the order of the tiles, the ends of sides) where tiles share a bias."""
    assert p.bias is not None
    sizes, most = (p.batch, p.hq), processors(device)
    rows, ends = strip_table(-(-p.nq // C.TILE), C.TILE, sizes, p.bias[:2], most, C.SIDES)
    return len(ends) // C.SIDES, rows.to(device), ends.to(device)


@lru_cache(maxsize=256)
def _even_table(
    n: int, tokens: int, batch: int, heads: int, blocks: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the table of n query tiles with as many key tiles each, on the device.

    It is that of any number of keys: a decode has one more at every step.
    """
    counts = torch.ones(n, dtype=torch.int64)
    rows, ends = dense_table(counts, tokens, batch, heads, [batch * heads], blocks)
    return rows.to(device), ends.to(device)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
