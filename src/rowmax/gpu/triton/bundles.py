"""What every kernel takes: three bundles, ``t`` of pointers, ``n`` of numbers, ``c`` of constants.

``None`` in a bundle is a compile-time constant: a term that a problem lacks is ``None`` in ``t``
or ``n``, and the code for it is not compiled.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ...call.problem import Problem, Tensors
from .tiles import Tiles, padded

LOG2E = math.log2(math.e)
#: rows of lse2 and delta start at multiples of as many, so that they are read in pairs
ROW_UNIT = 16
#: what heads whose tiles are taken in turns may pass over together
TOGETHER_BYTES = 8 << 20


class Pointers(NamedTuple):
    """``t``: what a kernel reads and writes."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    lse: Any = None
    bias: Any = None
    sink: Any = None
    alibi: Any = None
    allowed: Any = None
    q_ids: Any = None
    k_ids: Any = None
    lengths: Any = None
    cu_q: Any = None
    cu_k: Any = None
    seed: Any = None
    order: Any = None  # int32, a row's tiles by number: full ones, then partial ones
    counts: Any = None  # int32 [..., 2], how many of each
    dout: Any = None
    dlse: Any = None
    lse2: Any = None  # float32 [B, Hq, Nq], lse in the units of the scores, +inf for no weights
    rest: Any = None  # as lse2, of natural scores: what lse lost when it was rounded (row_sums.py)
    delta: Any = None  # float32 [B, Hq, Nq], Delta - dlse
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None  # as bias
    dbias_rows: Any = None  # float32 [B, Hq, Nq], dS summed over keys
    dbias_cols: Any = None  # float32 [B, Hq, Nk], dS summed over queries
    states: Any = None  # uint8, a map of tiles
    dsink: Any = None  # float32 [B, Hq, tiles], of each tile of rows


class Strides(NamedTuple):
    """Steps (batch, head) in units of ``c.ALIGN`` or, of outputs, ``c.OUT_ALIGN`` elements."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    bias: Any = None  # (b, h, i, j), the first three in units of c.BIAS_ALIGN; j None is 1
    dbias: Any = None
    allowed: Any = None  # (b, h, i, j)
    q_ids: Any = None  # of the batch
    k_ids: Any = None
    order: Any = None  # (b, h) steps in fixed tiles, and how long the list of one is
    states: Any = None  # (b, h, tile of queries)


class Numbers(NamedTuple):
    """``n``: sizes, scalars and strides. No kernel is compiled anew for them."""

    batch: Any
    total_q: Any
    total_k: Any
    longest_q: Any
    longest_k: Any
    tiles: Any  # of the fixed dimension, a head
    rows: Any  # of lse2 and delta, a head, in units of ROW_UNIT
    scale: Any
    scale2: Any  # scale in the units of the scores
    cap2: Any  # softcap in the units of the scores
    scale_cap: Any  # scale / softcap
    left: Any
    right: Any
    threshold: Any
    keep_scale: Any
    first: Any
    stride: Any
    bias_batch: Any = None
    together: Any = 1  # heads whose tiles are taken in turns


class Constants(NamedTuple):
    """``c``: what a kernel is compiled for."""

    HQ: Any
    GROUP: Any
    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    ALIGN: Any
    OUT_ALIGN: Any
    BIAS_ALIGN: Any
    ROW_Q: Any  # the step from row to row, in elements, a constant for the sake of registers
    ROW_K: Any
    ROW_V: Any
    ROW_OUT: Any
    ROW_DOUT: Any
    ROW_DQ: Any
    ROW_DK: Any
    ROW_DV: Any
    RAGGED_Q: Any  # tiles of queries can run past the end
    RAGGED_K: Any  # tiles of keys can run past those in use
    SPLIT: Any  # full and partial tiles in loops of their own
    EDGES: Any  # tiles that need masking code can occur
    MASKS: Any  # pairs inside the matrix can be masked
    TO_LENGTHS: Any  # positions are aligned to the lengths, else to the keys
    NATURAL: Any  # scores are in natural units, else in units of log 2
    FOLDED: Any  # scores are q.k alone, so that the scale folds into the exponent
    PRECISION: Any  # of float32 products
    SHARING: Any  # heads that share a tile of the bias


def pointers(
    tensors: Tensors, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> Pointers:
    """The inputs of a call; what else a kernel needs is for it to add."""
    q, k, v, bias, sink, alibi, allowed, q_ids, k_ids, lengths, cu_q, cu_k, seed = tensors
    return Pointers(
        q, k, v, out, lse, bias, sink, alibi, allowed, q_ids, k_ids, lengths, cu_q, cu_k, seed
    )


def prepared(tensors: Tensors) -> Tensors:
    """Tensors as the kernels read them: q, k and v aligned, small ones without gaps."""
    q, k, v, _, sink, alibi, _, q_ids, k_ids, lengths, *_ = tensors
    fixed: dict[str, torch.Tensor] = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        y = aligned(x)
        if y is not x:
            fixed[name] = y
    for name, x in (("q_ids", q_ids), ("k_ids", k_ids), ("sink", sink), ("alibi", alibi)):
        if x is not None and x.stride(-1) != 1:
            fixed[name] = x.contiguous()
    if lengths is not None and not lengths.is_contiguous():
        fixed["lengths"] = lengths.contiguous()
    return tensors._replace(**fixed) if fixed else tensors


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, such that rows start at multiples of 16 bytes and have no gaps.

    Other rows would be read an element at a time, which costs more than the copy.
    """
    unit = 16 // x.element_size()
    b, n, h, d = x.stride()
    whole = (d == 1 or x.shape[3] == 1) and x.data_ptr() % 16 == 0
    if whole and ((b | n | h) % unit == 0 or not any(s % unit for s in steps(x)[:3])):
        return x
    *sizes, width = x.shape
    return x.new_empty(*sizes, -(-width // unit) * unit)[..., :width].copy_(x)


def steps(x: torch.Tensor) -> tuple[int, ...]:
    """Strides with 0 where a dimension has one element, which nothing then steps over."""
    return tuple(s if size > 1 else 0 for s, size in zip(x.stride(), x.shape, strict=True))


def contiguous_steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What ``steps`` gives of a contiguous tensor of this shape."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step if size > 1 else 0)
        step *= size
    return tuple(reversed(found))


def strides_of(
    problem: Problem, tensors: Tensors, matrices: dict[str, tuple[int, ...]]
) -> tuple[Strides, dict[str, int]]:
    """The strides of the inputs and of ``matrices``, and those that are constants.

    ``dout`` is given, and read as q is; the others are contiguous.
    """
    unit = 16 // tensors.q.element_size()
    read = {name: steps(getattr(tensors, name))[:3] for name in ("q", "k", "v")}
    made = {name: s[:3] for name, s in matrices.items()}
    if "dout" in made:
        read["dout"] = made.pop("dout")
    align, out_align = unit, common_align(list(made.values()), unit)
    bias, bias_align = None, 1
    if tensors.bias is not None:
        bias = steps(tensors.bias)
        both = [bias[:3], contiguous_steps(tensors.bias.shape)[:3]]
        bias_align = common_align(both, 16 // tensors.bias.element_size())
    dbias = None if bias is None else contiguous_steps(tensors.bias.shape)  # pyright: ignore
    found = Strides(
        **{name: (b // align, h // align) for name, (b, _, h) in read.items()},
        **{name: (b // out_align, h // out_align) for name, (b, _, h) in made.items()},
        bias=None if bias is None else pair_strides(bias, bias_align),
        dbias=None if dbias is None else pair_strides(dbias, bias_align),
        allowed=None if tensors.allowed is None else pair_strides(steps(tensors.allowed)),
        q_ids=None if tensors.q_ids is None else steps(tensors.q_ids)[0],
        k_ids=None if tensors.k_ids is None else steps(tensors.k_ids)[0],
    )
    fixed = {"ALIGN": align, "OUT_ALIGN": out_align, "BIAS_ALIGN": bias_align}
    return found, fixed | {f"ROW_{n.upper()}": s[1] for n, s in (read | made).items()}


def common_align(matrices: list[tuple[int, ...]], width: int) -> int:
    """``width`` (16 bytes of elements) if it divides every stride, else 1."""
    return width if all(s % width == 0 for m in matrices for s in m) else 1


def pair_strides(steps: tuple[int, ...], align: int = 1) -> tuple[int | None, ...]:
    b, h, i, j = steps
    return b // align, h // align, i // align, None if j == 1 else j


def dense_batch(problem: Problem) -> int:
    """How often a head's tiles are launched: packed sequences share theirs."""
    return 1 if problem.varlen else problem.batch


def slots(problem: Problem, block: int, of: str) -> int:
    """Tiles a head: of one sequence, or of all that are packed with one more for what is left."""
    n, total = (problem.nq, problem.total_q) if of == "queries" else (problem.nk, problem.total_k)
    return total // block + problem.batch + 1 if problem.varlen else -(-n // block)


def together(problem: Problem, of: str) -> int:
    """How many heads have their tiles taken in turns, the longest first.

    Causal tiles are of all lengths. Head by head the last heads' longest tiles would start late,
    and most of the device wait for them; in turns, short ones come last. No more heads than L2 can
    hold what they pass over.
    """
    if problem.varlen or problem.right is None or problem.left is not None:
        return 1
    rows = problem.nq * problem.group if of == "keys" else problem.nk
    passed = rows * (problem.d + problem.dv) * problem.dtype.itemsize
    return max(1, TOGETHER_BYTES // max(passed, 1))


def numbers(problem: Problem, stride: Strides) -> Numbers:
    unit = 1.0 if problem.natural else LOG2E
    capped, dropped = problem.softcap > 0, problem.dropout_threshold > 0
    left, right = problem.limits
    indexed = problem.bias is not None or problem.allowed is not None
    return Numbers(
        batch=problem.batch,
        total_q=problem.total_q,
        total_k=problem.total_k,
        longest_q=problem.nq if indexed else problem.total_q,
        longest_k=problem.nk if indexed else problem.total_k,
        tiles=0,
        rows=-(-problem.total_q // ROW_UNIT),
        scale=problem.scale,
        scale2=problem.scale * unit,
        cap2=problem.softcap * unit if capped else None,
        scale_cap=problem.scale / problem.softcap if capped else None,
        left=left,
        right=right,
        threshold=problem.dropout_threshold if dropped else None,
        keep_scale=problem.keep_scale if dropped else None,
        first=problem.first if dropped else None,
        stride=stride,
    )


def constants(problem: Problem, tiles: Tiles, fixed: dict[str, int], precision: str) -> Constants:
    ragged_q = problem.varlen or problem.nq % tiles.block_q != 0
    ragged_k = problem.varlen or problem.prefix or problem.nk % tiles.block_k != 0
    values = dict.fromkeys(Constants._fields, 0) | {
        "HQ": problem.hq,
        "GROUP": problem.group,
        "D": problem.d,
        "DV": problem.dv,
        "BLOCK_D": padded(problem.d),
        "BLOCK_DV": padded(problem.dv),
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        **fixed,
        "RAGGED_Q": ragged_q,
        "RAGGED_K": ragged_k,
        "SPLIT": tiles.split and problem.masked and not problem.prefix,
        "EDGES": problem.masked or ragged_k,
        "MASKS": problem.masked,
        "TO_LENGTHS": problem.align == "lengths",
        "NATURAL": problem.natural,
        "FOLDED": folded(problem),
        "PRECISION": precision,
    }
    return Constants(**{name: tl.constexpr(value) for name, value in values.items()})


def folded(problem: Problem) -> bool:
    return (
        problem.softcap == 0 and problem.bias is None and not problem.alibi and problem.scale != 0
    )


def precision_of(tensors: Tensors) -> str:
    """Products of float32 keep float32's accuracy: three tf32 ones where there are such units."""
    if tensors.q.dtype != torch.float32:
        return "ieee"  # which 16-bit products pay no heed to
    found = capability(tensors.q.device)
    return "tf32x3" if found is not None and found >= (8, 0) else "ieee"


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
