"""Tile shapes for an H100 or H200, as data, and what is compiled into a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields

from triton.experimental.gluon import language as gl

ROWS = 64  # query rows of one warpgroup: the height of a wgmma


@dataclass(frozen=True)
class Tile:
    """How a head size is cut.

    ``block_q = 64 warpgroups`` rows by ``block_k`` keys; ``stages`` buffers each of K and V,
    ``q_stages`` of Q. Registers are those of a consumer and of the producer.
    """

    warpgroups: int
    block_k: int
    stages: int
    q_stages: int
    registers: tuple[int, int]


#: by (D, Dv), both padded to a size below
TILES = {
    (64, 64): Tile(3, 128, 2, 2, (160, 32)),
    (96, 96): Tile(2, 128, 2, 2, (240, 24)),
    (128, 128): Tile(2, 128, 2, 2, (240, 24)),
    (192, 128): Tile(2, 128, 2, 1, (240, 24)),
    (192, 192): Tile(2, 64, 2, 2, (240, 24)),
    (256, 256): Tile(2, 64, 2, 1, (240, 24)),
}

SIZES = (64, 96, 128, 192, 256)


def padded(d: int) -> int:
    """The head size whose tile holds a head of size d; what is missing reads as zero."""
    return next(size for size in SIZES if size >= d)


@dataclass(frozen=True)
class Config:
    """What is compiled into one kernel, under the names that the kernel uses."""

    D: int  # head sizes of the tile
    DV: int
    BLOCK_K: int
    STAGES: int
    Q_STAGES: int
    WARPGROUPS: int
    DV_OUT: int  # the head size of the output, DV or less
    GROUP: int = 1  # query heads of a kv head that share a tile
    LEFT: bool = False  # the band has a left limit
    RIGHT: bool = False
    RESCALE_FIRST: bool = False  # rescale O under the product of scores, before its own
    ROUND_LATE: bool = False  # round the weights after the product that they were made under


def first_part(d: int) -> int:
    """The largest power of two in d: shapes are powers of two, so 96 is 64 + 32."""
    return 1 << (d.bit_length() - 1)


class Constants:
    """A Config as kernels read it: every field, and what follows from them, a constexpr."""

    def __init__(self, config: Config) -> None:
        self.config = config
        given = {f.name: getattr(config, f.name) for f in fields(config)}
        d0, dv0 = first_part(config.D), first_part(config.DV)
        parts = {"D0": d0, "D1": config.D - d0, "DV0": dv0, "DV1": config.DV - dv0}
        for name, value in (given | parts | {"TOKENS": ROWS // config.GROUP}).items():
            setattr(self, name, gl.constexpr(value))

    def __repr__(self) -> str:
        return repr(self.config)

    def __hash__(self) -> int:
        return hash(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.config == other.config
