"""Problem: shapes, dtypes and features of a call, without the values of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import HEAD_TERMS, Gap, Gradients, Options, Positions, Tensors, Wanted, part_of

Shape4 = tuple[int, int, int, int]

#: lse is rounded to 6e-8 of itself, so weights made of it sum to 1 only up to that. From this size
#: on a backward sums the weights again: 1024 leaves an error of 6e-5, 3e38 would lose all of log n.
FAR = 1024.0


class Problem(NamedTuple):
    """Shapes, dtypes and features of one call. It is hashable, and the key of plans.

    In a packed call ``batch`` counts the sequences and ``nq``, ``nk`` bound their lengths;
    ``total_q`` and ``total_k`` are the packed lengths. Otherwise the totals equal ``nq``, ``nk``.
    ``left`` and ``right`` limit a band around the aligned position of a query: the shift of a block
    (``Positions``) is in them, so no kernel, tile map or count has to know it.
    """

    device: str
    dtype: torch.dtype
    batch: int
    nq: int
    nk: int
    hq: int
    hk: int
    d: int
    dv: int
    scale: float
    softcap: float
    dropout_p: float
    left: int | None
    right: int | None
    documents: bool
    prefix: bool
    allowed: Shape4 | None
    bias: Shape4 | None
    bias_dtype: torch.dtype | None
    heads: tuple[str, ...]  # the head terms, by name (``inputs.HEAD_TERMS``)
    sink: bool
    varlen: bool
    total_q: int
    total_k: int
    deterministic: bool
    positions: Positions | None = None  # those that a distance or dropout reads; None: all are 0
    align: str = "keys"  # "lengths" only where a band or a distance reads positions
    device_index: int | None = None  # index among the devices of its type; None: the current one
    bidirectional: bool = False  # a prefix of the keys is seen whatever ``right`` is
    wide: bool = False  # dk and dv are parts of sums: in the accumulator's dtype
    part: bool = False  # out and lse of a backward are of more keys than these
    gap: Gap | None = None  # between the queries of a forward, where its backend takes one

    @property
    def offset(self) -> int:
        """Aligned to the keys, query i stands at key position ``i + offset``.

        Aligned to the lengths, it stands there or before (see ``mask.offset``).
        """
        return self.nk - self.nq

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.hq // self.hk

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of lse and of every running sum."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def gradient_dtype(self, name: str, like: Tensor) -> torch.dtype:
        """Return the dtype of the gradient of an input, by its name."""
        return self.accumulator if self.wide and name in ("k", "v") else like.dtype

    @property
    def natural(self) -> bool:
        """True if scores and lse stay in natural units; otherwise they are in base 2.

        A bias may be the largest number of its dtype, and times log2(e) it would overflow. Only the
        difference from the row's maximum or lse is multiplied: it is small, or its weight is 0.
        A function of the product is one of natural units.
        """
        return self.bias is not None or not all(HEAD_TERMS[name].added for name in self.heads)

    @property
    def distance(self) -> bool:
        """True if a term of the score reads distances."""
        return reads_distance(self.heads)

    @property
    def masked(self) -> bool:
        return (
            self.left is not None
            or self.right is not None
            or self.documents
            or self.prefix
            or self.allowed is not None
        )

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Return (left, right) clamped to the length of the call, so that 32 bits hold them."""
        reach = self.total_q + self.total_k
        left, right = (
            None if n is None else max(-reach, min(n, reach)) for n in (self.left, self.right)
        )
        return left, right

    @property
    def most_seen(self) -> int:
        """Return the most keys that a query may see: all, or those of a band with two limits."""
        if self.left is None or self.right is None or self.bidirectional:
            return self.nk
        return max(0, min(self.nk, self.left + self.right + 1))

    @property
    def usual(self) -> Problem:
        """Return this problem, with the mean length of packed sequences that have no bound.

        A bound of all rows is none. Only what decides between equal results may read it.
        """
        if not self.varlen or self.batch < 2:
            return self
        nq = self.total_q // self.batch if self.nq >= self.total_q else self.nq
        nk = self.total_k // self.batch if self.nk >= self.total_k else self.nk
        return self._replace(nq=nq, nk=nk)

    @property
    def dropout_threshold(self) -> int:
        """Return the least 16-bit draw that is kept; 0 without dropout (``rules/dropout.py``)."""
        if self.dropout_p == 0.0:
            return 0
        return min(65535, max(1, round(self.dropout_p * 65536)))

    @property
    def keep_scale(self) -> float:
        """Return the factor of kept weights: 1 / (the exact probability of keeping one)."""
        return 65536.0 / (65536 - self.dropout_threshold)

    @property
    def out_shape(self) -> Shape4:
        """[B, Nq, Hq, Dv]; of a packed call [1, total_q, Hq, Dv]."""
        return (1 if self.varlen else self.batch, self.total_q, self.hq, self.dv)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """[B, Hq, Nq]; of a packed call [1, Hq, total_q]."""
        return (1 if self.varlen else self.batch, self.hq, self.total_q)


def problem_of(tensors: Tensors, options: Options) -> Problem:
    """Return the problem of a normalized call."""
    q, k, v, bias, _, _, allowed, _, _, _, cu, *_ = tensors
    b, total_q, hq, d = q.shape
    total_k, _, dv = v.shape[1:]
    varlen = cu is not None
    nq, nk = (options.max_q, options.max_k) if varlen else (total_q, total_k)
    left, right = shifted_band(options, nq, nk)
    heads = tuple(options.head_terms.split(",")) if options.head_terms else ()
    placed = left is not None or right is not None or reads_distance(heads)
    return Problem(
        device=q.device.type,
        dtype=q.dtype,
        batch=cu.shape[0] - 1 if cu is not None else b,
        nq=nq,
        nk=nk,
        hq=hq,
        hk=k.shape[2],
        d=d,
        dv=dv,
        scale=options.scale,
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        left=left,
        right=right,
        documents=tensors.k_ids is not None,
        prefix=tensors.lengths is not None,
        allowed=tuple(allowed.shape) if allowed is not None else None,  # pyright: ignore
        bias=tuple(bias.shape) if bias is not None else None,  # pyright: ignore
        bias_dtype=bias.dtype if bias is not None else None,
        heads=heads,
        sink=tensors.sink is not None,
        varlen=varlen,
        total_q=total_q,
        total_k=total_k,
        deterministic=options.deterministic,
        positions=positions_read(options, reads_distance(heads), tensors.seed is not None),
        align=options.align if placed else "keys",
        device_index=q.device.index,
        bidirectional=tensors.prefix is not None and right is not None,
    )


def zero_gradients(problem: Problem, tensors: Tensors, wanted: Wanted) -> Gradients:
    """Return zeros for the wanted gradients."""
    return Gradients(
        *(
            x.new_zeros(x.shape, dtype=problem.gradient_dtype(name, x))
            if want and x is not None
            else None
            for (name, want), x in zip(wanted._asdict().items(), tensors, strict=False)
        )
    )


def shifted_band(options: Options, nq: int, nk: int) -> tuple[int | None, int | None]:
    """Return (left, right) counted from the aligned position of a query.

    A limit that the shift moves past every pair is None: a block below the diagonal is a call
    without a mask, as fast as one.
    """
    shift = options.shift
    left = None if options.left is None else options.left - shift
    right = None if options.right is None else options.right + shift
    if type(shift) is int and shift != 0:  # a symbolic one decides nothing while a call is traced
        left = None if left is not None and left >= nk - 1 else left
        right = None if right is not None and right >= nq - 1 else right
    return left, right


def reads_distance(heads: tuple[str, ...]) -> bool:
    """Return True if one of these head terms reads distances."""
    return any(HEAD_TERMS[name].distance for name in heads)


def positions_read(options: Options, distance: bool, dropout: bool) -> Positions | None:
    """Return the positions that a call reads, 0 for the others; None if all are 0."""
    shift, *counters = options.positions
    read = Positions(shift if distance else 0, *(counters if dropout else ()))
    whole = all(type(x) is int and x == 0 for x in read)
    return None if whole else read


#: inputs that are not packed
_UNPACKED = ("bias", "allowed", "lengths", "prefix")


def each_sequence(
    problem: Problem, tensors: Tensors
) -> Iterator[tuple[slice, slice, Problem, Tensors]]:
    """Yield each sequence of a packed call as a dense call: (queries, keys, problem, tensors).

    Reads the offsets, which waits for their device.
    """
    assert tensors.cu_seqlens_q is not None
    assert tensors.cu_seqlens_k is not None
    starts_q, starts_k = tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()
    positions = problem.positions or Positions()
    dropped = problem.dropout_threshold > 0
    for b in range(problem.batch):
        rows, cols = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        nq, nk = rows.stop - rows.start, cols.stop - cols.start
        packed = {name: part_of(name, getattr(tensors, name), i=rows, j=cols) for name in "qkv"}
        # a term that is not packed has rows and keys of its own for each sequence, from 0 on
        own = {"b": slice(b, b + 1), "i": slice(nq), "j": slice(nk)}
        terms = {name: part_of(name, getattr(tensors, name), **own) for name in _UNPACKED}
        here = positions._replace(sequence=positions.sequence + b) if dropped else problem.positions
        one = tensors._replace(**packed, **terms, cu_seqlens_q=None, cu_seqlens_k=None)
        yield (
            rows,
            cols,
            problem._replace(
                batch=1,
                nq=nq,
                nk=nk,
                total_q=nq,
                total_k=nk,
                varlen=False,
                positions=here,
                bias=None if one.bias is None else tuple(one.bias.shape),
                allowed=None if one.allowed is None else tuple(one.allowed.shape),
            ),
            one,
        )
