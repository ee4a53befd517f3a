"""The cells of ``benchmarks.distributed``: sequences that several devices share."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import torch

import rowmax
from rowmax.bench.cells import Cell, cells
from rowmax.distributed import Layout

#: lengths of documents of a training set, as (longest of a class, documents in it): the histogram
#: that MagiAttention's benchmark samples (SandAI-org/MagiAttention 2c64135, exps/dist_attn)
DOCUMENTS = (
    (10, 30254), (50, 391188), (100, 699596), (200, 1377757), (500, 3794735), (1024, 3316785),
    (2048, 2106566), (4096, 988525), (8192, 410002), (16384, 173574), (32768, 115007),
    (65536, 18428), (131072, 22513), (196608, 18284),
)  # fmt: skip

CHUNK = 512  # rows of a chunk of a balanced layout


def document_lengths(n: int, seed: int = 0) -> tuple[int, ...]:
    """Return the lengths of documents that fill n positions, none longer than a quarter of n."""
    draw = random.Random(seed)
    tops = [top for top, _ in DOCUMENTS]
    counts = [count for _, count in DOCUMENTS]
    found: list[int] = []
    left = n
    while left:
        (at,) = draw.choices(range(len(tops)), counts)
        length = draw.randint(tops[at - 1] + 1 if at else 1, tops[at])
        found.append(min(length, max(1, n // 4), left))
        left -= found[-1]
    return tuple(found)


def _packed(n: int) -> str:
    return "+".join(map(str, document_lengths(n)))


_GROUPED = "d=128 b=1 hq=32 hk=8"
#: by name, in the form that ``rowmax.bench.cells`` reads
CELLS = {
    **{f"causal-{n}k": f"{_GROUPED} n={1024 * n} causal=1" for n in (16, 32, 64, 128, 256, 512)},
    "causal-1m": f"{_GROUPED} n={2**20} causal=1",
    "mha-32k": "d=128 b=1 hq=32 n=32768 causal=1",
    "mha-64k": "d=128 b=1 hq=32 n=65536 causal=1",
    "documents-64k": f"d=128 hq=64 hk=8 causal=1 packed={_packed(65536)}",
    "window-256k": f"{_GROUPED} n=262144 window=1024",
    "full-64k": f"{_GROUPED} n=65536",
    "dbias-16k": "d=128 b=1 hq=16 hk=4 n=16384 bias=1hqk dbias=1",
    "tiny-causal": "d=16 b=1 hq=4 hk=2 n=512 causal=1 dtype=float32",
    "tiny-documents": "d=16 hq=4 hk=2 causal=1 dtype=float32 packed=100+30+70+56",
    "tiny-window": "d=16 b=1 hq=4 hk=2 n=512 window=64 dtype=float32",
    "tiny-dbias": "d=16 b=1 hq=4 hk=2 n=256 bias=1hqk dbias=1 dtype=float32",
}
#: measured if none is named: the most important first
USUAL = ("causal-64k", "causal-16k", "documents-64k", "window-256k", "mha-64k", "dbias-16k",
         "full-64k", "causal-128k", "causal-256k")  # fmt: skip
ALL = (*USUAL, "causal-32k", "mha-32k")
LONG = ("causal-512k", "causal-1m")
ON_CPU = ("tiny-causal", "tiny-documents", "tiny-window", "tiny-dbias")


def named(name: str) -> list[Cell]:
    """Return the cell of a name, or the cells of a text such as "n=8192 causal=0|1"."""
    return cells(CELLS.get(name, name))


def short(cell: Cell, n: int) -> Cell:
    """Return the cell with at most n positions."""
    if not cell.packed:
        return replace(cell, n=min(cell.n, n))
    ends = [min(end, n) for end in accumulate(cell.packed)]
    lengths = (end - start for start, end in zip([0, *ends], ends, strict=False))
    return replace(cell, packed=tuple(x for x in lengths if x))


def mask_of(cell: Cell) -> rowmax.Mask:
    """Return the mask of a cell on the CPU, for the balance of layouts."""
    mask = rowmax.Causal() if cell.causal else rowmax.Mask()
    if cell.window:
        mask = mask & rowmax.Window(cell.window, 0)
    if cell.packed:
        offsets = torch.tensor((0, *cell.packed)).cumsum(0)
        mask = mask & rowmax.Documents(cu_seqlens=offsets)
    return mask


def layout_for(cell: Cell, strategy: str, ranks: int, balanced: bool = False) -> tuple[str, Layout]:
    """Return the layout that suits a cell, and its name; "balanced" on request.

    Distributed heads need no balance. A window needs none either, and a contiguous layout moves
    the fewest rows.
    """
    if balanced:
        return "balanced", Layout.balanced(mask_of(cell), cell.n, ranks, CHUNK)
    if strategy == "heads" or cell.window or not cell.causal:
        return "contiguous", Layout.contiguous(cell.n, ranks)
    if cell.packed:
        return "documents", Layout.documents([0, *accumulate(cell.packed)], ranks)
    return "zigzag", Layout.zigzag(cell.n, ranks)
