"""Layouts: the places of a tile's elements, in registers and in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def product_layout(width):
    """Return the layout of S or O ``[64, width]`` after its product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def weight_layout(width):
    """Return the layout of P as the left operand in registers, in the threads that held S."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(width), k_width=2)


@gluon.constexpr_function
def matrix(rows, width, dtype):
    """Return the layout of a tile in shared memory, swizzled for TMA and wgmma."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


@gluon.constexpr_function
def only(L, rank, axis):
    """Return the layout of one axis of a tile with layout L, of so many axes."""
    for other in reversed(range(rank)):
        if other != axis:
            L = gl.SliceLayout(other, L)
    return L


@gluon.constexpr_function
def output_layout(width):
    """Return the layout of O ``[64, width]`` for stores of 16 bytes: eight columns a thread.

    A quad keeps its rows, so the conversion from the product's layout stays within a warp.
    """
    far = [[0, n] for n in (32, 64, 128) if n < width]
    rows = [[1, 0], [2, 0], [4, 0], [8, 0]]
    lanes = [[0, 8], [0, 16], *rows[:3]] if width > 16 else [[0, 8], *rows]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *(rows[3:] if width > 16 else []), *far],
        lane_bases=lanes,
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )
