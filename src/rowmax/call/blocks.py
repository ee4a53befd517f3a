"""A block of a call: some sequences, query heads, queries and keys of it, and their positions.

Computed alone, a block of queries gives its rows of the whole call, with the same bands, distances
and kept set of dropout. Blocks of keys give parts that ``rowmax.merge`` joins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import bad
from ..masks import as_int
from .check import check_positions
from .inputs import Options, Positions, Tensors, part_of
from .problem import problem_of


class Block(NamedTuple):
    """The ranges of a block, from a start to a stop; None takes all."""

    b: slice | None = None
    h: slice | None = None  # query heads: whole groups, or some of one group
    i: slice | None = None
    j: slice | None = None


def at_positions(tensors: Tensors, options: Options, positions: Positions) -> Options:
    """Return the options of a call that stands at these positions.

    Raises:
        TypeError, ValueError: naming the position, what it is and what it may be.
    """
    check_positions(positions, problem_of(tensors, options))
    return options._replace(**{name: as_int(n) for name, n in positions._asdict().items()})


def block_of(tensors: Tensors, options: Options, block: Block) -> tuple[Tensors, Options]:
    """Return a block of a dense call, which may itself be a block.

    The sink joins the sum of a row once: the block that holds the first key keeps it.

    Raises:
        ValueError: the call is packed, its heads are cut within several groups, or its keys are cut
            while positions are aligned to the lengths.
    """
    if tensors.cu_seqlens_q is not None:
        raise bad("block", "a packed call", "a dense one")
    if any(cut is not None and cut.step not in (None, 1) for cut in block):
        raise bad("block", block, "ranges without gaps")
    batch, nq, hq, _ = tensors.q.shape
    nk, hk = tensors.k.shape[1:3]
    b, h, i, j = (
        range(n)[slice(None) if cut is None else cut]
        for cut, n in zip(block, (batch, hq, nq, nk), strict=True)
    )
    if options.align == "lengths" and len(j) != nk:
        raise bad("block", "some of the keys", 'all keys of a call with align="lengths"')
    ranges = {
        axis: slice(x.start, x.stop)
        for axis, x in zip("bhgij", (b, h, _kv_heads(h, hq // hk), i, j), strict=True)
    }
    cut = {name: part_of(name, t, **ranges) for name, t in tensors._asdict().items()}
    if j.start > 0 or (nk > 0 and len(j) == 0):
        cut["sink"] = None
    for name in ("lengths", "prefix"):  # counted from the first key of the block
        t = cut[name]
        if t is not None:
            cut[name] = (t - j.start).clamp(min=0).to(torch.int32)
    old = options.positions
    positions = Positions(  # the last query of a call stands at its last key
        shift=old.shift + (i.stop - nq) - (j.stop - nk),
        query=old.query + i.start,
        key=old.key + j.start,
        head=old.head + h.start,
        sequence=old.sequence + b.start,
    )
    parts = Tensors(**cut)  # pyright: ignore[reportArgumentType]
    return parts, at_positions(parts, options, positions)


def _kv_heads(h: range, group: int) -> range:
    """Return the kv heads of a range of query heads."""
    whole = h.start % group == 0 and h.stop % group == 0
    found = range(h.start // group, -(-h.stop // group))
    if not whole and len(found) > 1:
        raise bad("block", f"heads {h.start} to {h.stop}", f"whole groups of {group}, or one group")
    return found
