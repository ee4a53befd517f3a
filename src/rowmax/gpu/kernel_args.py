"""The arguments of every kernel: ``ptr`` (pointers), ``num`` (numbers) and ``cfg`` (constants).

None is a compile-time constant: a term that a problem lacks is None in ``ptr`` or ``num``, and its
code is not compiled.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call.inputs import Tangents, parameters_of
from ..call.problem import Problem, Tensors
from ..rules.mask import distinct
from ..rules.softmax import LOG2E
from .tiles import Tiles, padded
from .unit_copies import copied_in_units

#: constants of kernels are kept: 40 new ones would take 28 us of every new length (a CPU's host)
constant = lru_cache(maxsize=4096, typed=True)(tl.constexpr)

#: rows of lse2 and delta start at multiples of it, so that they are read in pairs
ROW_UNIT = 16
#: numbers of each row of dheads: the parameters of all head terms, padded to a power of two
PARAMETER_ROWS = triton.next_power_of_2(len(parameters_of()))


class Pointers(NamedTuple):
    """``ptr``: the tensors that a kernel reads and writes. The first are those of ``Tensors``."""

    q: Any
    k: Any = None
    v: Any = None
    bias: Any = None
    sink: Any = None
    heads: Any = None  # float32 [parameters, Hq]
    allowed: Any = None
    q_ids: Any = None
    k_ids: Any = None
    lengths: Any = None
    cu_q: Any = None
    cu_k: Any = None
    seed: Any = None
    prefix: Any = None
    out: Any = None
    lse: Any = None
    order: Any = None  # int32 [lists, 2 length], tiles by number: full ones, then partial ones
    counts: Any = None  # int32 [..., 2], the number of each
    states: Any = None  # uint8, a map of tiles
    dout: Any = None
    dlse: Any = None
    lse2: Any = None  # float32 [B, Hq, Nq], lse in the units of the scores, +inf for no weights
    rest: Any = None  # as lse2, of natural scores: the rounding error of lse (preprocess.py)
    delta: Any = None  # float32 [B, Hq, Nq], Delta - dlse
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None  # as bias
    dbias_rows: Any = None  # float32 [B, Hq, Nq], dS summed over keys
    dbias_cols: Any = None  # float32 [B, Hq, Nk], dS summed over queries
    dsink: Any = None  # float32 [B, Hq, tiles], of each tile of rows
    dheads: Any = None  # float32 [B, Hq, Nq, PARAMETER_ROWS], of each row
    # tangents of inputs and results, and the gradients of the tangents
    tq: Any = None
    tk: Any = None
    tv: Any = None
    tbias: Any = None
    tsink: Any = None
    theads: Any = None  # as heads
    tout: Any = None
    tlse: Any = None
    dtout: Any = None
    dtlse: Any = None
    tdelta: Any = None  # as delta: b of rules/tangent.py, where delta is c
    dtq: Any = None
    dtk: Any = None
    dtv: Any = None
    dtbias: Any = None
    dtbias_rows: Any = None
    dtbias_cols: Any = None
    dtsink: Any = None
    dtheads: Any = None
    dk_parts: Any = None  # float32 [parts, B, Nk, Hk, D], dK of a part of the queries or heads
    dv_parts: Any = None
    part_out: Any = None  # float32 [parts B, Nq, Hq, Dv], O of a part of the keys
    part_rows: Any = None  # float32 [2 parts, B Hq Nq], m and then l of each part


class Matrix(NamedTuple):
    """The layout of a matrix ``[B, N, H, D]``; all but b and head are constants."""

    b: Any  # strides in units of ALIGN
    head: Any
    ROW: Any  # elements from row to row: a run-time number would cost registers
    D: Any
    BLOCK_D: Any  # the width of its tiles
    ALIGN: Any


class Pairs(NamedTuple):
    """The strides of a term ``[B, H, Nq, Nk]``, all but the last in units of ALIGN."""

    b: Any
    head: Any
    row: Any
    col: Any = None  # None: 1
    ALIGN: Any = tl.constexpr(1)


class Lists(NamedTuple):
    """The strides of lists of tiles, counted in lists, and the length of a list."""

    b: Any
    head: Any
    length: Any


class Numbers(NamedTuple):
    """``num``: sizes, scalars and strides. A kernel serves any value of them."""

    batch: Any
    total_q: Any
    total_k: Any
    longest_q: Any
    longest_k: Any
    tiles: Any  # resident tiles of a head
    rows: Any  # rows of a head in lse2 and delta, in units of ROW_UNIT
    scale: Any
    scale2: Any  # scale in the units of the scores
    cap2: Any  # softcap in the units of the scores
    scale_cap: Any  # scale / softcap
    left: Any
    right: Any
    threshold: Any
    keep_scale: Any
    shift: Any  # added to distances in a block of a longer call; None: 0
    first_query: Any  # for dropout's counters there; None, all four: 0
    first_key: Any
    first_head: Any
    first_sequence: Any
    q: Any  # a Matrix each
    k: Any
    v: Any
    out: Any = None
    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    bias: Any = None  # Pairs
    dbias: Any = None
    tq: Any = None  # a Matrix each
    tk: Any = None
    tv: Any = None
    tout: Any = None
    dtout: Any = None
    dtq: Any = None
    dtk: Any = None
    dtv: Any = None
    tbias: Any = None  # Pairs
    allowed: Any = None
    q_ids: Any = None  # strides of the batch
    k_ids: Any = None
    parts: Any = None  # the number of parts of a tile's keys, or of the heads that read it
    # one of these is None: triton 3.6 loses the constants of a record within this one, in a loop,
    # unless a constant of this one follows
    states: Any = None  # Pairs of tiles
    order: Any = None  # Lists
    bias_batch: Any = None
    together: Any = 1  # heads whose tiles alternate


class Config(NamedTuple):
    """``cfg``: the constants that a kernel is compiled for."""

    HQ: Any
    GROUP: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    PACKED: Any  # sequences are packed, and their offsets count
    RAGGED_Q: Any  # tiles of queries can extend past the end
    RAGGED_K: Any  # tiles of keys can extend past those in use
    SPLIT: Any  # full and partial tiles in separate loops
    EDGES: Any  # tiles that need masking code can occur
    MASKS: Any  # pairs inside the matrix can be masked
    TO_LENGTHS: Any  # positions are aligned to the lengths, else to the keys
    NATURAL: Any  # scores are in natural units, else in units of log 2
    FOLDED: Any  # scores are q.k alone, so that the scale folds into the exponent
    HEAD_ROWS: Any  # the row of ``heads`` of each parameter of head terms; -1: the call has none
    DISTANCE: Any  # a head term reads distances
    PRECISION: Any  # precision of float32 products
    SHARING: Any  # heads that share a tile of the bias
    WIDTH: Any  # columns of a head that a step of dbias reads
    PARTS: Any  # steps that read all columns


# --- tensors as kernels read them --------------------------------------------------------------


def prepared(tensors: Tensors) -> Tensors:
    """Return the tensors as kernels read them: rows aligned, small ones contiguous."""
    q, k, v, _, sink, heads, allowed, q_ids, k_ids, lengths, *_, prefix = tensors
    fixed: dict[str, Tensor] = {}
    if allowed is not None and not in_units(allowed):
        fixed["allowed"] = copied_in_units(distinct(allowed)).expand(allowed.shape)
    for name, x in (("q", q), ("k", k), ("v", v)):
        y = aligned(x)
        if y is not x:
            fixed[name] = y
    names = ("q_ids", "k_ids", "sink", "heads", "lengths", "prefix")
    for name, x in zip(names, (q_ids, k_ids, sink, heads, lengths, prefix), strict=True):
        if x is not None and x.stride(-1) != 1:
            fixed[name] = x.contiguous()
    return tensors._replace(**fixed) if fixed else tensors


def prepared_tangents(tangents: Tangents) -> Tangents:
    """Return the tangents as kernels read them, as ``prepared`` does."""
    q, k, v, bias, sink, heads = tangents
    q, k, v = (None if x is None else aligned(x) for x in (q, k, v))
    sink, heads = (None if x is None else x.contiguous() for x in (sink, heads))
    return Tangents(q, k, v, bias, sink, heads)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy, with rows without gaps that start at multiples of 16 bytes.

    Other rows would be read an element at a time, which costs more than the copy.
    """
    unit = 16 // x.element_size()
    b, n, h, d = x.stride()
    whole = (d == 1 or x.shape[3] == 1) and x.data_ptr() % 16 == 0
    if whole and ((b | n | h) % unit == 0 or not any(s % unit for s in strides(x)[:3])):
        return x
    return copied_in_units(x)


def in_units(x: Tensor) -> bool:
    """Return True if a term ``[B, H, Nq, Nk]`` can be read 16 bytes at a time, up to each end."""
    n, unit = x.shape[3], 16 // x.element_size()
    if n == 1:
        return True
    rows = strides(x)[:3]
    if x.stride(3) != 1 or x.data_ptr() % 16 or common_align(rows, unit) != unit:
        return False
    last = sum(s * (size - 1) for s, size in zip(rows, x.shape, strict=False))
    end = x.storage_offset() + last + -(-n // unit) * unit
    return n % unit == 0 or end * x.element_size() <= x.untyped_storage().nbytes()


def strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides, 0 for a dimension of one element."""
    return tuple(s if size > 1 else 0 for s, size in zip(x.stride(), x.shape, strict=True))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``strides`` of a contiguous tensor of this shape."""
    found, stride = [], 1
    for size in reversed(shape):
        found.append(stride if size > 1 else 0)
        stride *= size
    return tuple(reversed(found))


# --- arguments of one job ----------------------------------------------------------------------


#: the matrices and terms whose strides are those of the tensors that a launch is given
STRIDED = ("dout", "tq", "tk", "tv", "dtout", "tbias")


def strided(made: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a launch, other than inputs, whose strides its numbers hold."""
    return {name: made[name] for name in STRIDED if made.get(name) is not None}


def matrices(
    problem: Problem, tensors: Tensors, names: tuple[str, ...], given: dict[str, Tensor]
) -> dict[str, Matrix]:
    """Return q, k, v and the named matrices, contiguous except q, k, v and those ``given``."""
    q, k, v = tensors[:3]
    given = {"q": q, "k": k, "v": v, **given}
    kinds = {"q": q.shape, "k": k.shape, "v": v.shape, "out": problem.out_shape}
    shapes = {mark + name: shape for name, shape in kinds.items() for mark in ("", "d", "t", "dt")}
    unit = 16 // q.element_size()
    found = {}
    for name in ("q", "k", "v", *names):
        x = given.get(name)
        b, row, head, _ = contiguous_strides(shapes[name]) if x is None else strides(x)
        d = shapes[name][3] if x is None else x.shape[3]
        align = common_align((b, row, head), unit)
        fixed = map(constant, (row, d, padded(d), align))
        found[name] = Matrix(b // align, head // align, *fixed)
    return found


def pair_strides(tensors: Tensors, tbias: Tensor | None = None) -> dict[str, Any]:
    """Return the strides of the terms of pairs and of ids."""
    found: dict[str, Any] = {}
    if tensors.bias is not None:
        read, written = strides(tensors.bias), contiguous_strides(tensors.bias.shape)
        n, unit = tensors.bias.shape[3], 16 // tensors.bias.element_size()
        # units of a row may end past it, so a row of another length is read by elements
        align = common_align((*read[:3], *written[:3], n if n > 1 else 0), unit)
        found |= {"bias": pairs(read, align), "dbias": pairs(written, align)}
        if tbias is not None:
            read = strides(tbias)
            found["tbias"] = pairs(read, common_align((*read[:3], n if n > 1 else 0), unit))
    if tensors.allowed is not None:
        read = strides(tensors.allowed)
        found["allowed"] = pairs(read, common_align(read[:3], 16))
    if tensors.q_ids is not None and tensors.k_ids is not None:
        found |= {"q_ids": strides(tensors.q_ids)[0], "k_ids": strides(tensors.k_ids)[0]}
    return found


def common_align(found: tuple[int, ...], unit: int) -> int:
    """Return ``unit`` (16 bytes of elements) if it divides every stride, else 1."""
    return 1 if any(s % unit for s in found) else unit


def pairs(found: tuple[int, ...], align: int) -> Pairs:
    """Return the Pairs of strides, the first three in units of ``align``."""
    b, head, row = (s // align for s in found[:3])
    return Pairs(b, head, row, None if found[3] == 1 else found[3], tl.constexpr(align))


def sizes_and_scalars(problem: Problem) -> dict[str, Any]:
    """Return the numbers of a problem that every job has."""
    unit = 1.0 if problem.natural else LOG2E
    capped, dropped = problem.softcap > 0, problem.dropout_threshold > 0
    left, right = problem.limits
    indexed = problem.bias is not None or problem.allowed is not None
    return {
        "batch": problem.batch,
        "total_q": problem.total_q,
        "total_k": problem.total_k,
        "longest_q": problem.nq if indexed else problem.total_q,
        "longest_k": problem.nk if indexed else problem.total_k,
        "rows": -(-problem.total_q // ROW_UNIT),
        "scale": problem.scale,
        "scale2": problem.scale * unit,
        "cap2": problem.softcap * unit if capped else None,
        "scale_cap": problem.scale / problem.softcap if capped else None,
        "left": left,
        "right": right,
        "threshold": problem.dropout_threshold if dropped else None,
        "keep_scale": problem.keep_scale if dropped else None,
        **positions(problem),
    }


def positions(problem: Problem) -> dict[str, int | None]:
    """Return the shift and the first counters, None where all positions of the call are 0.

    If one of them is not, all that the call reads are numbers, so that a kernel is compiled for two
    cases and no more.
    """
    placed = problem.positions
    shift, *firsts = (None,) * 5 if placed is None else placed
    if not problem.distance:
        shift = None
    if problem.dropout_threshold == 0:
        firsts = (None,) * 4
    names = ("first_query", "first_key", "first_head", "first_sequence")
    return {"shift": shift, **dict(zip(names, firsts, strict=True))}


def config(problem: Problem, tiles: Tiles, precision: str, **more: Any) -> Config:
    """Return the constants; ``more`` replaces or adds some."""
    ragged_k = problem.varlen or problem.prefix or problem.nk % tiles.block_k != 0
    by_pairs = problem.allowed is not None  # full tiles then wait for no mask
    values = {
        "HQ": problem.hq,
        "GROUP": problem.group,
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "PACKED": problem.varlen,
        "RAGGED_Q": problem.varlen or problem.nq % tiles.block_q != 0,
        "RAGGED_K": ragged_k,
        "SPLIT": by_pairs or (tiles.split and problem.masked and not problem.prefix),
        "EDGES": problem.masked or ragged_k,
        "MASKS": problem.masked,
        "TO_LENGTHS": problem.align == "lengths",
        "NATURAL": problem.natural,
        "FOLDED": folded(problem),
        "DISTANCE": problem.distance,
        "PRECISION": precision,
        "SHARING": 0,
        "WIDTH": 0,
        "PARTS": 0,
    }
    constants = {name: constant(x) for name, x in (values | more).items()}
    return Config(**constants, HEAD_ROWS=tuple(map(constant, head_rows(problem))))


def head_rows(problem: Problem) -> list[int]:
    """Return the row of ``heads`` of each parameter that a call can have, -1 for absent ones."""
    present = parameters_of(problem.heads)
    return [present.index(name) if name in present else -1 for name in parameters_of()]


def folded(problem: Problem) -> bool:
    """Return True where a score is the product alone, times a scale that is not 0."""
    return (
        problem.softcap == 0 and problem.bias is None and not problem.heads and problem.scale != 0
    )


def precision_of(tensors: Tensors) -> str:
    """Return the precision of products: float32 keeps its accuracy, by three tf32 products."""
    if tensors.q.dtype != torch.float32:
        return "ieee"  # products of 16 bits ignore it
    found = capability(tensors.q.device)
    return "tf32x3" if found is not None and found >= (8, 0) else "ieee"


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
