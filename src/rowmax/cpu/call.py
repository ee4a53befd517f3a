"""One call as the compiled kernels read it: a record of addresses, steps, sizes and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..call.problem import Problem, Tensors
from ..rules.mask import tile_states
from .operands import bfloats_are_finite
from .vector import MR, NV, PAIRS, TILE_K, TILE_Q, W

UNLIMITED = 1 << 40  # a band's side that has no limit

_STRIDED = ("q", "k", "v", "out", "dout")  # rows of numbers: steps along b, n and h
_SCORE = ("bias", "allowed", "dbias")  # [B|1, Hq|1, Nq|1, Nk|1]: steps along b, h, q and k
_STEPS = [f"{name}_{axis}" for name in _STRIDED for axis in "bnh"]
_STEPS += [f"{name}_{axis}" for name in _SCORE for axis in "bhqk"]
_TERMS = [
    "lse",
    "lse_b",
    "lse_h",
    "dlse",
    "dlse_b",
    "dlse_h",
    "dlse_q",
    "q_ids",
    "q_ids_b",
    "k_ids",
    "k_ids_b",
    "lengths",
    "sink",
    "alibi",
    "natural",
    "rest",
]
_RESULTS = [
    "panels",
    "pairs",
    "dq",
    "dk",
    "dv",
    "slice_k",
    "slice_v",
    "slice_bias",
    "slices",
    "store_bias",
    "bias_kind",
]
_SIZES = [
    "hq",
    "hk",
    "group",
    "d",
    "dv_size",
    "d_whole",
    "dv_whole",
    "d_wide",
    "dv_wide",
    "left",
    "right",
    "seed",
    "threshold",
    "first",
    "longest_k",
    "packed",
]
_NUMBERS = ["scale", "softcap", "keep_scale"]

#: the kernels' view of a call; an address of 0 is a tensor that is not there
CALL = np.dtype(
    [(name, np.int64) for name in [*_STRIDED, *_SCORE, *_STEPS, *_TERMS, *_RESULTS, *_SIZES]]
    + [(name, np.float64) for name in _NUMBERS]
)

_BIAS_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Call:
    """The record, and what it points at (kept alive as long as the record is)."""

    def __init__(self, problem: Problem, tensors: Tensors, *more: Tensor) -> None:
        self.problem = problem
        self.dtype = problem.accumulator
        self.like = np.empty(0, np.float64 if self.dtype == torch.float64 else np.float32)
        self.paired = PAIRS and _finite_bfloats(*tensors[:3], *more)
        self.of = np.empty(0, np.uint32) if self.paired else self.like
        #: of the caller's rows as the kernels read and write them
        self.row_dtype = torch.bfloat16 if self.paired else self.dtype
        self.record = np.zeros(1, CALL)
        self._kept: list[Tensor] = []
        self._set_sizes(problem)
        for name in ("q", "k", "v"):
            self.rows(name, getattr(tensors, name))
        self._set_terms(problem, tensors)
        self.sequences = _sequences(problem, tensors)
        self.set(longest_k=int(self.sequences[:, 3].max(initial=0)))
        self.states = _tile_map(problem, tensors)

    def set(self, **fields: float) -> None:
        for name, value in fields.items():
            self.record[name] = value

    def keep(self, t: Tensor) -> int:
        """The address of a tensor that lives as long as the call."""
        self._kept.append(t)
        return t.data_ptr()

    def room(self, name: str, numbers: int) -> None:
        """Memory for the kernels to fill, of the accumulator's dtype or as large."""
        self.set(**{name: self.keep(torch.empty(numbers, dtype=self.dtype))})

    def rows(self, name: str, t: Tensor) -> None:
        """``[B, N, H, D]`` as the kernels read it: each row contiguous, and in whole vectors of
        the accumulator's dtype or, paired, in whole pairs. Most tensors are taken as they are."""
        t = t.detach().to(self.row_dtype)
        whole = 2 if self.paired else self.lanes
        if t.shape[3] % whole:
            t = torch.nn.functional.pad(t, (0, -t.shape[3] % whole))
        if t.stride(3) != 1:
            t = t.contiguous()
        self.set(**{name: self.keep(t)})
        self.steps(name, t.stride())

    @property
    def lanes(self) -> int:
        return W if self.dtype == torch.float32 else max(2, W // 2)

    @property
    def span(self) -> int:
        """Columns of a step of scores, as ``products.span`` of the kernels has it."""
        return math.lcm(MR, NV * self.lanes)

    def steps(self, name: str, stride: Sequence[int]) -> None:
        """Steps along b, n and h; packed sequences lie in one batch, each from its offset on."""
        b, n, h, _ = stride
        self.set(**{f"{name}_b": 0 if self.problem.varlen else b, f"{name}_n": n, f"{name}_h": h})

    def scores(self, name: str, t: Tensor) -> None:
        """A term of the score matrix's shape; a dimension that broadcasts has step 0."""
        steps = (0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))
        self.set(**{name: self.keep(t)})
        self.set(**{f"{name}_{axis}": step for axis, step in zip("bhqk", steps, strict=True)})

    def _set_sizes(self, p: Problem) -> None:
        self.set(
            hq=p.hq,
            hk=p.hk,
            group=p.group,
            d=p.d,
            dv_size=p.dv,
            d_whole=p.d + p.d % 2 if self.paired else p.d,
            dv_whole=p.dv + p.dv % 2 if self.paired else p.dv,
            d_wide=-(-p.d // self.lanes) * self.lanes,
            dv_wide=-(-p.dv // self.lanes) * self.lanes,
            left=UNLIMITED if p.left is None else p.left,
            right=UNLIMITED if p.right is None else p.right,
            threshold=p.dropout_threshold,
            first=p.first,
            natural=p.natural,
            scale=p.scale,
            softcap=p.softcap,
            keep_scale=p.keep_scale,
        )

    def _set_terms(self, problem: Problem, t: Tensors) -> None:
        if t.bias is not None:
            self.scores("bias", t.bias.detach())
            self.set(bias_kind=_BIAS_KINDS[t.bias.dtype])
        if t.allowed is not None:
            self.scores("allowed", t.allowed)
        if t.q_ids is not None and t.k_ids is not None:
            q_ids, k_ids = t.q_ids.contiguous(), t.k_ids.contiguous()
            self.set(q_ids=self.keep(q_ids), q_ids_b=0 if q_ids.shape[0] == 1 else q_ids.shape[1])
            self.set(k_ids=self.keep(k_ids), k_ids_b=0 if k_ids.shape[0] == 1 else k_ids.shape[1])
        if t.lengths is not None:
            self.set(lengths=self.keep(t.lengths.contiguous()))
        for name, x in (("sink", t.sink), ("alibi", t.alibi)):
            if x is not None:
                self.set(**{name: self.keep(x.detach().to(self.dtype).contiguous())})
        if t.seed is not None:
            self.set(seed=int(t.seed))


def _finite_bfloats(*rows: Tensor) -> bool:
    """Whether all are bfloat16 and hold neither inf nor NaN."""
    return all(
        t.dtype == torch.bfloat16
        and t.stride(3) == 1
        and bool(bfloats_are_finite(t.data_ptr(), tuple(t.shape), *t.stride()[:3]))
        for t in rows
    )


def _sequences(problem: Problem, tensors: Tensors) -> np.ndarray:
    """int64 ``[sequences, 5]``: first query, queries, first key, keys, offset.

    Of a batch that is not packed the sequences start at 0, each a step of b further on. Query i
    stands at key position ``i + offset``.
    """
    found = np.empty((problem.batch, 5), np.int64)
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        found[:, :4] = 0, problem.nq, 0, problem.nk
    else:
        starts = [np.asarray(cu, np.int64) for cu in (tensors.cu_seqlens_q, tensors.cu_seqlens_k)]
        found[:, :4] = np.stack([x for cu in starts for x in (cu[:-1], np.diff(cu))], 1)
    used = found[:, 3]
    if problem.align == "lengths":
        used = np.clip(np.asarray(tensors.lengths, np.int64), 0, used)
    found[:, 4] = used - found[:, 1]
    return found


_NO_MAP = np.empty((0, 0, 0, 0), np.uint8)


def _tile_map(problem: Problem, tensors: Tensors) -> np.ndarray:
    """The states of tiles under documents and a boolean tensor; bands the kernels work out."""
    if tensors.k_ids is None and tensors.allowed is None:
        return _NO_MAP
    unbanded = problem._replace(left=None, right=None, align="keys")
    return tile_states(unbanded, tensors._replace(lengths=None), TILE_Q, TILE_K).numpy()


@lru_cache(maxsize=64)
def _head_tasks(batch: int, hq: int, nq: int) -> np.ndarray:
    tiles = -(-nq // TILE_Q)
    order = np.arange(tiles - 1, -1, -1)  # the last rows of a causal call see most keys: first
    heads = np.stack(np.divmod(np.arange(batch * hq), hq), 1)
    tasks = np.empty((batch * hq, tiles, 3), np.int64)
    tasks[:, :, :2] = heads[:, None]
    tasks[:, :, 2] = order
    return tasks.reshape(-1, 3)


def query_tasks(call: Call) -> np.ndarray:
    """int64 ``[tasks, 3]``: sequence, query head, tile of queries."""
    p = call.problem
    if not p.varlen:
        return _head_tasks(p.batch, p.hq, p.nq)
    parts = [_head_tasks(1, p.hq, int(n)) for n in call.sequences[:, 1]]
    tasks = np.concatenate([_head_tasks(0, 1, 0), *parts])
    tasks[:, 0] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return tasks
