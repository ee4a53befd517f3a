"""One call as the compiled kernels read it: a record of tensors, sizes and numbers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..call.inputs import HEAD_TERMS, INPUTS, Positions, Tangents, Tensors, parameters_of
from ..call.problem import Problem
from ..rules.mask import PARTIAL, distinct, tile_states
from . import amx
from .vector import MR, NV, PAIRS, TILE_K, TILE_Q, W

UNLIMITED = 1 << 40  # the limit of an unlimited side of a band

_READ = ("q", "k", "v", "bias", "sink", "heads", "allowed", "q_ids", "k_ids")  # by the kernels


def _axes(name: str) -> str:
    """Return the axes of an input as kernels name them: n for the rows of q as of k and v."""
    axes = "".join(INPUTS[name].letters)
    return axes.replace("g", "h") if "ij" in axes else axes.translate(_ROW_AXES)


_ROW_AXES = str.maketrans("ijge", "nnhd")
#: the axes of each tensor that kernels read or write; p: parts that are added at the end
_AXES = {name: _axes(name) for name in _READ}
_AXES |= {"out": "bnhd", "dout": "bnhd", "lse": "bhn", "delta": "bhn", "rest": "bhn"}
_AXES |= {"dlse": "bhn"}
_AXES |= {f"t{name}": _AXES[name] for name in Tangents._fields}
_AXES |= {"tout": "bnhd", "dtout": "bnhd", "tlse": "bhn", "row_b": "bhn", "row_c": "bhn"}
for _d in ("d", "dt"):  # gradients, and those of tangents
    _AXES |= {f"{_d}q": _AXES["q"], f"{_d}heads": "pbth"}
    _AXES |= {f"{_d}{name}": "p" + _AXES[name] for name in ("k", "v", "bias")}
#: the states of tiles of queries and keys
_AXES["states"] = "bhij"
#: addresses: of the sequences, and of memory that kernels fill
_MEMORY = ("sequences", "panels", "tangent_panels", "values")
_SIZES = ["batch", "hq", "hk", "group", "d", "value_d", "d_operand", "value_d_operand", "d_padded"]
_SIZES += ["value_d_padded", "left", "right", "seed", "threshold", "natural", "bias_kind"]
_SIZES += ["longest_q", "longest_k", "parts", "store_bias", "bent", "wide"]
#: 1 + the row of each parameter of head terms; 0: absent
_SIZES += [f"head_{name}" for name in parameters_of()]
#: from ``Positions``: the shift of distances, and the first of each of dropout's counters
_SIZES += ["shift", "first_query", "first_key", "first_head", "first_sequence"]
#: for few queries and short sequences: two counts of their threads, the tasks, kv heads of a task,
#: chunks of a sequence, tiles of a chunk, the address of the chunks' parts of a result.
#: ``part_step``: the parts from a sequence to the next, without those by its keys
_SIZES += ["next", "infinite", "tasks", "task_heads", "chunks", "chunk", "chunk_parts", "part_step"]
_NUMBERS = ["scale", "softcap", "keep_scale"]


def _fields(*names: str) -> np.dtype:
    return np.dtype([(name, np.int64) for name in names])


#: the kernels' view of a call: each tensor is its address (0: absent) and a stride for each
#: axis (0: it broadcasts)
CALL = np.dtype(
    [(name, _fields("address", *axes)) for name, axes in _AXES.items()]
    + [(name, np.int64) for name in [*_MEMORY, *_SIZES]]
    + [(name, np.float64) for name in _NUMBERS]
)
#: the place of each field, in words of 8 bytes: writing words is ten times as fast as writing
#: fields
_WORD = {name: field[1] // 8 for name, field in (CALL.fields or {}).items()}
#: the first query and key, how many there are, how many keys lengths leave; query i stands at key
#: position ``i + offset``; ``right`` limits no key of the prefix
SEQUENCE = _fields("query", "queries", "key", "keys", "end", "offset", "prefix")
_END = (SEQUENCE.names or ()).index("end")
_FEW_SEQUENCES = 16  # for which a loop takes less time than numpy
Words = ctypes.Array[ctypes.c_int64]  # memory that kernels read
TASK = _fields("s", "h", "tile")  # sequence, query head, tile of queries

_BIAS_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def word_of(name: str) -> int:
    """Return the place of a field of the record, in words; of a tensor that of its address."""
    return _WORD[name]


class Call:
    """The record, and the owner of the memory that it points at."""

    def __init__(
        self,
        problem: Problem,
        tensors: Tensors,
        *more: Tensor,
        bfloats: bool = True,
        in_place: bool = False,
    ) -> None:
        """Describe a call; ``bfloats``: operands of bfloat16 where the processor multiplies them.

        ``in_place``: kernels read and write rows of the caller's dtype.

        Kernels count the tiles in which such operands are not finite.
        """
        self.problem = problem
        self.dtype = problem.accumulator
        self.like = np.empty(0, np.float64 if self.dtype == torch.float64 else np.float32)
        strips = amx.ready()
        bfloats = bfloats and not in_place and (PAIRS or strips)
        bfloats = bfloats and all(t.dtype == torch.bfloat16 for t in (*tensors[:3], *more))
        self.strips, self.paired = bfloats and strips, bfloats and not strips
        self.operand_like = self.like
        if bfloats:
            self.operand_like = np.empty(0, np.uint16 if strips else np.uint32)
        #: the dtype of the caller's rows as kernels read and write them
        self.row_dtype = problem.dtype if bfloats or in_place else self.dtype
        self.lanes = W if self.dtype == torch.float32 else max(2, W // 2)
        #: columns of a step of scores: the host's ``products.span``
        self.span = amx.STRIP if self.strips else math.lcm(MR, NV * self.lanes)
        #: numbers of which a row has a multiple
        self.whole = amx.STRIP if self.strips else 2 if self.paired else 1
        self.sequences = sequences_of(problem, tensors)
        words = _numbers(problem, self.whole, max(self.lanes, self.whole)).view(np.int64).copy()
        self.record = words.view(CALL)
        self._words = words.data
        for of, name in (("queries", "longest_q"), ("keys", "longest_k")):
            self.set(**{name: int(self.sequences[of].max(initial=0))})
        self.set(sequences=self.sequences.ctypes.data)
        self._kept: list[Tensor] = []
        self.states = _tile_map(problem, tensors, in_place)
        if self.states is not None:
            self.tensor("states", self.states)
        for name in _READ:
            if (t := getattr(tensors, name)) is not None:
                self.tensor(name, self._readable(name, t.detach()))
        if tensors.bias is not None:
            self.set(bias_kind=_BIAS_KINDS[tensors.bias.dtype])
        if tensors.seed is not None:
            self.set(seed=int(tensors.seed))

    def tangents(self, tangents: Tangents) -> None:
        """Store the tangents that are not zero."""
        for name, t in tangents._asdict().items():
            if t is not None:
                self.tensor(f"t{name}", self._readable(name, t.detach()))

    def set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._words[_WORD[name]] = value

    def tensor(self, name: str, t: Tensor) -> None:
        """Store a tensor's address and strides. A dimension of 1 broadcasts."""
        self._kept.append(t)
        word = _WORD[name]
        self._words[word] = t.data_ptr()
        for n, stride in zip(t.shape, t.stride(), strict=True):
            word += 1
            self._words[word] = 0 if n == 1 else stride

    def reads(self, given: Iterable[Tensor | None]) -> bool:
        """Return True if these tensors are read in place: none of them was copied."""
        kept = {t.data_ptr() for t in self._kept}
        return all(t is None or t.data_ptr() in kept for t in given)

    def memory(self, name: str, numbers: int) -> None:
        """Allocate memory that kernels fill, for so many numbers of the accumulator's size."""
        self._kept.append(torch.empty(numbers, dtype=self.dtype))
        self.set(**{name: self._kept[-1].data_ptr()})

    def rows(self, t: Tensor) -> Tensor:
        """Return ``[B, N, H, D]`` as the kernels read it: most tensors unchanged, others copied.

        Each row is contiguous, in whole vectors of the accumulator's dtype, pairs or strips.
        """
        t = t.detach().to(self.row_dtype)
        whole = self.lanes if self.whole == 1 else self.whole
        if t.shape[3] % whole:
            t = torch.nn.functional.pad(t, (0, -t.shape[3] % whole))
        return t if t.stride(3) == 1 else t.contiguous()

    def _readable(self, name: str, t: Tensor) -> Tensor:
        """Return an input as the kernels read it."""
        if name in ("q", "k", "v"):
            return self.rows(t)
        if name in ("sink", "heads"):
            t = t.to(self.dtype)
        return t if name in ("bias", "allowed") else t.contiguous()


@lru_cache(maxsize=64)
def _numbers(p: Problem, whole: int, lanes: int) -> np.ndarray:
    """Return the record with the numbers of the problem, without addresses."""
    record = np.zeros(1, CALL)
    fields = {
        "d_operand": -(-p.d // whole) * whole,
        "value_d_operand": -(-p.dv // whole) * whole,
        "d_padded": -(-p.d // lanes) * lanes,
        "value_d_padded": -(-p.dv // lanes) * lanes,
        "value_d": p.dv,
        "left": UNLIMITED if p.left is None else p.left,
        "right": UNLIMITED if p.right is None else p.right,
        "threshold": p.dropout_threshold,
        "bent": p.softcap > 0 or not all(HEAD_TERMS[name].added for name in p.heads),
    }
    fields |= {f"head_{name}": 1 + n for n, name in enumerate(parameters_of(p.heads))}
    for name in ("batch", "hq", "hk", "group", "d", "natural", "wide", *_NUMBERS):
        fields[name] = getattr(p, name)
    for name, value in (p.positions or Positions())._asdict().items():
        fields[name if name == "shift" else f"first_{name}"] = value
    for name, value in fields.items():
        record[name] = value
    return record


def sequences_of(problem: Problem, tensors: Tensors) -> np.ndarray:
    """Return each sequence; in a batch that is not packed all start at 0."""
    nq, nk = problem.nq, problem.nk
    found = np.empty((problem.batch, SEQUENCE.itemsize // 8), np.int64)
    found[:] = 0, nq, 0, nk, nk, nk - nq, 0
    query, queries, key, keys, end, offset, prefix = found.T
    if tensors.prefix is not None:
        prefix[:] = tensors.prefix.numpy()
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        cu_q, cu_k = tensors.cu_seqlens_q.numpy(), tensors.cu_seqlens_k.numpy()
        query[:], queries[:] = cu_q[:-1], np.diff(cu_q)
        key[:], keys[:] = cu_k[:-1], np.diff(cu_k)
        end[:] = keys
    sequences = found.view(SEQUENCE)[:, 0]
    if tensors.lengths is not None:
        limit(sequences, tensors.lengths)
    np.subtract(end if problem.align == "lengths" else keys, queries, out=offset)
    return sequences


def limit(sequences: np.ndarray, lengths: Tensor) -> None:
    """Let sequences end at their lengths."""
    np.minimum(np.maximum(lengths.numpy(), 0), sequences["keys"], out=sequences["end"])


def leave_out(sequences: np.ndarray, hidden: np.ndarray) -> None:
    """Let ``hidden`` sequences have neither queries nor keys: their rows are not computed."""
    for name in ("queries", "keys", "end"):
        sequences[name][hidden] = 0


def words(sequences: np.ndarray) -> Words:
    """Return sequences as kernels read them; both are the same memory."""
    return (ctypes.c_int64 * (sequences.nbytes // 8)).from_buffer(sequences.data)


def sequences_stay(tensors: Tensors) -> bool:
    """Return True if the sequences of a call depend on no values."""
    found = tensors.lengths, tensors.prefix, tensors.cu_seqlens_q
    return all(t is None for t in found)


def sequences_again(problem: Problem, tensors: Tensors) -> Callable[[Tensors], Words | None]:
    """Return the function of the sequences of calls like this one; None: they stay as they are."""
    if sequences_stay(tensors):
        return lambda _: None
    first = sequences_of(problem, tensors)
    kind = ctypes.c_int64 * (first.nbytes // 8)
    packed = tensors.cu_seqlens_q is not None
    if packed or tensors.prefix is not None or problem.align == "lengths":
        return lambda tensors: words(sequences_of(problem, tensors))
    kept, nk, step = first.tobytes(), problem.nk, SEQUENCE.itemsize // 8

    def again(tensors: Tensors) -> Words:
        """Return the sequences: lengths decide their ends alone."""
        found = kind.from_buffer_copy(kept)
        assert tensors.lengths is not None
        if problem.batch > _FEW_SEQUENCES:
            limit(np.frombuffer(memoryview(found), SEQUENCE), tensors.lengths)
            return found
        for n, length in enumerate(tensors.lengths.tolist()):
            found[n * step + _END] = min(max(length, 0), nk)
        return found

    return again


def _tile_map(problem: Problem, tensors: Tensors, in_place: bool) -> Tensor | None:
    """Return the tiles' states under documents and a boolean tensor; kernels apply the band.

    Kernels that read rows in place look at a boolean tensor themselves, where there are no
    documents: its values decide nothing here, and such a call can be repeated.
    """
    if tensors.k_ids is None and tensors.allowed is None:
        return None
    if in_place and tensors.k_ids is None and tensors.allowed is not None:
        shape = (1, distinct(tensors.allowed).shape[1], 1, 1)
        return torch.full(shape, PARTIAL, dtype=torch.uint8)
    unbanded = problem._replace(left=None, right=None, align="keys")
    return tile_states(unbanded, tensors._replace(lengths=None), TILE_Q, TILE_K)


@lru_cache(maxsize=64)
def _head_tasks(batch: int, hq: int, nq: int) -> np.ndarray:
    tiles = -(-nq // TILE_Q)
    tasks = np.empty((batch, hq, tiles), TASK)
    tasks["s"], tasks["h"] = np.arange(batch)[:, None, None], np.arange(hq)[:, None]
    tasks["tile"] = np.arange(tiles)[::-1]  # causal: the last rows see most keys and come first
    return tasks.reshape(-1)


def query_tasks(call: Call) -> np.ndarray:
    """Return the tasks of a forward, ``TASK [tasks]``."""
    p = call.problem
    if not p.varlen:
        return _head_tasks(p.batch, p.hq, p.nq)
    parts = [_head_tasks(1, p.hq, int(n)) for n in call.sequences["queries"]]
    tasks = np.concatenate([_head_tasks(0, 1, 0), *parts])
    tasks["s"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return tasks
