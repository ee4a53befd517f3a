"""Where scores lie in the backward: keys down, queries across."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def score_layout(C):
    """S^T ``[64, BLOCK_Q]`` as the product leaves it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_Q, 16])


@gluon.constexpr_function
def column_layout(C):
    """One number a query, where its column is."""
    return gl.SliceLayout(0, score_layout(C))


@gluon.constexpr_function
def row_layout(C):
    """The same numbers as they lie in memory: four of each thread, one after the other."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], *([n] for n in (16, 32, 64) if n < C.BLOCK_Q)],
        lane_bases=[[4], [8], [0], [0], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[C.BLOCK_Q],
    )


@gluon.jit
def by_columns(x, C: gl.constexpr):
    """From there to where the columns are: query 16 n + 8 i + 2 c + j is in the order of
    (n, c, i, j), and c is the thread."""
    x = x.reshape([C.BLOCK_Q // 16, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([C.BLOCK_Q])
    return gl.convert_layout(x, column_layout(C))


@gluon.constexpr_function
def by_row_layout():
    """Of the same order in memory, where those threads have them that hold the rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[2]],
        lane_bases=[[0], [0], [1], [4], [8]],
        warp_bases=[[16], [32]],
        block_bases=[],
        shape=[64],
    )


@gluon.jit
def by_rows(x, C: gl.constexpr):
    """64 numbers from there to where the rows of scores are."""
    x = x.reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([64])
    return gl.convert_layout(x, gl.SliceLayout(1, score_layout(C)))


@gluon.jit
def in_columns(r):
    """The place of query r in the order of ``by_columns``."""
    return (r & -16) | ((r & 6) << 1) | ((r & 8) >> 2) | (r & 1)


@gluon.constexpr_function
def held_layout(C):
    """K or V ``[64, D]`` as a product takes it from registers."""
    return gl.DotOperandLayout(operand_index=0, parent=score_layout(C), k_width=2)


@gluon.constexpr_function
def by_thread(C):
    """Numbers as ``score_layout`` has them in shared memory: the first four of each thread, then
    the next four of each. The copy engine brings tiles of a bias there as well."""
    near = [[0, 1], [8, 0]]
    threads = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
    far = [[0, n] for n in (8, 16, 32, 64) if n < C.BLOCK_Q]
    alignment = 1024 if C.BIAS else 16
    return gl.SharedLinearLayout(offset_bases=near + threads + far, alignment=alignment)


@gluon.jit
def by_threads(x, WIDTH: gl.constexpr):
    """``[64, WIDTH]`` as a product leaves it, as ``[2 WIDTH, 32]``: four numbers of each thread
    after the other, so that each stores 16 bytes at a time and all of them to banks of their own.

    Rows are 16 w + 8 i + r and columns 8 n + 2 c + j, in the order of (w, n, r, c, i, j): w is the
    warp, r and c are the thread of it.
    """
    x = x.reshape([4, 2, 8, WIDTH // 8, 4, 2])
    return x.permute((0, 3, 2, 4, 1, 5)).reshape([2 * WIDTH, 32])


@gluon.jit
def store_rows(x, to, stride, rows, OUT: gl.constexpr):
    """The first ``rows`` of rows x, as they lie in registers."""
    L: gl.constexpr = x.type.layout
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    d = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    there = (r < rows)[:, None]
    if x.shape[1] != OUT:
        there = there & (d < OUT)[None, :]
    gl.store(to + (r * stride)[:, None] + d[None, :], x.to(to.dtype.element_ty), mask=there)
